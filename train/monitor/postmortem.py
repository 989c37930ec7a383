"""The key tracking.postmortem: on GPUs, write files that show why a run ended, and that torch's own tools read."""

import os
from pathlib import Path

import torch

_OURS: dict[str, str] = {}  # variables that this process has set


def enable_flight_recorder(folder: Path) -> None:
    """Make NCCL write its flight recorder to nccl_trace_rank_<RANK> in `folder` when a collective times out.

    Call it before the process group is made. It sets environment variables of NCCL, except those that the user has set.
    The command `torchfrtrace -p nccl_trace_rank_ FOLDER` reads the files.
    """
    records = {"TORCH_FR_DUMP_TEMP_FILE": str(folder.resolve() / "nccl_trace_rank_"), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    for name, value in records.items():
        if os.environ.get(name) == _OURS.get(name):  # not set, or by an earlier run of a sweep
            os.environ[name] = _OURS[name] = value


def record_allocations(folder: Path, rank: int) -> None:
    """Record CUDA allocations, and write them to memory_rank<RANK>.pickle in `folder` when memory runs out.

    `folder` must exist then. https://docs.pytorch.org/memory_viz shows the file. Recording goes on until the process
    ends, and costs microseconds per allocation.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    attach = torch._C._cuda_attach_out_of_memory_observer  # pyright: ignore[reportAttributeAccessIssue]
    attach(lambda *_: torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle")))
