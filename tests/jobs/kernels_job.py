"""What the kernels must be, on any device: against dense float64 on the same bf16 or fp16 numbers.

As a program it runs them interpreted, on the CPU: TRITON_INTERPRET=1 python tests/jobs/kernels_job.py (Triton reads the
variable when it is imported, hence a process of its own). A block takes 30 ms there, so each exclusion meets few,
unless started with "all". On a CUDA device test_lse_triton.py calls them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses.sums import lse_triton as kernels
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.logits import Logits
from dyad.train.losses.sums.lse import log_partition
from dyad.train.losses.sums.lse_one_shift import _kernels
from dyad.train.losses.sums.lse_triton import KernelExclusion
from dyad.train.losses.sums.tiles import Exclusion, Pairs, Tiles
from dyad.train.losses.sums.triton_setup import compile_problem

SCALE, SHIFT = 20.0, 9.0
SIZES = [(1, 1, 1), (130, 300, 72), (257, 129, 64), (128, 513, 33)]  # rows, columns, width: beside and at block edges
SHORT_STRIP = 136  # neither all rows nor whole blocks
SOME = ("one key", "two keys, one of few columns")  # own pairs kept and dropped

Case = tuple[KernelExclusion, list[list[bool]]]


def embeddings(rows: int, columns: int, width: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    x, y = (F.normalize(torch.randn(n, width, generator=generator), dim=1) for n in (rows, columns))
    near = min(rows, columns)
    y[:near] = F.normalize(y[:near] + 0.3 * x[:near], dim=1)
    return x.to(device, dtype), y.to(device, dtype)


def exclusions(rows: int, columns: int, device: str) -> dict[str, Case]:
    """Every kind, with what it leaves out, pair by pair."""
    generator = torch.Generator().manual_seed(0)

    def keys(first_own: int, keyed: int = columns) -> tuple[Tensor, Tensor]:
        """Small in number, and different in the upper half of their bits only."""
        of_columns = torch.randint(-4, 12, (columns,), generator=generator) * 2**32
        of_rows = torch.randint(-4, 12, (rows,), generator=generator) * 2**32
        for i in range(max(0, -first_own), min(rows, columns - first_own)):
            of_rows[i] = of_columns[first_own + i]
        return of_rows.to(device), of_columns[:keyed].to(device)

    offset = columns // 3
    found = {
        "own kept": KernelExclusion((), offset),
        "own dropped": KernelExclusion((), offset, own_dropped=True),
        "own before the first column dropped": KernelExclusion((), -offset, own_dropped=True),
        "one key": KernelExclusion((keys(offset),), offset),
        "one key, own dropped": KernelExclusion((keys(0),), 0, own_dropped=True),
        "two keys": KernelExclusion((keys(offset), keys(offset)), offset),
        "two keys, one of few columns": KernelExclusion((keys(0), keys(0, offset)), 0, own_dropped=True),
        "a key of no column": KernelExclusion((keys(0, 0),), 0),
        "own elsewhere": KernelExclusion((keys(0),), columns),
    }
    cases: dict[str, Case] = {name: (e, _left_out(e, rows, columns)) for name, e in found.items()}
    return {"nothing": (kernels.NOTHING, [[False] * columns for _ in range(rows)]), **cases}


def _left_out(exclusion: KernelExclusion, rows: int, columns: int) -> list[list[bool]]:
    keys = [(of_rows.tolist(), of_columns.tolist()) for of_rows, of_columns in exclusion.keys]
    table = []
    for i in range(rows):
        own = exclusion.first_own + i
        leaves = [any(j < len(c) and r[i] == c[j] for r, c in keys) for j in range(columns)]
        if 0 <= own < columns:
            leaves[own] = exclusion.own_dropped
        table.append(leaves)
    return table


def dense(x: Tensor, y: Tensor, left_out: list[list[bool]]) -> Tensor:
    e = torch.exp(SCALE * (x.double() @ y.double().T) - SHIFT)
    return e.masked_fill(torch.tensor(left_out, device=e.device), 0.0)


def close(got: Tensor, want: Tensor, tolerance: float, *context: object) -> None:
    """As torch.testing.assert_close, which imports for seconds."""
    assert got.shape == want.shape, (*context, got.shape, want.shape)
    assert bool(((got.double() - want).abs() <= tolerance * want.abs()).all()), (*context, got, want)


def check_sums_and_strips(
    device: str, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]] = SIZES, names: Sequence[str] = ()
) -> None:
    """Sums to 1e-5; G to half a unit in the last place of its type, exactly 0 where left out. names: of exclusions."""
    for size in sizes:
        x, y = embeddings(*size, device, dtype)
        u, v = (torch.linspace(-1.0, 2.0, n, device=device) / 4 for n in size[:2])
        least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        every = exclusions(*size[:2], device)
        for name in names or every:
            exclusion, left_out = every[name]
            want = dense(x, y, left_out)
            of_rows, of_columns = kernels.exp_sums(x, y, SCALE, SHIFT, exclusion)
            assert of_rows.dtype == of_columns.dtype == torch.float32
            close(of_rows, want.sum(1), 1e-5, size, name, "rows")
            close(of_columns, want.sum(0), 1e-5, size, name, "columns")
            g = kernels.gradient_strip(x, y, SCALE, SHIFT, u, v, exclusion)
            assert g.dtype == dtype
            pull = u[:, None].double() + v.double()
            error = (g.double() - want * pull).abs()
            # the pull is a float32 sum, in which opposite numbers lose digits
            allowed = want * (pull.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-8) + 0.51 * least * (want > 0)
            assert bool((error <= allowed).all()), (size, name)


def check_short_strips(device: str) -> None:
    """Several strips of rows and columns are as good as one, and a strip's own part of an exclusion is found."""
    size = (200, 210, 24)
    x, y = embeddings(*size, device, torch.bfloat16)
    u, v = (torch.linspace(0.5, 1.5, n, device=device) for n in size[:2])
    exclusion, left_out = exclusions(*size[:2], device)["two keys"]
    want = dense(x, y, left_out)
    g = (want * (u[:, None].double() + v.double())).bfloat16().double()
    whole = kernels.STRIP
    kernels.STRIP = SHORT_STRIP
    try:
        of_rows, of_columns = kernels.exp_sums(x, y, SCALE, SHIFT, exclusion)
        dx, dy = kernels.gradients(x, y, SCALE, SHIFT, u, v, exclusion)
    finally:
        kernels.STRIP = whole
    close(of_rows, want.sum(1), 1e-5, "rows of strips")
    close(of_columns, want.sum(0), 1e-5, "columns of strips")
    assert relative_error(dx, g @ y.double()) < 3e-4
    assert relative_error(dy, g.T @ x.double()) < 3e-4


