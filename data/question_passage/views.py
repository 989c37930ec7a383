"""Two views of one text as a training pair: both are its tokens, and the dropout of the tower makes them differ
(SimCSE, Gao et al. 2021).

A text is a row with a `text` and perhaps a `title`, read as a passage. Texts of equal content have equal keys.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dyad.data.base.errors import BadRow, SampleError
from dyad.data.batch import Batch, lengths_by
from dyad.data.config import DataConfig
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.question_passage.corpus import corpus_of
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.formats import passage_of
from dyad.data.question_passage.passages import Passage
from dyad.data.shards.rows import SUFFIXES, Rows
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import ShardSource, Tables, parse_sources
from dyad.data.tables.pictures import TableOptions
from dyad.data.tables.prepare import CheckRow, prepared_tables, table_options


def text_of(fields: Mapping[str, Any]) -> Passage:
    """Return the text of a row, as a passage; of a table whose column the user named, that column. Raises BadRow for a
    row without one."""
    passage = passage_of({"text": fields["anchor"]} if "anchor" in fields else fields)
    if not passage.text.strip():
        raise BadRow("empty text", f"text is {passage.text!r:.80}")
    return passage


def text_sources(value: Any, config: DataConfig, by: Callable[[TableOptions, CheckRow], Tables]) -> list[ShardSource]:
    """Return the files of texts that `value` names, in the syntax of data.train; of a folder of BEIR its passages.

    by: checked_tables or prepared_tables. Raises ConfigError for a value that cannot work, and for a table without
    texts. Reads no text.
    """
    tables = by(table_options(config), text_of)

    def files(path: str) -> Sequence[str]:
        return [corpus] if (corpus := corpus_of(path)) else tables(path)

    return parse_sources(value, "data.train", SUFFIXES, files)


def open_texts(value: Any, config: DataConfig) -> Rows:
    """Open the texts that `value` names. Arguments and errors as of `text_sources`; DataError for a damaged file."""
    return Rows(open_shards(text_sources(value, config, prepared_tables)))


class TextViews:
    """The training data set of two views of each text. A batch depends only on its positions (epoch, row) and the
    rows."""

    def __init__(self, rows: Rows, tokenize: TokenizeTexts, config: DataConfig, seed: int) -> None:
        """Set up the data set and check its first rows. seed: chooses replacements of bad rows. Raises SampleError when
        all checked rows are unusable."""
        self.rows, self.tokenize, self.config = rows, tokenize, config
        self._replacements = Replacements(rows.shards.sizes, seed, config.tolerated)
        check_any(range(min(len(rows), max(config.tolerated, 1))), lambda i: self._text(0, i))

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of the rows at the given positions, each a pair (epoch, row index): x and y the same tokens,
        int64 (b, L). Bad (unusable) rows are replaced. Errors as of `PictureViews`."""
        found, bad = self._replacements.load(positions, self._text, self.rows.shards.origin)
        ids, texts = zip(*found, strict=True)
        x = tokens(texts, self.tokenize, self.config.passage)
        ids, keys = torch.tensor(ids), torch.tensor([text.key for text in texts])
        n, pad = lengths_by(self.tokenize, x), self.tokenize.pad
        return Batch(x, x.clone(), ids, keys, keys.clone(), bad=bad, padding=pad, x_lengths=n, y_lengths=n)

    def where(self, sample_id: int) -> str:
        return self.rows.where(sample_id)

    def _text(self, epoch: int, i: int) -> tuple[int, Passage]:
        try:
            return i, text_of(self.rows.parse(i))
        except BadRow as bad:
            raise SampleError(f"{self.rows.where(i)}: {bad}.") from bad
