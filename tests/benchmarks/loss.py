"""CPU time and memory of the clip objective beside open_clip's ClipLoss: python -m tests.benchmarks.loss [largest B]

Both take raw float32 embeddings (D = 512, positives at a cosine of about 0.2, τ = 0.01) to a loss and the gradients of
x, y and the temperature. CPU time on one thread, methods taking turns, median of the turns: other jobs on the machine
move wall time, not this. Memory: highest resident set of one forward and backward, above what was there before it, in a
fresh process.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from train.losses import build_objective
from train.losses.pairwise import TILE

D = 512
TAU = 0.01
DENSE_UP_TO = 4096
M_MMAP_THRESHOLD = -3  # malloc.h
Method = Callable[[Tensor, Tensor], Tensor]


def ours() -> Method:
    objective = build_objective("clip", temperature=TAU)
    return lambda x, y: objective(x, y).loss


def open_clip() -> Method:
    from open_clip.loss import ClipLoss

    logit_scale = torch.nn.Parameter(torch.tensor(1 / TAU).log())
    loss = ClipLoss()
    return lambda x, y: loss(F.normalize(x, dim=1), F.normalize(y, dim=1), logit_scale.exp())


METHODS: dict[str, Callable[[], Method]] = {"ours": ours, "open_clip": open_clip}


def embeddings(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (F.normalize(torch.randn(size, D, generator=generator), dim=1) for _ in range(2))
    return x.requires_grad_(), (0.2 * x.detach() + noise).requires_grad_()


def tile_matmuls(size: int) -> Callable[[], None]:
    """The 8·B²·D flops that any exact method with recomputation needs, and nothing else: four matmuls per tile."""
    x, y = (torch.randn(size, D) for _ in range(2))
    dx, dy, a = torch.zeros_like(x), torch.zeros_like(y), torch.empty(TILE, TILE)
    strips = [slice(start, start + TILE) for start in range(0, size, TILE)]

    def run() -> None:
        for rows in strips:
            for columns in strips:
                torch.mm(x[rows], y[columns].T, out=a)
                torch.mm(x[rows], y[columns].T, out=a)
                dx[rows].addmm_(a, y[columns], beta=0)
                dy[columns].addmm_(a.T, x[rows], beta=0)

    return run


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def times(size: int, turns: int) -> dict[str, float]:
    """Median CPU seconds of a forward and backward per method, and of the bare matmuls."""
    x, y = embeddings(size)
    names = METHODS if size <= DENSE_UP_TO else ["ours"]
    runs: dict[str, Callable[[], object]] = {"matmuls": tile_matmuls(size)}
    for name in names:
        method = METHODS[name]()
        runs[name] = lambda method=method: method(x, y).backward()
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + (turns > 1)):
        for name, run in runs.items():
            seconds = cpu_seconds(run)
            if turn or turns == 1:  # the first turn warms up
                measured[name].append(seconds)
    return {name: statistics.median(values) for name, values in measured.items()}


def peak_megabytes(name: str, size: int) -> float:
    """Measured in a process of its own, so that nothing earlier has left memory to reuse."""
    command = [sys.executable, "-m", "tests.benchmarks.loss", "--peak", name, str(size)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(name: str, size: int) -> None:
    method = METHODS[name]()
    # blocks above 64 KiB come straight from the system and go back to it: the resident set is then what is in use
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    method(*embeddings(64)).backward()  # libraries load and threads start here
    x, y = embeddings(size)
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts again from now
    before = _status("VmRSS")
    method(x, y).backward()
    print((_status("VmHWM") - before) / 1024)


def _status(key: str) -> int:
    """A line of /proc/self/status in KiB."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))


def table(largest: int) -> None:
    print(
        "| B | ours, CPU s | open_clip, CPU s | ratio | share of 8B²D floor | peak MB | growth | open_clip, peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    size, last = 1024, None
    while size <= largest:
        seconds = times(size, turns=7 if size <= 1024 else 5 if size <= 4096 else 1)
        dense = seconds.get("open_clip")
        peak = peak_megabytes("ours", size)
        cells = [size, f"{seconds['ours']:.3f}"]
        cells += [f"{dense:.3f}", f"{seconds['ours'] / dense:.2f}"] if dense else ["", ""]
        cells += [f"{seconds['matmuls'] / seconds['ours']:.2f}", f"{peak:.0f}", f"{peak / last:.2f}" if last else ""]
        cells += [f"{peak_megabytes('open_clip', size):.0f}" if dense else ""]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        size, last = size * 2, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("largest", type=int, nargs="?", default=8192, help="largest B (default 8192)")
    parser.add_argument(
        "--peak", nargs=2, metavar=("METHOD", "B"), help="only print the peak memory of one method, in MB"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print_peak(arguments.peak[0], int(arguments.peak[1]))
    else:
        table(arguments.largest)


if __name__ == "__main__":
    main()
