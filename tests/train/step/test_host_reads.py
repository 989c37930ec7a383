"""One host read a step: how often the host would wait for a GPU, and what happens when an assumption does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.host_reads import counted_host_reads
from helpers.messages import raises
from helpers.step import batch, gradients_of, same_bits, snapshot, towers, train_step, with_extra

from dyad.train.losses import build_objective
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.sums.conditions import collect_checks
from dyad.train.step import loss_term as module
from dyad.train.step.step import TrainStep
from tests.benchmarks import host_reads

WAITS = {"mask": "tiles with equal keys are looked for"}
QUANTILES = ("isogclr", "nuclr")  # their metrics have quantiles of parameters of samples
MOST = {"sogclr": 4, "fastclip_v3": 4, "fastclip_v3 + chunks": 4, "isogclr": 6}  # collectives of a step; others: five


@pytest.fixture(scope="module", params=[1, 2])
def census(request: pytest.FixtureRequest) -> host_reads.Census:
    return host_reads.census(request.param)


def test_a_step_reads_once_and_copies_nothing(census: host_reads.Census) -> None:
    with counted_host_reads() as of_torch:
        torch.quantile(torch.ones(3), torch.ones(1))  # torch 2.8 reads which quantiles are asked for
    for case, found in census.items():
        assert not found["copies"], (case, found["copies"])
        if not any(word in case for word in WAITS):
            most = 1 + any(name in case for name in QUANTILES) * of_torch.reads.total()
            assert 1 <= sum(found["reads"].values()) <= most, (case, found["reads"])
        assert sum(found["collectives"].values()) <= MOST.get(case, 5), (case, found["collectives"])


def test_the_counter_sees_what_waits() -> None:
    values, index = torch.arange(6.0), torch.tensor([1, 0, 1])
    waits = {
        "item": lambda: values[0].item(),
        "bool": lambda: bool(values[0] > 0),
        "float": lambda: float(values[0]),
        "tolist": lambda: values.tolist(),
        "nonzero": lambda: values.nonzero(),
        "unique": lambda: index.unique(),
        "unique rows": lambda: index[:, None].unique(dim=0),
        "bool index": lambda: values[values > 2],
        "repeat_interleave": lambda: index.repeat_interleave(index),
        "bincount": lambda: index.bincount(),
    }
    for name, wait in waits.items():
        with counted_host_reads() as found:
            wait()
        assert sum(found.reads.values()) == 1, name
    copies = {
        "tensor": lambda: torch.tensor([1.0], device="cpu"),
        "new_tensor": lambda: values.new_tensor([1.0]),
        "cpu": lambda: values.cpu(),
    }
    for name, copy in copies.items():
        with counted_host_reads() as found:
            copy()
        assert sum(found.copies.values()) == 1, name
    with counted_host_reads() as found:
        values[values > 2] = 0.0  # a masked fill
        _ = values[index] + values.sum()
    assert not found.reads and not found.copies


def spread(scale: float) -> TrainStep:
    """A step whose logits are dot products about `scale` apart: above a bound no single shift serves all of them."""
    torch.manual_seed(0)
    made = towers()
    for tower in (made.x_tower, made.y_tower):
        tower.get_parameter("layers.2.weight").data.mul_(scale)
    return train_step(made, 8, objective=build_objective("clip", similarity="dot"))


def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "collect_checks", lambda _, sizes, logged: collect_checks(False, sizes, logged))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_step_that_assumed_too_much_is_taken_again(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scalars and weights are, bit for bit, those of steps that assume nothing."""
    step, reads = spread(scale), list[int]()
    scalars = []
    for index in range(3):
        with counted_host_reads() as found:
            scalars.append(step(batch(8, seed=index), index))
        reads.append(sum(found.reads.values()))
    assert reads[0] == (1 if scale == 1 else 3), reads  # one attempt; or a second one, that reads its condition
    assert reads[1:] == ([1, 1] if scale == 1 else [2, 2]), reads  # then the condition is read at once
    always_read(monkeypatch)
    plain = spread(scale)
    assert [plain(batch(8, seed=index), index) for index in range(3)] == scalars
    assert same_bits(snapshot(step), snapshot(plain)) and same_bits(gradients_of(step), gradients_of(plain))


def test_a_loss_of_rows_needs_no_column_sum() -> None:
    """One row without candidates of its own: no column has one either, and the first attempt holds."""
    step, whole = train_step(towers(), 1, objective=build_objective("dpr")), with_extra(batch(1), [1])
    assert whole.extra is not None
    whole.extra = replace(whole.extra, positive=torch.tensor([False]), positives=0)
    with counted_host_reads() as found:
        step(whole, 0)
    assert sum(found.reads.values()) == 1, found.reads


@pytest.mark.parametrize("name", ["clip", "dpr", "siglip", "coce", "spectral", "sogclr"])
def test_relevance_is_not_waited_for(name: str) -> None:
    """That it is in (0, 1] is a condition like others."""
    options = {"num_samples": 20, "gamma_epochs": 30} if name == "sogclr" else {}
    step, whole = train_step(towers(), 8, objective=build_objective(name, **options), pairs=(8,)), batch(8)
    whole.relevance = torch.linspace(0.1, 1.0, 8)
    with counted_host_reads() as found:
        step(whole, 0)
    assert sum(found.reads.values()) == 1 and not found.copies, (found.reads, found.copies)
    whole.relevance[3] = 1.5
    with raises(ValueError, "relevance", "1.5"):
        step(whole, 1)


def test_a_step_that_is_taken_again_times_each_attempt_once() -> None:
    step, calls = spread(300.0), list[str]()
    for name in ("start", "stop"):
        setattr(step.local_timer, name, lambda name=name: calls.append(name))
    step(batch(8), 0)
    assert calls == ["start", "stop", "start", "stop"]


def test_a_repeated_sample_is_met_by_the_general_path() -> None:
    """The second attempt begins with the state of before the first."""
    options = {"num_samples": 20, "gamma": 0.5}
    steps = [train_step(towers(), 8, objective=build_objective("sogclr", **options)) for _ in range(2)]
    whole = batch(8)
    whole.sample_ids = torch.tensor([0, 1, 2, 3, 3, 5, 6, 7])
    steps[1]._assume_from = 1 << 30
    assert steps[0](whole, 0) == steps[1](whole, 0)
    memories = [memory for step in steps if isinstance(memory := step.objective.sample_state, SampleState)]
    first, second = (memory.gathered(torch.device("cpu"))["log_u_x"] for memory in memories)
    assert torch.equal(first.nan_to_num(-1.0), second.nan_to_num(-1.0))
    assert memories[0].samples_seen == 8


def test_a_stop_request_is_seen_at_the_end_of_its_step() -> None:
    step = train_step(towers(), 8)
    step(batch(8), 0)
    assert not step.stopping
    step(batch(8), 1, stop_requested=lambda: True)
    assert step.stopping
