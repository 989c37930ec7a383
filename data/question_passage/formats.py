"""Parse the formats of question files. A row of any format is converted to a Record; a bad row raises BadRow.

The names of a row's fields determine its format:

- DPR: question, answers [str], positive_ctxs, negative_ctxs, hard_negative_ctxs [{title, text, psg_id | passage_id}].
  A typographic apostrophe of the question becomes ', as in DPR's own reader.
- Tevatron: query_id, query, answers, positive_passages, negative_passages [{docid, title, text}]; with ids:
  query_id, query_text, positive_document_ids, negative_document_ids [str] of data.passage.corpus. These negatives were
  mined, so they are read as hard negatives.
- FlagEmbedding: query, pos [str], neg [str]; neg are hard negatives. prompt is not read.
- sentence-transformers: anchor and positive, query and answer, … (PAIRS), and perhaps negative, negative_1, negative_2,
  …; each a text or a list of texts, lists also in positives and negatives. Blank passages are left out. With a column
  score, label or another of SCORES the rows are no pairs of equal meaning, and refused, unless data.relevance or
  data.teacher names the column, or a teacher's score is read from another one. SimCSE: so with sent0, sent1, hard_neg.
- scored candidates (EPR): question, and candidates or ctxs [{title, text, score}]; a greater score is better. The best
  data.passage.pos_pool are positives, the worst data.passage.neg_pool of the others are hard negatives.

A question's id is its field query_id, qid, question_id, id or _id, if it has one. data.relevance names the field with
the relevance of positives, numbers in (0, 1]. It is a field of each positive if positives are objects with fields; else
a field of the row: one number for all positives, or a list with one for each, such as FlagEmbedding's pos_scores.

data.teacher names the field with a score of every passage, a finite number, which a teacher or people gave. It is a
field of each passage if passages are objects with fields; NAME in FlagEmbedding's rows is pos_NAME and neg_NAME; else
it is a field of the row: a list with one number for each positive, then for each negative; or one number: the score of
a row's only passage, or, with one positive and one negative, the score of the positive minus that of the negative
(sentence-transformers' MarginMSELoss).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dyad.data.base.errors import BadFormat, BadRow
from dyad.data.base.relevance import IfGiven, relevance_of
from dyad.data.config import PassageConfig
from dyad.data.question_passage import fields as row_fields
from dyad.data.question_passage.fields import Fields, finite, id_of, list_of, named, required_value, text_of, texts_of
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.tables.prepare import SCORES

QUESTION_IDS = ("query_id", "qid", "question_id", "id", "_id")
QUESTION_FIELDS = (*QUESTION_IDS, "answers", "metadata")
PASSAGE_IDS = ("_id", "docid", "id", "psg_id", "passage_id", "pid")
PASSAGE_FIELDS = (*PASSAGE_IDS, "text", "contents", "title")


class PairScore(str):
    """The setting data.teacher of an objective that learns the score of a pair. By this type instead of str, a row with
    negatives is refused: of their scores nothing would be learned."""


class AnyScore(str):
    """The setting data.teacher, the name of the field with the score of a pair, in the form for evaluation data. The
    type AnyScore instead of str says that a row without this field may have the score in another field of SCORES."""


@dataclass(frozen=True)
class Record:
    """A question and its lists of passages, as parsed from one row. In a format that names passages by id, the lists
    hold ids; otherwise they hold Passage objects. relevance: the weight in (0, 1] of each positive; None: no weights
    were read."""

    question: Question
    positives: Sequence[Passage] | Sequence[str]
    negatives: Sequence[Passage] | Sequence[str]
    hard_negatives: Sequence[Passage] | Sequence[str]
    relevance: Sequence[float] | None = None


@dataclass(frozen=True)
class QuestionFormat:
    """A format of question rows. A row has this format if it has the two fields that `question` and `positives` name.

    name: the format's name, for messages. question, positives, negatives, hard_negatives: names of fields; "" for a
    list that the format lacks. read_list(fields, name): returns the passages, or their ids, in the field `name`.
    passage_fields: the fields that are read of a passage inside the row. If "score" is among them, positives and hard
    negatives are both chosen by score from the list `positives`.
    """

    name: str
    question: str
    positives: str
    negatives: str
    hard_negatives: str
    read_list: Callable[[Fields, str], Sequence[Passage] | Sequence[str]]
    passage_fields: tuple[str, ...] = PASSAGE_FIELDS

    def lists(self, fields: Fields, *names: str) -> list[str]:
        """Return the names of the fields of a row that hold lists of passages. names: the lists to look for, such as
        self.positives; without any, all lists of this format. A list may be spread over several fields, such as
        negative_1 and negative_2."""
        names = names or (self.positives, self.negatives, self.hard_negatives)
        return [field for name in names if name for field in _numbered(fields, name)]


def format_of(fields: Fields) -> QuestionFormat | None:
    """Return the first format whose fields for question and positives are both in the row; None when no format fits."""
    return next((f for f in FORMATS if f.question in fields and f.lists(fields, f.positives)), None)


def record_of(
    fields: Fields, config: PassageConfig, relevance: str | None = None, teacher: str | None = None
) -> Record:
    """Convert the fields of a row of any known format to a Record. A question without an id gets the id "".

    config: for rows of scored candidates, gives the numbers of positives and hard negatives to take. relevance: name of
    the field with the weight of the positives; None: no weight is read. If it is an IfGiven (data/base/relevance.py),
    the field is read only in rows of the format sentence-transformers that have it. teacher: name of the field with a
    given score of every passage; None or an IfGiven: no score is read. If it is an AnyScore that the row lacks, the
    first of SCORES that the row has is read.

    Raises BadRow for a row of no known format, a field of a wrong type, a blank question, an empty passage, and a row
    without positives; for a sentence-transformers row with a field of SCORES that is neither `relevance` nor `teacher`,
    unless a given score is read; for a positive whose weight is missing or not in (0, 1]; and for a passage whose given
    score is missing or not finite.
    """
    found = format_of(fields)
    if found is None:
        raise unknown_format(fields)
    named_fields, teacher = (relevance, teacher), _score_field(fields, teacher)
    scored = [] if teacher else [name for name in SCORES if name in fields and name not in named_fields]
    if found.read_list is _texts_or_lists and scored:
        raise _scored_pair_error(fields, found, scored[0])
    if isinstance(relevance, IfGiven) and (found.read_list is not _texts_or_lists or relevance not in fields):
        relevance = None
    text = _not_blank(text_of(fields[found.question], found.question), found.question)
    if found.name == "DPR":
        text = text.replace("’", "'")
    question_id = id_of(fields, QUESTION_IDS, "the row") or ""
    question = Question(question_id, text, tuple(texts_of(fields, "answers")), group_of(fields))
    names = (found.positives, found.negatives, found.hard_negatives)
    lists: tuple[Sequence[Any], ...] = tuple(found.read_list(fields, name) if name else () for name in names)
    if not lists[0]:
        raise BadRow("no positive", f"{found.positives} is empty")
    if teacher is not None:
        lists = _with_scores(fields, teacher, found, lists)
    told = None if relevance is None else _of_positives(fields, relevance, found, len(lists[0]))
    chosen: Sequence[int] = range(len(lists[0]))
    if "score" in found.passage_fields:
        chosen, worst = _choose_by_score(fields, found.positives, config)
        lists = ([lists[0][i] for i in chosen], (), [lists[0][i] for i in worst])
    return Record(question, *lists, relevance=None if told is None else [relevance_of(*told[i]) for i in chosen])


def unknown_format(fields: Fields, more: str = "") -> BadFormat:
    """Return the error for a row of no known format: `chat_error`, or its fields, the known formats and `more`."""
    own = f"its fields are {named(fields)}. Name those of question and positive: data.columns=[QUESTION,POSITIVE]"
    return row_fields.chat_error(fields) or BadFormat("unknown format", f"{own}. {known_formats()}{more}")


def known_formats() -> str:
    """Return the names of the known formats and of their fields, for a message."""
    by_name = groupby(FORMATS, lambda each: each.name)
    known = "; ".join(f"{name}: {' or '.join(f'{f.question}, {f.positives}' for f in all_)}" for name, all_ in by_name)
    return f"Known are {known}; others by plugins=[…]"


def _scored_pair_error(fields: Fields, found: QuestionFormat, score: str) -> BadFormat:
    """Return the error for a sentence-transformers row with the field `score`, one of SCORES, that no setting names."""
    pair, columns = f"{found.question}, {found.positives} and a {score}", f"{found.question},{found.positives}"
    own, value = f"{pair}, {fields[score]!r:.80}", str(fields[score])
    by_class = (
        f"Keep the rows of one class, such as entailment, then data.columns=[{columns}]. Leave out the others, or name "
        "their texts as hard negatives"
    )
    if isinstance(fields[score], str) and not re.search(r"\d", value):
        return BadFormat("pairs of classes", f"{own}: the name of a class is no score. {by_class}")
    learns = "distill_kl or margin_mse" if found.lists(fields, found.hard_negatives) else "cosent, as in the recipe sts"
    by_score = (
        f"data.teacher={score} learns the scores, by {learns}. Else leave out rows of low {score}, then "
        f"data.columns=[{columns}]. data.relevance={score} takes values above 0 and at most 1 as weights: a pair of "
        "0.05 is a weak positive, no negative"
    )
    if re.fullmatch(r"\d|True|False", value):  # one row does not tell which it is
        return BadFormat("classes or scores", f"{own}: is it a class? {by_class}. Or a similarity? {by_score}")
    kind = "most objectives take pairs that belong together, not similarities"
    return BadFormat("scored pairs", f"{pair}: {kind}. {by_score}")


def query_of(fields: Fields) -> Question:
    """Convert the fields of a line of BEIR's queries.jsonl, as of a passage and its group, to a question without title.

    Raises BadRow as passage_of and group_of do, and for a blank text. A line without an id is not refused here, but
    when the file is opened as a Corpus; its id would become "None".
    """
    query = passage_of(fields)
    return Question(str(query.id), _not_blank(query.text, "text"), group=group_of(fields))


def answered_of(fields: Fields, answers: str) -> Question:
    """Convert a row without passages to a question with answers. A question without an id gets the id "".

    The text is the first of the fields question, query and text that the row has. answers: name of the field that holds
    one answer or a list of them. Raises BadRow for a row without question or answers, and for one of a wrong type.
    """
    name = next((name for name in ("question", "query", "text") if name in fields), None)
    if name is None or not (found := fields.get(answers)):
        raise BadRow("no question with answers", f"its fields are {named(fields)}")
    texts = [text_of(found, answers)] if isinstance(found, str) else texts_of(fields, answers)
    question_id = id_of(fields, QUESTION_IDS, "the row") or ""
    return Question(question_id, _not_blank(text_of(fields[name], name), name), tuple(texts), group_of(fields))


def passage_of(fields: Any, where: str = "the row") -> Passage:
    """Convert the fields of a passage, as parsed from JSON or a table, to a Passage.

    Its text is the field text or contents, which may be blank; its title the field title, if any; its id the first
    field of PASSAGE_IDS that is neither missing nor null, or None. where: location of the passage, for the message.
    Raises BadRow when there is no text or a field has a wrong type.
    """
    if not isinstance(fields, Mapping):
        raise BadRow("no passage", f"{where} is {fields!r:.80}, no object with a text")
    name = next((name for name in ("text", "contents") if name in fields), None)
    if name is None:
        raise BadFormat("no text", f"{where} has the fields {named(fields)}")
    title = "" if fields.get("title") is None else text_of(fields["title"], f"title of {where}")
    return Passage(text_of(fields[name], f"{name} of {where}"), title, id_of(fields, PASSAGE_IDS, where))


# ---- fields --------------------------------------------------------------------------------------------------------


def _not_blank(text: str, name: str) -> str:
    if not text.strip():
        raise BadRow("empty question", f"{name} is {text!r:.80}")
    return text


def group_of(fields: Fields) -> str | None:
    """Return the text in metadata.topic, the group of a question, or None. Raises BadRow for invalid Unicode."""
    metadata = fields.get("metadata")
    topic = metadata.get("topic") if isinstance(metadata, Mapping) else None
    return text_of(topic, "metadata.topic") if isinstance(topic, str) else None


def _score_field(fields: Fields, teacher: str | None) -> str | None:
    """Return the field that is read for the setting data.teacher: `teacher` itself; None for None and for an IfGiven.
    For an AnyScore that the row lacks, return the first of SCORES that the row has, as an AnyScore."""
    if isinstance(teacher, AnyScore):
        return AnyScore(next((name for name in (teacher, *SCORES) if name in fields), teacher))
    return None if isinstance(teacher, IfGiven) else teacher


def _passages(fields: Fields, name: str) -> list[Passage]:
    entries = ((entry, f"{name}[{i}]") for i, entry in enumerate(list_of(fields, name)))
    return [_not_empty(passage_of(entry, where), where) for entry, where in entries]


def _passage_texts(fields: Fields, name: str) -> list[Passage]:
    return [_not_empty(Passage(text), f"{name}[{i}]") for i, text in enumerate(texts_of(fields, name))]


def _numbered(fields: Fields, name: str) -> list[str]:
    """Return the names of the fields of a row that hold the list of passages `name`: `name` itself; for "positive" and
    "negative" also the plural and numbered fields, such as negatives, negative_1, negative_2."""
    more = r"(s|_?\d+)?" if name in ("positive", "negative") else ""
    return [field for field in fields if re.fullmatch(name + more, field)]


def _texts_or_lists(fields: Fields, name: str) -> list[Passage]:
    """Return the passages in the fields that `_numbered` returns for `name`, each field a text or a list of texts.
    Blank texts are left out, because tables have blank cells in rows with fewer passages."""
    found = []
    for field in _numbered(fields, name):
        value = fields[field]
        texts = texts_of(fields, field) if isinstance(value, list) else [] if value is None else [text_of(value, field)]
        found += [Passage(text) for text in texts if text.strip()]
    return found


def _not_empty(passage: Passage, where: str) -> Passage:
    if not passage.text.strip() and not passage.title.strip():
        raise BadRow("empty passage", where)
    return passage


def _ids(fields: Fields, name: str) -> list[str]:
    return [id_of({"id": value}, ("id",), f"{name}[{i}]") or "" for i, value in enumerate(list_of(fields, name))]


def _of_positives(fields: Fields, name: str, found: QuestionFormat, count: int) -> list[tuple[Any, str]]:
    """Return, for each of the `count` positives of a row, the value of the field `name` and its location for messages.

    The field is in each passage if passages are objects with fields; else it is in the row, and has one value for all
    positives or a list with one value for each. Raises BadRow when the field is missing, and for a list of another
    length.
    """
    if found.read_list is _passages:
        return _of_passages(fields, found.positives, name, "no relevance")
    value = required_value(fields, name, "the row", "no relevance")
    if not isinstance(value, list):
        return [(value, name)] * count
    if len(value) != count:
        raise BadRow("no relevance", f"{name} has {len(value)} values for {count} positives")
    return [(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _with_scores(fields: Fields, name: str, found: QuestionFormat, lists: Sequence[Any]) -> tuple[list[Passage], ...]:
    """Return the positives, negatives and hard negatives of a row with the teacher's score in each Passage.

    name: the setting data.teacher, the field with the scores. found: the format of the row. lists: the three lists
    without scores. Raises BadRow when a score is missing or no finite number, for a format that names passages by id,
    and for a row with negatives if `name` is a PairScore.
    """
    names, counts = (found.positives, found.negatives, found.hard_negatives), [*map(len, lists)]
    if isinstance(name, PairScore) and any(counts[1:]):
        own = "objective=cosent and cosine_mse learn pairs. Take margin_mse or distill_kl with data.negatives.per_row=1"
        raise BadRow("no pair", f"it has negatives; {own}")
    if found.read_list is _ids:
        raise BadRow(NO_SCORE, f"{found.positives} names passages by id; scores are read beside texts")
    if found.read_list is _passages:
        scores = [_of_passages(fields, own, name, NO_SCORE) if own else [] for own in names]
    elif found.read_list is _passage_texts:
        given = [field.removeprefix("pos_") for field in fields if field.startswith("pos_")]
        if given and name not in given:
            raise BadFormat(NO_SCORE, f"the row has no 'pos_{name}': pos_{given[0]} is read by data.teacher={given[0]}")
        scores = [
            _of_texts(fields, f"{own}_{name}", [count]) if own else [] for own, count in zip(names, counts, strict=True)
        ]
    else:
        if name not in fields and (other := next((each for each in SCORES if each in fields), None)):
            raise BadFormat(NO_SCORE, f"the row has no '{name}': {other} is read by data.teacher={other}")
        told = _of_texts(fields, name, counts)
        scores = [told[: counts[0]], [], told[counts[0] :]]
    pairs = zip(lists, scores, strict=True)
    return tuple([replace(p, teacher=finite(*s, LARGEST)) for p, s in zip(*each, strict=True)] for each in pairs)


def teacher_fields(teacher: str | None) -> tuple[str, ...]:
    """Return the names of the fields that a row of any format may have for the setting data.teacher; () for None."""
    return () if teacher is None else (teacher, f"pos_{teacher}", f"neg_{teacher}")


def _of_texts(fields: Fields, name: str, counts: Sequence[int]) -> list[tuple[Any, str]]:
    """Return the values in the field `name` of a row, one for each of its texts, and their locations for messages.

    counts: the numbers of positives, negatives and hard negatives of the row, or of one of these lists. The field has a
    list, or one number. One number is the value of the only text. With one positive and one hard negative it is the
    difference of their values, returned as the number and 0; an AnyScore asks for scores of pairs, so for it this
    number is refused. Raises BadRow when the field is missing or has another number of values.
    """
    value, count = required_value(fields, name, "the row", NO_SCORE), sum(counts)
    if not isinstance(value, list):
        if max(counts) > 1 or count > (1 if isinstance(name, AnyScore) else 2):
            raise BadRow(NO_SCORE, f"{name} is {value!r:.80}, and there are {count} texts: give a list of their scores")
        return [(value, name), (0.0, name)][:count]
    if len(value) != count:
        raise BadRow(NO_SCORE, f"{name} has {len(value)} values for {count} texts")
    return [(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _of_passages(fields: Fields, passages: str, name: str, kind: str) -> list[tuple[Any, str]]:
    """Return the field `name` of each passage of the list in the field `passages` of a row, and its location. Raises
    BadRow of the kind `kind` for a passage without it."""
    entries = [(entry, f"{passages}[{i}]") for i, entry in enumerate(list_of(fields, passages))]
    return [(required_value(entry, name, where, kind), f"{name} of {where}") for entry, where in entries]


def _choose_by_score(fields: Fields, name: str, config: PassageConfig) -> tuple[list[int], list[int]]:
    """Choose positives and hard negatives by score from the list of candidates in the field `name`. Return their
    positions in this list.

    First those of the config.pos_pool best candidates, then those of the config.neg_pool worst of the others, both by
    descending score. Raises BadRow for a candidate without a usable score.
    """
    scores = [_score(entry, f"{name}[{i}]") for i, entry in enumerate(list_of(fields, name))]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: of equal scores the first is better
    return best[: config.pos_pool], best[config.pos_pool :][-config.neg_pool :]


def _score(entry: Any, where: str) -> float:
    """Return the score of a candidate passage, `entry`. where: its location, for the message.

    Raises BadRow when the score is no finite number, and when the entry has a field has_answer: the candidates are then
    results of a retriever, whose scores do not tell which passage is right.
    """
    if "has_answer" in entry:
        raise BadRow("results of a retriever", f"{where} has has_answer; scores do not say which passage is right")
    return finite(entry.get("score"), f"score of {where}")


NO_SCORE = "no score"  # kind of a BadRow
LARGEST = 3.4e38  # score of a teacher, a float32
PAIRS = (
    *(("anchor", "positive"), ("query", "positive"), ("question", "positive"), ("query", "answer")),
    *(("question", "answer"), ("query", "passage"), ("query", "document"), ("sentence1", "sentence2")),
    *(("premise", "hypothesis"), ("prompt", "answer")),
)
FORMATS = [
    QuestionFormat("Tevatron with ids", "query_text", "positive_document_ids", "", "negative_document_ids", _ids),
    QuestionFormat("Tevatron", "query", "positive_passages", "", "negative_passages", _passages),
    QuestionFormat("DPR", "question", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs", _passages),
    QuestionFormat("FlagEmbedding", "query", "pos", "", "neg", _passage_texts),
    QuestionFormat("scored candidates", "question", "candidates", "", "", _passages, (*PASSAGE_FIELDS, "score")),
    QuestionFormat("scored candidates", "question", "ctxs", "", "", _passages, (*PASSAGE_FIELDS, "score")),
    QuestionFormat("SimCSE", "sent0", "sent1", "", "hard_neg", _texts_or_lists),
    *(QuestionFormat("sentence-transformers", *pair, "", "negative", _texts_or_lists) for pair in PAIRS),
]
