"""Plans of runs beside what real steps take: memory, bytes of collectives, FLOPs; and what people type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import Commands
from helpers.dist import launch
from helpers.plan import measured_step, planned
from helpers.tiny_runs import refused

from dyad.data.base.errors import ConfigError
from dyad.train.cli.command_line import read_line
from dyad.train.cli.compose import compose_config
from dyad.train.config import DistConfig, Parallel, Precision, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.monitor.telemetry import peak_tflops
from dyad.train.plan.cluster import GPUS, planned_devices
from dyad.train.plan.objective import Sizes, objective_cost, small_step
from dyad.train.plan.plan import RunPlan
from dyad.train.plan_config import Gpu


def config_of(*words: str) -> TrainConfig:
    return compose_config(read_line(words).words)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small steps on a machine that does other things too take seconds longer with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["tiny_clip_gn", "minilm", "small_cnn"])
def test_planned_memory_is_what_a_step_takes(name: str, one_thread: None) -> None:
    config = planned(name)
    plan = RunPlan(config)
    taken, _ = measured_step(config, World())
    assert plan.peak(plan.pairs, plan.chunk) == pytest.approx(taken, rel=0.15)


def test_two_ranks_take_and_send_what_is_planned() -> None:
    launch("plan_job.py", 2)


@pytest.mark.parametrize("objective", ["siglip", "sogclr"])
def test_the_formulas_of_an_objective_hold_for_larger_batches(objective: str) -> None:
    config = config_of(f"objective={objective}")
    cost, sizes = objective_cost(config, 16), Sizes(100, 16, 320)
    step = small_step(config, sizes)
    assert {kind: sizes.value(formula) for kind, formula in cost.sent.items()} == {
        "all-gather": step.sent["all-gather"],
        "all-reduce": step.sent["all-reduce"] - 8,  # of the two towers that do nothing
        "reduce-scatter": step.sent["reduce-scatter"],
    }
    assert sizes.value(cost.memory) == pytest.approx(step.peak, rel=0.25)  # another moment may take the most
    assert sizes.b * sizes.value(cost.flops) == pytest.approx(step.flops, rel=0.01)


def test_a_large_model_on_512_gpus_is_planned_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    plan = RunPlan(
        config_of("plan.gpus=512", "plan.gpu=h100", "model.name=ViT-L-14", "global_batch_size=32768", "steps=9")
    )
    lines = list(plan.lines())
    assert time.process_time() - start < 30
    assert "512 × H100, bf16, ddp" in lines[0]
    assert plan.towers.weights / 4e6 == pytest.approx(427.6, abs=0.1)  # millions, as open_clip's model profile says
    flops = plan.flops()["towers"][0]
    assert flops / 64 / 1e9 == pytest.approx(526, rel=0.01)  # of a pair, as shared by that profile
    sent = plan.sent()
    assert (
        sent["all-gather, objective"][0] == 32768 * 768 * 2 and sent["all-reduce, gradients"][0] == plan.towers.trained
    )
    assert not list(tmp_path.iterdir())


def test_shards_divide_weights_and_moments() -> None:
    config = config_of("model=tiny_clip_gn", "plan.gpus=16", "plan.gpu=a100-40", "steps=9")
    whole = RunPlan(config)
    assert whole.cost.flops == {"B·D": pytest.approx(8)}  # for each pair: clip needs 8·b·B·D
    assert whole.peak(64, 8) < whole.peak(64, 16) < whole.peak(128, 16)
    stays, _ = whole.memory(16, 16)
    for name, shards in (("fsdp2", 16), ("hsdp", 8)):
        dist = DistConfig(name=Parallel[name])
        whole.devices = planned_devices(replace(config, dist=dist))
        sharded, _ = whole.memory(16, 16)
        assert whole.devices.shards == shards
        assert [sharded[what][0] * shards for what in ("weights", "moments")] == [
            stays["weights"][0],
            stays["moments"][0],
        ]
        assert ("all-reduce, gradients" in whole.sent()) == (name == "hsdp")


def test_every_gpu_has_memory_and_peaks() -> None:
    assert {*GPUS} == {*Gpu}
    assert all(
        peak_tflops(name, precision) for _, name in GPUS.values() for precision in (Precision.fp32, Precision.fp16)
    )
    assert planned_devices(config_of("plan.gpu=t4", "plan.gpus=2")).precision is Precision.fp32


def test_both_short_forms_are_read() -> None:
    assert config_of("plan=true").planned and config_of("plan=true", "plan.gpus=64").plan.gpus == 64
    assert config_of("plan.gpus=64").planned and not config_of("plan=false").planned
    with pytest.raises(ConfigError, match=r"plan.gpu=h10: must be one of h100, .*Did you mean 'h100'"):
        config_of("plan.gpu=h10")


def test_a_plan_needs_no_data_and_writes_nothing(commands: Commands, tmp_path: Path) -> None:
    keys = ["model=tiny_clip_gn", f"run.dir={tmp_path}/runs", "steps=10"]
    ended = commands.run("train", *keys, "plan=true", "plan.gpus=8", "plan.gpu=h100", "data.train=not/there.tar")
    assert ended.code == 0 and "8 × H100" in ended.out and "largest chunk_size" in ended.out, ended.out
    assert not list(tmp_path.iterdir())
    refused(commands.run("train", *keys, "plan.gpus=0"), 2, "plan.gpus=0", "1 or more")
    refused(commands.run("train", *keys, "plan.gpus=512"), 2, "global_batch_size=256", "512 processes")


def test_a_dry_run_sends_what_is_planned(
    commands: Commands, tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    run = tiny({"plan.dry_run": 4, "global_batch_size": 256, "objective": "clip"})
    ended = commands.run(*run)
    assert ended.code == 0 and "rank 0 of 4, fp32: 64 of 256 pairs" in ended.out, ended.out
    assert not (tmp_path / "runs").exists()
    words = dict(line.split(": ") for line in ended.out.splitlines() if line.startswith("  "))
    loss = float(ended.out.partition("loss ")[2].split()[0])
    assert loss == pytest.approx(float(words["  expected"].split()[-1]), abs=0.03)
    plan = RunPlan(config_of(*run[1:], "plan.gpus=4", "plan.gpu=h100", "precision=fp32"))
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        of_plan = sum(size for what, (size, _) in plan.sent().items() if what.startswith(kind))
        assert of_plan == int(words[f"  {kind}"].replace(",", "")), kind
