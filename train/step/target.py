"""Target networks: copies of the towers, without gradient, whose embeddings the objective takes as targets.

The key target.kind chooses one. none: there is no copy; the targets of one side are the embeddings of the other side,
detached. copy: before each step whose number is a multiple of target.every, the target's weights become a copy of the
trained weights. ema: they begin as the initial weights; after each step that was not skipped,
target ← m · target + (1 − m) · weights, with m as returned by `momentum`.

The target's towers run in train() mode, as the trained towers do: dropout draws noise of its own, and batch norms use
the statistics of the batch. Frozen weights and the running statistics of batch norms are shared with the trained
towers; only the trained towers' forward pass updates the running statistics. The target is a second module, not the
trained module with other weights put in for a pass: autocast would use its cached casts of the trained weights, and
fully_shard would put its own parameters back.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dyad.train.config import TargetConfig, TargetKind, TrainConfig
from dyad.train.distributed.data_parallel import wrap_towers
from dyad.train.distributed.sharded_tensors import local
from dyad.train.distributed.world import World
from dyad.train.step.chunks import Chunk, Side, TensorPair
from dyad.train.towers.tower import TwoTower

NOISE = 1  # added to the key of `seeded_rng`, so that the target draws other noise than the trained towers


class Target:
    """The target network of a loss. With target.kind=none it has no towers, and its methods do nothing.

    towers: the trained towers, in train() mode. copy: their frozen copy (TwoTower.frozen_copy), made before either was
    sharded; None: there is no target. config: that of the run, or of an auxiliary loss. total_steps: optimiser steps of
    the run. Attributes: towers: the target's x tower and y tower. tensors: trained parameter → the target's weight.
    """

    def __init__(
        self, towers: TwoTower, copy: TwoTower | None, config: TrainConfig, total_steps: int, world: World
    ) -> None:
        self._config, self._total_steps = config.target, total_steps
        self.towers: Sequence[nn.Module] = ()
        self.tensors: dict[Parameter, Tensor] = {}
        if copy is not None:
            both = zip(towers.parameters(), copy.parameters(), strict=True)
            self.tensors = {p: own for p, own in both if p.requires_grad}
            self.towers = wrap_towers(copy, config.compile, world)

    @torch.no_grad()
    def load(self, saved: Mapping[Parameter, Tensor]) -> None:
        """Set the target's weights from `saved`: trained parameter → weight of the target.

        A parameter that `saved` does not have gives its own current value.
        """
        for parameter, own in self.tensors.items():
            local(own).copy_(local(saved.get(parameter, parameter)))

    def begin(self, step: int) -> None:
        """With target.kind=copy, copy the trained weights if `step` (from 0) is a multiple of target.every."""
        if self._config.kind is TargetKind.copy and step % self._config.every == 0:
            self.load({})

    def update(self, step: int) -> None:
        """With target.kind=ema, update the target with the trained weights, after step `step` (from 0) was taken."""
        if self._config.kind is TargetKind.ema:
            share = momentum(step, self._total_steps, self._config)
            average, weights = (list(map(local, tensors)) for tensors in (self.tensors.values(), self.tensors))
            get_ema_multi_avg_fn(share)(average, weights, 0)

    @torch.no_grad()
    def embeddings(
        self, chunks: Sequence[Chunk], sides: Sequence[Side], pairs: int, embed: Callable[..., TensorPair]
    ) -> dict[str, Tensor]:
        """Return the target's embeddings of the b pairs, "x_target" and "y_target", (b, D) each; {} without a target.

        chunks, sides: the batch, as `in_chunks` cuts it. pairs: b; embeddings of extra items are left out. embed(chunk,
        towers, key): returns the x and y embeddings of a chunk by `towers`, without dummy rows, with noise seeded by
        `key`.
        """
        if not self.towers:
            return {}
        parts = zip(*(embed(chunk, self.towers, NOISE) for chunk in chunks), strict=True)
        x, y = (side.joined(own) for side, own in zip(sides, parts, strict=True))
        return {"x_target": x[:pairs], "y_target": y[:pairs]}


def momentum(step: int, total_steps: int, config: TargetConfig) -> float:
    """Return the decay m of the target's average (target.kind=ema) at step `step` (from 0).

    m = m_end − (m_end − m_start) (cos(π step / total_steps) + 1) / 2, with m_start from target.momentum and m_end from
    target.momentum_end. With m_end = 1 this is the schedule of BYOL (Grill et al. 2020, arXiv 2006.07733,
    "Implementation details").
    """
    start, end = config.momentum, config.momentum_end
    return end - (end - start) * (math.cos(math.pi * step / total_steps) + 1) / 2


def describe_target(config: TargetConfig) -> str:
    """Return a line for the log that describes the target network; "" with target.kind=none."""
    return {
        TargetKind.none: "",
        TargetKind.copy: f"target.kind=copy: a side learns against towers of the last multiple of {config.every} steps",
        TargetKind.ema: f"target.kind=ema: a side learns against an average of the towers, which keeps "
        f"{config.momentum:g} of itself a step, {config.momentum_end:g} at the end",
    }[config.kind]
