"""What an export writes of its model is what is read of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dyad.evaluation.load_model import settings_of
from dyad.train.cli.compose import compose_config
from dyad.train.towers.libraries.calibration import SETTINGS, Calibration, exported


@pytest.mark.parametrize("bias", [None, -12.9])
def test_the_scale_and_bias_of_logits_are_read_back(bias: float | None, tmp_path: Path) -> None:
    known = Calibration("a run", 2.3, bias)
    (tmp_path / SETTINGS).write_text(json.dumps(settings_of(compose_config(["experiment=emoji"]), known)))
    _, found = exported(str(tmp_path), "an export")
    assert found == replace(known, source="an export")


def test_a_model_without_a_scale_says_so() -> None:
    assert settings_of(compose_config(["experiment=emoji"]), None)["logit_scale"] is None
