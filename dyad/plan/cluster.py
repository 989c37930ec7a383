"""The devices that a plan is made for: GPUs by name, their memory, links and peak, and how ranks share the weights."""

import math
import os
from dataclasses import dataclass

import torch

from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.sharding import shard_size
from dyad.train.gpus import KINDS, gpu_figures
from dyad.train.losses.sums.tiles import LARGE_TILE, ROOM, TILE
from dyad.train.monitor.telemetry import peak_tflops
from dyad.train.step.graph_cache import cpu_memory

WITHOUT_BF16 = ("V100", "Tesla T4")


@dataclass(frozen=True)
class Devices:
    """The devices of a plan, which are all alike.

    count: how many. name: as torch.cuda.get_device_name returns it, or "CPU". memory: bytes of each. precision: of the
    towers on them. peak: TFLOP/s of dense matrix products in that precision; NaN if unknown. tile: the most rows, and
    columns, of a tile (block of the matrix of scores), as `tile_size` in train/losses/sums/tiles.py returns. shards:
    how many ranks share one copy of the weights; 1: every rank has them all. per_node: devices in a node. link: GB/s
    from a device to the others of its node. network: GB/s from a device to other nodes.
    """

    count: int
    name: str
    is_gpu: bool
    memory: float
    precision: Precision
    peak: float
    tile: int
    shards: int
    per_node: int
    link: float
    network: float


def planned_devices(config: TrainConfig) -> Devices:
    """Return the devices that plan.gpus (their number) and plan.gpu (their name) describe.

    If plan.gpus is null, the number is that of this job's processes or of this machine's GPUs, whichever is larger. If
    plan.gpu is null, the devices are like this machine's first GPU; without one, H100 if plan.gpus is set, else CPUs,
    each with this machine's memory divided by the job's processes on it. precision=auto becomes bf16 on GPUs that
    compute it, else fp32. Raises ConfigError if dist.shard_size, or its default, does not divide the number.
    """
    plan, cuda, precision = config.plan, torch.cuda.is_available(), config.precision
    count = plan.gpus or max(int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count())
    name, memory = "CPU", cpu_memory()[1]
    if plan.gpu or (plan.gpus and not cuda):
        gib, name = KINDS[plan.gpu or "h100"]
        memory = gib * 2.0**30
    elif cuda:
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    is_gpu = name != "CPU"
    if precision is Precision.auto:
        precision = Precision.bf16 if is_gpu and not name.startswith(WITHOUT_BF16) else Precision.fp32
    peak = peak_tflops(name, precision) or math.nan
    tile = LARGE_TILE if is_gpu and memory >= ROOM else TILE
    shards = shard_size(config.dist, count, min(plan.gpus_per_node, count))
    link = gpu_figures(name).link or plan.network
    return Devices(count, name, is_gpu, memory, precision, peak, tile, shards, plan.gpus_per_node, link, plan.network)
