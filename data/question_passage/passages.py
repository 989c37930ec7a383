"""The classes Passage and Question, to which rows of all file formats are converted, and their texts for a
tokenizer."""

from dataclasses import dataclass

from dyad.data.config import PassageConfig, QuestionConfig, Title
from dyad.data.shards.content_keys import content_key

Rendered = tuple[str, str | None]  # the text for a tokenizer, and the second text of a pair; None: no pair


@dataclass(frozen=True)
class Passage:
    """A passage, from a corpus or from a row with a question. id: None if the file gives none. prefix: the text before
    the passage that its source sets (passage_prefix); None: data.passage.prefix. teacher: the score that a teacher or
    people gave the question and this passage; None: none was read."""

    text: str
    title: str = ""
    id: str | None = None
    prefix: str | None = None
    teacher: float | None = None

    @property
    def key(self) -> int:
        """The content key of the passage, a 64-bit hash of its title and text. Passages with equal title and text share
        a key, even if their ids differ."""
        return content_key(f"{self.title}\n{self.text}".encode())

    def rendered(self, config: PassageConfig) -> Rendered:
        """Return the passage as one or two texts for a tokenizer.

        With title=pair: (prefix + title, text), also if the title is empty, because either all rows of a batch are
        pairs or none is. With title=join: (prefix + title + blank + text, None), without the blank if the title is
        empty. With title=drop: (prefix + text, None).
        """
        prefix = config.prefix if self.prefix is None else self.prefix
        if config.title is Title.pair:
            return prefix + self.title, self.text
        title = f"{self.title} " if self.title and config.title is Title.join else ""
        return prefix + title + self.text, None


@dataclass(frozen=True)
class Question:
    """A question, from a data row or from the file of questions of a BEIR or MS MARCO folder.

    id: may be "" if the file gives none. answers: the answers that the file gives, texts or regular expressions; an
    evaluation may count a passage that contains one as right. group: the field metadata.topic, or None; questions of
    one group are drawn together in bootstrap resampling. prefix: the text before the question that its source sets
    (question_prefix); None: data.question.prefix.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    group: str | None = None
    prefix: str | None = None

    @property
    def key(self) -> int:
        """The content key of the question, a 64-bit hash of its text."""
        return content_key(self.text.encode())

    def rendered(self, config: QuestionConfig) -> Rendered:
        """Return (prefix + text, None) for a tokenizer. The second entry is None, because a question is never a pair of
        texts."""
        return (config.prefix if self.prefix is None else self.prefix) + self.text, None


class InlinePassages(tuple[Passage, ...]):
    """A tuple of passages whose texts are in the row of their question, not in a corpus."""

    @property
    def keys(self) -> list[int]:
        """The content keys (64-bit hashes of title and text) of the passages in this tuple, in order."""
        return [passage.key for passage in self]
