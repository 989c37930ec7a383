"""Control messages of ranks on a device that takes no collective, and what follows an abort of NCCL. Run by torchrun.

NCCL's semantics are played on gloo: the collective that an abort ends completes with random memory, the next raises.
"""

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, ProcessGroupGloo

from dyad.data.base.errors import ConfigError, DataError, ExitCode, HardwareError, UserError
from dyad.train.distributed import failures, listener
from dyad.train.distributed.agreement import from_rank_0, only_on, raise_on_all, rank_0_first, rank_0_only
from dyad.train.distributed.consistency import check_same_config, check_same_weights
from dyad.train.distributed.failures import PeerFailure, process_group
from dyad.train.distributed.world import World, all_reduce_sum, any_rank, broadcast_object, gather_objects
from dyad.train.monitor.stragglers import LocalTimer, Stragglers

SEEDS = int(sys.argv[1])  # of each ten, one is of each kind of failure
TIMEOUT = 10.0  # of the groups, in seconds
RANDOM = random.Random(0)
aborted: set[dist.ProcessGroup | None] = set()  # groups whose aborted collective has completed
garbage: list[str] = []  # the collectives that completed so


def check_control(world: World) -> None:
    """Every function of the control plane, on a device whose tensors hold nothing."""
    assert raise_on_all(world, lambda: world.rank) == world.rank
    assert from_rank_0(world, lambda: world.rank) == 0
    assert rank_0_only(world, lambda: "done") == (None if world.rank else "done")
    assert rank_0_first(world, lambda: world.rank) == world.rank
    assert only_on(world, world.rank == 1, lambda: "done") == ("done" if world.rank == 1 else None)
    assert broadcast_object({"rank": world.rank}, world) == {"rank": 0}
    assert gather_objects(world.rank, world) == list(range(world.size))
    assert any_rank(world.rank == 1, world) and not any_rank(False, world)
    check_same_config(world, {"steps": 1})
    with pytest.raises(ConfigError) as caught:
        check_same_config(world, {"steps": world.rank})
    assert caught.value.everywhere
    check_same_weights(world, {"w": torch.ones(3)}, 1)
    with pytest.raises(HardwareError) as caught_weights:
        check_same_weights(world, {"w": torch.full((3,), float(world.rank))}, 1)
    named = f"after step 1 ranks 0 and 1 of 2 ({socket.gethostname()}) have different weights"
    assert world.rank or (str(caught_weights.value).startswith(named) and "first in w." in str(caught_weights.value))
    said: list[str] = []
    stragglers = Stragglers(LocalTimer(torch.device("cpu")), 0.7, world, said.append)
    for waited in (0.0, 6.0 + 6.0 * world.rank):
        stragglers.observe(waited)
    stragglers.check()
    assert len(said) == 1 and f"rank {world.size - 1} of {world.size}" in said[0] and "waiting for data" in said[0]
    said.clear()
    timer = LocalTimer(torch.device("cpu"))
    with patch.object(timer, "read", side_effect=[0.0, 0.0, 6.0 + 6.0 * world.rank, 0.0]):  # computing, no wait
        stragglers = Stragglers(timer, 0.7, world, said.append)
        for _ in range(2):
            stragglers.observe(0.0)
        stragglers.check()
    assert len(said) == 1 and f"rank {world.size - 1} of {world.size}" in said[0] and "computing" in said[0]


def check_errors_of_one_rank(world: World) -> None:
    def failing() -> None:
        raise ConfigError("of one rank")

    for work in (rank_0_only, rank_0_first, from_rank_0):
        with pytest.raises(UserError) as caught:
            work(world, failing)
        assert caught.value.everywhere and str(caught.value) == "of one rank"  # rank 0 records it, whose ever it is
        assert caught.value.printed_elsewhere is (world.rank > 0)


def check_long_work(world: World, seconds: float) -> None:
    """Both halves of rank_0_first last longer than the timeout of the group."""
    rank_0_first(world, lambda: time.sleep(seconds))


def garbled(collective: Callable[..., Any], output: Callable[..., Tensor]) -> Callable[..., Any]:
    """A collective of gloo with NCCL's semantics of an abort. output: of its arguments, the tensor that it fills."""

    def call(*arguments: Any, **more: Any) -> Any:
        group = more.get("group")
        if group in aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0")
        try:
            return collective(*arguments, **more)
        except RuntimeError:
            aborted.add(group)
            garbage.append(collective.__name__)
            data = output(*arguments).view(-1).view(torch.uint8)
            data.copy_(torch.frombuffer(bytearray(RANDOM.randbytes(len(data))), dtype=torch.uint8))

    return call


COLLECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "all_reduce": lambda tensor, *_: tensor,
    "broadcast": lambda tensor, *_: tensor,
    "all_gather": lambda tensors, *_: tensors[-1],
    "all_gather_into_tensor": lambda whole, *_: whole,
}


