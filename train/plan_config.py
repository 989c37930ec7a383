"""The keys plan.*: the cluster for which `plan=true` estimates memory, traffic and time. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.config import described

# Part of a GPU's name → (peak TFLOP/s of dense products in bf16 and fp16, the same in TF32, GB/s to another GPU of its
# node in one direction); None: unknown. The first entry whose key is in the name of the GPU gives the peaks, the first
# such entry with a bandwidth the bandwidth. Peaks are those of NVIDIA's data sheets, whose figures "with sparsity" are
# halved. GPUs without TF32 have that of FP32 in its place, and their first figure is of fp16 alone. Bandwidths: half of
# the data sheet's NVLink figure, or PCIe with 16 lanes.
GPUS: dict[str, tuple[float | None, float | None, float | None]] = {"MIG": (None, None, None)}
GPUS |= {"GB200": (2500, 1250, 900), "B200": (2250, 1125, 900), "H200 NVL": (835.5, 417.5, 450)}
GPUS |= {"H100 PCIe": (756, 378, 64), "H100 NVL": (835, 417.5, 450), "H100": (989.4, 494.7, 450)}
GPUS |= {"A100": (312, 156, 300), "L40S": (362, 183, 32), "L40": (181, 90.5, 32), "L4": (121, 60.5, 32)}
GPUS |= {"A10G": (70, 35, 32), "A10": (125, 62.5, None), "RTX 4090": (165.2, 82.6, 32), "H200": (989.4, 494.7, 450)}
GPUS |= {"GH200": (989.4, 494.7, 450), "V100": (125, 15.7, 150), "Tesla T4": (65, 8.1, 16)}
# Value of plan.gpu → (memory in GiB, key of GPUS). Memory is the GB of NVIDIA's data sheets of the H100, H200, B200
# (DGX B200: 1,440 GB of eight), A100, L40S, L4, A10, V100 and T4, and of the GeForce RTX 4090's page.
KINDS = {"h100": (80, "H100"), "h100-pcie": (80, "H100 PCIe"), "h200": (141, "H200"), "b200": (180, "B200")}
KINDS |= {"a100-40": (40, "A100"), "a100-80": (80, "A100"), "l40s": (48, "L40S"), "l4": (24, "L4")}
KINDS |= {"a10g": (24, "A10G"), "rtx4090": (24, "RTX 4090"), "v100-16": (16, "V100"), "v100-32": (32, "V100")}
KINDS |= {"t4": (16, "Tesla T4")}
Gpu = StrEnum("Gpu", list(KINDS))


@dataclass
class PlanConfig:
    """Options of a plan (keys plan.*). One that differs from its default makes the command plan, and not train."""

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
