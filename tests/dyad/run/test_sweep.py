"""python -m train -m: what is said of a sweep whose run ends early."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyad.data.base.errors import HardwareError
from dyad.run import main
from dyad.train.config import TrainConfig


def test_a_run_that_ends_early_names_the_runs_that_were_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig) -> None:
        if config.seed == 1:
            raise HardwareError("gone")

    monkeypatch.setattr(main, "train_or_plan", train)
    words = "experiment=emoji_scratch", f"run.dir={tmp_path}", "-m"
    for seeds, last in (("0,1,2,3", "seed=2; seed=3"), ("0,1", "none")):
        monkeypatch.setattr("sys.argv", ["train", *words, f"seed={seeds}"])
        with pytest.raises(HardwareError):
            main.main()
        count = len(seeds.split(","))
        told = f"-m: 1 of {count} runs done; ended early: seed=1; not begun: {last}"
        assert capsys.readouterr().out.splitlines() == ["-m: seed=0", "-m: seed=1", told]
