"""Load the model of a run, for evaluation and export: its configuration, its newest whole checkpoint, its weights."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError, nearest, printable
from dyad.train.cli.compose import typed
from dyad.train.config import TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import saved_config

if TYPE_CHECKING:
    from dyad.train.towers.build import TwoTowerModel


@dataclass(frozen=True)
class LoadedRun:
    """A run and its model. logit_scale: log 1/τ as learnt by the objective; None if it has no temperature."""

    run: Path
    checkpoint: Path
    step: int
    config: TrainConfig
    model: TwoTowerModel
    logit_scale: float | None


def find_run(path: str) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of a path, which is a run (its newest whole checkpoint) or one checkpoint.

    A damaged checkpoint is skipped with a line on stderr. Raises ConfigError if there is no checkpoint, DataError if
    none is whole.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        hint = nearest(folder.name, [beside.name for beside in folder.parent.glob("*")])
        raise ConfigError(f"'{path}' is no folder.{hint} Give a run folder, e.g. runs/NAME")

    from dyad.train.run_folder.checkpoint import locate

    def log(line: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(printable(line), file=sys.stderr)

    checkpoint = locate(folder, log)
    return (folder if checkpoint != folder else folder.resolve().parent.parent), checkpoint


def load_run(run: Path, checkpoint: Path) -> LoadedRun:
    """Load a checkpoint. Raises DataError if it is damaged, ConfigError if it does not fit the configuration."""
    from dyad.data.image_text.dataset import image_spec
    from dyad.train.run_folder.checkpoint import load_weights, restore_weights, step_of
    from dyad.train.towers.build import ImageTextModel, build_model

    config = read_config(run)
    weights = load_weights(checkpoint)
    step = step_of(checkpoint)
    model = build_model(config.model, config.task, load_pretrained=False)
    restore_weights(weights, {"towers": model.towers})
    if isinstance(model, ImageTextModel):
        model = replace(model, image=image_spec(model.image, config.data))
    scale = weights.get("objective.logit_scale")
    return LoadedRun(run, checkpoint, step, config, model, None if scale is None else float(scale))


def read_config(run: Path) -> TrainConfig:
    """The configuration of a run; raises ConfigError if its config.yaml is missing or of another shape."""
    saved = OmegaConf.create(saved_config(run))
    try:
        objective = OmegaConf.merge(OmegaConf.structured(OBJECTIVES[saved.objective.name]), saved.objective)
        return typed(OmegaConf.merge(OmegaConf.structured(TrainConfig), saved, {"objective": objective}))
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{run}/config.yaml is not a configuration of this version: {reason}") from error
