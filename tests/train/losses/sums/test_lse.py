"""log_partition against dense float64 sums, on both of its paths, and what it allocates."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.pairwise import PATHS, alone, dense, gradients, left_out_by, problem
from helpers.reference import relative_error, used_path
from torch import Tensor

from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.lse import log_partition
from dyad.train.losses.sums.tiles import Exclusion, Pairs

ROOT = Path(__file__).parents[4]


def related(*numbers: int) -> Callable[[int, int], bool]:
    return lambda i, j: any(i % n == j % n for n in numbers)


EXCLUSIONS: dict[str, tuple[tuple[int, ...], bool]] = {  # name: (keys are row number mod these, whether own is out)
    "nothing": ((), False),
    "own": ((), True),
    "one key": ((3,), False),
    "two keys": ((3, 4), False),
    "two keys and own": ((3, 4), True),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(11, 11), (7, 12), (12, 7), (1, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("exclusion", EXCLUSIONS)
def test_equals_the_dense_sums(
    path: str, shape: tuple[int, int], exclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    b, m = shape
    inputs = problem(b, m, path)
    numbers, own = EXCLUSIONS[exclusion]
    rule = left_out_by(b, m, numbers, own)
    rows, columns = log_partition(*inputs, alone(inputs[1]), rule if numbers or own else None)
    pairs = itertools.product(range(b), range(m))
    left_out = {(i, j) for i, j in pairs if (own if i == j else related(*numbers)(i, j))}
    expected = dense(*inputs, left_out)
    has_empty = not all(v.isfinite().all() for v in expected)
    assert used_path(rows) == ("general" if has_empty else path)
    for got, want in zip((rows, columns), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for got, want in zip(gradients(rows, columns, *inputs), gradients(*expected, *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("exclusion", EXCLUSIONS)
def test_kept_exponentials_give_the_bits_of_computed_ones(exclusion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a second backward, for which nothing is kept."""
    monkeypatch.setattr(tiles, "TILE", 4)
    x, y, scale = (e.detach().float().requires_grad_() for e in problem(7, 12, PATHS[0]))
    numbers, own = EXCLUSIONS[exclusion]
    rule = left_out_by(7, 12, numbers, own)
    found = []
    for kept in (0, 7 * 12 * 4):
        monkeypatch.setattr(tiles, "KEPT", kept)
        assert tiles.Tiles(x, y).keeps_scores == bool(kept)
        rows, columns = log_partition(x, y, scale, alone(y), rule)
        loss = rows.clamp(0).sum() + columns.clamp(0).square().sum()
        for again in (True, False):
            found.append([rows, columns, *torch.autograd.grad(loss, (x, y, scale), retain_graph=again)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("path", PATHS)
def test_finite_differences(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 3)
    monkeypatch.setattr(tiles, "KEPT", 400)
    x, y, scale = problem(5, 5, path)
    exclusion = left_out_by(5, 5, (3,), False)
    assert torch.autograd.gradcheck(
        lambda x, y, scale: log_partition(x, y, scale, alone(y), exclusion), (x, y, scale), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("path", PATHS)
def test_empty_rows_and_columns_have_no_value_and_no_gradient(path: str) -> None:
    x, y, scale = problem(4, 4, path)
    keys = torch.tensor([7, 7, 7, 1])
    everything_but_the_last = Exclusion(((keys, torch.full((4,), 7)),), dropped=Pairs.own_columns(4, 0, x.device))
    rows, columns = log_partition(x, y, scale, alone(y), everything_but_the_last)
    assert rows[:3].eq(-math.inf).all() and rows[3].isfinite()
    assert columns[3] == -math.inf and columns[:3].isfinite().all()
    for value in (torch.where(rows.isfinite(), rows, 0.0).sum(), rows.sum()):  # also when the empty ones are asked for
        dx, dy, dscale = torch.autograd.grad(value, (x, y, scale), retain_graph=True)
        assert dx[:3].eq(0).all() and dx[3].ne(0).any()
        assert dy[3].eq(0).all() and dy[:3].ne(0).any() and dscale.isfinite()


def aligned(score: float, n: int = 8) -> tuple[Tensor, Tensor]:
    """Unit vectors of which every pair has the given score, plus what tells them apart."""
    generator = torch.Generator().manual_seed(1)
    x, y = 1e-3 * torch.randn(2, n, 4, generator=generator)
    x[:, 0], x[:, 1], y[:, 0], y[:, 1] = 1.0, 0.0, score, math.sqrt(1.0 - score**2)
    return x.requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("all opposite", "general"),
        ("all at −0.57", "general"),  # sums of e^−95: not 0, but with few digits left
        ("one row", "general"),
        ("one column", "general"),
        ("none", "bounded"),
    ],
)
def test_hands_over_when_a_sum_underflows(which: str, expected: str) -> None:
    """Scale 100: the shift leaves room for logits down to about −30, opposite vectors have −100."""
    x, y = aligned({"all opposite": -1.0, "all at −0.57": -0.57}.get(which, 1.0))
    with torch.no_grad():
        x[0, 0] = -1.0 if which == "one row" else x[0, 0]
        y[0, 0] = -1.0 if which == "one column" else y[0, 0]
    scale = torch.tensor(100.0, requires_grad=True)
    rows, columns = log_partition(x, y, scale, alone(y))
    assert used_path(rows) == expected
    exact = [e.detach().double().requires_grad_() for e in (x, y, scale)]
    want = dense(exact[0], exact[1], exact[2], set())
    for got, value in zip((rows, columns), want, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-6, atol=1e-5)
    for got, value in zip(gradients(rows, columns, x, y, scale), gradients(*want, *exact), strict=True):
        assert float((got - value).norm() / value.norm()) < 1e-5


def test_small_gradients_of_large_sums_keep_their_digits() -> None:
    """Every logit at its bound, as when a model has collapsed: the sums are as large as the shift lets them be."""
    x, y = aligned(1.0, n=32)
    scale = torch.tensor(100.0, requires_grad=True)
    rows, columns = log_partition(x, y, scale, alone(y))
    assert used_path(rows) == "bounded"
    p, q, t = (v.detach().double().requires_grad_() for v in (x, y, scale))
    want_rows, want_columns = dense(p, q, t, set())
    want = torch.autograd.grad(1e-7 * (want_rows.sum() + want_columns.sum()), (p, q, t))
    for got, value in zip(torch.autograd.grad(1e-7 * (rows.sum() + columns.sum()), (x, y, scale)), want, strict=True):
        assert float((got - value).norm() / value.norm()) < 5e-6


@pytest.mark.parametrize("tau", [1e-3, 0.01, 0.07, 1.0, 1e3])
@pytest.mark.parametrize("scores", ["spread", "collapsed", "huge", "largest", "duplicates", "one candidate"])
def test_float32_is_as_exact_as_dense_float32(tau: float, scores: str) -> None:
    n = 96
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.nn.functional.normalize(torch.randn(n, 16, generator=generator), dim=1) for _ in range(2))
    if scores == "collapsed":
        x, y = (torch.nn.functional.normalize(1e-2 * e + 1.0, dim=1) for e in (x, y))
    if scores == "duplicates":
        x, y = x[torch.arange(n) % 7], y[torch.arange(n) % 5]
    length = {"huge": 1e2, "largest": 3e2}.get(scores, 1.0)  # scores to ±7·10⁴ at the largest
    x, y = length * x, length * y[: 1 if scores == "one candidate" else n]

    def values(dtype: torch.dtype, tiled: bool) -> list[Tensor]:
        p, q, scale = (v.to(dtype).requires_grad_() for v in (x, y, torch.tensor(1 / tau)))
        a = scale * (p @ q.T)
        rows, columns = log_partition(p, q, scale, alone(q)) if tiled else (a.logsumexp(1), a.logsumexp(0))
        return [rows.detach(), columns.detach(), *gradients(rows, columns, p, q, scale)]

    exact = values(torch.float64, False)
    allowed = max(1e-5, 64 * torch.finfo(torch.float32).eps * float((x @ y.T).abs().max()) / tau)
    for got, dense32, want in zip(values(torch.float32, True), values(torch.float32, False), exact, strict=True):
        assert got.isfinite().all()
        if want is exact[0] or want is exact[1]:  # logarithms: a sum of 1 is 0
            want, got, dense32 = want + 1.0, got + 1.0, dense32 + 1.0
        error, dense_error = (relative_error(v, want) for v in (got, dense32))
        assert error <= max(1e-6, 2 * dense_error) and error <= allowed


