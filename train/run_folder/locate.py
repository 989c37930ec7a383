"""Which checkpoint a user means by a path: a checkpoint folder, a run folder (its newest), or RUN@best (its best)."""

from collections.abc import Callable
from pathlib import Path

from dyad.data.base.errors import ConfigError, DataError
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.checkpoint import Checkpoint, find_undamaged, is_checkpoint
from dyad.train.run_folder.folder import folder_of, steps, without_best


def locate(path: Path, log: Callable[[str], None]) -> Path:
    """Return the checkpoint folder that a user means by `path`.

    For a checkpoint folder that is the folder itself, for RUN@best the run's best checkpoint, both without verifying
    their files; for a run folder it is the newest undamaged checkpoint. log: called with one line for each damaged
    checkpoint that is passed over. Raises ConfigError when there is no checkpoint, or no best one, or one that is read
    has another format version; DataError when a run has checkpoints and all are damaged, or the best is missing. A path
    that ends in step_ and 8 digits or more is returned even if it does not exist.
    """
    if (run := without_best(path)) != path:
        return _best_checkpoint(run, path, log)
    refuse_without_checkpoint(path)
    folder = path if is_checkpoint(path) else find_undamaged(path, log)
    assert folder is not None
    return folder


def refuse_without_checkpoint(path: Path) -> None:
    """Raise ConfigError if `path` is neither a checkpoint folder nor a run folder that has one, whole or damaged.

    A path that ends in step_ and 8 digits or more passes as a checkpoint, even if it does not exist.
    """
    if not is_checkpoint(path) and not steps(path):
        raise ConfigError(f"'{path}' is neither a checkpoint (a step_… folder) nor a run folder that has one")


def _best_checkpoint(run: Path, name: Path, log: Callable[[str], None]) -> Path:
    """Return the folder of a run's best checkpoint, whose files are not verified. Errors and `log` are as in `locate`.

    name: RUN@best, for messages.
    """
    if not steps(run):
        raise ConfigError(f"{name}: '{run}' is no run folder that has a checkpoint")
    best = _newest_best(run, log)
    if best is None:
        raise ConfigError(
            f"{name}: no evaluation of this run has been compared yet, and only checkpoint.best=METRIC compares them. "
            f"{run} is its newest checkpoint"
        )
    folder = folder_of(run, best["step"])
    if not folder.is_dir():
        raise DataError(f"{name}: {folder} is missing, the best by {best['metric']}. {run} is the newest one")
    return folder


def _newest_best(run: Path, log: Callable[[str], None]) -> Best | None:
    """Return the entry "best" of a run's newest checkpoint; checkpoints with a damaged file are passed over.

    The files are manifest.json and state.json. Returns None if the run had no best by then. log: called with one line
    for each checkpoint passed over. Raises DataError if all are damaged, ConfigError for another format version.
    """
    for folder in (found := [folder_of(run, step) for step in steps(run)]):
        try:
            return Checkpoint(folder).best
        except DataError as error:
            log(f"passing over a damaged checkpoint: {error}")
    raise DataError(f"none of the {len(found)} checkpoints in {run} is whole: which is the best is not known")
