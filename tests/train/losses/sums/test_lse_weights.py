"""log_partition with a scale for every row and column, log-weights, and exclusion by lists, against dense sums."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.pairwise import PATHS, alone, dense, gradients, left_out_by, problem
from helpers.reference import LargestTensor, relative_error, used_path
from torch import Tensor

from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.lse import Scales, log_partition
from dyad.train.losses.sums.tiles import Exclusion, Pairs

KINDS = ["one scale", "scales"]
WEIGHTS = {"none": (False, False), "rows": (True, False), "columns": (False, True), "both": (True, True)}
SPARSE = [(0, 0), (0, 5), (2, 1), (3, 6), (4, 4), (4, 0), (4, 5), (6, 6), (6, 2)]


def tuned(b: int, m: int, kind: str, weights: str, path: str = "bounded", spread: float = 2.0) -> list[Tensor]:
    """x, y and the scales, then the weights of rows and of columns, as they are."""
    x, y, scale = problem(b, m, path)
    rows, columns = ((torch.linspace(-1, 1, n).double() ** 3 * spread).requires_grad_() for n in (b, m))
    scales = [(0.5 + torch.rand(n, generator=torch.Generator().manual_seed(n)).double()) for n in (b, m)]
    made = [x, y] + ([scale] if kind == "one scale" else [s.requires_grad_() for s in scales])
    return made + [v for v, wanted in zip((rows, columns), WEIGHTS[weights], strict=True) if wanted]


def spoken(inputs: list[Tensor], kind: str, weights: str) -> tuple[Tensor | Scales, Tensor | None, Tensor | None]:
    """The scale and the weights among the inputs."""
    count = 1 if kind == "one scale" else 2
    scale = inputs[2] if count == 1 else Scales(inputs[2], inputs[3])
    rest = iter(inputs[2 + count :])
    row_weights, column_weights = (next(rest) if wanted else None for wanted in WEIGHTS[weights])
    return scale, row_weights, column_weights


def both(inputs: list[Tensor], kind: str, weights: str, exclusion: Exclusion | None, left_out: set[Any]) -> list[Any]:
    """log_partition and the dense sums."""
    (x, y), (scale, row_weights, column_weights) = inputs[:2], spoken(inputs, kind, weights)
    given: dict[str, Any] = dict(row_weights_B=row_weights, column_weights_M=column_weights)
    got = log_partition(x, y, scale, alone(y), exclusion, **given)
    return [got, dense(x, y, scale, left_out, row_weights, column_weights)]


def same_values_and_gradients(found: list[Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    (rows, columns), expected = found
    for got, want in zip((rows, columns), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    got_gradients, want_gradients = gradients(rows, columns, *inputs), gradients(*expected, *inputs)
    for number, (got, want) in enumerate(zip(got_gradients, want_gradients, strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m, n=number: f"input {n}: {m}")
    return got_gradients


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", [(11, 7), (7, 12)], ids=str)
def test_scales_and_weights(
    path: str, kind: str, weights: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    b, m = shape
    whole_row = [(b - 1, j) for j in range(m)]
    for left_out in ([], SPARSE, [*SPARSE, *whole_row, *((i, m - 1) for i in range(b))]):
        inputs = tuned(b, m, kind, weights, path)
        exclusion = Exclusion(dropped=Pairs(torch.tensor(left_out))) if left_out else None
        found = both(inputs, kind, weights, exclusion, set(left_out))
        general = path == "general" or kind == "scales" or whole_row[0] in left_out
        assert used_path(found[0][0]) == ("general" if general else "bounded")
        same_values_and_gradients(found, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [50.0, 2000.0])
def test_weights_of_any_size(kind: str, spread: float) -> None:
    """Also −inf: one that counts for nothing; and so for all, which leaves nothing to sum."""
    inputs = tuned(9, 8, kind, "both", spread=spread)
    same_values_and_gradients(both(inputs, kind, "both", None, set()), inputs)
    for nothing in (slice(2, 4), slice(0, 6)):  # the largest weights are left in, or not
        inputs = tuned(9, 8, kind, "both", spread=spread)
        with torch.no_grad():
            inputs[-1][nothing] = inputs[-2][nothing] = -math.inf
        found = both(inputs, kind, "both", None, set())
        of_weights = same_values_and_gradients(found, inputs)[-2:]
        assert all(g[nothing].eq(0).all() and g.ne(0).any() for g in of_weights)
    with torch.no_grad():
        inputs[-1][:] = -math.inf
    rows, columns = both(inputs, kind, "both", None, set())[0]
    assert rows.eq(-math.inf).all() and columns.isfinite().all()
    assert all(g.eq(0).all() for g in torch.autograd.grad(rows.sum(), inputs, materialize_grads=True))


def test_hands_over_when_a_weighted_sum_underflows() -> None:
    """Row 0 sees only a candidate of weight e^−90, beside which others have 1."""
    inputs = [v.detach().float().requires_grad_() for v in tuned(6, 6, "one scale", "columns")]
    with torch.no_grad():
        inputs[-1][:] = torch.tensor([-90.0, 0, 0, 0, 0, 0])
    left_out = [(0, j) for j in range(1, 6)]
    exact = [v.detach().double().requires_grad_() for v in inputs]
    for pairs, path in ((left_out[:-1], "bounded"), (left_out, "general")):
        got, _ = both(inputs, "one scale", "columns", Exclusion(dropped=Pairs(torch.tensor(pairs))), set(pairs))
        _, want = both(exact, "one scale", "columns", None, set(pairs))
        assert used_path(got[0]) == path
        for a, b in zip((*got, *gradients(*got, *inputs)), (*want, *gradients(*want, *exact)), strict=True):
            assert relative_error(a, b) < 1e-5


def test_exclusion_by_several_rules_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of which some columns have none, pairs that stay nevertheless, pairs that never do."""
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    b, m, keyed = 9, 11, 8
    keys = (torch.arange(b) % 3, torch.arange(keyed) % 3), (torch.arange(b) % 4, torch.arange(m) % 4)
    kept, dropped = {(0, 3), (5, 5), (8, 4), (8, 8)}, {(0, 3), (1, 9), (4, 10), (2, 2)}
    equal = {
        (i, j)
        for i, j in itertools.product(range(b), range(m))
        if any(j < len(columns) and rows[i] == columns[j] for rows, columns in keys)
    }
    listed = [Pairs(torch.tensor(sorted(pairs))) for pairs in (kept, dropped)]
    exclusion = Exclusion(keys, listed[0], listed[1])
    for kind in KINDS:
        inputs = tuned(b, m, kind, "both")
        same_values_and_gradients(both(inputs, kind, "both", exclusion, (equal - kept) | dropped), inputs)