def test_not_a_number_comes_through() -> None:
    x, y, scale = problem(5, 5, "bounded", torch.float32)
    with torch.no_grad():
        x[2, 2] = math.nan
    rows, columns = log_partition(x, y, scale, alone(y))
    assert rows[2].isnan() and rows[[0, 1, 3, 4]].isfinite().all() and columns.isnan().all()


def test_autocast_does_not_reach_the_scores() -> None:
    x, y, scale = problem(9, 9, "bounded", torch.float32)
    plain = log_partition(x, y, scale, alone(y))
    with torch.autocast("cpu", torch.bfloat16):
        cast = log_partition(x, y, scale, alone(y))
        cast_gradients = gradients(*cast, x, y, scale)
    for got, want in zip((*cast, *cast_gradients), (*plain, *gradients(*plain, x, y, scale)), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_no_row_or_no_column_is_a_problem_too(path: str) -> None:
    for b, m in ((0, 4), (4, 0), (0, 0)):
        x, y, scale = problem(b, m, path)
        rows, columns = log_partition(x, y, scale, alone(y))
        assert rows.shape == (b,) and columns.shape == (m,)
        for gradient in torch.autograd.grad(rows.clamp(0).sum() + columns.clamp(0).sum(), (x, y, scale)):
            assert gradient.eq(0).all()


def test_peak_memory_grows_with_the_batch_not_its_square() -> None:
    """Resident memory of a fresh process; the four B × B matrices of a dense loss would be 268 MB at B = 4096."""
    command = [sys.executable, "-m", "tests.benchmarks.loss", "--again", "--peak", "ours"]
    runs = [subprocess.Popen([*command, str(b)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for b in (2048, 4096)]
    peaks = [float(run.communicate()[0]) for run in runs]
    assert peaks[0] > 8  # at least the gradients themselves
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[1] < 100
