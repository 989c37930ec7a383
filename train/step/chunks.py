"""Cut a batch into chunks for the towers, and put the embeddings of all chunks together for the objective.

A tower embeds a chunk in one call, on one tensor with the rows of the pairs and of the extra items (for example mined
negatives) of its side. So pairs and extra items must have rows of one shape. Rows of token ids have: one tokenizer pads
all texts to one length.

Texts are sorted by length, on each side separately, before they are cut into several chunks: a text encoder then cuts
off more columns that are padding in every row. The embeddings are put back into the order of the batch. Rows of one
sequence stay in one chunk, in their order: the embedding of a row depends on the rows before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dyad.data.batch import Batch, Extra, ExtraX, Lengths
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.towers.text.rows import index_on

TensorPair = Sequence[Tensor]  # a tensor of side x and one of side y
Arguments = dict[str, Lengths]  # further arguments of a tower: name → a number for each row


@dataclass(frozen=True)
class Chunk:
    """One chunk of a batch: the rows that both towers embed at once.

    index: position of the chunk in the batch, from 0. inputs: the input rows of the x tower and of the y tower.
    arguments: the further arguments of the x tower and of the y tower, by name: for texts lengths, the number of tokens
    of each row; for sequences places, the position of each row in its sequence; {}: none. sizes: the numbers of x rows
    and y rows. A side without rows has size 0 and one dummy row, whose embedding is dropped, so that the towers run
    equally often on all ranks.
    """

    index: int
    inputs: TensorPair
    arguments: Sequence[Arguments]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Side:
    """One side of a batch, x or y, cut into chunks.

    parts: for each chunk, this side's entries of Chunk.inputs, arguments and sizes. order: the index in the batch of
    each row of the concatenated chunks, int64 (n,); None: the chunks are in the order of the batch.
    """

    parts: list[tuple[Tensor, Arguments, int]]
    order: Tensor | None

    def joined(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Concatenate the embeddings of all chunks, and return them, (n, D), in the order of the batch.

        embeddings: one tensor for each chunk, from which the caller has removed the dummy row: (0, D) without rows.
        """
        whole = joined(embeddings)
        return whole if self.order is None else whole[self.order.argsort()]

    def split(self, gradient: Tensor) -> Sequence[Tensor]:
        """Cut `gradient`, (n, D) in the order of the batch, into one tensor for each chunk: the inverse of `joined`.

        A chunk without rows gets a tensor (0, D).
        """
        return (gradient if self.order is None else gradient[self.order]).split([size for _, _, size in self.parts])


def chunk_count(global_batch_size: int, world_size: int, chunk_size: int | None) -> int:
    """Return into how many chunks each rank's part of a batch is cut; the same on all ranks.

    global_batch_size: pairs, or sequences, of all ranks. chunk_size: those of a chunk, at most, where extra items do
    not count; None: one chunk for all.
    """
    rows = math.ceil(global_batch_size / world_size)
    return math.ceil(rows / (chunk_size or rows))


def in_chunks(batch: Batch, count: int) -> tuple[list[Chunk], tuple[Side, Side]]:
    """Cut the x rows and the y rows of a batch, extra items included, into `count` chunks each.

    Returns the chunks and (side x, side y), whose `joined` brings the embeddings of the chunks into the order of the
    batch. On each side the chunks' numbers of rows differ by at most one; if x rows form sequences, their numbers of
    whole sequences do. If a side has fewer rows than chunks, some of its chunks have none. Raises AssertionError if the
    rows of extra y items have another shape than those of y.
    """
    rows, lengths = batch.y, batch.y_lengths
    if (extra := batch.extra) is not None:
        assert extra.y.shape[1:] == rows.shape[1:], f"y of {rows.shape[1:]} a row, extra y of {extra.y.shape[1:]}"
        rows = joined([rows, extra.y])
        lengths = None if lengths is None or extra.lengths is None else np.concatenate([lengths, extra.lengths])
    x_rows = batch.x if batch.extra_x is None else joined([batch.x, batch.extra_x.x])
    x = _side(x_rows, batch.x_lengths, count, batch.x_places)
    y = _side(rows, lengths, count)
    parts = enumerate(zip(x.parts, y.parts, strict=True))
    chunks = [
        Chunk(i, (x_rows, y_rows), (of_x, of_y), (x_size, y_size))
        for i, ((x_rows, of_x, x_size), (y_rows, of_y, y_size)) in parts
    ]
    return chunks, (x, y)