def test_finite_differences_of_scales_and_weights() -> None:
    for kind in KINDS:

        def sums(*inputs: Tensor, kind: str = kind) -> Any:
            return both(list(inputs), kind, "both", Exclusion(dropped=Pairs(torch.tensor(SPARSE[:6]))), set())[0]

        assert torch.autograd.gradcheck(sums, tuned(5, 7, kind, "both"), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, path: str) -> None:
    x, y, _ = problem(13, 17, path, dtype)
    scale = torch.tensor(2.5, requires_grad=True)
    exact = [v.detach().double().requires_grad_() for v in (x, y, scale)]
    rows, columns = log_partition(x, y, scale, alone(y))
    want = dense(exact[0], exact[1], exact[2], set())
    for got, value in zip((rows, columns), want, strict=True):
        assert got.dtype == torch.float32 and relative_error(got, value) < 1e-6
    got_gradients = gradients(rows, columns, x, y, scale)
    for got, value, given in zip(got_gradients, gradients(*want, *exact), (x, y, scale), strict=True):
        assert got.dtype == given.dtype and relative_error(got, value) < 2 * torch.finfo(given.dtype).eps + 1e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["none", "both"])
def test_nothing_of_size_rows_times_columns_is_allocated(
    path: str, kind: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "KEPT", 0)
    b = 512
    inputs = [v.detach().float().requires_grad_() for v in tuned(b, b, kind, weights, path)]
    scale, row_weights, column_weights = spoken(inputs, kind, weights)
    keys = left_out_by(b, b, (100,), False)
    dropped = torch.stack([torch.arange(b), (torch.arange(b) * 7 + 1) % b], 1)
    with LargestTensor() as seen:
        rule = Exclusion(keys.keys, keys.kept, Pairs(dropped))
        given: dict[str, Any] = dict(row_weights_B=row_weights, column_weights_M=column_weights)
        rows, columns = log_partition(inputs[0], inputs[1], scale, alone(inputs[1]), rule, **given)
        gradients(rows, columns, *inputs)
    assert used_path(rows) == ("general" if kind == "scales" else path)
    assert seen.elements <= b * 6
