"""The rows of a text input as the host sees them: how many tokens each has, row indices for the device, and trunks
that run rows of similar length together.

A host that reads from a GPU waits until the GPU has done all work before. So the lengths come with a batch from the
loader, and only a caller without them, such as an evaluation, has them read from the tokens.
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
# Fewest rows of a group. Smaller groups would save padding, but lose the speed of larger products.
MIN_GROUP = {"cpu": 16, "cuda": 512}


def token_counts(tokens: Tensor, padding: int = PADDING) -> Lengths:
    """Return the number of tokens of each row of `tokens`, (b, L) token ids, without the padding on the right; at least
    1.
    """
    numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != padding) * numbers).amax(1).clamp(min=1).cpu().numpy()


def text_ends(tokens: Tensor, end: int | None) -> Lengths:
    """Return the number of tokens of each row of `tokens`, (b, L) token ids, up to and with the end of the text: the
    first token `end`, or the first of the largest id if `end` is None. That of a row without `end` is 1.
    """
    return ((tokens if end is None else (tokens == end).int()).argmax(1) + 1).cpu().numpy()


def sizes_of(places: Lengths) -> Lengths:
    """Return the number of rows of each sequence. places (n,): that of each row in its sequence, from 0."""
    return np.diff(np.append(np.flatnonzero(places == 0), len(places)))


def padded_length(longest: int, limit: int, step: int = LENGTH_STEP) -> int:
    """Return the length to which rows of up to `longest` tokens are padded: the next multiple of `step`, at most
    `limit`.

    Rounding keeps the number of different shapes small.
    """
    return min(-(-longest // step) * step, limit)


def index_on(device: torch.device, rows: Sequence[int] | Lengths) -> Tensor:
    """Return the row indices `rows` as an int64 tensor on `device`. The host does not wait for the device."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


class Grouped(nn.Module, ABC):
    """Embeds token ids (b, L) as (b, H); a row's embedding depends only on its own first tokens, up to rounding.

    So how rows are grouped and cut changes only the speed. A subclass says how a group runs, in encode_group, and how
    many tokens of a row count, in count: a function of the token ids alone, which the loader calls too. fills: a token
    id that may stand behind them. grouped: whether rows of similar length run together; otherwise there is one call of
    encode_group a forward pass, cut to the longest row. one_length: whether rows are never cut.
    """

    count: Callable[[Tensor], Lengths]
    fills: int = PADDING
    grouped = True
    one_length = False

    def forward(self, tokens: Tensor, counts: Lengths | None = None) -> Tensor:
        """Embed token ids (b, L) as (b, H). counts: the tokens of each row; None: they are read from `tokens`."""
        if self.one_length:
            return self.encode_group(tokens)
        counts = self.count(tokens) if counts is None else counts
        lengths = [padded_length(count, tokens.shape[1], self._step(tokens)) for count in counts.tolist()]
        groups = group_by_length(lengths, MIN_GROUP[tokens.device.type] if self.grouped else len(lengths))
        if len(groups) == 1:
            return self.encode_group(tokens[:, : max(lengths, default=1)].clone(memory_format=torch.contiguous_format))
        order = index_on(tokens.device, [row for group in groups for row in group])
        parts = zip(order.split([len(group) for group in groups]), groups, strict=True)
        # Copies, not views: strides and offsets would be further shapes to compile for
        embedded = [self.encode_group(tokens[:, : lengths[group[0]]][rows]) for rows, group in parts]
        return torch.cat(embedded)[order.argsort()]  # back in the order of the input

    def _step(self, tokens: Tensor) -> int:
        """Return of what lengths are multiples. Where a CPU encodes for an evaluation they are exact: texts are sorted
        by length there, so shapes change slowly, and of short texts the padding would be a third.
        """
        return 1 if tokens.device.type == "cpu" and not torch.is_grad_enabled() else LENGTH_STEP

    @abstractmethod
    def encode_group(self, tokens: Tensor) -> Tensor:
        """Embed token ids (b, L) of b texts as (b, H), by one call of the encoder, with L tokens a row."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the embedding of a group of rows, for any number of rows and tokens, with further arguments of
        torch.compile. The grouping by length is plain Python.
        """
        self.encode_group = torch.compile(self.encode_group, *args, dynamic=True, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def group_by_length(lengths: Sequence[int], min_rows: int) -> list[list[int]]:
    """Split row indices into groups of similar length, longest rows first, to save padding.

    Each group is padded to the length of its first row. lengths: tokens of each row. A group ends before a shorter row
    once it has `min_rows` rows. A last group with fewer rows joins the group before it.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    starts = [0]
    for position, row in enumerate(order):
        if position - starts[-1] >= min_rows and lengths[row] < lengths[order[starts[-1]]]:
            starts.append(position)
    if len(starts) > 1 and len(order) - starts[-1] < min_rows:
        starts.pop()
    return [order[start:stop] for start, stop in pairwise([*starts, len(order)])]
