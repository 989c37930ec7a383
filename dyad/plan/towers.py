"""The towers of a plan, without memory for their weights: one chunk runs forward and backward on fake tensors.

Fake tensors have shapes and no values, so a model that is too large for any machine takes seconds. Their device is the
CPU; where a GPU would use other memory, `as_on_gpu` imitates the GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dyad.plan.cluster import Devices
from dyad.plan.measure import Measured
from dyad.plan.objective import further_items
from dyad.run.class_names import class_inputs
from dyad.train.config import Task, TrainConfig
from dyad.train.distributed.devices import AUTOCAST
from dyad.train.step.optim import build_optimizer
from dyad.train.towers.build import build_model
from dyad.train.towers.layers import layers_of
from dyad.train.towers.models import ImageModel, TwoTowerModel
from dyad.train.towers.text.rows import Grouped
from dyad.train.towers.tower import COLOURS


def as_on_gpu() -> AbstractContextManager[Any]:
    """Return a context manager in which norms and attention of CPU tensors take the memory that they take on a GPU.

    Under autocast, layer_norm and group_norm compute in float32. Attention has no dropout, since a GPU's kernel keeps
    no mask. The functions of torch.nn.functional are replaced and restored; a TorchFunctionMode would not be active in
    the backward pass, where activation checkpointing computes the forward again.
    """
    attention = F.scaled_dot_product_attention

    def without_dropout(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """Call scaled_dot_product_attention with dropout_p=0, however it is passed."""
        return attention(*args[:4], *([0.0] * len(args[4:5])), *args[5:], **options)

    norms: dict[str, Any] = {norm.__name__: in_float32(norm) for norm in (F.layer_norm, F.group_norm)}
    return patch.multiple(F, scaled_dot_product_attention=without_dropout, **norms)


def in_float32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function like `norm`, a norm of torch.nn.functional, that casts its input to float32 under autocast."""

    def cast(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return norm(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **options)

    return cast


class FakeTowers:
    """The towers of a configuration on fake tensors, and the memory and FLOPs of a chunk (some pairs of a step).

    Attributes: model: the model with the towers, built on the meta device. trained: the weights that train. width:
    width of the embeddings. rows: the number of rows of a chunk on the side that has more.

    Attributes with numbers of bytes: weights: all weights and buffers. moments: the state of the optimiser. whole: the
    most weights of a sharded tower that are gathered at one time. largest: the most weights that one all-gather
    returns. inputs: the inputs of a chunk. graph: what a chunk keeps after its forward pass. forward, backward: the
    most during each of the passes, with the graph. Attributes with FLOPs of one pair: forward_flops, backward_flops.
    """

    def __init__(self, config: TrainConfig, devices: Devices, pairs: int, gradients_stay: bool) -> None:
        """Build the towers and run a chunk of `pairs` pairs, forward and backward, on fake tensors.

        gradients_stay: whether .grad of the weights counts as memory; else each gradient is freed at once. Raises
        ConfigError for a model that cannot be built.
        """
        with torch.device("meta"):
            self.model = model = build_model(
                replace(config, model=replace(config.model, frozen_cache_mb=0)), load_pretrained=False
            )
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu() if devices.is_gpu else nullcontext():
            towers = model.towers.to_empty(device="cpu")
            self._towers = (towers.x_tower, towers.y_tower)
            self.trained = [p for p in towers.parameters() if p.requires_grad]
            optimizer = build_optimizer(towers.named_parameters(), config.optim)
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in () if gradients_stay else self.trained:
                parameter.register_post_accumulate_grad_hook(free_gradient)
            tensors = [*towers.parameters(), *towers.buffers()]
            inputs = planned_inputs(config, model, devices.count, pairs)
            self._run(inputs, tensors, AUTOCAST[devices.precision], config.model.grad_checkpointing)
        state = [value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor)]
        self.weights, self.moments, self.inputs = map(nbytes, (tensors, state, inputs))
        parts = [*map(gathered_parts, self._towers)]
        self.whole, self.largest = max(rest + sum(layers[-2:]) for rest, *layers in parts), max(map(max, parts))
        self.rows = max(map(len, inputs))
        self.forward_flops, self.backward_flops = self.forward_flops / pairs, self.backward_flops / pairs

    def _run(
        self, inputs: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype | None, recomputed: bool
    ) -> None:
        """Run a chunk forward and backward; set graph, forward, backward, width, and the FLOPs of the whole chunk.

        tensors: weights and buffers, which do not count. dtype: of autocast; None: none. recomputed: whether activation
        checkpointing computes the forward again.
        """
        # an outer autocast, which is off, keeps casts of the weights until the backward is over, as the trainer's does
        with Measured([*tensors, *inputs]) as measured, torch.autocast("cpu", enabled=False):
            embeddings = [embed(tower, rows, dtype) for tower, rows in zip(self._towers, inputs, strict=True)]
            self.graph, self.forward, flops = measured.live, measured.peak, measured.flops
            measured.peak, self.width = self.graph, embeddings[0].shape[1]
            trained = [e for e in embeddings if e.requires_grad]
            torch.autograd.backward(trained, [torch.zeros_like(e) for e in trained])
        # the kernel of attention also computes scores again, which do not count as FLOPs of the model: hence the limit
        repeated = min(measured.flops - flops, (2 + recomputed) * flops)
        self.backward, self.forward_flops, self.backward_flops = measured.peak, flops, repeated

    def gathered(self, shards: int) -> tuple[int, int, int]:
        """Return the bytes of weights that fully_shard gathers: (forward and backward pass of a chunk, once in a step).

        The three numbers are for the forward pass, the backward pass, and once in a step. The backward pass skips the
        frozen layers below the first layer that trains; but the last of these frozen layers is prefetched, and kept for
        the next chunk. If one tower serves both sides, its layers are gathered for each side, its other weights once.
        shards: how many ranks share one copy of the weights.
        """
        forward, backward, once = 0, 0, 0
        for tower, sides in Counter(self._towers).items():
            layers, rest = [[*layer.parameters()] for layer in layers_of(tower)], [*tower.parameters()]
            sizes, whole = [nbytes(layer, shards) for layer in layers], nbytes(rest, shards)
            trained = [any(p.requires_grad for p in part) for part in (*layers, rest)]
            forward += sides * whole
            if trained[-1]:
                first = trained.index(True)
                backward += sides * sum(sizes[first:]) + whole - sum(sizes)
                once += sum(sizes[:first][-1:])
        return forward, backward, once


