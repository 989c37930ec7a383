"""The model of a run, for evaluation and export: its configuration, its newest whole checkpoint, its weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, nearest, printable
from train.command.compose import typed
from train.config import TrainConfig
from train.losses import OBJECTIVES
from train.runs.folder import saved_config

if TYPE_CHECKING:
    from train.towers.build import TwoTowerModel


@dataclass(frozen=True)
class Trained:
    """logit_scale: log 1/τ as the objective learnt it, None when it has no temperature."""

    run: Path
    checkpoint: Path
    step: int
    config: TrainConfig
    model: TwoTowerModel
    logit_scale: float | None


def note(line: str) -> None:
    """Say it once, whatever the number of ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(line), file=sys.stderr)


def find_run(path: str, note: Callable[[str], None] = note) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) that `path` means: a run's newest whole checkpoint, or one checkpoint.

    `note` hears of damaged ones that are passed over. ConfigError when there is none, DataError when none is whole.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(f"'{path}' is no folder.{nearest(folder.name, beside)} Give a run folder, e.g. runs/NAME")

    from train.runs.checkpoint import locate

    checkpoint = locate(folder, note)
    return (folder if checkpoint != folder else folder.resolve().parent.parent), checkpoint


def load_trained(run: Path, checkpoint: Path) -> Trained:
    """Raises DataError when the checkpoint is damaged, ConfigError when it does not fit the run's configuration."""
    from data.image_text import image_spec
    from train.runs.checkpoint import load_weights, restore_weights, step_of
    from train.towers.build import ImageTextModel, build_model

    config = read_config(run)
    weights = load_weights(checkpoint)
    step = step_of(checkpoint)
    model = build_model(config.model, config.task, load_pretrained=False)
    restore_weights(weights, {"towers": model.towers})
    if isinstance(model, ImageTextModel):
        model = replace(model, image=image_spec(model.image, config.data))
    scale = weights.get("objective.logit_scale")
    return Trained(run, checkpoint, step, config, model, None if scale is None else float(scale))


def read_config(run: Path) -> TrainConfig:
    """The configuration the run was trained with; raises ConfigError when its config.yaml is missing or not ours."""
    saved = OmegaConf.create(saved_config(run))
    try:
        objective = OmegaConf.merge(OmegaConf.structured(OBJECTIVES[saved.objective.name].options), saved.objective)
        return typed(OmegaConf.merge(OmegaConf.structured(TrainConfig), saved, {"objective": objective}))
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{run}/config.yaml is not a configuration of this version: {reason}") from error
