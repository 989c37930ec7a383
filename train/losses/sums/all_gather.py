"""The layout of a global batch (the batch of all ranks) over ranks, and collectives with an exact gradient.

In one process without torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyad.train.losses.sums.functions import first_order_only


@dataclass(frozen=True)
class Layout:
    """How the rows of a global batch are distributed: rank r holds sizes[r] rows, and global rows are in rank order.

    The sizes may differ and may be 0. rank: the index of this process.
    """

    sizes: tuple[int, ...]
    rank: int

    @staticmethod
    def of(*groups: Tensor) -> tuple[Layout, ...]:
        """Return one Layout (how many rows each rank holds) for each tensor of `groups`.

        The tensors hold rows of this rank; only their numbers of rows are sent. Every rank must call it, with equally
        many tensors.
        """
        here = [len(rows) for rows in groups]
        if not (dist.is_available() and dist.is_initialized()):
            return tuple(Layout((size,), 0) for size in here)
        counts = torch.empty(dist.get_world_size() * len(here), dtype=torch.int64, device=groups[0].device)
        dist.all_gather_into_tensor(counts, torch.tensor(here, device=groups[0].device))
        sizes = counts.view(-1, len(here)).T.tolist()
        return tuple(Layout(tuple(of_ranks), dist.get_rank()) for of_ranks in sizes)

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def share(self) -> float:
        """W / (number of rows of all W ranks).

        The mean over ranks of share · (sum over this rank's rows) is the mean over all rows.
        """
        return self.world_size / self.total

    @property
    def own(self) -> slice:
        """The slice of this rank's rows in the global batch."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    def gather(self, rows: Tensor) -> Tensor:
        """Join the `rows` (b, …) of all ranks, in rank order, to (B, …) on every rank.

        Backward sums the gradient over ranks, and each rank gets the part of its own rows. Every rank must call it,
        forward and backward.
        """
        return self.gathered(rows)[0]

    def gathered(self, rows: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Join `rows` as `gather` does, and the tensors of `more`, (b, …) of any types, by one collective.

        Returns the joined tensors, (B, …), in the order of the arguments; on several ranks only the first has a
        gradient, on one they are the arguments themselves. Every rank must call it, with equal types and further sizes,
        forward and backward.
        """
        return _Gather.apply(self, rows, *more) if self.world_size > 1 else (rows, *more)  # pyright: ignore[reportReturnType]

    def placed(self, values: Tensor) -> Tensor:
        """Return (…, B) with `values` (…, b) at this rank's rows and 0 elsewhere; a sum over ranks then joins them."""
        whole = values.new_zeros(*values.shape[:-1], self.total)
        whole[..., self.own] = values
        return whole

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of `values` over ranks, on every rank. Backward sums the gradient over ranks.

        Every rank must call it, forward and backward.
        """
        return _Sum.apply(values, self) if self.world_size > 1 else values  # pyright: ignore[reportReturnType]

    def sum_(self, values: Tensor) -> Tensor:
        """Sum `values` elementwise over ranks, in place and without gradient; return it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Set `values` to its elementwise maximum over ranks, without gradient; return it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _pad(self, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Split `rows` into blocks of sizes[0], sizes[1], … rows, and pad each block with zero rows at its end.

        Each block then has as many rows as the rank that holds the most, since torch.distributed needs blocks of equal
        size. Returns the padded blocks joined, or `rows` itself (contiguous) if all ranks hold equally many rows.
        """
        if len(set(self.sizes)) == 1:
            return rows.contiguous()
        padded = rows.new_zeros(len(sizes), max(self.sizes), *rows.shape[1:])
        for space, block in zip(padded, rows.split(sizes), strict=True):
            space[: len(block)] = block
        return padded.flatten(0, 1)


class _Gather(torch.autograd.Function):
    """The autograd function of Layout.gathered: an all-gather of several tensors.

    Backward is a reduce-scatter of the gradient of the first tensor; the others get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, layout: Layout, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        most = max(layout.sizes)
        joined = parts if len(parts) == 1 else [_as_bytes(part) for part in parts]
        rows = joined[0] if len(parts) == 1 else torch.cat(joined, 1)
        everyone = rows.new_empty(layout.world_size * most, *rows.shape[1:])
        dist.all_gather_into_tensor(everyone, layout._pad(rows, (len(rows),)))
        if len(everyone) != layout.total:
            blocks = zip(everyone.split(most), layout.sizes, strict=True)
            everyone = torch.cat([block[:size] for block, size in blocks])
        if len(parts) == 1:
            return (everyone,)
        every = zip(everyone.split([part.shape[1] for part in joined], 1), parts, strict=True)
        return tuple(e.contiguous().view(part.dtype).view(len(e), *part.shape[1:]) for e, part in every)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout: Layout = ctx.layout
        # in half precision each addition of the reduction would be rounded
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        own = wide.new_empty(max(layout.sizes), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, layout._pad(wide, layout.sizes))
        return None, own[: layout.sizes[layout.rank]].to(gradient.dtype), *(None for _ in others)


def _as_bytes(rows: Tensor) -> Tensor:
    """Return the bytes of each row: (b, …) of any type → (b, n) uint8."""
    return rows[..., None].flatten(1).contiguous().view(torch.uint8)


class _Sum(torch.autograd.Function):
    """The autograd function of Layout.sum: a sum over ranks (all-reduce); backward sums the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.sum_(values.clone())

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.layout.sum_(gradient.clone()), None
