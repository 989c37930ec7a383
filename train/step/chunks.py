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
    """One chunk of a batch. inputs: the rows that go through the x tower and through the y tower.

    Of x the first `pairs` rows count, of y the first `pairs` + `extra`. A side where none counts still has one row, a
    placeholder, so that the towers run equally often on all ranks.
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
    """How many chunks a rank's part of a batch is cut into, at chunk_size pairs each (None: one chunk).

    The number is the same on all ranks.
    """
    rows = math.ceil(global_batch_size / world_size)
    return math.ceil(rows / (chunk_size or rows))


def in_chunks(batch: Batch, count: int) -> list[Chunk]:
    """Cut a batch into `count` chunks, each with its share of the pairs and of the extra y-side items.

    The shares differ by one at most, so some may be empty.
    """
    extra = batch.y[:0] if batch.extra is None else batch.extra.y
    assert extra.shape[1:] == batch.y.shape[1:], f"y of {batch.y.shape[1:]} a row, extra y of {extra.shape[1:]}"
    parts = zip(*(rows.tensor_split(count) for rows in (batch.x, batch.y, extra)), strict=True)
    return [
        Chunk(i, (_at_least_one(x, batch.x), _at_least_one(joined([y, more]), batch.y)), len(x), len(more))
        for i, (x, y, more) in enumerate(parts)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their rows. When only one of them has rows, it is returned itself, not a copy."""
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


def _at_least_one(rows: Tensor, batch: Tensor) -> Tensor:
    """`rows`, or a placeholder row when there are none: the first row of the whole batch, or zeros."""
    if len(rows):
        return rows
    return batch[:1] if len(batch) else batch.new_zeros(1, *batch.shape[1:])
