"""Conditions on a batch that nearly always hold, and the sizes of the batch: known to a trainer ahead of the device.

An objective that reads a condition from a GPU makes the host wait. A trainer computes the objective within
`collect_checks`: conditions are then assumed and read later, with the other numbers of the step. If one of them did not
hold, the trainer drops the result and computes it again with speculative=False. Outside of `collect_checks` every
condition is read at once.

Sums over ranks that nothing waits for are left to the trainer in the same way: it sends them with its scalars.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout

Finish = Callable[[Tensor], dict[str, Tensor]]  # from a sum over ranks to metrics


@dataclass(frozen=True)
class Sizes:
    """The layouts of a global batch: of its x rows, of its y columns, of further y items, of the positives of these."""

    rows: Layout
    columns: Layout
    further: Layout
    positives: Layout


@dataclass(frozen=True)
class Checks:
    """What one computation of an objective is told, and what it leaves to the trainer to read and to sum.

    Told: speculative: whether conditions are assumed to hold; sizes: of the global batch, None if they are not known;
    logged: whether costly metrics are wanted; all three the same on all ranks.
    Left: conditions: those that were assumed or read, 0-d bool tensors of this rank; later: values to sum over ranks,
    1-d, each with the function that makes metrics of the sum (`summed_later`).
    """

    speculative: bool
    sizes: Sizes | None = None
    logged: bool = True
    conditions: list[Tensor] = field(default_factory=list)
    later: list[tuple[Tensor, Finish]] = field(default_factory=list)

    def violated(self, like: Tensor) -> Tensor:
        """Return how many conditions do not hold on this rank, 0-d, in the type and on the device of `like`."""
        if not self.conditions:
            return torch.zeros_like(like)
        return (~torch.stack(self.conditions)).sum().to(like)


_CHECKS: ContextVar[Checks | None] = ContextVar("checks", default=None)


@contextmanager
def collect_checks(speculative: bool, sizes: Sizes | None = None, logged: bool = True) -> Iterator[Checks]:
    """Collect the conditions of the block; see the module docstring."""
    checks = Checks(speculative, sizes, logged)
    token = _CHECKS.set(checks)
    try:
        yield checks
    finally:
        _CHECKS.reset(token)


def may_assume(condition: Tensor) -> bool:
    """Whether the caller may go on as if the 0-d bool tensor `condition` is True; the same on all ranks.

    False outside of `collect_checks`, and with speculative=False. The condition itself is not read, so it may differ by
    rank.
    """
    checks = _CHECKS.get()
    if checks is None:
        return False
    checks.conditions.append(condition.detach())
    return checks.speculative


def holds(condition: Tensor) -> bool:
    """Whether the 0-d bool tensor `condition` is True: assumed within `collect_checks`, else read (the host waits)."""
    return may_assume(condition) or bool(condition)


def logged() -> bool:
    """Whether metrics are wanted that cost as much as the loss: the same on all ranks; True outside of
    `collect_checks`."""
    checks = _CHECKS.get()
    return checks is None or checks.logged


def known_sizes() -> Sizes | None:
    """Return the sizes of the batch that the caller of `collect_checks` knows; None outside."""
    checks = _CHECKS.get()
    return checks and checks.sizes


def summed_later(values: Tensor, layout: Layout, finish: Finish) -> dict[str, Tensor]:
    """Return the metrics finish(sum of `values` over ranks), 0-d each, the same on all ranks. values: 1-d.

    Within `collect_checks` the caller of `collect_checks` sums and calls `finish`, and the result is {}. Every rank
    must call it.
    """
    if (checks := _CHECKS.get()) is None:
        return finish(layout.sum_(values) if len(values) else values)
    checks.later.append((values, finish))
    return {}
