"""Estimates of speed for a plan: the share of the peak FLOPs (MFU), seconds of collectives, samples of a CPU core.

The share is what the towers reach of the peak FLOPs of a device. A collective takes its time over the links between the
devices. The samples are those whose images one CPU core decodes in a second.
"""

import time
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dyad.data.base.errors import UserError
from dyad.data.base.files import read_lines
from dyad.data.image_text.stream import Stream
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.plan.cluster import Devices
from dyad.train.config import TrainConfig
from dyad.train.run_folder.folder import run_folder
from dyad.train.towers.models import ImageModel
from dyad.training_data import build_data

Span = NDArray[np.float64]  # (2,): the least and the most of an estimate

# Published runs reached an MFU of .11 (ViT-B-32), .13 (ViT-B-16) and .16 (ViT-L-14) on 128 to 400 A100 (GPU hours of
# open_clip's docs/PRETRAINED.md, 12.8 billion pairs), .39 and .21 on 8 A100 and 8 H100 (ViT-g-14, pairs a second of
# NVIDIA NeMo's page of CLIP): at least .11 · (FLOPs of a pair / those of ViT-B-32)^.15, at most twice that.
LEAST, GROWTH, MOST = 0.11, 0.15, 2.0
OF_VIT_B_32 = 14.8e9  # FLOPs of a pair, forward
# bytes that a link carries / bytes of the whole tensor, for many ranks
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
IMAGES_PER_CORE = 1065  # a second, decoded and cropped: tests/benchmarks/RESULTS.md, "Loading images"
OF_RESULTS = "JPEG of 360 × 300 pixels (RESULTS.md)"
MEASURED = 0.5  # seconds for which images are decoded to measure their rate
FEW = 16  # images of a batch in that measurement


def published_mfu(forward_flops: float) -> Span:
    """Return the least and the most model FLOPs utilisation (MFU) that published runs suggest for towers of this size.

    The result is float64 (2,), of a power law through runs of open_clip and NeMo (see the comment at LEAST).
    forward_flops: FLOPs of the forward pass of one pair.
    """
    return LEAST * (forward_flops / OF_VIT_B_32) ** GROWTH * np.array([1.0, MOST])


def planned_mfu(config: TrainConfig, forward_flops: float) -> tuple[Span, str]:
    """Return the model FLOPs utilisation (MFU) to plan with, float64 (2,), least and most, and a text on its source.

    The source is plan.mfu; else the median of train/mfu in metrics.jsonl of the run folder that this configuration has,
    if it exists; else `published_mfu`. forward_flops: FLOPs of the forward pass of one pair.
    """
    if config.plan.mfu:
        return np.full(2, config.plan.mfu), "plan.mfu"
    path = run_folder(config) / "metrics.jsonl"
    records = (record.get("train/mfu") for _, record in read_lines(path)) if path.exists() else ()
    if found := [mfu for mfu in records if isinstance(mfu, float) and 0 < mfu <= 1]:
        return np.full(2, median(found)), f"median of train/mfu in {path}"
    return published_mfu(forward_flops), "published runs of towers of this size; plan.mfu sets it"


def seconds_sent(kind: str, size: float, ranks: int, devices: Devices) -> float:
    """Return the seconds that a collective among `ranks` GPUs takes by bandwidth alone, without latency.

    The network counts if the ranks do not fit into a node. kind: all-reduce, all-gather or reduce-scatter. size: bytes
    of the whole tensor.
    """
    link = devices.link if ranks <= devices.per_node else devices.network
    return PASSES[kind] * size * (ranks - 1) / ranks / (link * 1e9)


def samples_per_core(config: TrainConfig, model: object, shard: str | None) -> tuple[float, str]:
    """Return (samples whose images one CPU core decodes and crops per second, a text that says what was measured).

    The first samples of `shard`, a path, are decoded for half a second on this machine; a shard without an index gets
    one. model: the model of the run, whose image size counts. Without a shard, for a model without images, and for
    streamed or unreadable data, the result is IMAGES_PER_CORE, the rate of single images in
    tests/benchmarks/RESULTS.md, divided by the images of a sample.
    """
    if shard is not None and isinstance(model, ImageModel):
        few = replace(config, global_batch_size=FEW, data=replace(config.data, train=shard))
        with suppress(UserError, OSError):
            data = build_data(few, model)
            if isinstance(data.order, Order) and not isinstance(data.dataset, Stream):
                alone: Any = {"rank": 0, "world_size": 1, "first_step": 0, "last_step": 1 << 20, "workers": 0}
                start = time.process_time()
                for steps, _ in enumerate(build_loader(data.dataset, data.order, **alone, noise_later=True), 1):
                    if (taken := time.process_time() - start) > MEASURED:
                        return FEW * steps / taken, f"the first {FEW * steps:,} of data.train, on this machine"
    return IMAGES_PER_CORE / max(1, config.images_of_sample), OF_RESULTS
