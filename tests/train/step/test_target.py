"""Target networks: the schedule, the recurrences over real steps, the step's gradient, and what is shared and saved."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dist import printed
from helpers.messages import raises
from helpers.step import batch, gradients_of, same_bits, snapshot, towers, train_step
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.config import Precision, TargetConfig, TargetKind
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import MANIFEST, TARGET, capture, restore
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.step.step import TrainStep
from dyad.train.step.target import momentum
from dyad.train.towers.frozen_cache import FrozenCache
from dyad.train.towers.tower import Tower, TwoTower

EMA = TargetConfig(TargetKind.ema, momentum=0.6, momentum_end=0.9)
COPY = TargetConfig(TargetKind.copy, every=3)
FIXED = TargetConfig(TargetKind.ema, momentum=0.5, momentum_end=1.0)


class Recorded(Objective):
    """spectral_alternating, and what it was given."""

    def __init__(self) -> None:
        inner = build_objective("spectral_alternating")
        super().__init__(inner.options)
        self.inner, self.given = inner, {}

    def forward(self, x: Tensor, y: Tensor, *args: Any, **given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.given = {"x": x.detach(), "y": y.detach(), **given}
        return self.inner(x, y, *args, **given)

    def clamp_(self) -> None: ...

    def undo(self) -> None:
        self.inner.undo()


def stepping(model: TwoTower, target: TargetConfig, count: int = 8, **options: Any) -> TrainStep:
    objective = options.pop("objective", None) or build_objective("spectral_alternating")
    return train_step(model, count, objective=objective, target=target, **options)


def of_target(step: TrainStep) -> dict[str, Tensor]:
    names = {id(p): name for name, p in step.towers.named_parameters()}
    return {names[id(p)]: tensor.clone() for p, tensor in step.target.tensors.items()}


def of_towers(step: TrainStep) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in step.towers.named_parameters() if p.requires_grad}


def given(step: TrainStep) -> dict[str, Tensor]:
    """What the objective got in the last step."""
    assert isinstance(step.objective, Recorded)
    return step.objective.given


def test_the_momentum_follows_the_cosine_of_byol() -> None:
    byol, constant = TargetConfig(TargetKind.ema), TargetConfig(TargetKind.ema, momentum=0.99, momentum_end=0.99)
    assert momentum(0, 1000, byol) == pytest.approx(0.996, abs=1e-15)
    assert momentum(250, 1000, byol) == pytest.approx(1 - 0.004 * (0.5**0.5 + 1) / 2, abs=1e-15)
    assert momentum(500, 1000, byol) == pytest.approx(0.998, abs=1e-15)
    assert momentum(1000, 1000, byol) == 1.0
    assert {momentum(step, 10, constant) for step in range(11)} == {0.99}


def test_ema_is_the_recurrence_and_a_skipped_step_leaves_it() -> None:
    step, spoiled = stepping(towers(normed=True), EMA), 3
    by_hand = of_towers(step)
    for index in range(6):
        rows = batch(8, seed=index)
        if index == spoiled:
            rows.x[0] = torch.nan
        before = of_target(step)
        step(rows, index)
        if index == spoiled:
            assert step.skip_reason and same_bits(of_target(step), before)
            continue
        share, now = momentum(index, 100, EMA), of_towers(step)
        by_hand = {name: share * by_hand[name] + (1 - share) * now[name] for name in now}
    for name, value in of_target(step).items():
        torch.testing.assert_close(value, by_hand[name], rtol=1e-12, atol=1e-14)
    assert not same_bits(of_target(step), of_towers(step))


def test_a_copy_is_of_the_last_multiple() -> None:
    step, seen = stepping(towers(), COPY), {}
    for index in range(8):
        seen[index] = of_towers(step)
        step(batch(8, seed=index), index)
        assert same_bits(of_target(step), seen[index - index % 3])


def test_a_skipped_step_copies_nothing() -> None:
    step = stepping(towers(), COPY)
    step(batch(8), 0)
    before, rows = of_target(step), batch(8)
    rows.x[0] = torch.nan
    for index in (1, 2):
        step(rows, index)
    assert step.skip_reason and same_bits(of_target(step), before) and not same_bits(of_towers(step), before)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("kind", ["two", "shared", "frozen", "half frozen"])
def test_the_step_is_that_of_autograd_on_the_whole_batch(kind: str, chunk_size: int | None) -> None:
    model = towers(shared=kind == "shared")
    if "frozen" in kind:
        (model.y_tower if kind == "frozen" else model.get_submodule("y_tower.layers.0")).requires_grad_(False)
    step = stepping(model, FIXED, chunk_size=chunk_size)
    for index in range(3):
        whole, dense, target = batch(8, seed=index), deepcopy(step.towers), deepcopy(step.towers)
        target.load_state_dict(of_target(step), strict=False)
        x, y = dense.x_tower(whole.x), dense.y_tower(whole.y)
        with torch.no_grad():
            sides = (x, target.y_tower(whole.y)), (y, target.x_tower(whole.x))
        loss = torch.stack([((e @ (nu.T @ nu) / 8 - 2 * nu) * e).sum() / 8 for e, nu in sides]).sum()
        trained = {name: p for name, p in dense.named_parameters() if p.requires_grad}
        want = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))
        assert step(whole, index)["loss"] == pytest.approx(loss.item(), rel=1e-12)
        got = gradients_of(step)
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["copy", "ema"])
def test_noise_is_the_targets_own_and_running_statistics_are_not_touched(kind: str) -> None:
    plain, step = (
        stepping(towers(noisy=True), TargetConfig(TargetKind(of)), objective=Recorded().double(), chunk_size=4)
        for of in ("none", kind)
    )
    plain(batch(8), 0)
    step(batch(8), 0)
    statistics = [{n: b.clone() for n, b in s.towers.named_buffers()} for s in (plain, step)]
    assert same_bits(*statistics)  # the first pass has the same weights, rows and noise
    of_plain, of_step = map(given, (plain, step))
    assert torch.equal(of_plain["x"], of_step["x"]) and "x_target" not in of_plain
    assert not torch.allclose(of_step["x_target"], of_step["x"])  # other dropout
    assert not of_step["x_target"].requires_grad
    again = stepping(towers(noisy=True), TargetConfig(TargetKind(kind)), objective=Recorded().double(), chunk_size=4)
    again(batch(8), 0)
    assert torch.equal(given(again)["x_target"], of_step["x_target"])


def test_an_evaluation_in_between_changes_nothing() -> None:
    straight, stopped = (stepping(towers(noisy=True), EMA) for _ in range(2))
    for index in range(3):
        straight(batch(8, seed=index), index)
        stopped(batch(8, seed=index), index)
        stopped.towers.eval()
    assert same_bits(snapshot(straight), snapshot(stopped)) and same_bits(of_target(straight), of_target(stopped))


def test_frozen_weights_buffers_and_caches_are_shared() -> None:
    frozen = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False)
    model = TwoTower(Tower(frozen, nn.Linear(8, 5)), Tower(nn.BatchNorm1d(6), nn.Linear(6, 5))).train()
    copy = model.frozen_copy()
    assert isinstance(copy.x_tower, Tower) and isinstance(model.x_tower, Tower)
    assert isinstance(model.x_tower._frozen_cache, FrozenCache)
    assert copy.x_tower._frozen_cache is model.x_tower._frozen_cache
    for (name, ours), theirs in zip(model.named_parameters(), copy.parameters(), strict=True):
        assert (ours is theirs) == (not ours.requires_grad) == name.startswith("x_tower.trunk"), name
        assert torch.equal(ours, theirs) and not theirs.requires_grad
    assert all(ours is theirs for ours, theirs in zip(model.buffers(), copy.buffers(), strict=True))
    assert [m.training for m in model.modules()] == [m.training for m in copy.modules()]
    assert all(p.requires_grad for p in model.y_tower.parameters())
    assert (shared := towers(shared=True).frozen_copy()).x_tower is shared.y_tower


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_under_autocast_the_targets_weights_are_used(precision: Precision) -> None:
    """Not the casts of the trained ones, which autocast keeps during a step."""
    step = stepping(towers().float(), FIXED, objective=Recorded(), precision=precision, chunk_size=4)
    for own in step.target.tensors.values():
        own.zero_()
    step(batch(8, dtype=torch.float32), 0)
    assert given(step)["y_target"].eq(0).all() and given(step)["y"].ne(0).any()


def saved(step: TrainStep, index: int, folder: Path) -> Path:
    parts = {"towers": step.towers, "objective": step.objective}
    state = capture(parts, step.optimizer, index, {}, target=step.target.tensors)
    return write_checkpoint(folder, state, keep=1)


@pytest.mark.parametrize("target", [EMA, COPY], ids=lambda t: t.kind)
@pytest.mark.parametrize("normed", [False, True])
def test_a_resumed_target_is_that_of_the_undisturbed_run_to_the_bit(
    target: TargetConfig, normed: bool, tmp_path: Path
) -> None:
    straight, first = (stepping(towers(normed=normed), target) for _ in range(2))
    for index in range(6):
        straight(batch(8, seed=index), index)
        if index < 4:
            first(batch(8, seed=index), index)
    path = saved(first, 4, tmp_path)
    assert '"format": 4' in (path / MANIFEST).read_text()
    second = stepping(towers(seed=9, normed=normed), target)
    parts = {"towers": second.towers, "objective": second.objective}
    average, loaded = restore(Checkpoint(path).read(), parts, second.optimizer)
    assert not average
    second.target.load(loaded)
    second.load_state_dict(first.state_dict())
    assert same_bits(of_target(second), of_target(first))
    for index in (4, 5):
        second(batch(8, seed=index), index)
    assert same_bits(snapshot(second), snapshot(straight)) and same_bits(of_target(second), of_target(straight))


def test_without_a_target_nothing_is_held_or_written_and_a_checkpoint_without_it_starts_one(tmp_path: Path) -> None:
    plain = stepping(towers(), TargetConfig())
    plain(batch(8), 0)
    path = saved(plain, 1, tmp_path)
    assert not plain.target.tensors and not plain.target.towers and not (path / TARGET).exists()
    assert '"format": 2' in (path / MANIFEST).read_text()
    later = stepping(towers(seed=9), EMA)
    parts = {"towers": later.towers, "objective": later.objective}
    later.target.load(restore(Checkpoint(path).read(), parts, later.optimizer)[1])
    assert same_bits(of_target(later), of_towers(plain))


def test_a_target_of_weights_that_do_not_train_is_refused(tmp_path: Path) -> None:
    step = stepping(towers(), EMA)
    state = Checkpoint(saved(step, 0, tmp_path)).read()
    state = replace(state, target={"towers.z_tower.weight": torch.zeros(1)})
    parts = {"towers": step.towers, "objective": step.objective}
    with raises(ConfigError, "towers.z_tower.weight"):
        restore(state, parts, step.optimizer)


@pytest.mark.compiler
def test_a_compiled_target_learns_the_same() -> None:
    compiled, plain = (stepping(towers(shared=True), FIXED, compile=c, chunk_size=4) for c in (True, False))
    for index in range(3):
        rows = batch(8, seed=index)
        assert compiled(rows, index)["loss"] == pytest.approx(plain(rows, index)["loss"], rel=1e-9)
    for name, value in of_target(plain).items():
        torch.testing.assert_close(of_target(compiled)[name], value, rtol=1e-9, atol=1e-12)


def test_any_number_of_ranks() -> None:
    """Ten steps of each kind in float32; tests/jobs/dist_target.py prints the losses and the target's weights."""
    kinds = ("plain", "normed", "shared")
    lines = [printed("dist_target.py", world_size, *kinds).splitlines() for world_size in (1, 2, 4)]
    for first in range(0, 10 * len(kinds), 10):
        of_kind = [
            [[float(number) for number in line.split()] for line in steps[first : first + 10]] for steps in lines
        ]
        alone, *others = map(torch.tensor, of_kind)
        assert alone.shape[0] == 10
        for result in others:
            torch.testing.assert_close(result, alone, rtol=1e-6, atol=1e-6)
