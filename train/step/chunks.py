"""A batch in chunks: the inputs of the towers chunk by chunk, and the objective's view of all embeddings.

The y tower runs once per chunk, over the y of its pairs and its share of the extra y-side items together. Both must
have the same shape per row. Tokens do, as one tokenizer pads them to one length (a tower that knows the padding cuts
off what a chunk does not need).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dyad.data.batch import Batch, Extra
from dyad.train.losses.gathered.batch import Columns

TensorPair = Sequence[Tensor]  # of x and of y


@dataclass(frozen=True)
class Chunk:
    """Inputs of x and y. The first `pairs` rows of x count, and of y the first `pairs` + `extra`.

    A side without such rows still has one row, so that the towers run equally often on all ranks.
    """

    index: int
    inputs: TensorPair
    pairs: int
    extra: int

    @property
    def sizes(self) -> tuple[int, int]:
        """How many rows count, of x and of y."""
        return self.pairs, self.pairs + self.extra


def chunk_count(global_batch_size: int, world_size: int, chunk_size: int | None) -> int:
    """How many chunks the towers run in. The number is the same on all ranks."""
    rows = math.ceil(global_batch_size / world_size)
    return math.ceil(rows / (chunk_size or rows))


def in_chunks(batch: Batch, count: int) -> list[Chunk]:
    """Cut pairs and extra items into `count` chunks each, whose sizes differ by one at most. Some may be empty."""
    extra = batch.y[:0] if batch.extra is None else batch.extra.y
    assert extra.shape[1:] == batch.y.shape[1:], f"y of {batch.y.shape[1:]} a row, extra y of {extra.shape[1:]}"
    parts = zip(*(rows.tensor_split(count) for rows in (batch.x, batch.y, extra)), strict=True)
    return [
        Chunk(i, (_at_least_one(x, batch.x), _at_least_one(joined([y, more]), batch.y)), len(x), len(more))
        for i, (x, y, more) in enumerate(parts)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor; the part itself, not a copy, when only one has rows."""
    filled = [part for part in parts if len(part)]
    return torch.cat(filled) if len(filled) > 1 else (filled or parts)[0]


def separated(y_nD: Tensor, chunks: Sequence[Chunk], extra: Extra | None) -> tuple[Tensor, Columns | None]:
    """Split y embeddings of all chunks in order (n = b + k rows) into (b, D) of the pairs and the k extra columns.

    `extra` is None on all ranks or on none; its number of items may be 0 on some.
    """
    if extra is None:
        return y_nD, None
    parts = y_nD.split([size for chunk in chunks for size in (chunk.pairs, chunk.extra)])
    y_bD, extra_kD = torch.cat(parts[::2]), torch.cat(parts[1::2])
    return y_bD, Columns(extra_kD, extra.row, extra.keys, extra.positive)


def _at_least_one(rows: Tensor, of: Tensor) -> Tensor:
    """`rows`, or one row in its place when it is empty: the first of `of`, or zeros."""
    if len(rows):
        return rows
    return of[:1] if len(of) else of.new_zeros(1, *of.shape[1:])
