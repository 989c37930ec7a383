"""CPU time and memory of an objective beside its peers: python -m tests.benchmarks.loss [B …] [--family NAME] [--bf16]

softmax: clip beside open_clip's ClipLoss and, from sentence-transformers, MultipleNegativesRankingLoss and its cached
form (score rows 1,024 at a time), both in both directions: one loss. sigmoid: siglip beside SigLipLoss. negatives: dpr
with one hard negative per row beside dense torch code. robust: coce (KL) beside dense code of its closed form. The
floor are the flops that each needs at least: 6·B·M·D for M columns. All take raw embeddings (D = 512, positives at a
cosine of about 0.2) to a loss and the gradients of x, y and what else the loss learns. CPU time on one thread, methods
taking turns, median of the turns: other jobs on the machine move wall time, not this. Memory: highest resident set of
one forward and backward, above what was there before it, in a fresh process.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses import build_objective
from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.tiles import TILE

D = 512
TAU = 0.01
M_MMAP_THRESHOLD = -3  # malloc.h
Method = Callable[[Tensor, Tensor], object]  # one forward and backward


@dataclass(frozen=True)
class Family:
    """Several ways to one loss, and how many columns it has for each row of the batch."""

    methods: dict[str, Callable[[], Method]]
    columns: int = 1


def ours(name: str, **options: Any) -> Callable[[], Method]:
    def method() -> Method:
        objective = build_objective(name, **options)
        return lambda x, y: objective(x, y).loss.backward()

    return method


def clip_loss() -> Method:
    from open_clip.loss import ClipLoss

    logit_scale = torch.nn.Parameter(torch.tensor(1 / TAU).log())
    loss = ClipLoss()
    return lambda x, y: loss(F.normalize(x, dim=1), F.normalize(y, dim=1), logit_scale.exp().to(x.dtype)).backward()


def ranking_loss() -> Method:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(None, scale=1 / TAU, **BOTH_DIRECTIONS)  # pyright: ignore[reportArgumentType]
    return lambda x, y: loss.compute_loss_from_embeddings([x, y], torch.empty(0)).backward()


def cached_ranking_loss() -> Method:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    loss = CachedMultipleNegativesRankingLoss(
        SentenceTransformer(modules=[torch.nn.Identity()], device="cpu"),
        scale=1 / TAU,
        mini_batch_size=1024,
        **BOTH_DIRECTIONS,
    )
    return lambda x, y: loss.calculate_loss([[x], [y]], with_backward=True)


BOTH_DIRECTIONS: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


def siglip_loss() -> Method:
    from open_clip.loss import SigLipLoss

    logit_scale = torch.nn.Parameter(torch.tensor(10.0).log())
    bias = torch.nn.Parameter(torch.tensor(-10.0))
    loss = SigLipLoss()
    return lambda x, y: loss(
        F.normalize(x, dim=1), F.normalize(y, dim=1), logit_scale.exp().to(x.dtype), bias.to(x.dtype)
    ).backward()


def negatives_of(y: Tensor) -> Tensor:
    """One hard negative per row, which learns as the other columns do."""
    return 0.9 * y.roll(1, 0)


def ours_with_negatives() -> Method:
    objective = build_objective("dpr", temperature=TAU)
    return lambda x, y: objective(x, y, negatives=negatives_of(y)[:, None]).loss.backward()


def dense_with_negatives() -> Method:
    def run(x: Tensor, y: Tensor) -> None:
        columns = torch.cat([y, negatives_of(y)]).float()
        F.cross_entropy(x.float() @ columns.T / TAU, torch.arange(len(x))).backward()

    return run


def dense_coce() -> Method:
    """coce's KL divergence in closed form: τ log mean_j exp((s_ij − s_ip)/τ) over the other columns j."""

    def run(x: Tensor, y: Tensor) -> None:
        scores = F.normalize(x.float(), dim=1) @ F.normalize(y.float(), dim=1).T
        others = scores.masked_fill(torch.eye(len(x), dtype=torch.bool), -math.inf)
        differences = (others - scores.diagonal()[:, None]) / TAU
        (TAU * (differences.logsumexp(1) - math.log(len(y) - 1)).mean()).backward()

    return run