def sizes_of_all(world: World) -> None:
    """As of a gather of unequal parts: a garbled size is negative, or far too large."""
    sizes_W = torch.zeros(world.size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes_W, torch.tensor([3]))
    whole = torch.empty(sum(sizes_W.tolist()))
    dist.all_gather_into_tensor(whole, torch.zeros(3))


def saved(world: World) -> None:
    """A step, then a checkpoint: garbled weights are not written."""
    weight = all_reduce_sum(torch.ones(4), world)

    def write() -> None:
        assert torch.equal(weight, torch.full((4,), float(world.size))), "garbage is written"

    rank_0_only(world, write)


def stopped(world: World) -> None:
    if any_rank(False, world):
        raise KeyError("nobody has asked to stop")


WORK: list[Callable[[World], Any]] = [
    sizes_of_all,
    saved,
    stopped,
    lambda world: raise_on_all(world, lambda: None),
    lambda world: from_rank_0(world, lambda: [1, 2]),
    lambda world: gather_objects("some text", world),
    lambda world: check_same_weights(world, {"w": torch.ones(3)}, 1),
    lambda world: check_same_config(world, {"steps": 1}),
]


class Failure(Exception):
    """The error of the rank that fails."""


def fail(world: World, seed: int) -> None:
    """Raise a bug or an error of a user; or, every tenth time, be gone without a word."""
    if seed % 10 == 9:
        for link in world.links:
            link.shut_down()
        raise KeyboardInterrupt
    if seed % 2:
        raise Failure(f"seed {seed}")
    raise DataError(f"seed {seed}")


def play(seed: int) -> None:
    """One rank fails at a random moment. Every other rank names it, and no other."""
    plan = random.Random(seed)
    failing, first, delay = plan.randrange(int(os.environ["WORLD_SIZE"])), plan.randrange(8), plan.choice([0, 0.01])
    aborted.clear()
    world = World()
    try:
        with process_group(TIMEOUT) as world:
            for number in range(1000):
                if world.rank == failing and number == first:
                    time.sleep(delay)
                    fail(world, seed)
                WORK[(seed + number) % len(WORK)](world)
        raise AssertionError(f"seed {seed}: no error")
    except (Failure, UserError, KeyboardInterrupt) as error:
        if world.rank == failing:
            assert isinstance(error, KeyboardInterrupt) or (type(error), str(error)) in (
                (Failure, f"seed {seed}"),
                (DataError, f"seed {seed}"),
            )
            return
        text, code = {
            0: (f"rank {failing}: seed {seed}", ExitCode.DATA),
            1: (f"rank {failing}: Failure: seed {seed}", ExitCode.BUG),
        }[seed % 2]
        if seed % 10 == 9:
            text, code = f"rank {failing} of {world.size}", ExitCode.HARDWARE
        assert isinstance(error, PeerFailure) and error.printed_elsewhere == (seed % 10 != 9), error
        assert str(error).startswith(text) and error.exit_code == code, (str(error), error.exit_code, text)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def nccl_semantics() -> Any:
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    inner = {name: getattr(dist.distributed_c10d, name) for name in COLLECTIVES}
    for name, output in COLLECTIVES.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, garbled(kept[name], output))
    get_error = getattr(ProcessGroupGloo, "get_error", None)  # torch 2.11 has none
    # as NCCL's watchdog sets it before it aborts
    ProcessGroupGloo.get_error = lambda self: ErrorType.REMOTE_ERROR if aborted else ErrorType.SUCCESS
    yield
    if get_error is None:
        del ProcessGroupGloo.get_error
    else:
        ProcessGroupGloo.get_error = get_error
    for name in COLLECTIVES:
        setattr(dist, name, kept[name])
        setattr(dist.distributed_c10d, name, inner[name])


def main() -> None:
    torch.set_num_threads(1)
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    with process_group(3.0) as world:
        on_meta = replace(world, device=torch.device("meta"))
        check_control(on_meta)
        check_errors_of_one_rank(on_meta)
        check_long_work(on_meta, 4.0)
        ports = broadcast_object(free_ports(SEEDS), world)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # each seed has a store of its own, in rank 0
    listener.POLL_SECONDS, failures.CONNECT_SECONDS, failures.REGISTER_SECONDS = 0.02, 1.0, 1.0
    with nccl_semantics():
        for seed in range(SEEDS):
            os.environ["MASTER_PORT"] = str(ports[seed])
            play(seed)
    assert len(garbage) > SEEDS // size // 2, garbage  # each rank fails in its share of the seeds
    assert threading.active_count() < 10, threading.enumerate()
    print(f"rank {rank} of {size} at {port}, {len(garbage)} collectives of random memory: all checks hold", flush=True)


if __name__ == "__main__":
    main()
