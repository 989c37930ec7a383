"""A run whose objective keeps state for every sample: it goes on with that state, on any number of processes."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.cli import Commands
from helpers.tiny_runs import QUIET, SHARD, losses, only_run, refused
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
