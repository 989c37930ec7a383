"""python -m train key=value …  Composes the configuration, builds the parts, fits. See python -m train --help."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from data import errors
from data.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from train.config import TrainConfig

HYDRA_MODES = {"-m", "--multirun", "--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion"}
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    from train.usage import help_text

    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return
    own_packages()
    import hydra

    from train.compose import CONFIG_DIR, check_words, compose_config, register

    check_words(arguments)
    register()
    if not HYDRA_MODES & set(arguments):
        compose_config(arguments)  # its messages are better than Hydra's
    hydra.main(config_path=str(CONFIG_DIR), config_name="train", version_base="1.3")(job)()


def own_packages() -> None:
    """A stranger's data/ or eval/ in the working folder would win silently: refuse it by name."""
    for package in map(import_module, ("data", "eval", "train")):
        if Path(package.__file__ or "").resolve().parent.parent != ROOT:
            raise ConfigError(
                f"the package '{package.__name__}' comes from another folder. Start from the repository: cd to it first"
            )


def job(composed: DictConfig) -> None:
    """One run, under Hydra. A user's error leaves as an exit code, which Hydra must not wrap."""
    from train.compose import typed

    errors.run(lambda: run(typed(composed)))


def run(config: TrainConfig) -> None:
    """Refuse what cannot work, then train. A run that is finished already is answered without loading anything."""
    from train.runs import is_finished, run_folder

    check(config)
    if not is_finished(config):
        return train(config)
    if os.environ.get("RANK", "0") == "0":
        from eval.results import print_saved_tables

        print(f"already finished: {run_folder(config)}")
        print_saved_tables(run_folder(config) / "eval")


def check_arguments(arguments: list[str]) -> Path | None:
    """The run folder, if any; refuses what `python -m train` would. launch/job.sh asks before it starts many."""
    from train.compose import check_words, compose_config
    from train.runs import run_folder

    check_words(arguments)
    if HYDRA_MODES & set(arguments):
        return None
    config = compose_config(arguments)
    check(config)
    return run_folder(config)


def check(config: TrainConfig) -> None:
    """Everything that can be refused before anything heavy is imported."""
    from data.questions import named_files
    from data.sources import parse_sources
    from eval.suite import check_specs
    from train.config import Task, validate
    from train.runs import check_run
    from train.tracking import check_tracking

    validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    if config.task is Task.question_passage:
        named_files(config.data.train, config.data)
    else:
        parse_sources(config.data.train)
    check_specs(config.eval.suite, config.data.val, config.task)
    check_tracking(config.tracking)
    _check_start(config)
    check_run(config)


def _check_start(config: TrainConfig) -> None:
    """What `resume`, `init_from` and `data.negatives.file` name must be there."""
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        hint = errors.nearest(config.resume, ("auto", "never"))
        choices = "auto (go on where the run stopped), never (begin again), a checkpoint folder"
        raise ConfigError(f"resume={config.resume}: no such folder.{hint} Choices: {choices}")
    if config.init_from is not None and not Path(config.init_from).is_dir():
        raise ConfigError(f"init_from={config.init_from}: no such folder. Give a run folder or a checkpoint of one")
    mined = config.data.negatives.file
    if mined is not None and not Path(mined).expanduser().exists() and "://" not in mined:
        raise ConfigError(f"data.negatives.file={mined}: no such file. It is what `python -m eval.mine run=…` writes")


def train(config: TrainConfig) -> None:
    """Build the parts of a run, fit, and leave with the exit code of how it ended. Every rank runs this."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave_early)
    from train.distributed import init_world, lost_contact_named, shutdown
    from train.fitting import run_on

    world = init_world(config.dist.timeout)
    try:
        with lost_contact_named(world):
            status = run_on(world, config)
    finally:
        shutdown()
    if status == "preempted":
        raise errors.Preempted


def _leave_early(*_: object) -> None:
    """Asked to stop before the loop takes over: there is nothing to save. Once, for a scheduler asks more than once."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    errors.leave(errors.ExitCode.REQUEUE, everywhere=True)


if __name__ == "__main__":
    errors.run(main)
