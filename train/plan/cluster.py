"""The devices that a plan is for, GPUs by name, and how their ranks share the weights."""

import os
from dataclasses import dataclass

import psutil
import torch

from dyad.train.config import Precision, TrainConfig
from dyad.train.losses.sums.tiles import LARGE_TILE, ROOM, TILE
from dyad.train.monitor.telemetry import peak_tflops

# Name → memory in GiB, and the name by which telemetry.py finds the peak. Memory: GB of NVIDIA's data sheets of the
# H100, H200, B200 (DGX B200: 1,440 GB of eight), A100, L40S, L4, A10, V100 and T4, and of the GeForce RTX 4090's page.
GPUS = {"h100": (80, "H100"), "h100-pcie": (80, "H100 PCIe"), "h200": (141, "H200"), "b200": (180, "B200")}
GPUS |= {"a100-40": (40, "A100"), "a100-80": (80, "A100"), "l40s": (48, "L40S"), "l4": (24, "L4")}
GPUS |= {"a10g": (24, "A10G"), "v100-16": (16, "V100"), "v100-32": (32, "V100"), "rtx4090": (24, "RTX 4090")}
GPUS |= {"t4": (16, "Tesla T4")}
WITHOUT_BF16 = ("V100", "Tesla T4")


@dataclass(frozen=True)
class Devices:
    """The devices of a plan: their number, name, bytes of memory each, and the precision of the towers on them.

    shards: how many ranks share the weights, gradients and moments; all others repeat them.
    """

    count: int
    name: str
    memory: float
    precision: Precision
    shards: int

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"

    @property
    def peak(self) -> float | None:
        """FLOP/s of dense products in the precision of the towers; None if that is not known."""
        peak = peak_tflops(self.name, self.precision)
        return peak and peak * 1e12

    @property
    def tile(self) -> int:
        """Rows and columns of a tile of scores, see tile_size of train/losses/sums/tiles.py."""
        return LARGE_TILE if self.is_gpu and self.memory >= ROOM else TILE


def planned_devices(config: TrainConfig) -> Devices:
    """Return the devices that plan.gpus and plan.gpu name; without them, those of this job or machine."""
    plan, cuda = config.plan, torch.cuda.is_available()
    count = plan.gpus or max(int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count())
    name, memory = "CPU", float(psutil.virtual_memory().total // count)
    if plan.gpu or (plan.gpus and not cuda):
        gib, name = GPUS[plan.gpu or "h100"]
        memory = gib * 2.0**30
    elif cuda:
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    precision = config.precision
    if precision is Precision.auto:
        precision = Precision.fp32 if name == "CPU" or name.startswith(WITHOUT_BF16) else Precision.bf16
    return Devices(count, name, memory, precision, shards_of(config, count))


def shards_of(config: TrainConfig, count: int) -> int:
    """Return over how many of `count` ranks dist.name spreads the weights, see shard_size of sharding.py."""
    own = config.dist.shard_size
    return {"ddp": 1, "fsdp2": own or count, "hsdp": own or min(config.plan.gpus_per_node, count)}[config.dist.name]
