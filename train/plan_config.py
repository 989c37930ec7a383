"""The keys plan.*: the cluster for which `plan=true` estimates memory, traffic and time. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.config import described
from dyad.train.gpus import KINDS

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
