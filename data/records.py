"""One parsed row of any format as one neutral record, or the reason why it is none. The row's fields tell the format.

- DPR: question, answers [str], positive_ctxs, negative_ctxs, hard_negative_ctxs [{title, text, psg_id | passage_id}].
  A typographic apostrophe of the question becomes ', as in DPR's own reader.
- Tevatron: query_id, query, answers, positive_passages, negative_passages [{docid, title, text}]; with ids:
  query_id, query_text, positive_document_ids, negative_document_ids [str], of data.passage.corpus. Their negatives are
  hard ones: mined beforehand.
- FlagEmbedding: query, pos [str], neg [str]; neg are hard negatives; pos_scores, neg_scores and prompt are not read.
- scored candidates (EPR): question, and candidates or ctxs [{title, text, score}], a greater score being better. The
  best data.passage.pos_pool are right, the worst data.passage.neg_pool of the others hard negatives.

A question's id is its field query_id, qid, question_id, id or _id, where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from data.config import PassageConfig
from data.passages import Passage, Question
from data.tables import BadRow

Fields = Mapping[str, Any]
QUESTION_IDS = ("query_id", "qid", "question_id", "id", "_id")
QUESTION_FIELDS = (*QUESTION_IDS, "answers", "metadata")
PASSAGE_IDS = ("_id", "docid", "id", "psg_id", "passage_id", "pid")
PASSAGE_FIELDS = (*PASSAGE_IDS, "text", "contents", "title")
NAMED = 20  # fields that a message names


@dataclass(frozen=True)
class Record:
    """A question and its passages; those of a format with ids as ids, the others whole."""

    question: Question
    positives: Sequence[Passage] | Sequence[str]
    negatives: Sequence[Passage] | Sequence[str]
    hard_negatives: Sequence[Passage] | Sequence[str]


@dataclass(frozen=True)
class Format:
    """A row that has the fields `question` and `positives` is of this format; others: lists that it may have besides;
    of_passage: what is read of a passage inside it."""

    name: str
    question: str
    positives: str
    others: tuple[str, ...]
    read: Callable[[Fields, PassageConfig], Record]
    of_passage: tuple[str, ...] = PASSAGE_FIELDS

    @property
    def lists(self) -> tuple[str, ...]:
        return (self.positives, *self.others)


def format_of(fields: Fields) -> Format | None:
    return next((f for f in FORMATS if f.question in fields and f.positives in fields), None)


def record_of(fields: Fields, config: PassageConfig) -> Record:
    """The record of a row; the id of a question without one is ''. Raises BadRow when it is none."""
    found = format_of(fields)
    if found is None:
        raise unknown_format(fields)
    record = found.read(fields, config)
    if not record.positives:
        raise BadRow("no positive", f"{found.positives} is empty")
    return record


def unknown_format(fields: Fields) -> BadRow:
    known = "; ".join(f"{f.name}: {f.question}, {f.positives}" for f in FORMATS)
    return BadRow("unknown format", f"its fields are {named(fields)}. Known are {known}")


def query_of(fields: Fields) -> Question:
    """The question of a line of BEIR's queries.jsonl, which is read like a passage. Raises BadRow."""
    query = passage_of(fields)
    return Question(str(query.id), _not_blank(query.text, "text"), group=group_of(fields))


def passage_of(fields: Any, place: str = "the row") -> Passage:
    """A passage of a corpus or of a list: text (or contents), title and one of PASSAGE_IDS. Raises BadRow."""
    if not isinstance(fields, Mapping):
        raise BadRow("no passage", f"{place} is {fields!r:.80}, no object with a text")
    name = next((name for name in ("text", "contents") if name in fields), None)
    if name is None:
        raise BadRow("no text", f"{place} has the fields {named(fields)}")
    title = fields.get("title")
    return Passage(
        _text(fields[name], f"{name} of {place}"),
        "" if title is None else _text(title, f"title of {place}"),
        _id(fields, PASSAGE_IDS, place),
    )


# ---- the formats ---------------------------------------------------------------------------------------------------


def _dpr(fields: Fields, config: PassageConfig) -> Record:
    question = _question(fields, "question")
    return Record(
        replace(question, text=question.text.replace("’", "'")),
        _passages(fields, "positive_ctxs"),
        _passages(fields, "negative_ctxs"),
        _passages(fields, "hard_negative_ctxs"),
    )


def _tevatron(fields: Fields, config: PassageConfig) -> Record:
    return Record(
        _question(fields, "query"),
        _passages(fields, "positive_passages"),
        (),
        _passages(fields, "negative_passages"),
    )


def _tevatron_ids(fields: Fields, config: PassageConfig) -> Record:
    return Record(
        _question(fields, "query_text"),
        _ids(fields, "positive_document_ids"),
        (),
        _ids(fields, "negative_document_ids"),
    )


