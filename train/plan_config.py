"""The keys plan.*: of what cluster a plan is. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.config import described

# Names of GPUs; train/plan/cluster.py says what they are
Gpu = StrEnum("Gpu", "h100 h100-pcie h200 b200 a100-40 a100-80 l40s l4 a10g v100-16 v100-32 rtx4090 t4".split())


@dataclass
class PlanConfig:
    on: bool = described(False, "print what the run takes, and train nothing. Short: plan=true")
    gpus: int | None = described(None, "number of GPUs of the plan, one a process; null: those of this job", least=1)
    gpu: Gpu | None = described(None, "kind of GPU; null: as here, or h100 for plan.gpus without a GPU here")
    gpus_per_node: int = described(8, "GPUs of a node", least=1)
    mfu: float = described(0.4, "model FLOPs utilisation: share of the GPU's peak that a step reaches", above=0, most=1)
    dry_run: int | None = described(
        None, "as rank 0 of this many, on the CPU and without a network: build the run, take a step, print it", least=1
    )
