"""The towers of a plan, without memory for their weights: one chunk runs forward and backward on fake tensors.

Fake tensors have shapes and no values, so a model that no machine could hold takes seconds. They say that they are on
the CPU; where a GPU computes in another way, as_on_gpu does so too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dyad.train.config import Task, TrainConfig
from dyad.train.distributed.sharding import layers_of
from dyad.train.plan.cluster import Devices
from dyad.train.plan.measure import Measured
from dyad.train.run.classes import class_inputs
from dyad.train.step.loss_term import AUTOCAST
from dyad.train.step.optim import build_optimizer
from dyad.train.towers.build import PictureModel, TwoTowerModel, build_model
from dyad.train.towers.pooled import Pooled
from dyad.train.towers.tower import COLOURS, Tower

NORMS = ("layer_norm", "group_norm")


@dataclass(frozen=True)
class Side:
    """One side of the pairs: its tower, an input (1, …), and the rows for each pair, or of a rank in any batch."""

    tower: Tower
    input: Tensor
    per_pair: int = 1
    rows: int | None = None

    def count(self, pairs: int) -> int:
        return self.rows or pairs * self.per_pair


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Norms compute in float32, as under autocast on GPUs, and attention by a kernel that has a dropout of its own."""

    def in_float32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *more, **kw: norm(x.float() if torch.is_autocast_enabled("cpu") else x, *more, **kw)

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args[:4], **{**kwargs, "dropout_p": 0.0})

    attend, norms = F.scaled_dot_product_attention, {name: in_float32(getattr(F, name)) for name in NORMS}
    with patch.multiple(F, scaled_dot_product_attention=attention, **norms):
        yield


class FakeTowers:
    """The towers of a configuration on fake tensors, and what a chunk takes. x, y: their sides. width: of embeddings.

    Bytes: weights: all; trained: those that train; moments: the state of the optimiser; largest: the weights of the
    larger tower; graph: what a chunk keeps after its forward pass; forward, backward: the most during each, the graph
    included. forward_flops, backward_flops: FLOPs of one pair.
    """

    def __init__(self, config: TrainConfig, devices: Devices, pairs: int, gradients_stay: bool) -> None:
        """Run a chunk of `pairs` pairs. gradients_stay: whether .grad of weights counts, else it is freed at once."""
        self._dtype = AUTOCAST[devices.precision]
        with torch.device("meta"):
            model = build_model(replace(config, model=replace(config.model, frozen_cache_mb=0)), load_pretrained=False)
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu() if devices.is_gpu else nullcontext():
            towers = model.towers.to_empty(device="cpu")
            self.x, self.y = sides(config, model, devices.count)
            optimizer = build_optimizer(towers.named_parameters(), config.optim)
            trained = [p for p in towers.parameters() if p.requires_grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in () if gradients_stay else trained:
                parameter.register_post_accumulate_grad_hook(free_gradient)
            self._measure([*towers.parameters(), *towers.buffers()], pairs)
        state = [value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor)]
        self.parameters = trained
        self.weights, self.trained, self.moments = map(
            nbytes, ([*towers.parameters(), *towers.buffers()], trained, state)
        )
        self.largest = max(nbytes(side.tower.parameters()) for side in (self.x, self.y))

    def _measure(self, tensors: Iterable[Tensor], pairs: int) -> None:
        # an outer autocast, which is off, keeps casts of the weights until the backward is over, as the trainer's does
        with Measured(tensors) as measured, torch.autocast("cpu", enabled=False):
            embeddings = [self._embed(side, side.count(pairs)) for side in (self.x, self.y)]
            self.graph, self.forward, flops = measured.live, measured.peak, measured.flops
            measured.peak, self.width = self.graph, embeddings[0].shape[1]
            trained = [e for e in embeddings if e.requires_grad]
            torch.autograd.backward(trained, [torch.zeros_like(e) for e in trained])
        repeated = min(measured.flops - flops, 2 * flops)  # more than twice: a part of the forward pass is repeated
        self.backward, self.forward_flops, self.backward_flops = measured.peak, flops / pairs, repeated / pairs

    def gathered(self, shards: int) -> tuple[int, int]:
        """Return the bytes of the weights that fully_shard gathers in the forward pass of a chunk, and in the backward.

        The backward skips frozen layers below the first that trains, but for one: that is fetched ahead of its turn. Of
        a tower of both sides it gathers the layers for each side, and what is in no layer once.
        """
        forward, backward, roots = 0, 0, dict[Tower, int]()
        for tower in (self.x.tower, self.y.tower):
            layers = [[*layer.parameters()] for layer in layers_of(tower)]
            sizes = [nbytes(layer, shards) for layer in layers]
            whole = nbytes(tower.parameters(), shards)
            trained = [any(p.requires_grad for p in layer) for layer in [*layers, tower.parameters()]]
            forward += whole
            if trained[-1]:
                backward += sum(sizes[max(trained.index(True) - 1, 0) :])
                roots[tower] = whole - sum(sizes)
        return forward, backward + sum(roots.values())

    def input_bytes(self, pairs: int) -> int:
        return sum(side.count(pairs) * side.input.nbytes for side in (self.x, self.y))

    def _embed(self, side: Side, rows: int) -> Tensor:
        inputs = torch.empty(rows, *side.input.shape[1:], dtype=side.input.dtype)
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            is_text = isinstance(side.tower.trunk, Pooled)
            return side.tower(inputs, np.full(rows, inputs.shape[1])) if is_text else side.tower(inputs)


def nbytes(tensors: Iterable[Tensor], multiple: int = 1) -> int:
    """Return the bytes of tensors, each with zero rows at its end until `multiple` divides their number."""
    sizes = ((tensor.nbytes, tensor.shape[:1].numel()) for tensor in tensors)
    return sum(size // rows * -(-rows // multiple) * multiple for size, rows in sizes)


def free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def sides(config: TrainConfig, model: TwoTowerModel, world_size: int) -> tuple[Side, Side]:
    """Return both sides of the pairs; texts are as long as they may be."""
    data, names, towers = config.data, config.run.classes or [], model.towers
    is_qa = config.task is Task.question_passage
    if isinstance(model, PictureModel):
        x = Side(towers.x_tower, torch.empty(1, COLOURS, model.image.size, model.image.size, dtype=torch.uint8))
    else:
        text = data.question if is_qa else data.passage
        x = Side(towers.x_tower, torch.empty(1, text.length, dtype=torch.int64))
    y = replace(x, tower=towers.y_tower)
    if config.task is Task.image_text:
        y = replace(y, input=model.tokenize(["a"]))
    elif is_qa:
        y = replace(
            y, input=torch.empty(1, data.passage.length, dtype=torch.int64), per_pair=1 + data.negatives.per_row
        )
    elif len(names) > 1:
        y = replace(y, input=class_inputs(config, model)[1](names[:1]), rows=-(-len(names) // world_size))
    return x, y
