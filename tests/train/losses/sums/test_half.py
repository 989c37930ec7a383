"""Products of half precision and what follows them, as GPUs compute them, on a CPU: against float64, and compiled."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.sums import fused_tiles, lse_one_shift, lse_online, pair_sum, row_losses, tiles

FUSED: list[Any] = [
    fused_tiles.exp_sums,
    fused_tiles.exp_gradients,
    fused_tiles.log_sums,
    fused_tiles.log_sum_gradients,
    fused_tiles.row_exponentials,
    pair_sum._terms,
]
WITHOUT_TILES = {"spectral", "spectral_alternating", "pca_penalty", "vicreg"}
B, D = 40, 32
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name, options in OBJECTIVES.items() if options.inputs == "pairs" and name not in WITHOUT_TILES},
    "siglip, duplicates": {"objective": "siglip", "duplicates": "positive"},
    "local_nce, masked": {"objective": "local_nce", "duplicates": "mask"},
    "one_sided_dpm, weights": {"objective": "one_sided_dpm", "importance": "log_q"},
    "clip, a low temperature": {"objective": "clip", "temperature": 0.004, "learnable": False},  # no shift fits all
    **{
        f"coce, {divergence}, {loss}": {"objective": "coce", "divergence": divergence, "pair_loss": loss}
        for divergence in ("kl", "chi2", "cvar")
        for loss in ("identity", "squared_hinge", "logistic")
    },
}
DOCUMENT = Path(__file__).parents[4] / "docs/gpu.md"
QUICK = ("one_sided_dpm, weights", "clip, a low temperature", "coce", "siglip, duplicates", "coce, kl, logistic")


def embeddings(b: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    x, y, more = (
        torch.nn.functional.normalize(torch.randn(*shape, D, generator=generator), dim=-1).bfloat16()
        for shape in ((b,), (b,), (b, 1))
    )
    return x, (y + x).bfloat16(), more


def loss_and_gradients(name: str, options: dict[str, Any], dtype: torch.dtype, b: int = B) -> list[Tensor]:
    """The loss, and its gradients in x, y and the parameters."""
    options = dict(options)
    name = options.pop("objective", name)
    needed = {"num_samples": b, "gamma_epochs": 30}
    options |= {key: value for key, value in needed.items() if hasattr(OBJECTIVES[name], key)}
    objective: Any = build_objective(name, **options).to(dtype if dtype == torch.float64 else torch.float32)
    x, y, more = (e.to(dtype).requires_grad_() for e in embeddings(b))
    ids = torch.arange(b)
    keys = ids.clone()
    keys[3] = keys[20]
    inputs: dict[str, Any] = {}
    if "duplicates" in options:
        inputs = {"x_keys": keys, "y_keys": keys}
    elif "importance" in options:
        inputs["importance"] = torch.linspace(-3, 0, b).to(dtype)
    elif "negatives" in objective.takes:
        inputs["negatives"] = more
    loss = objective(x, y, ids, **inputs).loss
    learning = [x, y, *(p for p in objective.parameters() if p.requires_grad)]
    return [loss.detach(), *torch.autograd.grad(loss, learning, materialize_grads=True)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[torch.dtype]:
    """Several tiles, and products of bf16 on this CPU; counts the products by dtype."""
    counted: Counter[torch.dtype] = Counter()

    def counting(left: Tensor, *rest: Any) -> Tensor:
        counted[left.dtype] += 1
        return product(left, *rest)

    product = tiles.wide_product
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "fuses", lambda device: True)
    monkeypatch.setattr(Objective, "_comparable", lambda self, e: e)  # keeps half precision, as on a GPU
    for module in (tiles, row_losses):
        monkeypatch.setattr(module, "wide_product", counting)
    return counted


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_float64(name: str, products: Counter[torch.dtype]) -> None:
    got = loss_and_gradients(name, CASES[name], torch.bfloat16)
    want = loss_and_gradients(name, CASES[name], torch.float64)
    assert products[torch.bfloat16] > 3
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-5, atol=2e-5)
    for g, expected in zip(got[1:], want[1:], strict=True):
        assert (g.double() - expected).norm() <= 1e-2 * expected.norm() + 1e-6, name


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.soak) for n in CASES])
def test_what_gpus_compile_is_one_graph(
    name: str, products: Counter[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by Dynamo and run as traced; the numbers are those of the functions as they stand.

    Of 2 x 2 whole tiles: each further shape is traced anew.
    """
    want = loss_and_gradients(name, CASES[name], torch.bfloat16, b=32)
    torch._dynamo.reset()
    counters.clear()
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    for function in FUSED:
        traced: Any = whole(function.__wrapped__, dynamic=True)
        for module in (fused_tiles, lse_one_shift, lse_online, pair_sum, row_losses):
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, traced)
    got = loss_and_gradients(name, CASES[name], torch.bfloat16, b=32)
    assert not counters["graph_break"]
    for g, expected in zip(got, want, strict=True):
        torch.testing.assert_close(g, expected, rtol=1e-5, atol=1e-7)


def test_the_table_of_paths_has_every_objective() -> None:
    """Each in one row but that of options, and those without scores in the last."""
    rows = [line.split(" | ")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(\w+)`", row) for row in rows]
    assert sorted(name for row in named for name in row) == sorted(
        WITHOUT_TILES | {n for n in CASES if n in OBJECTIVES}
    )
    assert set(named[-1]) == WITHOUT_TILES
