"""Time, memory and exactness of the clip objective on a CUDA device: python -m tests.benchmarks.loss_gpu [B ...]

All methods take bf16 embeddings of length 1 (D = 512, positives at a cosine of about 0.2, τ = 0.01) to a loss and the
gradients of x, y and the temperature: ours, and open_clip's ClipLoss under bf16 autocast where its logits fit. Time is
of CUDA events, median of the turns. The floor is the bare bf16 matmuls of the same strips, 8·B²·D flops: scores twice,
two gradients. Memory is the most allocated above the embeddings. Errors are relative, of the gradient of x (itself
rounded to bf16), at a smaller B, to float64 on the same bf16 numbers. Without a CUDA device it says so and exits 4.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses import build_objective
from dyad.train.losses.sums import lse_triton as kernels

D = 512
TAU = 0.01
SIZES = (32768, 65536)
EXACT = 4096  # B at which errors are measured
TURNS = 11
NO_DEVICE = 4  # the exit code for hardware
Method = Callable[[Tensor, Tensor], Tensor]


def ours() -> Method:
    objective = build_objective("clip", temperature=TAU, similarity="dot").cuda()
    return lambda x, y: objective(x, y).loss


def open_clip() -> Method:
    from open_clip.loss import ClipLoss

    logit_scale = torch.nn.Parameter(torch.tensor(1 / TAU, device="cuda").log())
    loss = ClipLoss()

    def run(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(x, y, logit_scale.exp())

    return run


METHODS: dict[str, Callable[[], Method]] = {"ours": ours, "open_clip": open_clip}


def embeddings(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, noise = (F.normalize(torch.randn(size, D, generator=generator, device="cuda"), dim=1) for _ in range(2))
    y = F.normalize(0.2 * x + noise, dim=1)
    return x.bfloat16().requires_grad_(), y.bfloat16().requires_grad_()


def strip_matmuls(size: int) -> Callable[[], None]:
    """What any exact method with recomputation must multiply, on random numbers (zeros would be faster)."""
    x, y = (e.detach() for e in embeddings(size))
    strip = min(kernels.STRIP, size)
    a = torch.randn(strip, strip, device="cuda", dtype=torch.bfloat16)
    scores, of_rows = torch.empty_like(a), torch.empty_like(x[:strip])
    parts = [slice(start, start + strip) for start in range(0, size - strip + 1, strip)]

    def run() -> None:
        for rows in parts:
            for columns in parts:
                torch.mm(x[rows], y[columns].T, out=scores)
                torch.mm(x[rows], y[columns].T, out=scores)
                torch.mm(a, y[columns], out=of_rows)
                torch.mm(a.T, x[rows], out=of_rows)

    return run


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):  # kernels are compiled and chosen here
        run()
    times = []
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_and_memory(name: str, size: int) -> tuple[float, float] | None:
    """Milliseconds of a forward and backward, and peak MB above the embeddings; None where memory does not suffice."""
    method = METHODS[name]()
    x, y = embeddings(size)

    def run() -> None:
        x.grad = y.grad = None
        method(x, y).backward()

    try:
        median = milliseconds(run)
        x.grad = y.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return median, (torch.cuda.max_memory_allocated() - before) / 2**20
    except torch.OutOfMemoryError:
        return None


def gradient_error(name: str) -> float:
    x, y = embeddings(EXACT)
    x64, y64 = (e.detach().double().requires_grad_() for e in (x, y))
    a = x64 @ y64.T / TAU
    want = ((a.logsumexp(1) + a.logsumexp(0)) / 2 - a.diagonal()).mean()
    (want_dx,) = torch.autograd.grad(want, x64)
    (dx,) = torch.autograd.grad(METHODS[name]()(x, y), x)
    return float((dx.double() - want_dx).norm() / want_dx.norm())


def table(sizes: list[int]) -> None:
    used = kernels.available(*embeddings(128))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {'used' if used else 'NOT USED'}")
    print("| B | ours ms | TFLOP/s | floor ms | share of floor | peak MB | open_clip ms | ratio | open_clip peak MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in sizes:
        got, floor = time_and_memory("ours", size), milliseconds(strip_matmuls(size))
        torch.cuda.empty_cache()
        if got is None:
            print(f"| {size} | does not fit |" + " |" * 7, flush=True)
            continue
        dense = time_and_memory("open_clip", size)
        torch.cuda.empty_cache()
        rate = 8 * size**2 * D / got[0] / 1e9
        cells = [f"{size}", f"{got[0]:.2f}", f"{rate:.0f}", f"{floor:.2f}", f"{floor / got[0]:.2f}", f"{got[1]:.0f}"]
        cells += (
            [f"{dense[0]:.2f}", f"{got[0] / dense[0]:.2f}", f"{dense[1]:.0f}"] if dense else ["does not fit", "", ""]
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    for name in METHODS:
        print(f"relative error of the gradient of x at B = {EXACT}, {name}: {gradient_error(name):.1e}")
    for name, kernel in (("sums", kernels._sums_kernel), ("G", kernels._gradient_kernel)):
        print(f"shape chosen for {name}: {'; '.join(map(str, kernel.cache.values()))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", metavar="B", type=int, nargs="*", default=SIZES, help=f"default {SIZES}")
    sizes = parser.parse_args().sizes
    if not torch.cuda.is_available():
        print(
            "tests.benchmarks.loss_gpu needs a CUDA device, and torch finds none: nothing was measured", file=sys.stderr
        )
        return NO_DEVICE
    if any(size % kernels.STRIP and size > kernels.STRIP for size in sizes):
        parser.error(f"B above {kernels.STRIP} must be a multiple of it, so that the floor has the same strips")
    table(list(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
