"""Passages and questions: what a row of any format comes down to, and the text that a tower reads of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.config import PassageConfig, QuestionConfig, Title
from data.keys import content_key

Rendered = tuple[str, str | None]  # what a tokenizer takes as text and as second text of a pair


@dataclass(frozen=True)
class Passage:
    """A passage. id: None where the file has none."""

    text: str
    title: str = ""
    id: str | None = None

    @property
    def key(self) -> int:
        """Content id: equal title and text are the same passage, whatever their ids."""
        return content_key(f"{self.title}\n{self.text}".encode())

    def rendered(self, config: PassageConfig) -> Rendered:
        """The prefix, then title and text joined by a blank; with title=pair the text is the second of a pair, and
        the first one is there also where the title is empty: all rows of a batch are pairs or none is.
        """
        if config.title is Title.pair:
            return config.prefix + self.title, self.text
        title = f"{self.title} " if self.title and config.title is Title.join else ""
        return config.prefix + title + self.text, None


@dataclass(frozen=True)
class Question:
    """A question. answers: texts of which a right passage has one, where the file gives them; group: what bootstrap
    samples are drawn of, the field metadata.topic of a BEIR query."""

    id: str
    text: str
    answers: tuple[str, ...] = ()
    group: str | None = None

    @property
    def key(self) -> int:
        """Content id of its text."""
        return content_key(self.text.encode())

    def rendered(self, config: QuestionConfig) -> Rendered:
        return config.prefix + self.text, None


class Passages(Sequence[Passage]):
    """Passages of one row, read when they are asked for. keys: their content keys, known without reading."""

    @property
    @abstractmethod
    def keys(self) -> list[int]: ...


@dataclass(frozen=True)
class Inline(Passages):
    """Passages that are in the row itself."""

    passages: Sequence[Passage]

    @property
    def keys(self) -> list[int]:
        return [passage.key for passage in self.passages]

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, i: Any, /) -> Any:
        return self.passages[i]