def _flag(fields: Fields, config: PassageConfig) -> Record:
    return Record(
        _question(fields, "query"),
        [_not_empty(Passage(text), f"pos[{i}]") for i, text in enumerate(_texts(fields, "pos"))],
        (),
        [_not_empty(Passage(text), f"neg[{i}]") for i, text in enumerate(_texts(fields, "neg"))],
    )


def _scored(fields: Fields, config: PassageConfig) -> Record:
    name = "candidates" if "candidates" in fields else "ctxs"
    passages = _passages(fields, name)
    scores = [_score(entry, f"{name}[{i}]") for i, entry in enumerate(fields[name])]
    best = sorted(range(len(passages)), key=lambda i: -scores[i])  # stable: of equal ones the first is better
    others = best[config.pos_pool :]
    return Record(
        _question(fields, "question"),
        [passages[i] for i in best[: config.pos_pool]],
        (),
        [passages[i] for i in others[-config.neg_pool :]],
    )


FORMATS = (
    Format("Tevatron with ids", "query_text", "positive_document_ids", ("negative_document_ids",), _tevatron_ids),
    Format("Tevatron", "query", "positive_passages", ("negative_passages",), _tevatron),
    Format("DPR", "question", "positive_ctxs", ("negative_ctxs", "hard_negative_ctxs"), _dpr),
    Format("FlagEmbedding", "query", "pos", ("neg",), _flag),
    Format("scored candidates", "question", "candidates", (), _scored, (*PASSAGE_FIELDS, "score")),
    Format("scored candidates", "question", "ctxs", (), _scored, (*PASSAGE_FIELDS, "score")),
)


# ---- fields --------------------------------------------------------------------------------------------------------


def _question(fields: Fields, name: str) -> Question:
    text = _not_blank(_text(fields[name], name), name)
    name = _id(fields, QUESTION_IDS, "the row") or ""
    return Question(name, text, tuple(_texts(fields, "answers")), group_of(fields))


def _not_blank(text: str, name: str) -> str:
    if not text.strip():
        raise BadRow("empty question", f"{name} is {text!r:.80}")
    return text


def group_of(fields: Fields) -> str | None:
    """The field topic of its metadata, where that is a text. Raises BadRow when it is no Unicode."""
    metadata = fields.get("metadata")
    topic = metadata.get("topic") if isinstance(metadata, Mapping) else None
    return _text(topic, "metadata.topic") if isinstance(topic, str) else None


def named(fields: Iterable[str]) -> str:
    """Names of fields for a message: the first ones, and nothing that a terminal would obey."""
    names = [shown(name) for name in islice(fields, NAMED + 1)]
    return ", ".join([*names[:NAMED], *(["…"] if len(names) > NAMED else [])]) or "none"


def shown(name: str) -> str:
    return f"{name if name.isprintable() else repr(name):.80}"


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadRow("no text", f"{place} is {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow("no Unicode text", f"{place} has half a surrogate pair at {error.start}") from None
    return value


def _list(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        raise BadRow("a text where a list belongs", f"{name} is {value!r:.80}; write [{value!r:.20}…]")
    if not isinstance(value, list):
        raise BadRow("no list", f"{name} is {value!r:.80}")
    return value


def _texts(fields: Fields, name: str) -> list[str]:
    return [_text(value, f"{name}[{i}]") for i, value in enumerate(_list(fields, name))]


def _passages(fields: Fields, name: str) -> list[Passage]:
    places = ((entry, f"{name}[{i}]") for i, entry in enumerate(_list(fields, name)))
    return [_not_empty(passage_of(entry, place), place) for entry, place in places]


def _not_empty(passage: Passage, place: str) -> Passage:
    if not passage.text.strip() and not passage.title.strip():
        raise BadRow("empty passage", place)
    return passage


def _ids(fields: Fields, name: str) -> list[str]:
    return [_id({"id": value}, ("id",), f"{name}[{i}]") or "" for i, value in enumerate(_list(fields, name))]


def _id(fields: Fields, names: Sequence[str], place: str) -> str | None:
    """The first of `names` that is there: a text that is not empty, or a whole number, which becomes one."""
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        return None
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("no id", f"{name} of {place} is {value!r:.80}, neither a text nor a whole number")
    return _text(str(value), f"{name} of {place}")


def _score(entry: Any, place: str) -> float:
    score = entry.get("score")
    if "has_answer" in entry:
        raise BadRow(
            "results of a retriever", f"{place} has has_answer; their scores do not say which passage is right"
        )
    try:
        if not isinstance(score, bool) and isinstance(score, int | float) and math.isfinite(score):
            return float(score)
    except OverflowError:  # a whole number of more digits than a float can hold
        pass
    raise BadRow("no score", f"score of {place} is {score!r:.80}, no finite number")
