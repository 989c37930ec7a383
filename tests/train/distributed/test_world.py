"""The process group of one process, and of two when the other does not join. More ranks: tests/jobs/dist_step.py."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.messages import raises

from dyad.data.base.errors import ExitCode, HardwareError
from dyad.train.distributed.failures import report_failures
from dyad.train.distributed.world import (
    World,
    all_reduce_sum,
    any_rank,
    broadcast_object,
    init_world,
    shutdown,
)


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's environment, and no state left behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown(World())


@pytest.mark.parametrize("port", ["", "tcp://10.0.0.1:80"])
def test_a_port_of_something_else_is_nothing_to_one_process(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert init_world(timeout=5, cpu=True).size == 1


def test_alone_without_a_launcher() -> None:
    world = init_world(timeout=5, cpu=True)
    assert world == World(rank=0, size=1, device=torch.device("cpu"))
    assert broadcast_object([1], world) == [1]
    assert torch.equal(all_reduce_sum(torch.ones(2), world), torch.ones(2))
    assert any_rank(True, world) and not any_rank(False, world)


def test_a_run_can_follow_a_run_in_one_process() -> None:
    assert init_world(timeout=5, cpu=True) == init_world(timeout=5, cpu=True)
    shutdown(World())
    assert init_world(timeout=5, cpu=True).size == 1


def test_no_thread_of_gloo_outlives_the_group() -> None:
    """One that frees a tensor while the interpreter ends aborts the process."""
    code = """
import dyad.train.distributed.world, os
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.fsdp  # and what it imports, which must not keep the group
dist.destroy_process_group()
print([open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "python" in run.stdout and "gloo" not in run.stdout, run.stdout + run.stderr


def cannot_join(monkeypatch: pytest.MonkeyPatch, rank: int, address: str, port: int) -> str:
    """What one process says that should be one of two."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    for name, value in {**place, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with raises(HardwareError, f"rank {rank} of 2") as caught:
        init_world(timeout=1, cpu=True)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == ExitCode.HARDWARE
    return str(caught.value)


@pytest.mark.parametrize(("address", "port"), [("127.0.0.1", 1), ("no.such.host.invalid", 29411)])
def test_a_first_rank_that_is_not_there_is_one_line(address: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cannot_join(monkeypatch, 1, address, port)


def test_others_that_do_not_come_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert "1/2 clients joined" in cannot_join(monkeypatch, 0, "127.0.0.1", port)


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "address already in use" in cannot_join(monkeypatch, 0, "127.0.0.1", taken.getsockname()[1])


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with raises(HardwareError, "2 processes", "1 GPU"):
        init_world(timeout=1)


@pytest.mark.parametrize(("buffer", "dump"), [(None, "0"), ("0", "0"), ("2000", None)])
def test_nccl_waits_for_dumps_only_if_there_is_something_to_dump(
    monkeypatch: pytest.MonkeyPatch, buffer: str | None, dump: str | None
) -> None:
    environment = {} if buffer is None else {"TORCH_NCCL_TRACE_BUFFER_SIZE": buffer}
    monkeypatch.setattr(os, "environ", environment)
    init_world(timeout=5, cpu=True)
    assert environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "1000"
    assert environment.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == dump


def test_other_errors_pass_unchanged() -> None:
    with raises(RuntimeError), report_failures(World()):
        raise RuntimeError("a bug")
