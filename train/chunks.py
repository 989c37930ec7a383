"""A batch in chunks: what the towers get at a time, and what the objective gets of all of them.

The y tower runs once a chunk, over the y of its pairs and its share of the further y-side items together. So these must
be shaped alike, row by row; tokens are, as one tokenizer fills them up to one length (a tower that knows the padding
cuts off what a chunk does not need).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch, Extra
from train.losses import Columns

Pair = Sequence[Tensor]  # of x and of y


@dataclass(frozen=True)
class Chunk:
    """Inputs of x and y; `pairs` rows of x count, and of y as many and then `extra` further ones.

    A side of which no row counts runs one all the same, so that the towers run equally often on all ranks.
    """

    index: int
    inputs: Pair
    pairs: int
    extra: int

    @property
    def sizes(self) -> tuple[int, int]:
        """How many rows count, of x and of y."""
        return self.pairs, self.pairs + self.extra


def chunk_count(global_batch_size: int, world_size: int, chunk_size: int | None) -> int:
    """How many chunks the towers run in: the same number on all ranks."""
    rows = math.ceil(global_batch_size / world_size)
    return math.ceil(rows / (chunk_size or rows))


def in_chunks(batch: Batch, count: int) -> list[Chunk]:
    """`count` runs of pairs whose sizes differ by one at most, and of extra items likewise; some may be empty."""
    further = batch.y[:0] if batch.extra is None else batch.extra.y
    assert further.shape[1:] == batch.y.shape[1:], f"y of {batch.y.shape[1:]} a row, extra y of {further.shape[1:]}"
    parts = zip(*(rows.tensor_split(count) for rows in (batch.x, batch.y, further)), strict=True)
    return [
        Chunk(i, (_at_least_one(x, batch.x), _at_least_one(joined([y, more]), batch.y)), len(x), len(more))
        for i, (x, y, more) in enumerate(parts)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, which is the part itself when only one has rows."""
    filled = [part for part in parts if len(part)]
    return torch.cat(filled) if len(filled) > 1 else (filled or parts)[0]


def separated(y_nD: Tensor, chunks: Sequence[Chunk], extra: Extra | None) -> tuple[Tensor, Columns | None]:
    """The y side of all chunks, one after the other (n = b + k rows) → y of the b pairs, and the k further columns.

    Whether there are any is the task's affair and the same on all ranks; how many may be 0 on some.
    """
    if extra is None:
        return y_nD, None
    parts = y_nD.split([size for chunk in chunks for size in (chunk.pairs, chunk.extra)])
    y_bD, extra_kD = torch.cat(parts[::2]), torch.cat(parts[1::2])
    return y_bD, Columns(extra_kD, extra.row, extra.keys, extra.positive)


def _at_least_one(rows: Tensor, of: Tensor) -> Tensor:
    """`rows`; if there are none the first `of` all, or a row of zeros."""
    if len(rows):
        return rows
    return of[:1] if len(of) else of.new_zeros(1, *of.shape[1:])