FAMILIES = {
    "softmax": Family(
        {
            "ours": ours("clip", temperature=TAU),
            "ClipLoss": clip_loss,
            "MNRL": ranking_loss,
            "CachedMNRL": cached_ranking_loss,
        }
    ),
    "sigmoid": Family({"ours": ours("siglip"), "SigLipLoss": siglip_loss}),
    "negatives": Family({"ours": ours_with_negatives, "dense": dense_with_negatives}, columns=2),
    "robust": Family({"ours": ours("coce", temperature=TAU), "dense": dense_coce}),
}


def embeddings(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (F.normalize(torch.randn(size, D, generator=generator), dim=1) for _ in range(2))
    y = 0.2 * x + noise
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def tile_matmuls(rows: int, columns: int) -> Callable[[], None]:
    """The flops that scores, computed once, and the two gradients need, and nothing else, tile by tile."""
    x, y = (torch.randn(size, D) for size in (rows, columns))
    dx, dy, a = torch.zeros_like(x), torch.zeros_like(y), torch.empty(min(rows, TILE), min(columns, TILE))

    def run() -> None:
        for r in tiles.slices(rows):
            for c in tiles.slices(columns):
                torch.mm(x[r], y[c].T, out=a)
                dx[r].addmm_(a, y[c], beta=0)
                dy[c].addmm_(a.T, x[r], beta=0)

    return run


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def times(family: Family, size: int, turns: int, dtype: torch.dtype) -> dict[str, float]:
    """Median CPU seconds of a forward and backward per method, and of the bare matmuls in float32."""
    x, y = embeddings(size, dtype)
    runs: dict[str, Callable[[], object]] = {"matmuls": tile_matmuls(size, family.columns * size)}
    for name, build in family.methods.items():
        runs[name] = partial(build(), x, y)
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + (turns > 1)):
        for name, run in runs.items():
            x.grad = y.grad = None
            seconds = cpu_seconds(run)
            if turn or turns == 1:  # the first turn warms up
                measured[name].append(seconds)
    return {name: statistics.median(values) for name, values in measured.items()}


def peak_megabytes(*arguments: str) -> float:
    """Measured in a process of its own, so that nothing earlier has left memory to reuse."""
    command = [sys.executable, "-m", "tests.benchmarks.loss", *arguments]
    return float(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )  # wandb may speak first


def print_peak(method: Method, size: int, dtype: torch.dtype) -> None:
    # blocks above 64 KiB come straight from the system and go back to it: the resident set is then what is in use
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    method(*embeddings(64, dtype))  # libraries load and threads start here
    x, y = embeddings(size, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts again from now
    before = _status("VmRSS")
    method(x, y)
    print((_status("VmHWM") - before) / 1024)


def _status(key: str) -> int:
    """A line of /proc/self/status in KiB."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))


def table(name: str, sizes: list[int], only: list[str] | None, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    family = replace(family, methods={m: build for m, build in family.methods.items() if not only or m in only})
    print("| B | method | CPU s | ours / it | share of the 6·B·M·D floor | peak MB |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        seconds = times(family, size, 7 if size <= 1024 else 5 if size <= 4096 else 1, dtype)
        for method in family.methods:
            flags = ["--bf16"] * (dtype is torch.bfloat16) + ["--again"] * (tiles.KEPT == 0)
            peak = peak_megabytes("--family", name, *flags, "--peak", method, str(size))
            shares = f"{seconds['ours'] / seconds[method]:.2f} | {seconds['matmuls'] / seconds[method]:.2f}"
            print(f"| {size} | {method} | {seconds[method]:.3f} | {shares} | {peak:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=[1024, 4096], help="B (default 1024 4096)")
    parser.add_argument("--family", choices=FAMILIES, default="softmax", help="which losses (default softmax)")
    parser.add_argument("--only", nargs="*", help="these methods only, ours among them (default all)")
    parser.add_argument("--bf16", action="store_true", help="embeddings in bf16")
    parser.add_argument(
        "--again", action="store_true", help="compute scores twice in small batches too, as in large ones"
    )
    parser.add_argument("--peak", nargs=2, metavar=("METHOD", "B"), help="only print the peak memory of one, in MB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.again:
        tiles.KEPT = 0
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    if arguments.peak:
        method, size = arguments.peak
        print_peak(FAMILIES[arguments.family].methods[method](), int(size), dtype)
    else:
        table(arguments.family, arguments.sizes, arguments.only, dtype)


if __name__ == "__main__":
    main()
