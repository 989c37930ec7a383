"""How well a run uses its device: peak memory, copies to the device, FLOPs of the towers, model FLOPs utilisation."""

import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dyad.data.batch import Batch
from dyad.train.config import Precision
from dyad.train.distributed.world import World
from dyad.train.gpus import gpu_figures
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.towers.batch_norm import batch_norms
from dyad.train.towers.text.rows import Grouped, padded_length
from dyad.train.towers.tower import TwoTower
from dyad.train.towers.trial import features_on_meta, on_meta


@dataclass
class Telemetry:
    """Measures how this rank uses its device; the call `telemetry(batch, steps, batch_time)` returns the metrics.

    towers: unwrapped and with weights of whole shape; of sharded towers, a copy on the meta device. precision: that of
    the towers, with auto resolved. copies: measures the seconds of the copies of batches to the device. once: further
    metrics, name → value, which the next call returns too and removes from `once`.
    """

    towers: TwoTower
    precision: Precision
    copies: LocalTimer
    world: World
    once: dict[str, float] = field(default_factory=dict)
    _flops: float | None = None

    def __call__(self, batch: Batch, steps: int, batch_time: float) -> Mapping[str, float]:
        """Return metrics (name → value) of the `steps` steps since the last call, which took batch_time seconds each.

        On a GPU: peak_gpu_gib, the largest memory of tensors since the last call, in GiB; copy_time, the mean seconds
        that the copies of a step took. On a CPU: peak_rss_gib, the largest memory of the process since its start, in
        GiB. On rank 0, unless a tower's FLOPs cannot be counted: tflops_per_second_per_device, the TFLOP/s of the
        towers, whose FLOPs per step are counted once, for the batch of the first call, without auxiliary losses and the
        target network; mfu, its ratio to the GPU's peak, if the peak is known.
        """
        found, device = dict(self.once), self.world.device
        self.once.clear()
        if device.type == "cuda":
            found["peak_gpu_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            found["copy_time"] = self.copies.read() / steps
            torch.cuda.reset_peak_memory_stats(device)
        else:
            found["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
        if self._flops is None:
            self._flops = 0.0
            with suppress(Exception):  # a plugin's tower may raise anything, and a metric must not end a run
                self._flops = step_flops(self.towers, batch) if self.world.rank == 0 else 0.0
        if self._flops:
            found["tflops_per_second_per_device"] = self._flops / batch_time / 1e12
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
            if peak := peak_tflops(name, self.precision):
                found["mfu"] = found["tflops_per_second_per_device"] / peak
        return found


def peak_tflops(gpu: str, precision: Precision) -> float | None:
    """Return the peak TFLOP/s of dense products of a GPU in `precision`; None if the table GPUS has no figure.

    fp32: the peak in TF32, or in FP32 on a GPU without TF32. bf16 and fp16 have the same figure. precision: auto must
    be resolved before. gpu: the name of the GPU as torch.cuda.get_device_name returns it.
    """
    figures = gpu_figures(gpu)
    return figures.tf32 if precision is Precision.fp32 else figures.half


def step_flops(towers: TwoTower, batch: Batch) -> float:
    """Return the FLOPs of the towers' forward and backward passes for one rank's `batch`, without the objective.

    These are model FLOPs: a forward pass that a step repeats (for chunks or gradient checkpointing) counts once. The
    forward pass of a frozen trunk does not count if the tower caches its outputs.
    """
    x = [batch.x, *([batch.extra_x.x] if batch.extra_x else [])]
    sides = ((towers.x_tower, x), (towers.y_tower, [batch.y, *([batch.extra.y] if batch.extra else [])]))
    return sum(sum(map(len, rows)) * sum(row_flops(tower, torch.cat(rows))) for tower, rows in sides)


def row_flops(tower: Any, rows: Tensor) -> tuple[float, float]:
    """Return (FLOPs of the forward pass, FLOPs of the backward pass) of a Tower for one input.

    rows: a batch of inputs (b, …), for their shape and, if the tower groups texts by length, for their mean length. A
    copy of the tower on the meta device is run eagerly on two rows, so neither the tower nor the state of the random
    number generators changes. The forward pass of the trunk counts 0 if the tower caches its outputs.
    """
    shape, copied = list(rows.shape[1:]), on_meta(tower)
    for norm in batch_norms(copied):
        norm.eval()  # in training it may wait for other ranks
    if isinstance(copied.trunk, Grouped):
        lengths = [padded_length(count, shape[0]) for count in copied.trunk.count(rows)]
        shape = [round(sum(lengths) / len(lengths))]
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        features = features_on_meta(copied, torch.empty(2, *shape, dtype=rows.dtype, device="meta"))
        trunk = counter.get_total_flops()
        embeddings = copied.projection(features)
        forward = counter.get_total_flops()
        if embeddings.requires_grad:
            trained = (p for p in copied.parameters() if p.requires_grad)
            torch.autograd.grad(embeddings.sum(), [*trained], allow_unused=True)
        backward = counter.get_total_flops() - forward
    if tower._frozen_cache and tower._frozen_cache.capacity_on(rows.device):
        forward -= trunk
    return forward / 2, min(backward, 2 * forward) / 2  # more than twice: a part of the forward pass is repeated
