"""Time, memory and exactness of the clip and siglip objectives on a CUDA device.

python -m tests.benchmarks.loss_gpu [--objective siglip] [B ...]

All methods take bf16 embeddings of length 1 (D = 512, positives at a cosine of about 0.2) to a loss and the gradients
of x, y and the parameters: ours; open_clip's loss under bf16 autocast, as it stands and compiled, where its logits fit
("dense": tests/gpu/test_loss.py shows that it is open_clip's to the bit); and a plain loop over strips of rows that
computes each strip again in the backward pass. Time is of CUDA events, median
of the turns. The floor is the bare bf16 matmuls of the same strips: 8·B²·D flops for clip (scores twice, two
gradients), 6·B²·D for siglip (scores once). Memory is the most allocated above the embeddings. Errors are relative, of
the gradient of x (itself rounded to bf16), at a smaller B, to float64 on the same bf16 numbers. Without a CUDA device
it says so and exits 4.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dyad.train.losses import build_objective
from dyad.train.losses.sums import lse_triton as kernels

D = 512
TAU = 0.01
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0
PRODUCTS = {"clip": 4, "siglip": 3}  # of B²·D multiplications each, of a method that keeps no scores
SIZES = (32768, 65536)
EXACT = 4096  # B at which errors are measured
STRIP_ROWS = 1024  # of the plain loop
TURNS, ENOUGH_SECONDS = 11, 2.0
NO_DEVICE = 4  # the exit code for hardware
Method = Callable[[Tensor, Tensor], Tensor]


def ours(objective: str = "clip", device: str = "cuda") -> Method:
    start: dict[str, Any] = {"temperature": TAU} if objective == "clip" else {"init_scale": SIGLIP_SCALE}
    built = build_objective(objective, similarity="dot", **start).to(device)
    return lambda x, y: built(x, y).loss


def parameters(objective: str, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """A function that returns the learnt numbers of a loss: the logit scale, and for siglip the bias."""
    scale = TAU**-1 if objective == "clip" else SIGLIP_SCALE
    log_scale = nn.Parameter(torch.tensor(scale, device=device).log())
    bias = nn.Parameter(torch.tensor(SIGLIP_BIAS, device=device))
    return lambda: (log_scale.exp(),) if objective == "clip" else (log_scale.exp(), bias)


def dense(objective: str = "clip", device: str = "cuda", compiled: bool = False) -> Method:
    learnt, loss = parameters(objective, device), _dense_clip if objective == "clip" else _dense_siglip

    def run(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(x, y, *learnt())

    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(run, backend=backend, dynamic=False) if compiled else run


def _dense_clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    own = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(scale * x @ y.T, own) + F.cross_entropy(scale * y @ x.T, own)) / 2


def _dense_siglip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * x @ y.T
    logits += bias
    minus = -torch.ones_like(logits, dtype=x.dtype)
    signs = 2 * torch.eye(len(x), device=x.device, dtype=x.dtype) + minus
    return -F.logsigmoid(signs * logits).sum() / len(x)


def loop(objective: str = "clip", device: str = "cuda") -> Method:
    """What one writes by hand: no strip of scores is kept, torch.utils.checkpoint computes it again."""
    learnt = parameters(objective, device)
    of_strip = _clip_strip if objective == "clip" else _siglip_strip

    def run(x: Tensor, y: Tensor) -> Tensor:
        numbers, total = learnt(), x.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, torch.bfloat16):
            sides = ((x, y), (y, x)) if objective == "clip" else ((x, y),)
            for rows, columns in sides:
                for start in range(0, len(rows), STRIP_ROWS):
                    strip = rows[start : start + STRIP_ROWS]
                    part = checkpoint(of_strip, strip, columns, start, *numbers, use_reentrant=False)
                    total = total + part / len(sides) / len(x)  # pyright: ignore[reportOperatorIssue]
        return total

    return run


def _clip_strip(rows: Tensor, columns: Tensor, start: int, scale: Tensor) -> Tensor:
    own = torch.arange(start, start + len(rows), device=rows.device)
    return F.cross_entropy(scale * rows @ columns.T, own, reduction="sum")


def _siglip_strip(rows: Tensor, columns: Tensor, start: int, scale: Tensor, bias: Tensor) -> Tensor:
    signs = -torch.ones(len(rows), len(columns), device=rows.device, dtype=rows.dtype)
    signs.diagonal(start).fill_(1)
    return -F.logsigmoid(signs * (scale * rows @ columns.T + bias)).sum()


METHODS: dict[str, Callable[..., Method]] = {
    "ours": ours,
    "dense": dense,
    "dense compiled": partial(dense, compiled=True),
    "plain loop": loop,
}


def embeddings(size: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x, noise = (F.normalize(torch.randn(size, D, generator=generator, device=device), dim=1) for _ in range(2))
    y = F.normalize(0.2 * x + noise, dim=1)
    return x.bfloat16().requires_grad_(), y.bfloat16().requires_grad_()


def strip_matmuls(size: int, device: str = "cuda", objective: str = "clip") -> Callable[[], None]:
    """What a method that keeps no scores must multiply, on random numbers (zeros would be faster)."""
    x, y = (e.detach() for e in embeddings(size, device))
    strip = min(kernels.STRIP, size)
    a = torch.randn(strip, strip, device=device, dtype=torch.bfloat16)
    scores, of_rows = torch.empty_like(a), torch.empty_like(x[:strip])
    parts = [slice(start, start + strip) for start in range(0, size - strip + 1, strip)]
    forwards = PRODUCTS[objective] - 2

    def run() -> None:
        for rows in parts:
            for columns in parts:
                for _ in range(forwards):
                    torch.mm(x[rows], y[columns].T, out=scores)
                torch.mm(a, y[columns], out=of_rows)
                torch.mm(a.T, x[rows], out=of_rows)

    return run


def milliseconds(run: Callable[[], object], device: str = "cuda") -> float:
    """Of one call: the median of TURNS, or of as many as ENOUGH_SECONDS allow, but of three at least."""
    for _ in range(3):  # kernels are compiled and chosen here
        run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < TURNS and sum(times) < 1000 * ENOUGH_SECONDS):
        times += _timed(run, device)
    return statistics.median(times)


def _timed(run: Callable[[], object], device: str) -> Iterator[float]:
    if device != "cuda":
        begun = perf_counter()
        run()
        yield 1000 * (perf_counter() - begun)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    yield start.elapsed_time(end)


@cache
def floor(size: int, device: str, objective: str) -> float:
    """Milliseconds of strip_matmuls."""
    return milliseconds(strip_matmuls(size, device, objective), device)


def time_and_memory(name: str, size: int, objective: str = "clip", device: str = "cuda") -> tuple[float, float] | None:
    """Milliseconds of a forward and backward, and peak MB above the embeddings; None where memory does not suffice.

    On a CPU the memory is not measured: 0.
    """
    method = METHODS[name](objective, device)
    x, y = embeddings(size, device)

    def run() -> None:
        x.grad = y.grad = None
        method(x, y).backward()

    try:
        median = milliseconds(run, device)
        x.grad = y.grad = None
        if device != "cuda":
            return median, 0.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return median, (torch.cuda.max_memory_allocated() - before) / 2**20
    except torch.OutOfMemoryError:
        return None


def gradient_error(name: str, objective: str = "clip", device: str = "cuda", size: int = EXACT) -> float:
    x, y = embeddings(size, device)
    x64, y64 = (e.detach().double().requires_grad_() for e in (x, y))
    if objective == "clip":
        a = x64 @ y64.T / TAU
        want = ((a.logsumexp(1) + a.logsumexp(0)) / 2 - a.diagonal()).mean()
    else:
        a = SIGLIP_SCALE * x64 @ y64.T + SIGLIP_BIAS
        want = -F.logsigmoid((2 * torch.eye(size, device=device) - 1) * a).sum() / size
    (want_dx,) = torch.autograd.grad(want, x64)
    (dx,) = torch.autograd.grad(METHODS[name](objective, device)(x, y), x)
    return float((dx.double() - want_dx).norm() / want_dx.norm())


def table(objective: str, sizes: list[int]) -> None:
    used = kernels.available(*embeddings(128))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {'used' if used else 'NOT USED'}")
    print(f"| B, {objective} | method | ms | share of floor | TFLOP/s | peak MB |\n|---|---|---|---|---|---|")
    for size in sizes:
        for name in METHODS:
            got, least = time_and_memory(name, size, objective), floor(size, "cuda", objective)
            torch.cuda.empty_cache()
            if got is None:
                print(f"| {size} | {name} | does not fit | | | |", flush=True)
                continue
            rate = 2 * PRODUCTS[objective] * size**2 * D / got[0] / 1e9
            print(f"| {size} | {name} | {got[0]:.2f} | {least / got[0]:.2f} | {rate:.0f} | {got[1]:.0f} |", flush=True)
    for name in METHODS:
        print(f"relative error of the gradient of x at B = {EXACT}, {name}: {gradient_error(name, objective):.1e}")
    for name, kernel in (("sums", kernels._sums_kernel), ("G", kernels._gradient_kernel)):
        print(f"shape chosen for {name}: {'; '.join(map(str, kernel.cache.values()))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", metavar="B", type=int, nargs="*", default=SIZES, help=f"default {SIZES}")
    parser.add_argument("--objective", choices=PRODUCTS, default="clip")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "tests.benchmarks.loss_gpu needs a CUDA device, and torch finds none: nothing was measured", file=sys.stderr
        )
        return NO_DEVICE
    if any(size % kernels.STRIP and size > kernels.STRIP for size in asked.sizes):
        parser.error(f"B above {kernels.STRIP} must be a multiple of it, so that the floor has the same strips")
    table(asked.objective, list(asked.sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
