"""The journey "train longer": a finished run goes on, as one of that length would have; with averaged weights too."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.cli import ROOT
from helpers.tiny_runs import QUIET, last_weights, losses, records, refused, state
from safetensors.torch import load_file

# every command is of README or --help, made small
SCRIPT = """
set -euo pipefail
cd {checkout}
export OMP_NUM_THREADS=1 WANDB_MODE=disabled
train() {{ python -m train experiment=emoji_scratch data.val=data/samples/emoji/twemoji-undrawn.tar eval.suite=[] \\
    global_batch_size=32 tracking.every=1 run.dir={runs} "$@"; }}
train run.name=scratch steps=4 optim.ema=0.999 optim.warmup=0.25
train run.name=scratch steps=8 optim.ema=0.999 optim.warmup=0.25
python -m eval checkpoint={runs}/scratch
python -m train.export run={runs}/scratch
"""


@pytest.mark.soak  # five processes that import everything
def test_the_script(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.format(checkout=ROOT, runs=runs)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "PWD": str(ROOT)})
    assert done.returncode == 0, done.stderr
    log = (runs / "scratch" / "log.txt").read_text()
    assert "8 steps, not 4: the learning rate, " in log and "optim.warmup=0.25: 2 of 8 steps" in log
    assert "evaluation, mining and exports use the average of the weights" in log
    card = (runs / "scratch" / "export" / "open_clip" / "README.md").read_text()
    assert "exponential moving average, decay 0.999" in card
    assert [record["step"] for record in records(runs / "scratch") if "train/loss" in record] == [*range(1, 9)]
    assert all(record["epoch"] > 0 and record["time"] > 1.7e9 for record in records(runs / "scratch"))


def averages(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").iterdir()) / "average.safetensors")


def test_a_longer_run_is_the_run_of_that_length(commands, tiny, tmp_path: Path) -> None:
    """With a constant rate, to the bit; at another number of processes too what is averaged goes on."""
    keys = {"optim.schedule": "const", "optim.ema": 0.9, "data.val": ROOT / "data/samples/emoji/twemoji-undrawn.tar"}
    keys["optim.warmup"] = 4
    whole, run = tmp_path / "runs" / "whole", tmp_path / "runs" / "a"
    assert commands.run(*tiny({**keys, "run.name": "whole", "steps": 6})).code == 0
    assert commands.run(*tiny({**keys, "run.name": "a", "steps": 4})).code == 0
    longer = commands.run(*tiny({**keys, "run.name": "a", "steps": 6}))
    assert longer.code == 0 and "6 steps, not 4: the learning rate, 0.0005 at step 4, is 0.0005 from" in longer.out
    assert "warning: optim.warmup=4 is 4 of 6 steps: the learning rate comes to 0.0005, optim.lr is" in longer.out
    assert losses(run) == losses(whole) and last_weights(run) == last_weights(whole)
    ours, theirs = averages(run), averages(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert state(run)["total_steps"] == 6 and state(run)["format"] == 1

    scored = {k: v for k, v in records(run)[-1].items() if k.startswith("val/")}
    evaluated = commands.run("eval", f"checkpoint={run}", f"out={tmp_path / 'out'}")
    (result,) = (tmp_path / "out").glob("val.json")
    content = json.loads(result.read_text())
    assert evaluated.code == 0 and content["weights"] == "their average, optim.ema=0.9"
    for name, value in scored.items():
        assert content["metrics"][name.removeprefix("val/")] == pytest.approx(value, abs=1e-12)

    fewer = commands.run(*tiny({**keys, "run.name": "a", "steps": 5}))
    refused(fewer, 2, "6 steps", "5", "resume=never")
    assert commands.run(*tiny({**keys, "run.name": "a", "steps": 6})).out.startswith("already finished")


def test_averages_go_on_with_two_processes_and_leave_frozen_towers_alone(commands, tiny, tmp_path: Path) -> None:
    val = ROOT / "data/samples/emoji/twemoji-undrawn.tar"
    keys = {**QUIET, "optim.ema": 0.9, "data.val": val, "eval.every": 2, "checkpoint.every": 2, "steps": 4}
    keys |= {"model.text.frozen": "true", "model.frozen_cache_mb": 64, "optim.schedule": "const"}
    cached, computed, two = (tmp_path / "runs" / name for name in ("cached", "computed", "two"))
    assert commands.run(*tiny({**keys, "run.name": "cached"})).code == 0
    assert commands.run(*tiny({**keys, "run.name": "computed", "model.frozen_cache_mb": 0})).code == 0
    assert losses(cached) == pytest.approx(losses(computed), rel=1e-6)
    scores = [[v for r in records(run) for k, v in r.items() if k.startswith("val/")] for run in (cached, computed)]
    assert scores[0] == scores[1] != []
    middle = cached / "checkpoints" / "step_00000002"
    ended = commands.world(2, *tiny({**keys, "run.name": "two", "resume": middle}))
    assert [each.code for each in ended] == [0, 0], ended[0].out
    ours, theirs = averages(two), averages(cached)
    assert ours.keys() == theirs.keys() == {name for name in theirs if ".y_tower.trunk." not in name}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_a_new_run_names_the_shorter_one_that_it_could_go_on_with(commands, tiny, tmp_path: Path) -> None:
    assert commands.run(*tiny({"steps": 2})).code == 0
    (short,) = (tmp_path / "runs").iterdir()
    longer = commands.run(*tiny({"steps": 3}))
    assert longer.code == 0
    assert f"{short} has finished the same training with fewer steps: run.name={short.name} would" in longer.out
    shorter = commands.run(*tiny({"steps": 1}))
    assert shorter.code == 0 and "with fewer steps" not in shorter.out
