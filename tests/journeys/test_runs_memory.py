"""A run whose objective keeps state for every sample: it goes on with that state, on any number of processes."""

import json
import math
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from helpers.cli import Commands
from helpers.tiny_runs import QUIET, SHARD, losses, only_run, records, refused
from safetensors.torch import load_file


def memory(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}/memory.safetensors")


def files(run: Path, step: int) -> dict[str, bytes]:
    folder = run / f"checkpoints/step_{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_state_of_samples_goes_on_bit_for_bit_and_on_two_processes(
    commands: Commands,
    tiny: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    keys = {
        **QUIET,
        "objective": "isogclr",
        "objective.rho": 1.0,
        "steps": 6,
        "checkpoint.every": 3,
    }
    ended = commands.run(*tiny(keys))
    assert ended.code == 0, ended.out
    undisturbed = only_run(tmp_path / "runs")
    seen = memory(undisturbed, 6)
    assert seen["samples_seen"] == 6 * 32
    with tarfile.open(SHARD) as shard:
        assert len(seen["tau_x"]) == len({name.partition(".")[0] for name in shard.getnames()})
    assert seen["never_visited"] == seen["log_u_x"].isnan().sum() == len(seen["tau_x"]) - (seen["tau_x"] != 0.07).sum()
    for size in (1, 2):
        again = tmp_path / f"again{size}" / undisturbed.name
        shutil.copytree(undisturbed, again)
        shutil.rmtree(again / "checkpoints/step_00000006")
        ended = commands.world(size, *tiny({**keys, "run.dir": again.parent}))
        assert [e.code for e in ended] == [0] * size, ended[0].out
        assert "going on at step 3" in ended[0].out
        if size == 1:
            assert losses(again) == losses(undisturbed)
            assert files(again, 6) == files(undisturbed, 6)
        for name, values in memory(again, 6).items():
            torch.testing.assert_close(values, seen[name], rtol=1e-3, atol=1e-4, equal_nan=True)
    listed = again / "checkpoints/step_00000006/manifest.json"
    assert "memory.safetensors" in json.loads(listed.read_text())["files"]
    refused(commands.run(*tiny({**keys, "objective.num_samples": 7, "run.dir": tmp_path / "7"})), 2, "num_samples")


def test_gamma_follows_the_length_of_the_run_and_an_old_folder_keeps_its_own(
    commands: Commands, tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    def gammas(keys: Mapping[str, object]) -> tuple[str, list[float]]:
        ended = commands.run(*tiny({**QUIET, **keys}))
        assert ended.code == 0, ended.out
        return ended.out, [
            record["train/gamma"] for record in records(tmp_path / "runs" / "a") if "train/gamma" in record
        ]

    def published(steps: int, of: range) -> list[float]:
        epochs = steps / 2
        least = min(1, 4.177 * epochs**-0.7265)
        return [least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step // 2) / epochs)) for step in of]

    keys = {"objective": "sogclr", "objective.samples_per_epoch": 64, "checkpoint.every": 10, "run.name": "a"}
    out, found = gammas({**keys, "steps": 20})
    assert "objective.gamma=auto: γ = 1 → 0.784 over 10 epochs" in out
    assert found == pytest.approx(published(20, range(20)), rel=1e-6)
    out, found = gammas({**keys, "steps": 24})  # goes on by the schedule of the longer run
    assert "going on at step 20" in out and "γ = 1 → 0.687 over 12 epochs" in out
    assert found == pytest.approx([*published(20, range(20)), *published(24, range(20, 24))], rel=1e-6)

    config = tmp_path / "runs/a/config.yaml"
    config.write_text(config.read_text().replace("gamma: auto", "gamma: null"))  # as before there was gamma=auto
    longer = {**keys, "steps": 26}
    refused(commands.run(*tiny({**QUIET, **longer})), 2, "objective.gamma: null there, auto now")
    out, found = gammas({**longer, "objective.gamma": "null"})
    assert "going on at step 24" in out and found[24:] == pytest.approx([0.8, 0.8])
