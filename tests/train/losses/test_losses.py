"""train.losses as a stranger uses it: building, refusals, the temperature, a plain loop, any number of ranks."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
from helpers.dist import in_ways, launch
from helpers.messages import raises
from jobs.dist_losses import OTHERS, needed_options
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.objectives.base import Objective, ObjectiveResult
from dyad.train.losses.options.registry import configure

SOFTMAX = ["symmetric_dpm", "clip", "gcl", "one_sided_dpm", "info_nce", "dpr", "epr", "cross_entropy", "listwise_ce"]


def test_temperature_is_clamped_after_the_step() -> None:
    objective: Any = build_objective("clip", temperature=0.02, min_temperature=0.015)
    for pushed, expected in ((9.0, -math.log(0.015)), (-3.0, 0.0), (2.0, 2.0)):
        objective.logit_scale.data.fill_(pushed)
        objective.clamp_()
        assert float(objective.logit_scale.detach()) == pytest.approx(expected)
    fixed: Any = build_objective("clip", temperature=5.0, learnable=False)
    fixed.clamp_()
    assert float(fixed.logit_scale.detach()) == pytest.approx(-math.log(5.0))
    assert not fixed.logit_scale.requires_grad
    objective.undo()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("clip", {"tau_scaled": True}, "learnable=true"),
    ("clip", {"tau_scaled": True, "rho": 0.1}, "learnable=true"),  # a sum, not a mean
    ("clip", {"tau_scaled": True, "partition": "mean"}, "learnable=true rho"),
    ("symmetric_dpm", {"learnable": True}, "tau_scaled"),
    ("gcl", {"learnable": True}, "tau_scaled"),
    ("simclr", {"tau_scaled": True}, "learnable=true tau_scaled"),
    ("clip", {"rho": 0.1}, "rho=0.1 tau_scaled=true objective.partition=mean"),
    ("symmetric_dpm", {"rho": 0.1}, "rho=0.1 partition=mean"),
    ("gcl", {"rho": -1.0}, "rho=-1.0"),
    ("clip", {"positives": "single", "duplicates": "positive"}, "positives=single each exclude merge"),
    ("one_sided_dpm", {"directions": "mean"}, "directions=mean directions=x"),
    ("one_sided_dpm", {"importance_file": "q.npy"}, "importance_file=q.npy log_q zeta"),
    ("clip", {"temperature": 0.0}, "temperature=0.0"),
    ("clip", {"temperature": 3.0}, "temperature=3.0 objective.min_temperature=0.01"),
    ("clip", {"min_temperature": 0.0}, "min_temperature=0.0"),
    ("sogclr", {"num_samples": 1 << 40, "gamma": 0.8}, f"objective.num_samples={1 << 40}"),
    ("clip", {"temperature": 1e13, "learnable": False}, "objective.temperature=10000000000000.0"),
    ("spectral_alternating", {"width": 0}, "objective.width=0"),
    ("clip", {"temprature": 0.1}, "'temperature'"),
    ("clip", {"gamma": 0.1}, "gamma"),
    ("clip", {"importance": "log_q"}, "importance"),
    ("clip", {"duplicates": "msk"}, "objective.duplicates keep mask positive"),
    ("clip", {"positives": "some"}, "objective.positives single each exclude merge"),
    ("clip", {"matryoshka": [4, 2]}, "objective.matryoshka=[4, 2]"),
    ("siglip", {"matryoshka": [0]}, "objective.matryoshka=[0]"),
    ("sogclr", {"matryoshka": [2], "num_samples": 9, "gamma": 0.5}, "objective.matryoshka sogclr"),
    ("clip", {"temperature": "warm"}, "objective.temperature warm"),
    ("symetric_dpm", {}, "'symmetric_dpm'"),
]


@pytest.mark.parametrize(("name", "options", "named"), REFUSED, ids=str)
def test_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with raises(ConfigError, *named.split()) as caught:
        build_objective(name, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_a_scaled_loss_learns_its_temperature_with_a_radius_alone() -> None:
    for name, options in (
        ("symmetric_dpm", {"tau_scaled": False}),
        ("gcl", {"rho": 0.1}),
        ("clip", {"tau_scaled": True, "partition": "mean", "rho": 0.1}),
    ):
        objective: Any = build_objective(name, learnable=True, **options)
        assert objective.logit_scale.requires_grad


def test_every_objective_has_a_configuration_and_a_formula() -> None:
    for name, options in OBJECTIVES.items():
        assert f":{type(build_objective(name, **needed_options(name))).__name__}" in options.formula
        assert configure(name, **needed_options(name)).name == name


@pytest.mark.parametrize("name", SOFTMAX)
def test_wrong_inputs_say_what_is_wrong(name: str) -> None:
    x, y = torch.randn(2, 9, 5)
    objective = build_objective(name)
    with raises(ValueError, "positives="):
        objective(x, y[:8])
    with raises(ValueError, "(9, 5)", "(9, 4)"):
        objective(x, y[:, :4])
    with raises(ValueError, "(9, 5)", "None"):
        objective(x, None)
    with raises(ValueError):
        objective(x[:0], y[:0])
    with raises(ConfigError, "duplicates=mask", "x_keys", "y_keys"):
        build_objective(name, duplicates="mask")(x, y)


@pytest.mark.parametrize("rows", [8, 10])
def test_rows_of_negatives_are_those_of_x(rows: int) -> None:
    x, y = torch.randn(2, 9, 5)
    with raises(ValueError, f"negatives has {rows} rows for 9 of x"):
        build_objective("info_nce")(x, y, negatives=torch.randn(rows, 2, 5))


def test_arrays_are_no_embeddings() -> None:
    x, y = torch.randn(2, 9, 5)
    arrays: list[Any] = [x.numpy(), y.numpy()]
    with raises(ValueError, "x is a ndarray"):
        build_objective("clip")(arrays[0], y)
    with raises(ValueError, "y is a ndarray"):
        build_objective("clip")(x, arrays[1])


class Returns(Objective):
    """An objective whose of_batch returns what `made` makes of the loss."""

    made: Callable[[Tensor], Any]

    def of_batch(self, batch: GatheredBatch) -> Any:
        return self.made(batch.pair_scores().mean())


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda loss: None, "NoneType ObjectiveResult(loss,"),
        (lambda loss: loss, "Tensor ObjectiveResult(loss,"),
        (lambda loss: ObjectiveResult(loss[None], {}), "loss (1,)"),
        (lambda loss: ObjectiveResult(loss.item(), {}), "loss float"),
        (lambda loss: ObjectiveResult(loss.detach(), {}), "gradient"),
        (lambda loss: ObjectiveResult(loss, {"good": loss, "wrong": loss.expand(3)}), "wrong (3,)"),
        (lambda loss: ObjectiveResult(loss, cast(Any, {"word": "x"})), "word str"),
    ],
)
def test_what_an_objective_of_yours_returns_wrong_is_one_line(made: Callable[[Tensor], Any], named: str) -> None:
    objective = Returns(configure("vicreg"))
    objective.made = made
    x, y = torch.randn(2, 9, 5)
    with raises(ConfigError, "objective=vicreg: of_batch of Returns", *named.split()) as caught:
        objective(x.requires_grad_(), y)
    assert len(str(caught.value).splitlines()) == 1


def test_wrong_views_say_what_is_wrong() -> None:
    x, y = torch.randn(2, 9, 5)
    objective = build_objective("simclr")
    with raises(ValueError, "(9, 5)", "(8, 5)"):
        objective(x, y[:8])
    with raises(ValueError, "9"):
        objective(x, None)
    with raises(ValueError):
        objective(x[:0], y[:0])


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("partial_auc", "nll", *OTHERS)])
def test_a_plain_loop_learns(name: str) -> None:
    """Matching pairs get scores above all others."""
    torch.manual_seed(0)
    y = torch.randn(32, 7)
    x = y @ torch.randn(7, 12)
    towers = torch.nn.ModuleList([torch.nn.Linear(12, 16), torch.nn.Linear(7, 16)])
    options = {**needed_options(name), **({"num_samples": 32} if "num_samples" in needed_options(name) else {})}
    objective = build_objective(name, **options)
    optimizer = torch.optim.AdamW([*towers.parameters(), *objective.parameters()], lr=0.03)

    def accuracy() -> float:
        similarity = objective.options.similarity.value
        e, f = towers[0](x), towers[1](y)
        if similarity == "cosine":
            e, f = (torch.nn.functional.normalize(v, dim=1) for v in (e, f))
        return float(((e @ f.T).argmax(1) == torch.arange(32)).double().mean())

    before = accuracy()
    losses = []
    for _ in range(60):
        loss = objective(towers[0](x), towers[1](y), sample_ids_b=torch.arange(32)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        objective.clamp_()
        losses.append(float(loss.detach()))
    assert math.isfinite(losses[-1])
    assert before < 0.2 and accuracy() > 0.5


FIXED = {"learnable": False, "min_temperature": 1e-4, "max_temperature": 1e3}
EDGES: list[tuple[str, Callable[[Tensor], Tensor], dict[str, Any]]] = [
    ("one embedding is 0", lambda e: e * torch.tensor([[0.0], [1.0]]), {}),
    ("all are 0", torch.zeros_like, {}),
    ("all are equal", torch.ones_like, {}),
    ("all are large", lambda e: 1e4 * e, {}),
    ("τ is small", lambda e: e, {**FIXED, "temperature": 1e-4}),
    ("τ is large", lambda e: e, {**FIXED, "temperature": 1e3}),
]


@pytest.mark.parametrize("name", [name for name, options in OBJECTIVES.items() if options.inputs == "pairs"])
def test_two_pairs_have_a_finite_loss_at_the_edges(name: str) -> None:
    known = {field.name for field in fields(OBJECTIVES[name])}
    pairs = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))
    for edge, made, options in EDGES:
        chosen = needed_options(name) | {key: value for key, value in options.items() if key in known}
        x, y = (made(e).requires_grad_() for e in pairs)
        result = build_objective(name, **chosen)(x, y, torch.arange(2))
        numbers = result.loss, *torch.autograd.grad(result.loss, (x, y)), *result.metrics.values()
        assert all(value.isfinite().all() for value in numbers), edge


@in_ways
def test_any_number_of_ranks(ways: str) -> None:
    """tests/jobs/dist_losses.py says what is checked; each rank prints a line when all of it holds."""
    launch("dist_losses.py", 4, ways)


def further_of(name: str, width: int | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    negatives = torch.randn(6, 2, 5, generator=generator, dtype=torch.float64)[..., :width]
    return {} if name == "simclr" else {"negatives": negatives}


@pytest.mark.parametrize("name", ["clip", "symmetric_dpm", "dpr", "siglip", "nce", "simclr"])
def test_nested_widths_are_trained_as_embeddings_of_their_own(name: str) -> None:
    """The loss and every gradient are sums of those of cut embeddings, with one temperature."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    nested, plain = build_objective(name, matryoshka=[1, 3]).double(), build_objective(name).double()
    found = nested(x, y, **further_of(name, None))
    each = [plain(x[:, :width], y[:, :width], **further_of(name, width)) for width in (1, 3, None)]
    total = torch.stack([result.loss for result in each]).sum()
    torch.testing.assert_close(found.loss, total)
    for width, result in zip((1, 3), each, strict=False):
        torch.testing.assert_close(found.metrics[f"loss_{width}"], result.loss.detach())
    assert found.metrics.keys() - each[-1].metrics.keys() == {"loss_1", "loss_3"}
    leaves = [[x, y, *(p for p in objective.parameters() if p.requires_grad)] for objective in (nested, plain)]
    got = torch.autograd.grad(found.loss, leaves[0])
    want = torch.autograd.grad(total, leaves[1])
    torch.testing.assert_close(got, want)
    with raises(ConfigError, "objective.matryoshka=[1, 3]", "3 numbers"):
        nested(x[:, :3], y[:, :3], **further_of(name, 3))
