"""Rank, world size and device of this process, and collectives. Without torchrun the world size is 1."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from threading import Event, Timer
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# Before a group is joined. The defaults of its functions keep the group of that moment, whose threads then run while
# the interpreter ends. One that frees a tensor at that time aborts the process.
import torch.distributed.nn
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, PrefixStore, Store

from dyad.data.base.errors import ConfigError, HardwareError, first_line
from dyad.data.base.sockets import Connection, open_connections
from dyad.train.distributed.devices import cuda_usable, gpu_problem

P = ParamSpec("P")
T = TypeVar("T")
SILENCE = 10.0  # seconds without an answer of rank 0 until this process prints that it waits
_FIRST: dict[tuple[str, str], tuple[Store, str]] = {}  # address → store and backend of the first process group there
_GROUPS = count(1)


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of the job: its `rank`, their number `size`, and its device.

    `init_world` makes it; World() is that of a single process on the CPU. group: the process group for tensors of
    `device`; None for the default group of all ranks. control: the gloo group for objects and tensors on the CPU; None
    if `group` takes them, too. links: gloo's TCP connections to the other ranks; `linked` adds those of further groups.
    aborted: set before this process aborts its groups.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    links: set[Connection] = field(default_factory=set, compare=False)
    aborted: Event = field(default_factory=Event, compare=False, repr=False)

    def is_broken(self) -> bool:
        """Whether this process has aborted its communication, or NCCL has an error in any process group.

        NCCL completes an aborted collective with undefined memory, and only the next collective raises. An error, a
        number or a decision that came after the last collective means nothing then. gloo, which raises in the failed
        collective itself, and torch 2.11 and older do not say whether there is an error.
        """
        backends = [group._get_backend(device) for group in _process_groups() for device in group._device_types]
        failed = [backend.get_error() for backend in backends if hasattr(backend, "get_error")]
        return self.aborted.is_set() or any(error != ErrorType.SUCCESS for error in failed)


def init_world(timeout: float, cpu: bool = False) -> World:
    """Join the process group of torchrun's processes and return this process's World; without torchrun join none.

    The backend is NCCL on GPUs, gloo on CPUs. Every process of the job must call it; after `shutdown` it may be called
    again. timeout: seconds that processes may take to join, and that a collective may wait until `set_timeout` changes
    it. cpu: use no GPU. Prints a line if rank 0 does not answer for SILENCE seconds. Sets environment variables that
    say what NCCL does after a failure, unless the user has set them. Raises HardwareError, naming the rank or the
    machine, when the group cannot be formed, a machine has more processes than GPUs, or torch cannot use its GPUs;
    ConfigError for several tasks of srun without torchrun.
    """
    from accelerate import PartialState

    _check_launch(cpu)
    cpu = cpu or not cuda_usable()
    _set_nccl_failure_handling()
    rank_and_world = f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if not cpu and processes > gpus:
        raise HardwareError(
            f"{rank_and_world}: {processes} processes on a machine with {gpus} GPU(s). Start one for each GPU, or hide "
            "them: CUDA_VISIBLE_DEVICES="
        )
    # with device_id NCCL connects here, where a failure gets a clear message, not in the first collective
    device: dict[str, Any] = {}
    if not cpu and "LOCAL_RANK" in os.environ:
        device["device_id"] = torch.device("cuda", _local_rank())
    before = set(open_connections())
    waiting = Timer(SILENCE, _print_if_unreachable, (rank_and_world, timeout))
    waiting.daemon = True
    if "MASTER_PORT" in os.environ:
        waiting.start()
    try:
        if _address() in _FIRST:
            _join_again(timedelta(seconds=timeout), device)
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout), **device)
    except (RuntimeError, ValueError, OSError) as error:
        raise HardwareError(f"{rank_and_world}: cannot join the other processes: {first_line(error)}") from error
    finally:
        waiting.cancel()
    assert state.device is not None
    # accelerate's device is cpu:1; Module.to would copy buffers to it, and references to the old ones would be stale
    own = torch.device("cpu") if cpu else state.device
    if state.num_processes == 1:
        return World(device=own)
    _FIRST.setdefault(_address(), (c10d._get_default_store(), str(state.backend)))
    control: Any = None
    if not cpu:
        before = set(open_connections())  # NCCL's connections are not gloo's
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return World(state.process_index, state.num_processes, own, control=control, links=_opened_since(before))


@contextmanager
def linked(world: World) -> Iterator[None]:
    """Context manager: `abort_group` shuts down the connections that the block opens for further process groups."""
    before = set(open_connections())
    yield
    world.links.update(_opened_since(before))


def _opened_since(before: set[Connection]) -> set[Connection]:
    """Return the connections of this process that are not in `before`, without that to the TCPStore.

    Failure reports need that one after the groups are aborted. NCCL ends its own connections.
    """
    return {link for link in set(open_connections()) - before if int(os.environ["MASTER_PORT"]) not in link.ports}


def _process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, also those of device meshes; the group of all ranks is the first."""
    return list(c10d._world.pg_map)


def _address() -> tuple[str, str]:
    """Return (host, port) of this job's TCPStore, from MASTER_ADDR and MASTER_PORT; "" for a variable that is unset."""
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def _join_again(timeout: timedelta, device: dict[str, Any]) -> None:
    """Join another process group at the same address, for the next run of a sweep.

    The TCPStore of the first group is used again, since it lives as long as the process of rank 0. Keys get a prefix of
    their own, since the old keys hold the addresses of closed connections. device: further arguments of
    init_process_group, device_id on a GPU.
    """
    store, backend = _FIRST[_address()]
    where: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    own = PrefixStore(f"group {next(_GROUPS)}", store)
    dist.init_process_group(backend, store=own, timeout=timeout, **where, **device)