def check_nothing_to_sum(device: str) -> None:
    x, y = embeddings(3, 5, 8, device, torch.bfloat16)
    for rows, columns in ((0, 5), (3, 0), (0, 0)):
        of_rows, of_columns = kernels.exp_sums(x[:rows], y[:columns], SCALE, SHIFT)
        assert of_rows.shape == (rows,) and of_columns.shape == (columns,)
        assert not of_rows.any() and not of_columns.any()
        dx, dy = kernels.gradients(x[:rows], y[:columns], SCALE, SHIFT, of_rows, of_columns)
        assert dx.shape == (rows, 8) and dy.shape == (columns, 8) and not dx.any() and not dy.any()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_symmetric_loss(device: str, size: int, width: int, scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """mean_i (log Σ_j e^a_ij + log Σ_j e^a_ji) / 2 − a_ii with equal keys left out, put together from the kernels.

    Loss and gradients of x and y against autograd in float64 on the same rounded embeddings; relative errors returned.
    """
    x, y = embeddings(size, size, width, device, dtype)
    keys = torch.arange(size, device=device) // 2 * 2**33
    exclusion = KernelExclusion(((keys, keys),), 0)
    x64, y64 = (e.double().requires_grad_() for e in (x, y))
    a = scale * (x64 @ y64.T)
    other = (keys[:, None] == keys) & ~torch.eye(size, dtype=torch.bool, device=device)
    a = a.masked_fill(other, -math.inf)
    want = ((a.logsumexp(1) + a.logsumexp(0)) / 2 - a.diagonal()).mean()
    want_gradients = torch.autograd.grad(want, (x64, y64))

    shift = max(0.0, scale * 1.01 + math.log(size) - 60.0)
    of_rows, of_columns = kernels.exp_sums(x, y, scale, shift, exclusion)
    positive = scale * (x.float() * y.float()).sum(1)
    loss = (shift + (of_rows.log() + of_columns.log()) / 2 - positive).mean()
    assert abs(float(loss) - float(want.detach())) < 1e-5 * abs(float(want.detach()))
    u, v = (1 / (2 * size * sums) for sums in (of_rows, of_columns))
    dx, dy = kernels.gradients(x, y, scale, shift, u, v, exclusion)
    pairs = ((dx, y, want_gradients[0]), (dy, x, want_gradients[1]))
    errors = [relative_error(scale * (d - other.float() / size), g) for d, other, g in pairs]
    assert max(errors) < 2e-3, errors
    return errors[0], errors[1]


def check_small_loss(device: str, dtype: torch.dtype) -> None:
    """Own pairs left out and added beside the sum: a small InfoNCE has its digits, on the same rounded embeddings."""
    x, noise = embeddings(200, 200, 64, device, torch.float32)
    x, y = x.to(dtype), F.normalize(x + 0.2 * noise.flip(0), dim=1).to(dtype)
    scale, own = torch.tensor(20.0, device=device), Exclusion(dropped=Pairs.own_columns(200, 0, x.device))
    assert _kernels(Tiles(x, y, own), Logits(scale, None, None, None)) is not None
    rows, _ = log_partition(x, y, scale, Layout((200,), 0), own)
    loss = F.softplus(rows - scale * (x.float() * y.float()).sum(1)).mean()
    want = F.cross_entropy(scale * (x.double() @ y.double().T), torch.arange(200, device=device))
    assert 1e-5 < float(want) < 1e-2 and abs(float(loss) - float(want)) < 1e-5 * float(want), (loss, want)


def check_all(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        # interpreted, a type changes what is rounded, not what is summed
        check_sums_and_strips(device, dtype, SIZES if device == "cuda" or dtype is torch.bfloat16 else SIZES[2:3])
    check_rest(device, size=300)


def check_few_blocks() -> None:
    """Every exclusion in 2 x 2 blocks that the matrix does not fill; more blocks, groups and parts of D with some."""
    check_sums_and_strips("cpu", torch.bfloat16, [(1, 1, 1), (130, 140, 33)])
    check_sums_and_strips("cpu", torch.bfloat16, [(128, 257, 72)], SOME)
    check_sums_and_strips("cpu", torch.float16, [(257, 129, 64)], SOME)
    check_rest("cpu", size=150)


def check_rest(device: str, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_symmetric_loss(device, size=size, width=72, scale=100.0, dtype=dtype)
        check_symmetric_loss(device, size=size, width=72, scale=5.0, dtype=dtype)
        check_small_loss(device, dtype)
    check_short_strips(device)
    check_nothing_to_sum(device)


def check_available(device: str) -> None:
    x, y = embeddings(4, 5, 8, device, torch.bfloat16)
    assert kernels.available(x, y) and kernels.available(x.half(), y.half())
    assert not kernels.available(x.float(), y.float()) and not kernels.available(x, y.half())
    wide = x.new_zeros(4, kernels.WIDEST + 1)
    assert kernels.available(wide[:, 1:], wide[:, 1:]) and not kernels.available(wide, wide)


def main() -> None:
    torch.set_num_threads(1)
    assert kernels.INTERPRETED, "set TRITON_INTERPRET=1"
    assert not compile_problem(torch.device("cpu"))  # the trial runs a kernel
    check_available("cpu")
    if "all" in sys.argv:
        check_all("cpu")
    else:
        check_few_blocks()
    print("interpreted: all checks hold", flush=True)


if __name__ == "__main__":
    main()
