"""Check that processes can form a torch.distributed process group, and measure the bandwidth of its all-reduce.

ProcessGroup checks a group of new processes on this machine: it runs `main` in a fresh interpreter, which starts them;
each prints its result on one line. Under torchrun, `torchrun` also checks the group of all processes that torchrun has
started, on all machines.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from dyad.data.base.findings import Finding, fail, ok, warn

SECONDS = 20.0
AGREED = "all agree at"  # begins the result of `agree`; the GB/s follow
BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}  # of the tensor in the all-reduce that is timed
USUAL = {"gloo": "usual: about 1 GB/s"}
USUAL |= {"nccl": "usual: hundreds of GB/s with NVLink, 10 to 50 with PCIe or InfiniBand, 1 to 3 with TCP"}
SLOW = 5.0  # GB/s: GPUs with less probably communicate by TCP, which gives a warning


class ProcessGroup:
    """Processes on this machine that test a backend by an all-reduce, in an interpreter of their own.

    They start on construction; the caller must call `problem` once, which waits for them. backend: gloo or nccl. count:
    the number of processes. Attribute speed: bus bandwidth in GB/s of the slowest process, once `problem` has returned
    ""; before that, and for a single process, 0.
    """

    def __init__(self, backend: str, count: int) -> None:
        self.backend, self._count, self.speed = backend, count, 0.0
        # Not by -m, which would look for modules in the working folder, where untrusted data may lie
        code = f"import sys; sys.path[:] = {sys.path}; import {__name__} as group; group.main({backend!r}, {count})"
        command, output = [sys.executable, "-P", "-c", code], subprocess.PIPE
        # a torchrun around this process has a store of its own, to which torch 2.8 would connect
        own = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
        self._process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=own
        )

    def problem(self) -> str:
        """Wait for the processes that test the backend; return "" if all of them got the right sum by their all-reduce.

        Otherwise returns the last line of an error, or "no answer". After 100 s the processes are killed.
        """
        try:
            output, _ = self._process.communicate(timeout=5 * SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            return f"no answer in {5 * SECONDS:.0f} s"
        lines = [line for line in output.splitlines() if line.strip()]
        speeds = [float(speed) for speed in re.findall(rf"{AGREED} (\S+)", output)]  # gloo of torch 2.8 prints between
        if len(speeds) == self._count:
            self.speed = min(speeds)
            return ""
        return next((line for line in reversed(lines) if not line.startswith(AGREED)), "no answer")


def gloo(group: ProcessGroup) -> Iterator[Finding]:
    """Yield a finding (a line marked ok or fail, with a fix): whether two processes formed a gloo process group.

    Waits for their result. group: the two processes, already started. They use the network interface that the
    environment variable GLOO_SOCKET_IFNAME names, or else the one that gloo chooses; the fix names interfaces to try
    instead.
    """
    problem = group.problem()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    interfaces = [name for _, name in socket.if_nameindex()]
    if not problem:
        yield ok("gloo", f"two processes met and agreed; {_speed('gloo', group.speed)}")
    elif chosen and chosen not in interfaces:
        fix = f"unset GLOO_SOCKET_IFNAME, or one of {', '.join(interfaces)}"
        yield fail("gloo", f"GLOO_SOCKET_IFNAME={chosen}: this machine has no such interface", fix)
    else:
        loopback = next((name for name in interfaces if name.startswith("lo")), "lo")
        others = ", ".join(name for name in interfaces if name != loopback)
        fix = f"export GLOO_SOCKET_IFNAME={loopback} on one machine, {others or 'the network interface'} on several"
        yield fail("gloo", f"two processes do not meet: {problem}", fix)


def nccl(group: ProcessGroup) -> Iterator[Finding]:
    """Yield a finding (a line marked ok, warn or fail, with a fix): whether the processes formed an NCCL group.

    Waits for their result. It is a warning if their all-reduce is slow. group: processes already started, one per GPU
    of the machine.
    """
    yield _judged(group.problem(), group.speed)


def _judged(problem: str, speed: float) -> Finding:
    """Return the finding on NCCL: fail if there is a problem, warn if the all-reduce is slow, both with a fix; else ok.

    problem: why the processes could not form a group, "" if they did. speed: bus bandwidth of their all-reduce in GB/s,
    slow below 5; 0 for a single process, which is never slow.
    """
    if problem:
        fix = "run with NCCL_DEBUG=WARN for the reason; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which path fails"
        return fail("nccl", problem, fix)
    shown = f"the GPUs met and agreed; {_speed('nccl', speed)}"
    fix = "NCCL_DEBUG=INFO names the path: P2P, SHM, NET/IB or NET/Socket (TCP); a container needs /dev/infiniband"
    return warn("nccl", shown, fix) if 0 < speed < SLOW else ok("nccl", shown)


def _speed(backend: str, speed: float) -> str:
    """Return text for a finding: the measured bandwidth and the usual one, or "one process" if speed is 0.

    backend: gloo or nccl. speed: GB/s, 0 for a single process.
    """
    return f"{BYTES[backend] >> 20} MiB summed at {speed:.3g} GB/s ({USUAL[backend]})" if speed else "one process"


def torchrun(backend: str) -> Iterator[Finding]:
    """Yield a finding (a line marked ok, warn or fail) on the process group of all processes that torchrun has started.

    Each of these processes must call it. Rank 0 yields the result. Any other rank yields a finding only if the check
    fails there. backend: gloo or nccl. RANK, WORLD_SIZE and LOCAL_RANK are read from the environment.
    """
    rank, count, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    _, agreed, speed = (answer := agree(backend, rank, count, "env://", local)).partition(AGREED)
    if not agreed:
        yield fail(backend, f"rank {rank} of {count}: {answer}")
    elif rank == 0:
        on_cpus = ok("gloo", f"{count} agreed; {_speed(backend, float(speed))}")
        yield _judged("", float(speed)) if backend == "nccl" else on_cpus


def main(backend: str, count: int) -> None:
    """Import torch, then fork `count` processes, each of which prints the result of `agree`; wait for them.

    Each forked process returns from this function too, so the caller must end after it. backend: gloo or nccl.
    """
    import torch.distributed  # noqa: F401

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for rank in range(count):
        if os.fork() == 0:
            # One write per line, also with PYTHONUNBUFFERED=1: the processes share the pipe.
            sys.stdout.write(f"{agree(backend, rank, count, f'tcp://localhost:{port}', rank)}\n")
            return
    for _ in range(count):
        os.wait()


def agree(backend: str, rank: int, count: int, address: str, local_rank: int) -> str:
    """Form a process group of `count` ranks, all-reduce a tensor of ones, and time an all-reduce of 16 or 256 MiB.

    The timed tensor has 16 MiB for gloo, 256 for nccl. All `count` ranks must call it; this process must not be in a
    process group before. address: the init_method of torch.distributed, such as "tcp://HOST:PORT". local_rank: the GPU
    of this process, for nccl. Returns "all agree at" (AGREED) and the bus bandwidth in GB/s (as nccl-tests define it:
    each rank sends and receives 2 (count − 1) / count of the bytes) if the sum is `count`. Otherwise returns the
    problem in one line, also for an error of torch.distributed.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    try:
        dist.init_process_group(backend, address, timedelta(seconds=SECONDS), count, rank)
        number = torch.ones(1, device=device)
        dist.all_reduce(number)
        values, seconds = torch.zeros(BYTES[backend] // 4, device=device), 0.0
        for _ in range(2):  # the first one makes connections
            dist.all_reduce(number.clone())
            start = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for the GPU
            seconds = time.perf_counter() - start
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        return str(error).splitlines()[0]
    speed = 2 * (count - 1) / count * BYTES[backend] / seconds / 1e9
    return f"{AGREED} {speed:.3g}" if int(number) == count else f"{int(number)} instead of {count}"
