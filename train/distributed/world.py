"""Which process this is, which device it has, and how processes talk. Without torchrun: a world of one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Timer
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data.connections import Connection, connections
from data.errors import HardwareError, first_line

T = TypeVar("T")
SILENCE = 10.0  # seconds without an answer of rank 0 until this process says that it waits


@dataclass(frozen=True)
class World:
    """rank of size processes; local_rank on this machine; the device of this rank; group: None means all ranks.

    links: gloo's connections to the others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None
    links: tuple[Connection, ...] = ()


def init_world(timeout: float, cpu: bool = False) -> World:
    """Join the processes that torchrun or SLURM started: NCCL on GPUs, gloo on CPUs; alone without them.

    timeout: seconds a collective may wait. Raises HardwareError, naming the rank, when the group cannot be formed.
    """
    from accelerate import PartialState

    cpu = cpu or not torch.cuda.is_available()
    # of NCCL: a collective that waits too long is ended, and the next one raises; by default it would end the process
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    place = f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if not cpu and processes > gpus:
        raise HardwareError(
            f"{place}: {processes} processes on a machine with {gpus} GPU(s). Start one for each GPU, or hide them: "
            "CUDA_VISIBLE_DEVICES="
        )
    before = set(connections())
    try:
        with _awaited_aloud(place, timeout):
            state = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        raise HardwareError(f"{place}: cannot join the other processes: {first_line(error)}") from error
    assert state.device is not None
    world = World(state.process_index, state.num_processes, state.local_process_index, state.device)
    if world.size == 1:
        return world
    store = int(os.environ["MASTER_PORT"])  # where all have met: to be asked when the group is broken
    return replace(world, links=tuple(link for link in set(connections()) - before if store not in link.ports))


@contextmanager
def _awaited_aloud(place: str, timeout: float) -> Iterator[None]:
    """Say whom this process waits for when rank 0 has not even opened its port after a while: it may have died."""

    def say() -> None:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        try:
            socket.create_connection((host, int(port)), SILENCE).close()
        except OSError:
            print(
                f"{place} waits for rank 0: nobody answers at {host}:{port}. Is it running? This process gives up "
                f"after dist.timeout ({timeout:g} s)",
                file=sys.stderr,
            )

    timer = Timer(SILENCE, say)
    timer.daemon = True
    if "MASTER_PORT" in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shutdown(world: World, broken: bool = False) -> None:
    """Leave the group, so that the next run of this process can join one. broken: without waiting for the others."""
    from accelerate import PartialState

    if dist.is_available() and dist.is_initialized():
        if broken:
            abort_group(world)
        with suppress(RuntimeError):  # a broken group cannot be left in order
            dist.destroy_process_group()
    PartialState._reset_state()


def abort_group(world: World) -> None:
    """Close the connections of the group: who waits for this process in a collective learns that it does not come."""
    for link in world.links:  # gloo has no way to do it: its abort() ends only what this process waits for
        link.cut()
    if dist.group.WORLD is not None:
        with suppress(RuntimeError):  # broken already
            dist.group.WORLD.abort()


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier(world.group, device_ids=[world.device.index] if world.device.type == "cuda" else None)


def broadcast_object(value: T, world: World, source: int = 0) -> T:
    """`value` of rank `source`, on every rank. Pickled by torch between processes of this one run."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=source, group=world.group, device=world.device)
    return box[0]


def gather_objects(value: T, world: World) -> list[T]:
    """`value` of every rank, in their order, on every rank. Pickled by torch between processes of this one run."""
    box = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(box, value, group=world.group)
    return box


def all_reduce_sum(values: Tensor, world: World) -> Tensor:
    """Sum over ranks, in place."""
    if world.size > 1:
        dist.all_reduce(values, group=world.group)
    return values


def any_rank(flag: bool, world: World) -> bool:
    """Whether `flag` holds on any rank; the same answer everywhere."""
    return bool(all_reduce_sum(torch.tensor([float(flag)], device=world.device), world) > 0)
