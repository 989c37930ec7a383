"""What an export writes of its model is what is read of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dyad.evaluation.load_model import find_model, settings_of
from dyad.train.cli.compose import compose_config
from dyad.train.towers.libraries.calibration import SETTINGS, Calibration, exported


@pytest.mark.parametrize("bias", [None, -12.9])
def test_the_scale_and_bias_of_logits_are_read_back(bias: float | None, tmp_path: Path) -> None:
    known = Calibration("a run", 2.3, bias)
    (tmp_path / SETTINGS).write_text(json.dumps(settings_of(compose_config(["experiment=emoji"]), known)))
    _, found = exported(str(tmp_path), "an export")
    assert found == replace(known, source="an export")


def test_a_language_model_in_the_home_folder_has_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / SETTINGS).write_text(json.dumps({"keys": {"data.passage.length": 7}}))
    for name in ("~/export", str(tmp_path / "export")):
        assert find_model(f"lm:{name}").config.data.passage.length == 7


def test_a_model_without_a_scale_says_so() -> None:
    assert settings_of(compose_config(["experiment=emoji"]), None)["logit_scale"] is None
