"""Conditions on a batch that are assumed instead of read from a GPU, and sizes of the batch that are known beforehand.

A condition nearly always holds, and an objective that reads it from a GPU makes the host wait. A trainer computes the
objective within `collect_checks`: conditions are then assumed and read later, with the other numbers of the step. If a
condition did not hold, the trainer drops the result and computes the objective again with speculative=False. Outside of
`collect_checks` every condition is read at once.

Sums over ranks that the loss does not need, but metrics or per-sample state, are left to the trainer in the same way,
which sends them with its scalars.
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
    """The layouts of a global batch: of x rows, of y columns, of further y items, and of the positives among these."""

    rows: Layout
    columns: Layout
    further: Layout
    positives: Layout


@dataclass(frozen=True)
class Checks:
    """Settings that a trainer gives to one computation of an objective, and tensors that the objective gives back.

    speculative: whether to assume that each condition (a 0-d bool tensor that selects a way to compute, e.g. "no sum
    underflows") is true, instead of reading it, for which the host would wait for the GPU. sizes: the layouts of the
    global batch; None if not known. logged: whether costly metrics are wanted. These settings are the same on all
    ranks. The objective appends to two lists. conditions: those that it assumed or read on this rank; the trainer must
    check them. later: (1-d values to sum over ranks, function that makes metrics of the sum and may store per-sample
    state), see `summed_later`.
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
    """Give objectives in the `with` block these settings of Checks, and yield the Checks that the block fills.

    speculative: whether conditions such as "no sum underflows" are assumed to hold; the caller must then read
    Checks.violated, and compute again with speculative=False if it is not 0. The caller must also sum and finish
    Checks.later, see summed_later. sizes: the layouts of the global batch; None: the ranks exchange sizes. logged:
    whether costly metrics are wanted. All three must be equal on all ranks.
    """
    checks = Checks(speculative, sizes, logged)
    token = _CHECKS.set(checks)
    try:
        yield checks
    finally:
        _CHECKS.reset(token)


def may_assume(condition: Tensor) -> bool:
    """Record the 0-d bool tensor `condition` for the trainer, and return whether the caller may assume that it is True.

    Within `collect_checks` the condition is appended to Checks.conditions, and the result is the argument `speculative`
    of `collect_checks`, the same on all ranks. Outside of it nothing is recorded, and the result is False. The
    condition is not read, so it may differ by rank.
    """
    checks = _CHECKS.get()
    if checks is None:
        return False
    checks.conditions.append(condition.detach())
    return checks.speculative


def holds(condition: Tensor) -> bool:
    """Whether the 0-d bool tensor `condition` is True, by assumption (see may_assume) or else read from its device.

    Within `collect_checks` the condition is recorded for the trainer and, with speculative=True, assumed to be True.
    Otherwise it is read, for which the host waits for a GPU.
    """
    return may_assume(condition) or bool(condition)


def costly_metrics_wanted() -> bool:
    """Whether an objective is to compute metrics that cost as much as its loss, the same on all ranks.

    The argument `logged` of the enclosing `collect_checks`; True outside of it.
    """
    checks = _CHECKS.get()
    return checks is None or checks.logged


def known_sizes() -> Sizes | None:
    """Return the argument `sizes` of the enclosing `collect_checks`: the layouts of the batch, or None.

    Outside of `collect_checks` the result is None.
    """
    checks = _CHECKS.get()
    return checks and checks.sizes


def summed_later(values: Tensor, layout: Layout, finish: Finish) -> dict[str, Tensor]:
    """Return the metrics finish(sum of `values` over ranks), name → 0-d, the same on all ranks.

    Within `collect_checks` return {} and append (values, finish) to Checks.later: the trainer sums over ranks and calls
    `finish`, also in an attempt that it then drops and undoes. values: 1-d; outside of `collect_checks` the sum is
    written over them. finish: may also store per-sample state. layout: the ranks of the sum. Every rank must call it.
    """
    if (checks := _CHECKS.get()) is None:
        return finish(layout.sum_(values) if len(values) else values)
    checks.later.append((values, finish))
    return {}
