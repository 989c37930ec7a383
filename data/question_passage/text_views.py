"""Data set of single texts, for task=views (two views of each text) and task=labelled (each text with its class).

Both views of a text are its tokens; the dropout of the tower makes their embeddings differ (SimCSE, Gao et al. 2021). A
text is a row with a field `text` or `contents` and perhaps `title`, read as a passage; or, without a title, the field
that data.columns names. Texts of equal content have equal keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import BadRow, SampleError
from dyad.data.batch import Batch, text_lengths
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.image_text.dataset import Tokenize
from dyad.data.image_text.items import Captions, LabelledSet
from dyad.data.loading.class_batches import ClassNumbers
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.question_passage import fields as row_fields
from dyad.data.question_passage.corpus import corpus_of
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.fields import Fields, label_of
from dyad.data.question_passage.formats import passage_of
from dyad.data.question_passage.passages import Passage
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.rows import SUFFIXES, Rows
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import ShardSource, Tables, parse_sources
from dyad.data.tables.image_table import TableOptions
from dyad.data.tables.prepare import CheckRow, prepared_tables, table_options


def text_of(fields: Fields) -> Passage:
    """Return the text of a row as a Passage, its fields text (or contents) and title. If the row has a field anchor
    (the name that the first column of data.columns gets), this field alone is the text. Raises BadRow for a missing or
    blank text, and for a field of a wrong type."""
    passage = passage_of({"text": fields["anchor"]} if "anchor" in fields else fields)
    if not passage.text.strip():
        raise BadRow("empty text", f"text is {passage.text!r:.80}")
    return passage


def text_sources(
    value: Any, config: DataConfig, by: Callable[[TableOptions, CheckRow], Tables], key: str = "data.train"
) -> list[ShardSource]:
    """Return the files of texts that `value` names, in the syntax of data.train, with their weights. For a BEIR or MS
    MARCO folder this is the file of its passages.

    by: makes the function that handles tables among the files: checked_tables only checks them, prepared_tables
    converts them to shards. key: the configuration key of `value`, for messages. Raises ConfigError for a value that
    cannot work, and the errors of this function for a table without texts.
    """
    tables = by(table_options(config), text_of)

    def files(path: str) -> Sequence[str]:
        return [corpus] if (corpus := corpus_of(path)) else tables(path)

    return parse_sources(value, key, SUFFIXES, files)


def open_texts(value: Any, config: DataConfig) -> Rows:
    """Open the texts that `value` names, in the syntax of data.train. Raises ConfigError for a value that cannot work,
    and DataError for a damaged file."""
    return Rows(open_shards(text_sources(value, config, prepared_tables)))


class SingleTexts:
    """The training data set of two views of each text, or of texts and their classes. A batch depends only on the rows
    at its positions; if one of them is bad, also on the seed and the epoch, which choose its replacement."""

    def __init__(
        self,
        rows: Rows,
        tokenize: TokenizeTexts,
        config: DataConfig,
        seed: int,
        numbers: ClassNumbers | None = None,
        kinds: np.ndarray | None = None,
    ) -> None:
        """Set up the data set, and check its first rows until one is usable: at most data.bad_in_a_row, at least one.

        seed: seed of the choice of replacements for bad rows. numbers: converts the class names in the field data.label
        to numbers; None: y is a second view. kinds: as in Replacements. Raises SampleError when all checked rows are
        unusable.
        """
        self.rows, self.tokenize, self.config, self.numbers = rows, tokenize, config, numbers
        self._replacements = Replacements(rows.shards.sizes, seed, config.bad_in_a_row_limit, kinds)
        check_any(range(min(len(rows), max(config.bad_in_a_row_limit, 1))), lambda i: self._text(0, i))

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of the rows at the given positions, each a pair (epoch, row index). x is tokens, int64 (b,
        L), with L as TokenizeTexts says; y is the same tokens, or the class numbers, int64 (b,).

        Bad (unusable) rows are replaced by others. Raises DataError when a file has changed or cannot be read, and when
        a row and its replacements, data.bad_in_a_row rows in all, are bad. With data.bad_samples=stop no row is
        replaced: the first bad one raises SampleError.
        """
        found, bad = self._replacements.load(positions, self._text, self.rows.shards.origin)
        ids, texts, labels = zip(*found, strict=True)
        x = tokens(texts, self.tokenize, self.config.passage)
        ids, keys = torch.tensor(ids), torch.tensor([text.key for text in texts])
        n = text_lengths(self.tokenize, x)
        y, m = (self.numbers(labels), None) if self.numbers else (x.clone(), n)
        return Batch(x, y, ids, keys, keys.clone(), bad=bad, x_lengths=n, y_lengths=m)

    def where(self, sample_id: int) -> str:
        return self.rows.where(sample_id)

    def _text(self, epoch: int, i: int) -> tuple[int, Passage, str]:
        """Return i, text i and the name of its class ("" if there are no classes). Raises SampleError for a bad row."""

        def text_and_label(fields: Fields) -> tuple[Passage, str]:
            return text_of(fields), label_of(fields, self.config.label) if self.numbers else ""

        text, label = self.rows.read(i, text_and_label, SampleError)
        if self.numbers:
            self.numbers([label], f"{self.rows.where(i)}: its class ")
        return i, text, label


# Evaluation -----------------------------------------------------------------------------------------------------------


def text_tokens(
    kind: Callable[[str], Any], tokenize: TokenizeTexts, config: PassageConfig | QuestionConfig, texts: list[str]
) -> Tensor:
    """Tokenise n texts. Return int64 (n, L), with L as TokenizeTexts says. kind: converts a text to a Passage if
    `config` is a PassageConfig, to a Question if it is a QuestionConfig. config: gives prefix and largest length."""
    return tokens(map(kind, texts), tokenize, config)


def plain_text(fields: Fields) -> str:
    """Return the text in the field "text" of a row, which may be blank. Raises BadRow if the field is missing or is no
    text."""
    return row_fields.text_of(fields.get("text"), "'text'")


def titled_text(fields: Fields) -> str:
    """Return the title of a row, if it has one, and its text, as `text_of` finds them, with a blank between them.
    Raises BadRow as `text_of` does."""
    passage = text_of(fields)
    return f"{passage.title} {passage.text}".strip()


def labelled_texts(
    shards: Shards, label: str, tokenize: Tokenize, text: Callable[[Fields], str] = plain_text
) -> LabelledSet:
    """Read all texts and class labels of files of rows into memory. Texts are tokenised only when a block is read.

    label: the field of a row with its class. text: a function that returns the text of a row. tokenize: the tokenizer
    of the tower. Raises DataError, naming the line, for a row that lacks a text or a label.
    """
    rows = Rows(shards)
    pairs = [rows.read(i, lambda fields: (text(fields), label_of(fields, label))) for i in range(len(rows))]
    texts, labels = [text for text, _ in pairs], [found for _, found in pairs]
    keys = np.array([content_key(text.encode()) for text in texts], dtype=np.int64)
    return LabelledSet(Captions(texts, tokenize), labels, keys)
