"""The towers of a plan, without memory for their weights: one chunk runs forward and backward on fake tensors.

Fake tensors have shapes and no values, so a model that no machine could hold takes seconds. They say that they are on
the CPU; where a GPU computes in another way, as_on_gpu does so too.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dyad.train.config import Task, TrainConfig
from dyad.train.plan.cluster import Devices
from dyad.train.plan.measure import Measured
from dyad.train.run.classes import class_inputs
from dyad.train.step.loss_term import AUTOCAST
from dyad.train.step.optim import build_optimizer
from dyad.train.towers.build import PictureModel, TwoTowerModel, build_model
from dyad.train.towers.pooled import Pooled


@dataclass(frozen=True)
class Chunk:
    """What a chunk takes. graph: bytes kept after the forward pass; forward, backward: the most bytes during each, the
    graph included; forward_flops, backward_flops: FLOPs of one pair."""

    graph: float
    forward: float
    backward: float
    forward_flops: float
    backward_flops: float


@dataclass(frozen=True)
class Side:
    """One side of the pairs: its tower, an input (1, …), and the rows for each pair, or of a rank in any batch."""

    tower: nn.Module
    input: Tensor
    per_pair: int = 1
    rows: int | None = None

    def count(self, pairs: int) -> int:
        return self.rows or pairs * self.per_pair


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Norms compute in float32, as under autocast on GPUs, and attention by a kernel that has a dropout of its own."""

    def in_float32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(*args: Any, **kwargs: Any) -> Tensor:
            wide = torch.is_autocast_enabled("cpu")
            return norm(*(a.float() if wide and isinstance(a, Tensor) else a for a in args), **kwargs)

        return computed

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args[:4], **{**kwargs, "dropout_p": 0.0})

    attend = F.scaled_dot_product_attention
    replaced: dict[str, Any] = {name: in_float32(getattr(F, name)) for name in ("layer_norm", "group_norm")}
    with patch.multiple(F, **replaced, scaled_dot_product_attention=attention):
        yield


class FakeTowers:
    """The towers of a configuration on fake tensors. Bytes: weights: all; trained: those that train; moments: the state
    of the optimiser; largest: the weights of the larger tower. width: of the embeddings."""

    def __init__(self, config: TrainConfig, devices: Devices) -> None:
        self._dtype, self._is_gpu = AUTOCAST[devices.precision], devices.is_gpu
        with torch.device("meta"):
            model = build_model(replace(config, model=replace(config.model, frozen_cache_mb=0)), load_pretrained=False)
            x, y = sides(config, model, devices.count)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            towers = self._towers = fake_copy(model.towers)
            self.x, self.y = replace(x, tower=towers.x_tower), replace(y, tower=towers.y_tower)
            self.width = self._embed(self.x, 2).shape[1]
            self._tensors = [*towers.parameters(), *towers.buffers()]
            self._trained = [p for p in towers.parameters() if p.requires_grad]
            optimizer = build_optimizer(towers.named_parameters(), config.optim)
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            towers.zero_grad()
        state = [value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor)]
        self.weights, self.trained, self.moments = map(nbytes, (self._tensors, self._trained, state))
        self.largest = max(nbytes(side.tower.parameters()) for side in (self.x, self.y))

    def run(self, pairs: int, gradients_stay: bool) -> Chunk:
        """Run a chunk of `pairs` pairs. gradients_stay: whether .grad of weights counts, else it is freed at once."""
        freed = [] if gradients_stay else [p.register_post_accumulate_grad_hook(free_gradient) for p in self._trained]
        device = as_on_gpu() if self._is_gpu else nullcontext()
        # an outer autocast, which is off, keeps casts of the weights until the backward is over, as the trainer's does
        with self._mode, Measured(self._tensors) as measured, torch.autocast("cpu", enabled=False), device:
            embeddings = [self._embed(side, side.count(pairs)) for side in (self.x, self.y)]
            graph, forward, flops = measured.live, measured.peak, measured.flops
            measured.peak = graph
            trained = [e for e in embeddings if e.requires_grad]
            torch.autograd.backward(trained, [torch.zeros_like(e) for e in trained])
            self._towers.zero_grad()
        for hook in freed:
            hook.remove()
        repeated = min(measured.flops - flops, 2 * flops)  # more than twice: a part of the forward pass is repeated
        return Chunk(graph, forward, measured.peak, flops / pairs, repeated / pairs)

    def input_bytes(self, pairs: int) -> int:
        return sum(side.count(pairs) * side.input.nbytes for side in (self.x, self.y))

    def _embed(self, side: Side, rows: int) -> Tensor:
        inputs = torch.empty(rows, *side.input.shape[1:], dtype=side.input.dtype)
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            if isinstance(getattr(side.tower, "trunk", None), Pooled):
                return side.tower(inputs, np.full(rows, inputs.shape[1]))
            return side.tower(inputs)


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def fake_copy(module: Any) -> Any:
    """Return a copy of a module on the meta device whose tensors say that they are on the CPU. Needs the mode on."""
    copies: dict[int, Any] = {}
    for tensor in (*module.buffers(), *module.parameters()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(module, copies)


def sides(config: TrainConfig, model: TwoTowerModel, world_size: int) -> tuple[Side, Side]:
    """Return both sides of the pairs; texts are as long as they may be."""
    data, towers, names = config.data, model.towers, config.run.classes or []
    is_qa = config.task is Task.question_passage
    if isinstance(model, PictureModel):
        x = Side(towers.x_tower, torch.empty(1, 3, model.image.size, model.image.size, dtype=torch.uint8))
    else:
        length = data.question.length if is_qa else data.passage.length
        x = Side(towers.x_tower, torch.empty(1, length, dtype=torch.int64))
    if config.task is Task.image_text:
        return x, Side(towers.y_tower, model.tokenize(["a"]))
    if is_qa:
        passage = torch.empty(1, data.passage.length, dtype=torch.int64)
        return x, Side(towers.y_tower, passage, per_pair=1 + data.negatives.per_row)
    if len(names) > 1:
        return x, Side(towers.y_tower, class_inputs(config, model)[1](names[:1]), rows=-(-len(names) // world_size))
    return x, replace(x, tower=towers.y_tower)
