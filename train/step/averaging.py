"""An exponential moving average of the trained weights (optim.ema), for evaluation, mining and exports.

After the n-th step that changed the weights w, counted from 0: average ← d · average + (1 − d) · w with
d = min(optim.ema, (1 + n) / (10 + n)), so that early weights count little in the average of a short run; the first
average is w. Buffers, such as the running statistics of batch norms, are not averaged: they are those of the last step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dyad.train.distributed.sharded_tensors import local

WARMUP = 10  # the 10 in the formula of d above


class WeightAverage:
    """The moving average of `parameters`, as in the module docstring.

    decay: optim.ema; None: there is no average, and the methods do nothing. Attributes: tensors: parameter → its
    average, sharded as the parameter is; empty before the first update. updates: the number of updates so far. A resume
    sets both attributes.
    """

    def __init__(self, parameters: Sequence[Parameter], decay: float | None) -> None:
        self._parameters, self._decay = parameters, decay
        self.tensors: dict[Parameter, Tensor] = {}
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current values of the parameters; call it after each step that changed them."""
        if self._decay is None:
            return
        if not self.tensors:
            self.tensors = {p: p.detach().clone() for p in self._parameters}
        decay = min(self._decay, (1 + self.updates) / (WARMUP + self.updates))
        average = [local(self.tensors[p]) for p in self._parameters]
        get_ema_multi_avg_fn(decay)(average, [*map(local, self._parameters)], 0)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: put the average into the parameters, and the trained weights back when the block ends.

        During the block, `tensors` holds the trained weights. Without an average (yet), the block changes nothing.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, average in self.tensors.items():  # in place: a sharded tower keeps its own tensors
            weights = local(parameter).clone()
            local(parameter).copy_(local(average))
            local(average).copy_(weights)
