"""The classes Passage and Question, which all file formats are converted to, and the texts that a tower (encoder)
reads."""

from dataclasses import dataclass

from dyad.data.config import PassageConfig, QuestionConfig, Title
from dyad.data.shards.content_keys import content_key

Rendered = tuple[str, str | None]  # a tokenizer's text, and the second text when it takes a pair


@dataclass(frozen=True)
class Passage:
    """A passage, from a corpus or from a row with a question. id: None when the file gives none. prefix: of its source;
    None: that of the configuration."""

    text: str
    title: str = ""
    id: str | None = None
    prefix: str | None = None

    @property
    def key(self) -> int:
        """The content id of a passage, a hash of its title and text. Passages with equal title and text share it, even
        if their ids differ."""
        return content_key(f"{self.title}\n{self.text}".encode())

    def rendered(self, config: PassageConfig) -> Rendered:
        """Return a passage as the one or two texts that a tower (encoder) reads.

        With the setting title=pair, returns two texts: the prefix followed by the title, and the passage's text. An
        empty title gives two texts as well, because either all rows of a batch are pairs or none is. With any other
        setting, returns one text and None. The one text is the prefix, then (only with title=join) the title and a
        blank, unless the title is empty, then the passage's text.
        """
        prefix = config.prefix if self.prefix is None else self.prefix
        if config.title is Title.pair:
            return prefix + self.title, self.text
        title = f"{self.title} " if self.title and config.title is Title.join else ""
        return prefix + title + self.text, None


@dataclass(frozen=True)
class Question:
    """A question, from a data row or from queries.jsonl of a BEIR folder.

    answers: texts, if the file gives any; a relevant passage contains at least one. group: the field metadata.topic, or
    None; questions of one group are drawn together in bootstrap resampling. prefix: as of a passage.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    group: str | None = None
    prefix: str | None = None

    @property
    def key(self) -> int:
        """The content id of a question, a hash of its text."""
        return content_key(self.text.encode())

    def rendered(self, config: QuestionConfig) -> Rendered:
        """Return the text of a question that a tower (encoder) reads: the prefix and the question. The second entry is
        None, since a question is never a pair of texts."""
        return (config.prefix if self.prefix is None else self.prefix) + self.text, None


class InlinePassages(tuple[Passage, ...]):
    """Passages whose texts are in the row of their question, not in a corpus."""

    @property
    def keys(self) -> list[int]:
        """The content ids (hashes of title and text) of the passages in this tuple, in its order."""
        return [passage.key for passage in self]
