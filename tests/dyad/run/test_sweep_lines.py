"""python -m train -m: what is said of a sweep of which a run fails or is stopped; of whole runs: test_sweep.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dyad.data.base.errors import HardwareError, Preempted
from dyad.run import main
from dyad.train.config import TrainConfig


def swept(patch: pytest.MonkeyPatch, folder: Path, seeds: str, errors: Mapping[int, Exception]) -> None:
    def train(config: TrainConfig) -> None:
        if error := errors.get(config.seed):
            raise error

    patch.setattr(main, "train_or_plan", train)
    patch.setattr("sys.argv", ["train", "experiment=emoji_scratch", f"run.dir={folder}", "-m", f"seed={seeds}"])
    main.main()


def test_a_run_that_fails_is_named_and_the_others_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        swept(monkeypatch, tmp_path, "0,1,2", {1: HardwareError("gone")})
    assert ended.value.code == 4
    said = capsys.readouterr()
    begun = [f"-m: seed={seed}" for seed in range(3)]
    assert said.out.splitlines() == [*begun, "-m: 2 of 3 runs done; failed: seed=1"]
    assert said.err == "error: gone\n"


@pytest.mark.parametrize("error", [Preempted(), RuntimeError("a bug")])
@pytest.mark.parametrize(("seeds", "last"), [("0,1,2,3", "seed=2; seed=3"), ("0,1", "none")])
def test_a_stop_or_a_bug_ends_it_and_names_the_runs_that_were_not_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    seeds: str,
    last: str,
) -> None:
    with pytest.raises(type(error)):
        swept(monkeypatch, tmp_path, seeds, {1: error})
    told = f"-m: 1 of {len(seeds.split(','))} runs done; ended early: seed=1; not begun: {last}"
    assert capsys.readouterr().out.splitlines() == ["-m: seed=0", "-m: seed=1", told]


def test_an_error_of_one_rank_of_several_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process group is gone. What all ranks raise together leaves the group as it is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    together = HardwareError("all")
    together.everywhere = True
    with pytest.raises(HardwareError):
        swept(monkeypatch, tmp_path, "0,1,2", {0: together, 1: HardwareError("one")})
    told = "-m: 0 of 3 runs done; failed: seed=0; ended early: seed=1; not begun: seed=2"
    assert capsys.readouterr().out.splitlines()[-1] == told
