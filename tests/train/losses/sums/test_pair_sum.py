"""pair_sum against dense autograd: value, every gradient, what it allocates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.reference import LargestTensor, relative_error
from torch import Tensor

from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.pair_sum import pair_sum
from dyad.train.losses.sums.tiles import Exclusion, Pairs

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True, params=[4, 8])
def several_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Of a CPU; and on a larger device, of several blocks in which pairs are listed."""
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "KEPT", 400)
    if request.param > 4:
        monkeypatch.setattr(tiles, "tile_size", lambda device: request.param)


FUNCTIONS: dict[str, tuple[Function, tuple[int, int, int]]] = {  # and how many inputs of rows, of columns, of all
    "square": (lambda s: s**2, (0, 0, 0)),
    "sigmoid": (lambda s, t, b: F.softplus(t.exp() * s + b), (0, 0, 2)),
    "hinge of differences": (lambda s, own: (1.0 + s - own).clamp(min=0) ** 2, (1, 0, 0)),
    "noise": (lambda s, log_q, log_z: F.softplus(s - log_q - log_z), (0, 1, 1)),
    "all of it": (lambda s, u, v, w, t: torch.tanh(s * t + u * w) * v, (2, 1, 1)),
    "not of the score": (lambda s, u: (0.0 * s + u) ** 2, (1, 0, 0)),
    "not of the parameter": (lambda s, t: s.sin(), (0, 0, 1)),
}
EXCLUDED = [(0, 0), (0, 5), (2, 1), (3, 6), (4, 4), (6, 6), (6, 2), *((5, j) for j in range(9))]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def problem(b: int, m: int, counts: tuple[int, int, int]) -> tuple[list[Tensor], dict[str, Any]]:
    x, y = numbers(b, 3, seed=1), numbers(m, 3, seed=2)
    shapes = zip(("rows", "columns", "parameters"), counts, ((b,), (m,), ()), strict=True)
    more = {name: [numbers(*shape, seed=10 + i) for i in range(count)] for name, count, shape in shapes}
    return [x, y, *(v for group in more.values() for v in group)], more


def dense(f: Function, x: Tensor, y: Tensor, more: dict[str, list[Tensor]], left_out: Any, factors: Any) -> Tensor:
    """Pair by pair."""
    total = 0.0 * x.sum() + 0.0 * y.sum()
    for i in range(len(x)):
        for j in range(len(y)):
            if (i, j) not in left_out:
                given = (*(r[i] for r in more["rows"]), *(c[j] for c in more["columns"]), *more["parameters"])
                total = total + (1.0 if factors is None else factors[i]) * f(x[i] @ y[j], *given)
    return total


def gradients(value: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(1.7 * value, inputs, materialize_grads=True)


@pytest.mark.parametrize("shape", [(7, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_dense_autograd(name: str, shape: tuple[int, int]) -> None:
    f, counts = FUNCTIONS[name]
    pairs = [(i, j) for i, j in EXCLUDED if i < shape[0] and j < shape[1]]
    for left_out in ([], pairs):
        for factors in (None, torch.linspace(0.0, 2.0, shape[0]).double()):
            inputs, more = problem(*shape, counts)
            exclusion = Exclusion(dropped=Pairs(torch.tensor(left_out))) if left_out else None
            got = pair_sum(f, inputs[0], inputs[1], exclusion, row_factors_b=factors, **more)
            want = dense(f, inputs[0], inputs[1], more, left_out, factors)
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
            for g, expected in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
                torch.testing.assert_close(g, expected, rtol=1e-10, atol=1e-11)


def test_finite_differences() -> None:
    f, counts = FUNCTIONS["all of it"]
    inputs, _ = problem(5, 6, counts)

    def value(x: Tensor, y: Tensor, u: Tensor, v: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return pair_sum(f, x, y, rows=(u, v), columns=(w,), parameters=(t,))

    assert torch.autograd.gradcheck(value, inputs, atol=1e-6)


def test_only_what_learns_has_a_gradient() -> None:
    f, counts = FUNCTIONS["all of it"]
    everything, more = problem(7, 9, counts)
    expected = gradients(dense(f, everything[0], everything[1], more, (), None), everything)
    for learning in ([0], [1], [2], [3, 5], [4], []):
        inputs = [v.detach().requires_grad_(i in learning) for i, v in enumerate(everything)]
        x, y, u, v, w, t = inputs
        value = pair_sum(f, x, y, rows=(u, v), columns=(w,), parameters=(t,))
        assert value.requires_grad == bool(learning)
        for i, g in zip(learning, gradients(value, [inputs[i] for i in learning]) if learning else (), strict=True):
            torch.testing.assert_close(g, expected[i], rtol=1e-10, atol=1e-11)
    with torch.no_grad():
        assert not pair_sum(f, everything[0], everything[1], **more).requires_grad


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_no_row_or_no_column(shape: tuple[int, int]) -> None:
    f, counts = FUNCTIONS["all of it"]
    inputs, more = problem(*shape, counts)
    nothing = Exclusion(dropped=Pairs(torch.zeros(0, 2, dtype=torch.int64)))
    value = pair_sum(f, inputs[0], inputs[1], nothing, row_factors_b=torch.ones(shape[0]).double(), **more)
    assert value == 0.0
    for g, given in zip(gradients(value, inputs), inputs, strict=True):
        assert g.shape == given.shape and g.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    f, counts = FUNCTIONS["sigmoid"]
    inputs, more = problem(30, 40, counts)
    x, y = (v.detach().to(dtype).requires_grad_() for v in inputs[:2])
    narrow = [x, y, *(v.detach().float().requires_grad_() for v in more["parameters"])]
    value = pair_sum(f, x, y, parameters=narrow[2:])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair_sum(f, x, y, parameters=narrow[2:]), value)
    exact = [v.detach().double().requires_grad_() for v in narrow]
    want = f(exact[0] @ exact[1].T, *exact[2:]).sum()
    assert value.dtype == torch.float32 and relative_error(value.detach(), want.detach()) < 1e-6
    for g, expected, given in zip(gradients(value, narrow), gradients(want, exact), narrow, strict=True):
        assert g.dtype == given.dtype and relative_error(g, expected) < 2 * torch.finfo(given.dtype).eps + 2e-6


def test_nothing_of_size_rows_times_columns_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "KEPT", 0)
    f, counts = FUNCTIONS["all of it"]
    b = 96  # three columns of numbers are more than a tile
    inputs, more = problem(b, b, counts)
    keys = torch.arange(b) % 2
    with LargestTensor() as seen:
        exclusion = Exclusion(((keys, keys),), Pairs.own_columns(b, 0, keys.device))
        gradients(pair_sum(f, inputs[0], inputs[1], exclusion, row_factors_b=torch.ones(b).double(), **more), inputs)
    assert seen.elements <= b * 3


@pytest.mark.parametrize(("gigabytes", "size"), [(8, 1024), (24, 1024), (48, 8192), (141, 8192)])
def test_tiles_are_larger_on_a_gpu_with_room(gigabytes: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert tiles.tile_size(torch.device("cuda", 0)) == size
    assert tiles.tile_size(torch.device("cpu")) == 1024
