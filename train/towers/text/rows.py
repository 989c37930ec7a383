"""Count the tokens of rows of texts on the host, and embed rows of similar length together.

A host that reads from a GPU waits until the GPU has done all earlier work. So the loader gives the lengths of rows with
each batch. They are read from the tokens only for a caller that does not have them, such as an evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dyad.data.batch import PADDING, Lengths

LENGTH_STEP = 8  # tokens; lengths are rounded up to a multiple of it
# fewest rows of a group, by type of device: smaller groups would save padding, but lose the speed of larger products
MIN_GROUP = {"cpu": 16, "cuda": 512}


def token_counts(tokens: Tensor, padding: int = PADDING) -> Lengths:
    """Return the number of tokens of each row without the padding on the right, at least 1: int64 (b,) in NumPy.

    tokens: token ids (b, L). padding: the id of padding.
    """
    numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != padding) * numbers).amax(1).clamp(min=1).cpu().numpy()


def text_ends(tokens: Tensor, end: int | None) -> Lengths:
    """Return the number of tokens of each row up to and including the end of the text: int64 (b,) in NumPy.

    tokens: token ids (b, L). end: the id of the token that ends a text; None: the largest id of each row. The first
    such token of a row counts. A row without `end` gets 1.
    """
    return ((tokens if end is None else (tokens == end).int()).argmax(1) + 1).cpu().numpy()


def sequence_sizes(places: Lengths) -> Lengths:
    """Return the number of rows of each of b sequences, int64 (b,) in NumPy.

    places: the place of each row in its sequence, int64 (n,): 0, 1, 2, … for each sequence, one after the other.
    """
    return np.diff(np.append(np.flatnonzero(places == 0), len(places)))


def padded_length(longest: int, limit: int, step: int = LENGTH_STEP) -> int:
    """Return the length in tokens to which to pad rows of up to `longest` tokens.

    It is `longest` rounded up to a multiple of `step`, at most `limit`. Rounding keeps the number of different shapes
    small.
    """
    return min(-(-longest // step) * step, limit)


def index_on(device: torch.device, rows: Sequence[int] | Lengths) -> Tensor:
    """Return row indices of the host as an int64 tensor on `device`, by a copy with non_blocking=True."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


class Grouped(nn.Module, ABC):
    """Embeds token ids (b, L) as (b, H), in groups of rows of similar length, cut to the longest row of each group.

    A subclass defines encode_group, which embeds a group, and count, a function from token ids (b, L) to the number of
    tokens that each row needs, int64 (b,) in NumPy, which the loader calls too. The length of a group may be rounded up
    (`_step`). The embedding of a row must depend only on the tokens that it needs, its first ones, so that grouping
    changes nothing but the speed. fills: a token id that can stand behind the needed tokens without changing the
    embedding, such as padding. grouped: whether to group rows by length; False: one call of encode_group, cut to the
    longest row. one_length: whether rows are neither grouped nor cut.
    """

    count: Callable[[Tensor], Lengths]
    fills: int = PADDING
    grouped = True
    one_length = False

    def forward(self, tokens: Tensor, counts: Lengths | None = None) -> Tensor:
        """Embed token ids (b, L) as (b, H).

        counts: the number of tokens that each row needs, int64 (b,) in NumPy; None: `count` computes it from `tokens`.
        """
        if self.one_length:
            return self.encode_group(tokens)
        counts = self.count(tokens) if counts is None else counts
        lengths = [padded_length(count, tokens.shape[1], self._step(tokens)) for count in counts.tolist()]
        groups = group_by_length(lengths, MIN_GROUP[tokens.device.type] if self.grouped else len(lengths))
        if len(groups) == 1:
            return self.encode_group(tokens[:, : max(lengths, default=1)].clone(memory_format=torch.contiguous_format))
        order = index_on(tokens.device, [row for group in groups for row in group])
        parts = zip(order.split([len(group) for group in groups]), groups, strict=True)
        # copies, not views, whose strides and offsets torch.compile would treat as further shapes
        embedded = [self.encode_group(tokens[:, : lengths[group[0]]][rows]) for rows, group in parts]
        return torch.cat(embedded)[order.argsort()]  # back in the order of the input

    def _step(self, tokens: Tensor) -> int:
        """Return the argument `step` of `padded_length`: 1 on a CPU without gradients, else LENGTH_STEP.

        1 means that lengths are not rounded up. An evaluation on a CPU sorts texts by length, so shapes change rarely
        without rounding, and padding of short texts would be a third of the work.
        """
        return 1 if tokens.device.type == "cpu" and not torch.is_grad_enabled() else LENGTH_STEP

    @abstractmethod
    def encode_group(self, tokens: Tensor) -> Tensor:
        """Embed token ids (b, L) of b texts as (b, H), by one call of the encoder, with L tokens a row."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile encode_group in place, for any number of rows and tokens, with further arguments of torch.compile.

        Do not pass `dynamic`, which is True. The grouping of rows by length is plain Python and is not compiled.
        """
        self.encode_group = torch.compile(self.encode_group, *args, dynamic=True, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def group_by_length(lengths: Sequence[int], min_rows: int) -> list[list[int]]:
    """Split row indices into groups of similar length, longest rows first, to save padding.

    Each group is padded to the length of its first row. lengths: number of tokens of each row. A group with `min_rows`
    rows ends before the next row that is shorter than its first. A last group with fewer rows joins the group before.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    starts = [0]
    for position, row in enumerate(order):
        if position - starts[-1] >= min_rows and lengths[row] < lengths[order[starts[-1]]]:
            starts.append(position)
    if len(starts) > 1 and len(order) - starts[-1] < min_rows:
        starts.pop()
    return [order[start:stop] for start, stop in pairwise([*starts, len(order)])]
