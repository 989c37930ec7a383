"""The loader of one rank's training batches, which worker processes prepare ahead of the step that uses them.

`Order` decides which samples a step uses; the workers only share the decoding. One iterator serves all steps of a run,
so the workers are not restarted between two epochs.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch

from dyad.data.base.parallel import available_cores, core_quota
from dyad.data.batch import Batch
from dyad.data.config import AUTO
from dyad.data.loading.batch_parts import batches_of_parts
from dyad.data.loading.drawn_items import DrawnItems
from dyad.data.loading.order import Order, local_rows

CPU_WORKERS, MOST_WORKERS = 2, 16  # data.workers=auto: the number of workers on CPUs, the largest number on GPUs
Positions = Sequence[tuple[int, int]]  # (epoch, sample id) each


def worker_count(workers: int | str, device: torch.device) -> int:
    """Return the number of loader processes of this rank. workers: the setting data.workers, a number or "auto".

    "auto" means on a GPU the number of CPU cores of this rank minus 1, at least 1 and at most 16; on a CPU 2. device:
    the device that trains.
    """
    if workers != AUTO:
        return int(workers)
    return min(max(cores_of_rank() - 1, 1), MOST_WORKERS) if device.type == "cuda" else CPU_WORKERS


def cores_of_rank() -> int:
    """Return the number of CPU cores for this process, rounded down: its share of the job's cores on this machine.

    The cores are divided by the number of the job's processes on this machine (environment variable LOCAL_WORLD_SIZE,
    or 1), so the result is 0 if these are more. The job's cores are those that this process may use, or the number in
    the environment variable DYAD_CORES, which launch/torchrun.sh sets because it may bind each process to the cores
    near its GPU; in both cases at most the quota of the container.
    """
    cores = min(int(os.environ.get("DYAD_CORES") or available_cores()), core_quota())
    return int(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class BatchSource(Protocol):
    """Interface of a data set that makes whole batches.

    `__getitems__` takes a list of positions, each a pair (epoch, sample id), and returns the batch of these samples, on
    the CPU. where(sample_id): returns the name of a sample for error messages; it must not read any storage.
    """

    def __getitems__(self, positions: Positions) -> Batch: ...
    def where(self, sample_id: int) -> str: ...


def build_loader(
    dataset: BatchSource,
    order: Order,
    *,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
    workers: int,
    timeout: float = 0,
    noise_later: bool = False,
    drawn: DrawnItems | None = None,
) -> Iterator[Batch]:
    """Yield this rank's part of the global batch of each step from first_step to last_step - 1, on the CPU.

    dataset: makes the batches. order: decides which samples a step uses. workers: number of loader processes; 0: none,
    batches are made on demand. timeout: seconds that a worker may take for a sample; 0: no limit. noise_later: whether
    noise is left out of the batches, to be added on the device by Batch.with_noise. drawn: adds noise items to each
    batch; None: none. If `dataset` has a method completed(batch, rank, world_size), its result is yielded for each
    batch. With CUDA batches lie in pinned memory. Ranks do not communicate. Raises HardwareError when a worker dies or
    exceeds the timeout, and the UserError that `dataset` raised for a batch that it cannot make.
    """
    local = lru_cache(maxsize=1)(order.local)  # a worker may make several parts of a step

    def make(step: int, number: int, rows: slice) -> Batch:
        epoch, ids = local(step, rank, world_size)
        batch = dataset.__getitems__([(epoch, sample_id) for sample_id in ids[rows].tolist()])
        of_batch = slice(own.start + rows.start, own.start + rows.stop)
        return batch if drawn is None else drawn.added(batch, step, of_batch)

    own, steps = local_rows(order.global_batch_size, rank, world_size), range(first_step, last_step)
    count = own.stop - own.start
    options = {"where": dataset.where, "timeout": timeout, "rank": rank}
    batches = batches_of_parts(make, steps, count, workers, noise_later, **options)
    completed = getattr(dataset, "completed", None)  # a method of data sets that complete whole batches of a rank
    if completed is None:
        return batches
    whole = (completed(batch, rank, world_size) for batch in batches)
    return map(Batch.pin_memory, whole) if torch.cuda.is_available() else whole  # what is pinned is not copied again
