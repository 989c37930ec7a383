"""The keys plan.*: of what cluster a plan is. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.config import described

# Name → memory in GiB, the name by which telemetry.py finds the peak, and GB/s to another GPU of the node, in one
# direction. Memory: GB of NVIDIA's data sheets of the H100, H200, B200 (DGX B200: 1,440 GB of eight), A100, L40S, L4,
# A10, V100 and T4, and of the GeForce RTX 4090's page. Links: half of NVLink's figure there, else PCIe's 16 lanes.
GPUS = {"h100": (80, "H100", 450), "h100-pcie": (80, "H100 PCIe", 64), "h200": (141, "H200", 450)}
GPUS |= {"b200": (180, "B200", 900), "a100-40": (40, "A100", 300), "a100-80": (80, "A100", 300)}
GPUS |= {"l40s": (48, "L40S", 32), "l4": (24, "L4", 32), "a10g": (24, "A10G", 32), "rtx4090": (24, "RTX 4090", 32)}
GPUS |= {"v100-16": (16, "V100", 150), "v100-32": (32, "V100", 150), "t4": (16, "Tesla T4", 16)}
Gpu = StrEnum("Gpu", list(GPUS))


@dataclass
class PlanConfig:
    on: bool = described(False, "print what the run takes, and train nothing. Short: plan=true")
    gpus: int | None = described(
        None, "number of GPUs of the plan, one a process; null: those of this job", least=1, most=1 << 20
    )
    gpu: Gpu | None = described(None, "kind of GPU; null: as here, or h100 for plan.gpus without a GPU here")
    gpus_per_node: int = described(8, "GPUs of a node", least=1, most=1 << 20)
    network: float = described(25.0, "GB/s of a GPU to other nodes: an eighth of its Gb/s", above=0)
    mfu: float | None = described(
        None,
        "model FLOPs utilisation: share of the GPU's peak that a step reaches; null: what this run measured, else what "
        "published runs reached",
        above=0,
        most=1,
    )
    dry_run: int | None = described(
        None,
        "as rank 0 of this many, on the CPU and without a network: build the run, take a step, print it",
        least=1,
        most=1 << 20,
    )
