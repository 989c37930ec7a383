"""python -m train key=value …  Composes the configuration, builds the parts, fits. See python -m train --help."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from data import errors
from data.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from train.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    from train.usage import help_text

    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return
    own_packages()
    import hydra

    from train.compose import CONFIG_DIR, check_words, register

    check_words(arguments)
    register()
    if not {"-m", "--multirun", "--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion"} & set(arguments):
        check(arguments)
    hydra.main(config_path=str(CONFIG_DIR), config_name="train", version_base="1.3")(job)()


def own_packages() -> None:
    """A stranger's data/ or eval/ in the working folder would win silently: refuse it by name."""
    for package in map(import_module, ("data", "eval", "train")):
        if Path(package.__file__ or "").resolve().parent.parent != ROOT:
            raise ConfigError(
                f"the package '{package.__name__}' comes from another folder. Start from the repository: cd to it first"
            )


def check(arguments: list[str]) -> TrainConfig:
    """Everything that can be refused before anything heavy is imported."""
    from data.sources import parse_sources
    from eval.suite import check_specs
    from train.compose import compose_config
    from train.config import validate

    config = compose_config(arguments)
    validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    parse_sources(config.data.train)
    if config.data.val is not None:
        parse_sources(config.data.val, key="data.val")
    check_specs(config.eval.suite)
    return config


def job(composed: DictConfig) -> None:
    """One run, under Hydra. A user's error leaves as an exit code, which Hydra must not wrap."""
    from train.compose import typed

    errors.run(lambda: train(typed(composed)))


def train(config: TrainConfig) -> None:
    """Build the parts of a run, fit, and leave with the exit code of how it ended. Every rank runs this."""
    from train.distributed import init_world, shutdown
    from train.fitting import run_on

    world = init_world(config.dist.timeout)
    try:
        status = run_on(world, config)
    finally:
        shutdown()
    if status == "preempted":
        sys.exit(errors.ExitCode.REQUEUE)


if __name__ == "__main__":
    errors.run(main)
