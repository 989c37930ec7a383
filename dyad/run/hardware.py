"""The devices of a run: choose the precision of its towers, describe its devices in the log, and explain their
errors."""

import math
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.cuda import nccl

from dyad.data.base.errors import HardwareError, first_line
from dyad.data.loading.loader import cores_of_rank, worker_count
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.compile_caches import describe_caches
from dyad.train.distributed.devices import chosen_precision, emulates_bf16
from dyad.train.distributed.world import World, any_rank, gather_objects
from dyad.train.run_folder.folder import recorded_precision

LEAST_CORES = 4  # CPU cores for each GPU: one trains, the others decode images
# Errors of CUDA that a device causes, not a program. torch gives their numbers only since 2.9, in AcceleratorError.
FAILED = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "CUDA-capable device(s) is/are busy",
    "unknown error",
)


def resolve_precision(config: TrainConfig, folder: Path, world: World) -> TrainConfig:
    """Return `config` with precision=auto replaced by the precision to train with, and with run.name set.

    In place of auto comes the precision of the run that is resumed; for a new run, bf16 if the GPUs of all ranks
    compute it, else fp32. Every rank must call it. folder: the run folder. Its path below run.dir becomes run.name,
    because a name that is derived from the keys would change with the precision.
    """
    precision = chosen_precision(from_rank_0(world, lambda: recorded_precision(config)), world.device)
    if any_rank(precision is Precision.fp32, world):  # a GPU of one rank does not compute bf16
        precision = Precision.fp32
    return replace(config, precision=precision, run=replace(config.run, name=str(folder.relative_to(config.run.dir))))


def describe_hardware(config: TrainConfig, world: World, requested_precision: Precision) -> Iterator[str]:
    """Yield the first log lines of a run: its devices, and what is unusual about them.

    Every rank must iterate to the end, because names are gathered; the lines are those for rank 0. requested_precision:
    the precision that the user set, before auto was replaced; config.precision is the one in use.
    """
    cuda, workers = world.device.type == "cuda", worker_count(config.data.workers, world.device)
    names = gather_objects(torch.cuda.get_device_name(world.device) if cuda else "CPU", world)
    if cuda:
        devices = " + ".join(f"{count} × {name}" for name, count in Counter(names).items())
        group = f", NCCL {'.'.join(map(str, nccl.version()))}"
    else:
        devices, group = f"{world.size} process{'es' * (world.size > 1)} on CPU", ", gloo"
    each = "" if world.size == 1 else " per rank" if cuda else " each"
    loader = f"{workers} loader worker{'s' * (workers != 1)}{each}"
    yield f"{devices}{group * (world.size > 1)}, {config.precision.value}, {loader}"
    if (own := chosen_precision(requested_precision, world.device)) is not config.precision:
        used = f"precision=auto takes {config.precision.value}, not {own.value}"
        yield f"{used}: so the run began, or not all GPUs compute {own.value}"
    if config.precision is Precision.bf16 and emulates_bf16(world.device):
        yield "warning: this CPU has no instructions for bf16: precision=fp32 is many times faster"
    if cuda or config.compile:
        yield describe_caches()
    if cuda and cores_of_rank() < LEAST_CORES:
        yield f"warning: {cores_of_rank()} CPU cores feed each GPU; give {LEAST_CORES} or more: sbatch --cpus-per-task"


@contextmanager
def explain_device_errors(config: TrainConfig, world: World) -> Iterator[None]:
    """Context manager that turns errors of a device in its block into HardwareError.

    These are the CUDA errors in FAILED, and torch.OutOfMemoryError of a GPU, for which the message gives the peak
    memory and a remedy, such as a smaller chunk_size. Other errors pass unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        pairs = math.ceil(config.global_batch_size / world.size)
        now = min(config.chunk_size or pairs, pairs)
        smaller = next((size for size in range(now - 1, 0, -1) if pairs % size == 0), None)  # chunks stay equal
        fix = f"Set chunk_size={smaller}" if smaller else "Take fewer pairs (global_batch_size) or more GPUs"
        raise HardwareError(
            f"rank {world.rank}: CUDA out of memory, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak. "
            f"chunk_size is {now} of {pairs} pairs per rank. {fix}, or model.grad_checkpointing=true if towers have it"
        ) from error
    except RuntimeError as error:
        if not any(f"CUDA error: {words}" in str(error) for words in FAILED):
            raise
        failed = f"rank {world.rank}: the GPU {world.device.index} of {socket.gethostname()} failed"
        raise HardwareError(f"{failed}: {first_line(error)}") from error
