"""Passages and questions, the same for all file formats, and the text of them that a tower reads."""

from __future__ import annotations

from dataclasses import dataclass

from dyad.data.config import PassageConfig, QuestionConfig, Title
from dyad.data.shards.content_keys import content_key

Rendered = tuple[str, str | None]  # a tokenizer's text, and the second text when it takes a pair


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus or of a row. id: None when the file gives none."""

    text: str
    title: str = ""
    id: str | None = None

    @property
    def key(self) -> int:
        """Content id: passages with equal title and text are the same, even if their ids differ."""
        return content_key(f"{self.title}\n{self.text}".encode())

    def rendered(self, config: PassageConfig) -> Rendered:
        """The text that a tower reads: the prefix, then title and text joined by a blank.

        With title=pair it is a pair of texts, and the title is the first of them, even an empty one: either all rows of
        a batch are pairs or none is.
        """
        if config.title is Title.pair:
            return config.prefix + self.title, self.text
        title = f"{self.title} " if self.title and config.title is Title.join else ""
        return config.prefix + title + self.text, None


@dataclass(frozen=True)
class Question:
    """A question, of a row or of queries.jsonl.

    answers: texts of which a relevant passage contains one, if the file gives them. group: the unit of bootstrap
    resampling, the field metadata.topic of a BEIR query.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    group: str | None = None

    @property
    def key(self) -> int:
        """Content id of the text."""
        return content_key(self.text.encode())

    def rendered(self, config: QuestionConfig) -> Rendered:
        """The text that a tower reads: the prefix, then the question."""
        return config.prefix + self.text, None


class InlinePassages(tuple[Passage, ...]):
    """Passages whose texts are in the row itself."""

    @property
    def keys(self) -> list[int]:
        """Their content ids."""
        return [passage.key for passage in self]
