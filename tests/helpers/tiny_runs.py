"""Runs of seconds through the command line: a tiny model on the emoji shards, and what their folders say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.cli import ROOT, Commands, Ended
from helpers.messages import check

SHARD = ROOT / "data/samples/emoji/fxemoji-trained.tar"
VAL = ROOT / "data/samples/emoji/twemoji-undrawn.tar"
TIMINGS = ("time", "per_second", "checkpoint_seconds", "peak_", "mfu", "outside_towers")
QUIET = {"data": "image_text", "data.captions": "[caption]"}  # no augmentation, one caption


def make_models(commands: Commands, folder: Path) -> Path:
    """Write open_clip.json and a transformers folder bert/, both tiny, into `folder`, and return it."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}  # a wide table is slow
    (folder / "open_clip.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    made = commands.run("helpers.tiny_bert", str(folder / "bert"))
    assert made.code == 0, made.out
    return folder


def tiny_arguments(models: Path, runs: Path, keys: Mapping[str, Any]) -> list[str]:
    """Return `train` and arguments for a tiny run, with run folders in `runs`; keys, as they are typed, override."""
    common = {
        "model": "cnn_minilm",
        "model.image.image_size": 32,
        "model.image.widths": [8, 16],
        "model.embed_dim": 32,
        "model.text.kind": "open_clip",
        "model.text.name": models / "open_clip.json",
        "model.text.context_length": "null",
        "model.text.frozen": "false",
        "data": "emoji",
        "data.train": SHARD,
        "data.val": "null",
        "data.workers": 0,
        "global_batch_size": 32,
        "steps": 6,
        "tracking": "local",
        "tracking.every": 1,
        "tracking.report": "false",  # a third of what a run of seconds takes
        "run.dir": runs,
    }
    return ["train", *(f"{key}={value}".replace(", ", ",") for key, value in {**common, **keys}.items())]


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of each step; steps are 1, 2, … without gap or repetition."""
    trained = [r for r in records(run) if "train/loss" in r]
    assert [r["step"] for r in trained] == list(range(1, len(trained) + 1))
    return [r["train/loss"] for r in trained]


def without_timings(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl without what differs each time: times, rates and memory."""
    return [{k: v for k, v in r.items() if not any(t in k for t in TIMINGS)} for r in records(run)]


def state(run: Path) -> dict[str, Any]:
    return json.loads((run / "run_state.json").read_text())


def last_weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step_*")) / "model.safetensors").read_bytes()


def only_run(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Wait until condition() is true; fail with the text `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def logged(run: Path, step: int) -> bool:
    """Whether metrics.jsonl has `step` lines or more."""
    path = run / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= step


def refused(ended: Ended, code: int, *named: object) -> None:
    """Check that a command ended with this code before training, with one error of at most 6 lines; see messages.py."""
    assert ended.code == code, ended.out
    assert len(ended.out.splitlines()) <= 6 and ended.out.count("error:") == 1, ended.out
    assert "Train Epoch" not in ended.out and "Traceback" not in ended.out, ended.out
    check(ended.out.partition("error: ")[2].rstrip("\n"), *named)


def run_script(script: str, mine: Path) -> str:
    """Run a bash script of commands, which end with 0; $MINE is a folder of the user. Returns what they print."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    quiet = {"MINE": str(mine), "PATH": path, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, env={**os.environ, **quiet}, text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
