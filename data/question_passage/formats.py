"""Parse the formats of question files. A row of any format is converted to a Record; a bad row raises BadRow.

The names of a row's fields determine its format:

- DPR: question, answers [str], positive_ctxs, negative_ctxs, hard_negative_ctxs [{title, text, psg_id | passage_id}].
  A typographic apostrophe of the question becomes ', as in DPR's own reader.
- Tevatron: query_id, query, answers, positive_passages, negative_passages [{docid, title, text}]; with ids:
  query_id, query_text, positive_document_ids, negative_document_ids [str] of data.passage.corpus. These negatives were
  mined, so they are read as hard negatives.
- FlagEmbedding: query, pos [str], neg [str]; neg are hard negatives. neg_scores and prompt are not read.
- sentence-transformers: anchor and positive, query and answer, … (PAIRS), and perhaps negative, negative_1, negative_2,
  …; each a text or a list of texts, lists also in positives and negatives. An empty negative is left out. With a column
  score or label the rows are no pairs of equal meaning, and refused, unless data.relevance names it.
- scored candidates (EPR): question, and candidates or ctxs [{title, text, score}]; a greater score is better. The best
  data.passage.pos_pool are positives, the worst data.passage.neg_pool of the others are hard negatives.

A question's id is its field query_id, qid, question_id, id or _id, if it has one. data.relevance names the field with
the relevance of positives, numbers in (0, 1]. It is a field of each positive if positives are objects with fields; else
a field of the row: one number for all positives, or a list with one for each, such as FlagEmbedding's pos_scores.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from dyad.data.base.errors import BadRow, nearest
from dyad.data.base.relevance import IfGiven, relevance_of
from dyad.data.config import PassageConfig
from dyad.data.question_passage.passages import Passage, Question

Fields = Mapping[str, Any]
QUESTION_IDS = ("query_id", "qid", "question_id", "id", "_id")
QUESTION_FIELDS = (*QUESTION_IDS, "answers", "metadata")
PASSAGE_IDS = ("_id", "docid", "id", "psg_id", "passage_id", "pid")
PASSAGE_FIELDS = (*PASSAGE_IDS, "text", "contents", "title")
NAMED = 20  # fields that a message lists


@dataclass(frozen=True)
class Record:
    """A question and its lists of passages, as parsed from one row. In a format that names passages by id, the lists
    hold ids; otherwise they hold Passage objects. relevance: the weight in (0, 1] of each positive; None:
    data.relevance is not set."""

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


def record_of(fields: Fields, config: PassageConfig, relevance: str | None = None) -> Record:
    """Convert the fields of a row of any known format to a Record: its question, positives, negatives and hard
    negatives. A question without an id gets the id "".

    config: for rows of scored candidates, gives the numbers of positives and hard negatives to take. relevance: name of
    the field with the weight of the positives; None: no weight is read; an IfGiven is read only in rows of the format
    sentence-transformers that have the field. Raises BadRow for a damaged row, an unknown format, a row without
    positives, a pair with a score that is not `relevance`, and a positive whose weight is missing or not in (0, 1].
    """
    found = format_of(fields)
    if found is None:
        raise unknown_format(fields)
    if found.read_list is _either and (scored := [name for name in SCORES if name in fields and name != relevance]):
        raise BadRow(
            "scored pairs",
            f"{found.question}, {found.positives} and a {scored[0]}: training takes pairs that belong together, not "
            f"similarities. Leave out rows of low {scored[0]}, then data.columns=[{found.question},{found.positives}]. "
            f"data.relevance={scored[0]} takes values above 0 and at most 1 as weights: a pair of 0.05 is a weak "
            "positive, no negative",
        )
    if isinstance(relevance, IfGiven) and (found.read_list is not _either or relevance not in fields):
        relevance = None
    text = _not_blank(text_of(fields[found.question], found.question), found.question)
    if found.name == "DPR":
        text = text.replace("’", "'")
    question_id = _id(fields, QUESTION_IDS, "the row") or ""
    question = Question(question_id, text, tuple(_texts(fields, "answers")), group_of(fields))
    names = (found.positives, found.negatives, found.hard_negatives)
    lists: tuple[Sequence[Any], ...] = tuple(found.read_list(fields, name) if name else () for name in names)
    if not lists[0]:
        raise BadRow("no positive", f"{found.positives} is empty")
    told = None if relevance is None else _of_positives(fields, relevance, found, len(lists[0]))
    chosen: Sequence[int] = range(len(lists[0]))
    if "score" in found.passage_fields:
        chosen, worst = _pools(fields, found.positives, config)
        lists = ([lists[0][i] for i in chosen], (), [lists[0][i] for i in worst])
    return Record(question, *lists, relevance=None if told is None else [relevance_of(*told[i]) for i in chosen])


def unknown_format(fields: Fields) -> BadRow:
    """Return the error for a row of no known format. The message lists the fields of the row and the known formats."""
    by_name = groupby(FORMATS, lambda each: each.name)
    known = "; ".join(f"{name}: {' or '.join(f'{f.question}, {f.positives}' for f in all_)}" for name, all_ in by_name)
    return BadRow("unknown format", f"its fields are {named(fields)}. Known are {known}; others by plugins=[…]")


def query_of(fields: Fields) -> Question:
    """Convert a line of BEIR's queries.jsonl, which has the same fields as a passage, to a question. Raises BadRow when
    the line is damaged or has no text."""
    query = passage_of(fields)
    return Question(str(query.id), _not_blank(query.text, "text"), group=group_of(fields))


def answered_of(fields: Fields, answers: str) -> Question:
    """Convert a row without passages to a question with answers. Its text is the first of the fields question, query
    and text that the row has. answers: name of the field that holds one answer or a list of them. Raises BadRow for a
    row without question or answers."""
    name = next((name for name in ("question", "query", "text") if name in fields), None)
    if name is None or not (found := fields.get(answers)):
        raise BadRow("no question with answers", f"its fields are {named(fields)}")
    texts = [text_of(found, answers)] if isinstance(found, str) else _texts(fields, answers)
    question_id = _id(fields, QUESTION_IDS, "the row") or ""
    return Question(question_id, _not_blank(text_of(fields[name], name), name), tuple(texts), group_of(fields))


def passage_of(fields: Any, where: str = "the row") -> Passage:
    """Convert the fields of a passage, as parsed from JSON or a table, to a Passage. Its text is the field text or
    contents, its title the field title, if any, and its id the first field of PASSAGE_IDS that is present; without one
    the id is None.

    where: location of the passage, for the error message. Raises BadRow when there is no text or a field has a wrong
    type.
    """
    if not isinstance(fields, Mapping):
        raise BadRow("no passage", f"{where} is {fields!r:.80}, no object with a text")
    name = next((name for name in ("text", "contents") if name in fields), None)
    if name is None:
        raise BadRow("no text", f"{where} has the fields {named(fields)}")
    title = "" if fields.get("title") is None else text_of(fields["title"], f"title of {where}")
    return Passage(text_of(fields[name], f"{name} of {where}"), title, _id(fields, PASSAGE_IDS, where))


# ---- fields --------------------------------------------------------------------------------------------------------


def _not_blank(text: str, name: str) -> str:
    if not text.strip():
        raise BadRow("empty question", f"{name} is {text!r:.80}")
    return text


def group_of(fields: Fields) -> str | None:
    """Return the group of a row's question, which is the text in the field metadata.topic; None if there is no such
    text. Raises BadRow when the text is no valid Unicode."""
    metadata = fields.get("metadata")
    topic = metadata.get("topic") if isinstance(metadata, Mapping) else None
    return text_of(topic, "metadata.topic") if isinstance(topic, str) else None


def label_of(fields: Fields, name: str) -> str:
    """Return the class label of a row, the value of its field `name`, as text. Raises BadRow if there is none."""
    if fields.get(name) is None:
        raise BadRow("no label", f"it has no '{name}'; its fields are {named(fields)}.{nearest(name, fields)}")
    return str(fields[name])


def named(fields: Iterable[str]) -> str:
    """Join the first NAMED field names as text for a message, with … for further ones; names with control characters
    are escaped. Returns "none" if there is no name."""
    names = [short_name(name) for name in islice(fields, NAMED + 1)]
    return ", ".join([*names[:NAMED], *(["…"] if len(names) > NAMED else [])]) or "none"


def short_name(name: str) -> str:
    """Return a field name for a message: escaped if it has control characters, cut to 80 characters."""
    return f"{name if name.isprintable() else repr(name):.80}"


def text_of(value: Any, where: str) -> str:
    """Return `value`, the content of a field. Raises BadRow when it is no text or no valid Unicode. where: location of
    the field, for the message."""
    if not isinstance(value, str):
        raise BadRow("no text", f"{where} is {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow("no Unicode text", f"{where} has half a surrogate pair at {error.start}") from None
    return value


def _list(fields: Fields, name: str) -> list[Any]:
    """Return the list in the field `name`; an empty one when the field is missing or null. Raises BadRow for any other
    value."""
    value = fields.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        raise BadRow("a text where a list belongs", f"{name} is {value!r:.80}; write [{value!r:.20}…]")
    if not isinstance(value, list):
        raise BadRow("no list", f"{name} is {value!r:.80}")
    return value


def _texts(fields: Fields, name: str) -> list[str]:
    return [text_of(value, f"{name}[{i}]") for i, value in enumerate(_list(fields, name))]


def _passages(fields: Fields, name: str) -> list[Passage]:
    entries = ((entry, f"{name}[{i}]") for i, entry in enumerate(_list(fields, name)))
    return [_not_empty(passage_of(entry, where), where) for entry, where in entries]


def _passage_texts(fields: Fields, name: str) -> list[Passage]:
    return [_not_empty(Passage(text), f"{name}[{i}]") for i, text in enumerate(_texts(fields, name))]


def _numbered(fields: Fields, name: str) -> list[str]:
    """Return the names of the fields of a row that hold the list of passages `name`: `name` itself; for "positive" and
    "negative" also the plural and numbered fields, such as negatives, negative_1, negative_2."""
    more = r"(s|_?\d+)?" if name in ("positive", "negative") else ""
    return [field for field in fields if re.fullmatch(name + more, field)]


def _either(fields: Fields, name: str) -> list[Passage]:
    """Return the passages in the fields that `_numbered` returns for `name`, each a text or a list of texts. Blank
    texts are left out, because tables have blank cells in rows with fewer passages."""
    found = []
    for field in _numbered(fields, name):
        value = fields[field]
        texts = _texts(fields, field) if isinstance(value, list) else [] if value is None else [text_of(value, field)]
        found += [Passage(text) for text in texts if text.strip()]
    return found


def _not_empty(passage: Passage, where: str) -> Passage:
    if not passage.text.strip() and not passage.title.strip():
        raise BadRow("empty passage", where)
    return passage


def _ids(fields: Fields, name: str) -> list[str]:
    return [_id({"id": value}, ("id",), f"{name}[{i}]") or "" for i, value in enumerate(_list(fields, name))]


def _id(fields: Fields, names: Sequence[str], where: str) -> str | None:
    """Return the id in a row as text: the value of the first field of `names` that is neither missing nor null; None
    when all these fields are missing or null.

    where: location of the row, for the message. Raises BadRow when the value is neither a whole number nor a non-empty
    text.
    """
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        return None
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("no id", f"{name} of {where} is {value!r:.80}, neither a text nor a whole number")
    return text_of(str(value), f"{name} of {where}")


def _of_positives(fields: Fields, name: str, found: QuestionFormat, count: int) -> list[tuple[Any, str]]:
    """Return, for each of the `count` positives of a row, the value of the field `name` and its location for messages.

    The field is in each passage if passages are objects with fields; else it is in the row, and has one value for all
    positives or a list with one value for each. Raises BadRow when the field is missing, and for a list of another
    length.
    """
    if found.read_list is _passages:
        entries = [(entry, f"{found.positives}[{i}]") for i, entry in enumerate(_list(fields, found.positives))]
        return [(_present(entry, name, where), f"{name} of {where}") for entry, where in entries]
    value = _present(fields, name, "the row")
    if not isinstance(value, list):
        return [(value, name)] * count
    if len(value) != count:
        raise BadRow("no relevance", f"{name} has {len(value)} values for {count} positives")
    return [(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _present(fields: Fields, name: str, where: str) -> Any:
    if name not in fields:
        raise BadRow("no relevance", f"{where} has no '{name}'.{nearest(name, fields)} Its fields are {named(fields)}")
    return fields[name]


def _pools(fields: Fields, name: str, config: PassageConfig) -> tuple[list[int], list[int]]:
    """Choose positives and hard negatives by score from the list of candidates in the field `name`. Return the
    positions of the config.pos_pool best candidates, and those of the config.neg_pool worst of the others, both by
    descending score. Raises BadRow for a candidate without a usable score."""
    scores = [_score(entry, f"{name}[{i}]") for i, entry in enumerate(_list(fields, name))]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: of equal scores the first is better
    return best[: config.pos_pool], best[config.pos_pool :][-config.neg_pool :]


def _score(entry: Any, where: str) -> float:
    """Return the score of a candidate passage, `entry`. where: its location, for the message.

    Raises BadRow when the score is no finite number, and when the entry has a field has_answer: the candidates are then
    results of a retriever, whose scores do not tell which passage is right.
    """
    score = entry.get("score")
    if "has_answer" in entry:
        raise BadRow("results of a retriever", f"{where} has has_answer; scores do not say which passage is right")
    # the comparison is also exact for whole numbers that are too large for a float, and False for NaN
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
        raise BadRow("no score", f"score of {where} is {score!r:.80}, no finite number")
    return float(score)


SCORES = ("score", "scores", "label", "labels", "similarity_score")
PAIRS = (
    *(("anchor", "positive"), ("query", "positive"), ("question", "positive"), ("query", "answer")),
    *(("question", "answer"), ("query", "passage"), ("query", "document"), ("sentence1", "sentence2")),
    ("prompt", "answer"),
)
FORMATS = [
    QuestionFormat("Tevatron with ids", "query_text", "positive_document_ids", "", "negative_document_ids", _ids),
    QuestionFormat("Tevatron", "query", "positive_passages", "", "negative_passages", _passages),
    QuestionFormat("DPR", "question", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs", _passages),
    QuestionFormat("FlagEmbedding", "query", "pos", "", "neg", _passage_texts),
    QuestionFormat("scored candidates", "question", "candidates", "", "", _passages, (*PASSAGE_FIELDS, "score")),
    QuestionFormat("scored candidates", "question", "ctxs", "", "", _passages, (*PASSAGE_FIELDS, "score")),
    *(QuestionFormat("sentence-transformers", *pair, "", "negative", _either) for pair in PAIRS),
]
