"""Learning rates and decay are open_clip's."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import pytest
import torch
from helpers.messages import raises
from open_clip_train import scheduler
from torch import nn
from transformers import TrainingArguments, get_linear_schedule_with_warmup

from dyad.data.base.errors import ConfigError
from dyad.train.config import OptimConfig, Schedule, TrainConfig
from dyad.train.config_rules import validate
from dyad.train.losses import build_objective
from dyad.train.run_schedule import RunSchedule
from dyad.train.step.optim import build_optimizer
from dyad.train.step.schedule import describe_schedule, learning_rate, warmup_steps

TOTAL = 50


def open_clip_rates(config: OptimConfig) -> list[float]:
    """What open_clip_train sets, step by step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    adjust = {
        "cosine": lambda: scheduler.cosine_lr(optimizer, config.lr, config.warmup, TOTAL),
        "const": lambda: scheduler.const_lr(optimizer, config.lr, config.warmup, TOTAL),
        "const-cooldown": lambda: scheduler.const_lr_cooldown(
            optimizer, config.lr, config.warmup, TOTAL, config.cooldown, config.cooldown_power, config.cooldown_end
        ),
    }[config.schedule.name]()
    rates = []
    for step in range(TOTAL):
        adjust(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("schedule", [schedule for schedule in Schedule if schedule.name not in ("linear", "wsd")])
@pytest.mark.parametrize("warmup", [0, 1, 7, TOTAL])
@pytest.mark.parametrize("cooldown", [1, 20, TOTAL])
def test_learning_rates_are_open_clips_to_the_bit(schedule: Schedule, warmup: int, cooldown: int) -> None:
    config = OptimConfig(
        lr=3e-4, schedule=schedule, warmup=warmup, cooldown=cooldown, cooldown_end=1e-6, cooldown_power=2.0
    )
    assert [learning_rate(step, TOTAL, config) for step in range(TOTAL)] == open_clip_rates(config)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_linear_schedule_is_the_one_of_transformers_after_the_warm_up(warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, TOTAL)
    theirs = []
    for _ in range(TOTAL):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    config = OptimConfig(lr=3e-4, schedule=Schedule["linear"], warmup=warmup)
    assert [learning_rate(step, TOTAL, config) for step in range(warmup, TOTAL)] == pytest.approx(theirs[warmup:])


@pytest.mark.parametrize(("share", "total", "steps"), [(0.1, 50, 5), (0.1, 51, 6), (0.0, 50, 0), (0.25, 10, 3)])
def test_a_share_is_the_warmup_ratio_of_transformers(share: float, total: int, steps: int) -> None:
    theirs = TrainingArguments(warmup_steps=share, output_dir="x").get_warmup_steps(total)
    own, same = OptimConfig(warmup=share), OptimConfig(warmup=steps)
    assert warmup_steps(total, own) == theirs == steps
    assert all(learning_rate(step, total, own) == learning_rate(step, total, same) for step in range(total))


def test_the_cosine_by_hand() -> None:
    config = OptimConfig(lr=1.0, warmup=2)
    rates = [learning_rate(step, 6, config) for step in range(6)]
    assert rates == pytest.approx([0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])


@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 4), (2, 4), (2, 5), (7, 5)])
def test_wsd_by_hand(warmup: int, cooldown: int) -> None:
    """Warm-up, plateau, and 1 − √t of Hägele et al. 2024: from the peak in the first step of the cooldown."""
    optim = OptimConfig(lr=1.0, schedule=Schedule["wsd"], warmup=warmup, cooldown=cooldown, cooldown_end=0.2)
    rates = [learning_rate(step, 10, optim) for step in range(10)]
    cooled = [0.2 + 0.8 * (1 - math.sqrt(i / cooldown)) for i in range(cooldown)]
    assert rates[warmup:] == pytest.approx([*[1.0] * (10 - cooldown), *cooled][warmup:])
    assert rates[:warmup] == [(i + 1) / warmup for i in range(warmup)]


def test_wsd_without_a_cooldown_is_refused() -> None:
    config = runnable()
    config.optim.schedule = Schedule["wsd"]
    with raises(ConfigError, "optim.schedule=wsd", "optim.cooldown"):
        validate(config, 2)
    config.optim.cooldown = 2
    validate(config, 2)