def _side(rows: Tensor, lengths: Lengths | None, count: int, places: Lengths | None = None) -> Side:
    """Cut the n rows of a side, (n, …), into `count` chunks, as `in_chunks` does.

    lengths: number of tokens of each row, (n,); None: rows are not texts, or not counted. If given, and `count` is more
    than 1, rows are sorted by length, the longest first, so that the first chunk shows how much memory a chunk takes at
    most. places: position of each row in its sequence, from 0, (n,); None: rows are not of sequences. Rows of sequences
    are not sorted.
    """
    order, starts = None, np.arange(len(rows)) if places is None else np.flatnonzero(places == 0)
    if lengths is not None and count > 1 and places is None:
        longest_first = np.argsort(-lengths, kind="stable")
        order = index_on(rows.device, longest_first)
        rows, lengths = rows[order], lengths[longest_first]
    dummy = rows[:1] if len(rows) else rows.new_zeros(1, *rows.shape[1:])  # so that a tower can always run
    # arguments of the dummy row, and of all rows
    dummies: Arguments = {"lengths": np.array(rows.shape[1:2]), "places": np.zeros(1, np.int64)}
    arguments = {name: each for name, each in (("lengths", lengths), ("places", places)) if each is not None}
    bounds = [int(part[0]) if len(part) else len(rows) for part in np.array_split(starts, count)]
    parts: list[tuple[Tensor, Arguments, int]] = []
    for start, stop in pairwise([*bounds, len(rows)]):
        own = {name: each[start:stop] if stop > start else dummies[name] for name, each in arguments.items()}
        parts.append((rows[start:stop] if stop > start else dummy, own, stop - start))
    return Side(parts, order)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dimension 0. If only one of them has rows, return that tensor itself, not a copy."""
    filled = [part for part in parts if len(part)]
    return torch.cat(filled) if len(filled) > 1 else (filled or parts)[0]


def separated(y_nD: Tensor, columns: int, extra: Extra | None) -> tuple[Tensor, Columns | None]:
    """Split the y embeddings of a batch into those of its m columns and those of its k extra y-side items.

    y_nD: embeddings of the columns, then of the extra items; n = m + k. columns: m. extra: the extra items of the batch
    (such as mined negatives), None on all ranks or on none; k may be 0 on some ranks. Returns the (m, D) embeddings of
    the columns, and Columns: the (k, D) embeddings of the extra items, with the row that each belongs to, its content
    key, whether it is a positive, the log of the probability with which it was drawn if it was, its relevance and its
    score by a teacher. The second result is None if `extra` is None.
    """
    if extra is None:
        return y_nD, None
    y_mD, extra_kD = y_nD.split([columns, len(y_nD) - columns])
    return y_mD, Columns(extra_kD, extra.row, extra.keys, extra.positive, extra.log_q, extra.relevance, extra.teacher)


def separated_x(x_nD: Tensor, rows: int, extra: ExtraX | None) -> tuple[Tensor, XNegatives | None]:
    """Split the x embeddings of a batch into those of its b rows and those of its k extra x-side items.

    x_nD: embeddings of the rows, then of the extra items; n = b + k. rows: b. extra: the extra items of the batch, None
    on all ranks or on none. Returns the (b, D) embeddings of the rows, and XNegatives: the (k, D) embeddings of the
    extra items with the row that each belongs to and its content key; None if `extra` is None.
    """
    if extra is None:
        return x_nD, None
    x_bD, extra_kD = x_nD.split([rows, len(x_nD) - rows])
    return x_bD, XNegatives(extra_kD, extra.row, extra.keys)