def _set_nccl_failure_handling() -> None:
    """Set the environment variables for what NCCL does when a collective fails, unless the user has set them."""
    # 2: the collective after one that timed out raises; by default NCCL ends the process, and nothing is reported
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # Before it aborts, NCCL waits four times so long for dumps of its flight recorder: a minute by default.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    if not any(os.environ.get(name, "0") != "0" for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _check_launch(cpu: bool) -> None:
    """Raise ConfigError if srun started several tasks without torchrun; HardwareError if torch cannot use the GPUs.

    Only the first task prints the ConfigError, and only one process of each machine the HardwareError. cpu: whether no
    GPU is wanted.
    """
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1 and "RANK" not in os.environ:
        error = ConfigError(
            f"srun started {tasks} tasks without torchrun: each would be a run of its own. Submit "
            "launch/slurm.sbatch, or one task per node: srun --ntasks-per-node=1 bash launch/torchrun.sh …"
        )
        error.printed_elsewhere = os.environ.get("SLURM_PROCID", "0") != "0"
        raise error
    if not cpu and (problem := gpu_problem()):
        error = HardwareError(f"{socket.gethostname()}: {problem[0]}. {problem[1]}")
        error.printed_elsewhere = _local_rank() > 0
        raise error


def _print_if_unreachable(rank_and_world: str, timeout: float) -> None:
    """Print that this process waits for rank 0, if nothing accepts a connection at MASTER_ADDR:MASTER_PORT.

    A timer calls it while the process waits to join the group. rank_and_world: this process, for example "rank 1 of 8".
    timeout: the seconds after which this process gives up. Both are only shown in the message.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.create_connection((host, int(port)), SILENCE).close()
    except OSError:
        print(
            f"{rank_and_world} waits for rank 0: nobody answers at {host}:{port}. Is it running? This process gives up "
            f"after dist.start_timeout ({timeout:g} s)",
            file=sys.stderr,
        )


def set_timeout(seconds: float) -> None:
    """Limit the wait of every collective that this process begins from now on to `seconds`, in all process groups."""
    # torch 2.11 and older know it by a private name alone
    set_of_group = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    for group in _process_groups():  # those of device meshes begin with a timeout of torch's own
        set_of_group(timedelta(seconds=seconds), group)


def patient_at_first(work: Callable[P, T], first: float, later: float) -> Callable[P, T]:
    """Return a function that calls `work`, with a longer timeout of collectives in its first call.

    Collectives of all process groups may wait `first` seconds during that call, which may compile for minutes on one
    rank while the other ranks wait, and `later` seconds after it (see `set_timeout`).
    """
    called = False

    def patient(*arguments: P.args, **keywords: P.kwargs) -> T:
        nonlocal called
        if called:
            return work(*arguments, **keywords)
        set_timeout(first)
        result, called = work(*arguments, **keywords), True
        set_timeout(later)
        return result

    return patient


def shutdown(world: World, broken: bool = False) -> None:
    """Leave the process group, if there is one, so that the next run in this process can join another.

    broken: whether to abort the group first, instead of waiting for ranks that may be gone. If False, every rank must
    call it.
    """
    from accelerate import PartialState

    if dist.is_available() and dist.is_initialized():
        if broken:
            abort_group(world)
        with suppress(RuntimeError):  # a broken group cannot be destroyed in order
            dist.destroy_process_group()
    PartialState._reset_state()


def abort_group(world: World) -> None:
    """Abort all process groups, which ends the collectives in which this process waits.

    Does nothing if called again.
    """
    if world.aborted.is_set():
        return
    world.aborted.set()  # first: an aborted collective of NCCL completes with undefined memory
    for link in world.links:  # needed for gloo: its abort() ends no collective that waits
        link.shut_down()
    for group in _process_groups():
        with suppress(RuntimeError):  # aborted already
            group.abort()


def broadcast_object(value: T, world: World) -> T:
    """Send rank 0's `value` to all ranks and return it on every rank. Every rank must call it.

    torch pickles the value. This is safe, because it is only sent between processes of one run.
    """
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, group=world.control or world.group, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: T, world: World) -> list[T]:
    """Gather the `value` of every rank; return the list in rank order, on every rank. Every rank must call it.

    torch pickles the values. This is safe, because they are only sent between processes of one run.
    """
    box = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(box, value, group=world.control or world.group)
    return box


def all_reduce_sum(values: Tensor, world: World) -> Tensor:
    """Sum the tensor `values` elementwise over ranks, in place, and return it. Every rank must call it.

    values: a tensor of any shape on world.device or on the CPU. Small numbers are best kept on the CPU, where the sum
    takes no time of the GPU.
    """
    if world.size > 1:
        on_device = values.device.type == world.device.type
        dist.all_reduce(values, group=world.group if on_device else world.control or world.group)
    return values


def any_rank(flag: bool, world: World) -> bool:
    """Whether `flag` is True on any rank; the same answer on every rank. Every rank must call it."""
    return bool(all_reduce_sum(torch.tensor([float(flag)]), world) > 0)