@pytest.mark.parametrize("warmup", [5, 6, 100])
def test_a_warm_up_as_long_as_the_run_or_longer_only_warms_up(warmup: int) -> None:
    config = OptimConfig(lr=1.0, warmup=warmup)
    assert [learning_rate(step, 5, config) for step in range(5)] == [(step + 1) / warmup for step in range(5)]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_run_of_one_step(schedule: Schedule) -> None:
    assert learning_rate(0, 1, OptimConfig(lr=0.3, schedule=schedule)) == 0.3


def runnable() -> TrainConfig:
    config = TrainConfig(steps=10)
    config.data.train = "shards.tar"
    validate(config, 2)
    return config


def illegal(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(key, a number beyond its limit) of every key that has a limit."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from illegal(value, f"{prefix}{field.name}.")
        elif "least" in field.metadata:
            yield f"{prefix}{field.name}", field.metadata["least"] - 1
        elif "above" in field.metadata:
            yield f"{prefix}{field.name}", float(field.metadata["above"])


@pytest.mark.parametrize(("key", "value"), [*illegal(TrainConfig())])
def test_values_below_what_is_legal_are_refused_by_name(key: str, value: float) -> None:
    config = runnable()
    *path, last = key.split(".")
    setattr(reduce(getattr, path, config), last, value)
    with raises(ConfigError, f"{key}={value}"):
        validate(config, 2)


def test_rules_of_adam_and_of_the_cooldown() -> None:
    config = runnable()
    config.optim.cooldown = 10
    validate(config, 2)
    config.optim.cooldown, config.optim.beta2 = 11, 1.0
    with raises(ConfigError, "beta2=1.0", "cooldown=11", "steps=10"):
        validate(config, 2)


@pytest.mark.parametrize("schedule", ["const-cooldown", "wsd"])
@pytest.mark.parametrize(("cooldown", "warned"), [(40, False), (41, True), (200, True)])
def test_a_cooldown_that_begins_in_the_warm_up_is_told(cooldown: int, warned: bool, schedule: str) -> None:
    """The rates stay open_clip's; a run by epochs has its length only here."""
    optim = OptimConfig(warmup=60, schedule=Schedule[schedule], cooldown=cooldown)
    lines = [*describe_schedule(TrainConfig(optim=optim), RunSchedule(0, 100, 8, 1, 1, 1, 1), None, None)]
    assert any(f"{cooldown} of optim.cooldown are more than 100" in line for line in lines) == warned


def test_decay_only_where_open_clip_has_it() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "ln_pre": nn.Linear(3, 3),
            "bn1": nn.BatchNorm1d(3),
            "embed": nn.Embedding(4, 3),
            "frozen": nn.Linear(3, 3).requires_grad_(False),
            "relative_bias": nn.Embedding(4, 3),
        }
    )
    objective = build_objective("clip")
    config = OptimConfig(lr=1e-3, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-5)
    named = {**dict(model.named_parameters("towers")), **dict(objective.named_parameters("objective"))}
    optimizer = build_optimizer(named.items(), config)
    of = {id(p): name for name, p in named.items()}
    decay = {of[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, value in decay.items() if value} == {"towers.linear.weight", "towers.embed.weight"}
    assert decay.keys() == {name for name in named if "frozen" not in name}
    assert "objective.logit_scale" in decay
    assert optimizer.defaults["betas"] == (0.8, 0.9) and optimizer.defaults["eps"] == 1e-5
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3, 0.0}


def test_a_shared_parameter_is_updated_once() -> None:
    linear = nn.Linear(2, 2, bias=False)
    weight = linear.get_parameter("weight")
    optimizer = build_optimizer([("x.weight", weight), ("y.weight", weight)], OptimConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_a_fixed_temperature_is_no_parameter() -> None:
    linear, objective = nn.Linear(2, 2), build_objective("clip", learnable=False)
    optimizer = build_optimizer([*linear.named_parameters(), *objective.named_parameters()], OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_nothing_to_train_is_refused() -> None:
    with raises(ConfigError):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False).named_parameters(), OptimConfig())
