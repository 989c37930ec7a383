"""Load the model of a training run, for evaluation and export, from a checkpoint and the run's configuration."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError, UserError, nearest
from dyad.data.base.files import leads_inside
from dyad.data.base.plugins import plugins_needed
from dyad.data.base.progress import print_on_rank_0
from dyad.train.cli.compose import to_train_config
from dyad.train.config import TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import saved_config, steps, without_best
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.libraries.kept_files import kept_model

if TYPE_CHECKING:
    from dyad.train.distributed.world import World
    from dyad.train.towers.models import TwoTowerModel


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights: of a training run, or of another library (dyad/evaluation/load_model.py).

    source: the name of the model in results: the checkpoint folder, or the name that the user wrote; "" while
    `find_model` has not set it. calibration: the learnt scale and bias of its logits; None if they are unknown.
    """

    source: str
    config: TrainConfig
    model: "TwoTowerModel"
    calibration: Calibration | None


@dataclass(frozen=True)
class LoadedRun(LoadedModel):
    """The model of a training run, loaded from one of its checkpoints.

    run, checkpoint: the run folder and the checkpoint folder. step: finished optimiser steps of the checkpoint.
    """

    run: Path
    checkpoint: Path
    step: int


def find_run(path: str) -> tuple[Path, Path]:
    """Return (run folder, checkpoint folder) for `path`, which is a run folder, a checkpoint folder or RUN@best.

    For a run folder, the checkpoint is the newest one that is not damaged; damaged ones are skipped with a printed
    line. A checkpoint folder and RUN@best are returned unverified. Raises ConfigError if there is no checkpoint, or
    RUN keeps no best one; DataError if all are damaged, or the best is missing.
    """
    from dyad.train.run_folder.locate import locate

    return run_folder_of(path), locate(Path(path).expanduser(), print_on_rank_0)


def load_found(path: str) -> LoadedRun:
    """Load the model of a run in this process alone, as `load_on_all` does, with its errors."""
    from dyad.train.distributed.world import World

    return load_on_all(path, World())


def run_folder_of(path: str) -> Path:
    """Return the run folder for `path`, which is a run folder, a checkpoint folder in one, or RUN@best.

    No checkpoint is read. Raises ConfigError if `path` is none of these, also for a run folder without a checkpoint.
    """
    folder = without_best(Path(path).expanduser())
    if not folder.is_dir():
        beside = [other.name for other in folder.parent.glob("*") if other.is_dir()]
        within = str(folder).removesuffix(folder.name)
        hint = nearest(folder.name, [*beside, *(f"{name}@best" for name in beside)], within)
        raise ConfigError(f"'{path}' is no folder.{hint} Give a run folder, e.g. runs/NAME")
    runs = sorted(str(config.parent) for config in folder.glob("*/config.yaml"))
    if runs and not (folder / "config.yaml").exists():
        raise ConfigError(f"'{path}' is a folder of runs: give one of {', '.join(runs[:5])}")

    from dyad.train.run_folder.checkpoint import is_checkpoint
    from dyad.train.run_folder.locate import refuse_without_checkpoint

    refuse_without_checkpoint(folder)
    return folder.resolve().parent.parent if is_checkpoint(folder) else folder


def own_output(run: Path, name: str) -> Path:
    """Return the path of the subfolder `name` of a run folder, to which a command writes; it need not exist yet.

    Raises ConfigError if it is a symbolic link that leads out of the run folder: a run may come from a stranger.
    """
    if not leads_inside(run / name, run):
        raise ConfigError(f"{run / name} is a link that leads out of the run folder. Write elsewhere: out=FOLDER")
    return run / name


def load_run(run: Path, checkpoint: Path) -> LoadedRun:
    """Build the model of a run's configuration and load the weights of one of its checkpoints.

    The model is on the CPU; its weights are moving averages where the run kept them (optim.ema), and its frozen towers
    cache nothing. Raises DataError if the checkpoint is damaged, ConfigError if config.yaml is invalid or the weights
    do not fit it.
    """
    from dyad.data.image_text.dataset import image_spec
    from dyad.train.run_folder.checkpoint import Checkpoint
    from dyad.train.run_folder.named_tensors import restore_weights
    from dyad.train.towers.build import build_model
    from dyad.train.towers.models import ImageModel
    from dyad.train.towers.sequence import SequenceTower
    from dyad.train.towers.tower import Tower

    config = read_config(run)
    saved = Checkpoint(checkpoint)
    weights = saved.weights()
    model = build_model(config, load_pretrained=False)
    restore_weights(weights, {"towers": model.towers})
    for tower in model.towers.children():
        if isinstance(tower, Tower):
            tower.drop_cache()  # the cache computes blocks of one size, even for a single query
    if isinstance(model, ImageModel):
        model = replace(model, image=image_spec(model.image, config.data))
    if isinstance(tower := model.towers.x_tower, SequenceTower) and (w := weights.get("objective.w_HDD")) is not None:
        tower.set_prediction_matrices(w)
    calibration = Calibration.of_run(str(checkpoint), weights, config.objective)
    return LoadedRun(str(checkpoint), config, model, calibration, run, checkpoint, saved.step)


def load_on_all(path: str, world: "World") -> LoadedRun:
    """Load the model of a run on every rank. Every rank must call it.

    path: in a form that `find_run` takes. Rank 0 chooses the checkpoint, and one rank of each machine verifies the
    SHA-256 digests of the files that are read. A run that still trains may delete the checkpoint that is being read.
    The newest one is then taken again, once. Raises the errors of `find_run` and `load_run` on all ranks.
    """
    from dyad.train.distributed.agreement import from_rank_0, raise_on_all
    from dyad.train.run_folder.checkpoint import OF_WEIGHTS, Checkpoint
    from dyad.train.run_folder.checkpoint_state import STATE
    from dyad.train.run_folder.digests import once_a_machine

    def loaded() -> LoadedRun:
        run, checkpoint = from_rank_0(world, lambda: find_run(path))
        once_a_machine(world, lambda: Checkpoint(checkpoint).verify(*OF_WEIGHTS, STATE))
        return raise_on_all(world, lambda: load_run(run, checkpoint))

    there = from_rank_0(world, lambda: {*steps(run_folder_of(path))})
    try:
        return loaded()
    except UserError:
        if from_rank_0(world, lambda: there <= {*steps(run_folder_of(path))}):
            raise
    return loaded()


def read_config(run: Path, copies: bool = True) -> TrainConfig:
    """Read the configuration of a run from its config.yaml.

    copies: whether names of models that the run folder has a copy of become paths of these copies, which have no
    weights (train/towers/libraries/kept_files.py); False: they stay as they were typed. Plugins that it names are not
    imported: those that the model needs must be imported before. Raises ConfigError if the file is missing, a link out
    of the folder, or no configuration of this version.
    """
    tree = saved_config(run)
    names, saved = tree.get("plugins"), OmegaConf.create(tree)
    hint = plugins_needed([str(name) for name in names] if isinstance(names, list) else [])
    try:
        objective = OmegaConf.merge(OmegaConf.structured(OBJECTIVES[saved.objective.name]), saved.objective)
        config = to_train_config(OmegaConf.merge(OmegaConf.structured(TrainConfig), saved, {"objective": objective}))
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        reason = "no objective " * isinstance(error, KeyError) + " ".join(str(error).split())[:200]
        raise ConfigError(f"{run}/config.yaml is not a configuration of this version: {reason}.{hint}") from error
    except ConfigError as error:
        raise ConfigError(f"{run}/config.yaml: {error}.{hint}") from error
    return replace(config, model=kept_model(config.model, run)) if copies else config