def gathered_parts(tower: nn.Module) -> list[int]:
    """Return the bytes of each part of a tower that fully_shard gathers at once.

    First those of the weights outside of layers (see `layers_of`), then those of each layer, the largest last.
    """
    layers = sorted(nbytes(layer.parameters()) for layer in layers_of(tower))
    return [nbytes(tower.parameters()) - sum(layers), *layers]


def embed(tower: nn.Module, inputs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the embeddings (b, D) of a tower under autocast, for `inputs` (b, …).

    Texts count as texts of full length, as fake tokens have no values. dtype: of autocast; None: no autocast.
    """
    lengths = np.full(len(inputs), inputs.shape[1]) if isinstance(tower.trunk, Grouped) else None
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        return tower(inputs, lengths)


def nbytes(tensors: Iterable[Tensor], multiple: int = 1) -> int:
    """Return the bytes of tensors, each padded with rows until `multiple` divides its first dimension."""
    sizes = ((tensor.nbytes, tensor.shape[:1].numel()) for tensor in tensors)
    return sum(size // rows * -(-rows // multiple) * multiple for size, rows in sizes)


def free_gradient(parameter: Tensor) -> None:
    """Set .grad of a parameter to None."""
    parameter.grad = None


def planned_inputs(config: TrainConfig, model: TwoTowerModel, world_size: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Return tensors like the inputs of the x and y towers for `pairs` pairs and their extra items.

    Their shapes and dtypes count, their values mean nothing. Texts have their largest length. With classes, y holds one
    rank's share of them; world_size: the number of ranks.
    """
    data, names, items = config.data, config.run.classes or [], pairs + further_items(config, pairs)
    is_qa = config.task is Task.question_passage
    if config.task is Task.language_model:  # a row of y begins with the number of tokens of its prompt
        longest = min(data.question.length + data.passage.length, model.tokenize.limit)
        return torch.empty(pairs, 1, dtype=torch.int64), torch.empty(items, 1 + longest, dtype=torch.int64)
    if isinstance(model, ImageModel):
        images = pairs * (1 + data.negatives.pictures)
        x = torch.empty(images, COLOURS, model.image.size, model.image.size, dtype=torch.uint8)
    else:
        x = torch.empty(pairs, (data.question if is_qa else data.passage).length, dtype=torch.int64)
    if config.task is Task.image_text:
        return x, model.tokenize(["a"]).repeat(items, 1)
    if is_qa:
        return x, torch.empty(items, data.passage.length, dtype=torch.int64)
    if len(names) > 1:
        return x, class_inputs(config, model)[1](names[: -(-len(names) // world_size)])
    return x, torch.empty_like(x)
