"""What an export writes of its model is what is read of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_causal

import dyad
from dyad.evaluation.find_model import find_model, settings_of
from dyad.train.cli.compose import compose_config
from dyad.train.config import Task
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


def test_the_folder_of_a_language_model_is_one_without_its_kind(tmp_path: Path) -> None:
    """Its files have the names of an encoder's, and what loaded them gave embeddings of it without a word."""
    tiny_causal.write(tmp_path)
    config = compose_config(["experiment=lm_nll", "data.passage.length=7"])
    (tmp_path / SETTINGS).write_text(json.dumps(settings_of(config, None)))
    model = dyad.load(tmp_path, "cpu")
    assert model.config.data.passage.length == 7
    of_kind = dyad.load(f"lm:{tmp_path}", "cpu").score("a", ["b", "cd"])
    assert model.score("a", ["b", "cd"]).tolist() == of_kind.tolist()
    (tmp_path / SETTINGS).unlink()
    assert find_model(str(tmp_path)).config.task is Task.question_passage  # of another program: an encoder, as hf:


def test_a_model_without_a_scale_says_so() -> None:
    assert settings_of(compose_config(["experiment=emoji"]), None)["logit_scale"] is None
