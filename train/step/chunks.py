"""Cuts a batch into chunks for the towers, and puts the embeddings of all chunks together for the objective.

The y tower runs once per chunk, on one tensor: the y of the chunk's pairs, then the chunk's share of the extra y-side
items (for example mined negatives). So the rows of pairs and of extra items must have the same shape. Token ids do, as
one tokenizer pads them to one length. This costs little if the tower cuts off columns that are padding in every row.
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
    """One chunk of a batch: the rows that both towers embed at once.

    index: position of the chunk in the batch, from 0. inputs: the input rows of the x tower and of the y tower. pairs:
    how many pairs the chunk has. extra: how many extra y-side items (such as mined negatives) follow the y of the
    pairs. A side without rows gets one dummy row, whose embedding is dropped, so that the towers run equally often on
    all ranks.
    """

    index: int
    inputs: TensorPair
    pairs: int
    extra: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the number of x rows (pairs) and of y rows (pairs and extra items) of a chunk, without dummy rows."""
        return self.pairs, self.pairs + self.extra


def chunk_count(global_batch_size: int, world_size: int, chunk_size: int | None) -> int:
    """Return into how many chunks each rank's part of a batch is cut; the same on all ranks.

    chunk_size: how many pairs a chunk has at most; None: everything in one chunk.
    """
    rows = math.ceil(global_batch_size / world_size)
    return math.ceil(rows / (chunk_size or rows))


def in_chunks(batch: Batch, count: int) -> list[Chunk]:
    """Cut a batch into `count` chunks, each with an equal share of the pairs and of the extra y-side items.

    The shares differ by one row at most; if there are fewer rows than chunks, some shares are empty.
    """
    extra = batch.y[:0] if batch.extra is None else batch.extra.y
    assert extra.shape[1:] == batch.y.shape[1:], f"y of {batch.y.shape[1:]} a row, extra y of {extra.shape[1:]}"
    parts = zip(*(rows.tensor_split(count) for rows in (batch.x, batch.y, extra)), strict=True)
    return [
        Chunk(i, (_at_least_one(x, batch.x), _at_least_one(joined([y, more]), batch.y)), len(x), len(more))
        for i, (x, y, more) in enumerate(parts)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their rows. If only one of them has rows, return that tensor itself, not a copy."""
    filled = [part for part in parts if len(part)]
    return torch.cat(filled) if len(filled) > 1 else (filled or parts)[0]


def separated(y_nD: Tensor, chunks: Sequence[Chunk], extra: Extra | None) -> tuple[Tensor, Columns | None]:
    """Split the y embeddings of a batch into those of its b pairs and those of its k extra y-side items.

    y_nD: embeddings of all chunks, one chunk after the other, in each first those of the pairs; n = b + k. extra: the
    extra items of the batch (such as mined negatives), None on all ranks or on none; k may be 0 on some ranks. Returns
    the (b, D) embeddings of the pairs, and Columns: the (k, D) embeddings of the extra items, with the row that each
    belongs to, its content key, and whether it is a positive. The second result is None if `extra` is None.
    """
    if extra is None:
        return y_nD, None
    parts = y_nD.split([size for chunk in chunks for size in (chunk.pairs, chunk.extra)])
    y_bD, extra_kD = torch.cat(parts[::2]), torch.cat(parts[1::2])
    return y_bD, Columns(extra_kD, extra.row, extra.keys, extra.positive)


def _at_least_one(rows: Tensor, batch: Tensor) -> Tensor:
    """Return the tensor `rows`, or one dummy row if it has no rows, so that a tower can always run.

    The dummy is the first row of `batch`, or a row of zeros if `batch` has no rows either.
    """
    if len(rows):
        return rows
    return batch[:1] if len(batch) else batch.new_zeros(1, *batch.shape[1:])
