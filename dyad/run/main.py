"""The command python -m train key=value …: compose the configuration, check it, and train.

See python -m train --help.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dyad.data.base.errors import ExitCode, Preempted, UserError, exit_with, printable
from dyad.process import print_error
from dyad.run.checks import check_sweep
from dyad.train.distributed.signals import STARTUP

if TYPE_CHECKING:
    from dyad.train.config import TrainConfig


def main() -> None:
    from dyad.train.cli.usage import help_text

    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return
    STARTUP.begin()
    from dyad.train.cli.command_line import parse_command_line
    from dyad.train.cli.compose import compose_config, preview

    line = parse_command_line(arguments)
    runs = line.runs()
    if line.show == "job":
        print(printable("---\n".join(map(preview, runs))), end="")
        return
    configs = [compose_config(own) for own in runs]
    check_sweep(line.words, configs)
    if line.show:
        print("\n".join(map(shlex.join, runs)))
        return
    if not line.sweep:
        return train_or_plan(configs[0])
    varied = [printable(shlex.join(a for a in own if a not in line.words)) for own in runs]
    train_each(dict(zip(varied, configs, strict=True)))


def train_each(runs: Mapping[str, TrainConfig]) -> None:
    """Train the runs of a sweep one after the other; a run that fails does not stop the others.

    runs: what differs in a run, as its arguments → its configuration. Every rank must call it. Exits with the code of
    the first run that failed, if any did. Raises Preempted, an error that is no UserError, and one of a single rank of
    several, whose process group is then aborted; a line says which runs were not begun.
    """
    say = print if _is_rank_0() else lambda _: None
    failed: dict[str, ExitCode] = {}

    def outcome(done: int) -> str:
        return f"-m: {done - len(failed)} of {len(runs)} runs done" + (f"; failed: {'; '.join(failed)}" * bool(failed))

    for number, (varied, config) in enumerate(runs.items()):
        say(f"-m: {varied}")
        try:
            train_or_plan(config)
        except Exception as error:
            together = os.environ.get("WORLD_SIZE", "1") == "1" or getattr(error, "everywhere", False)
            if isinstance(error, UserError) and not isinstance(error, Preempted) and together:
                print_error(error)
                failed[varied] = error.exit_code
                continue
            say(f"{outcome(number)}; ended early: {varied}; not begun: {'; '.join([*runs][number + 1 :]) or 'none'}")
            raise
    if failed:
        say(outcome(len(runs)))
        exit_with(next(iter(failed.values())), everywhere=True)


def train_or_plan(config: TrainConfig) -> None:
    """Train as the configuration says. Every rank must call it.

    If the run is finished already, its last results are printed, and nothing is trained. With a key plan.*, the plan or
    the dry run of a step is printed, and nothing is trained. For training, the process group is started and ended here.
    The configuration must have passed `check_sweep`. Raises Preempted when a stop was requested (by a signal such as
    SIGTERM), HardwareError for a failed device or a lost rank, ConfigError or DataError for what only the whole run
    finds.
    """
    from dyad.train.distributed.compile_caches import use_local_caches
    from dyad.train.run_folder.folder import SINCE_BEST, recorded_state, run_folder
    from dyad.train.run_folder.run_state import is_finished, shorter_run

    use_local_caches()
    if config.planned:
        if _is_rank_0():
            from dyad.plan.summary import print_plan

            print_plan(config)
        return
    if is_finished(config):
        if _is_rank_0():
            from dyad.eval.results.write import print_tables, saved_results

            folder, patience = run_folder(config), config.checkpoint.patience
            line = f"already finished: {folder}"
            if SINCE_BEST in recorded_state(folder):
                line += f", stopped early: checkpoint.patience={patience}; with a larger one, or null, it goes on"
            print(line)
            print_tables(saved_results(folder))
        return
    if _is_rank_0() and (shorter := shorter_run(config)):
        print(f"{shorter} has finished the same training with fewer steps: run.name={shorter.name} would go on with it")
    STARTUP.begin()  # again for each run of a sweep
    from dyad.run.hardware import explain_device_errors
    from dyad.run.train_run import train_run
    from dyad.train.distributed.devices import chosen_kernels
    from dyad.train.distributed.failures import process_group
    from dyad.train.monitor.postmortem import enable_flight_recorder

    if config.tracking.postmortem:
        enable_flight_recorder(run_folder(config))
    group = process_group(config.dist.seconds_to_start)
    with group as world, explain_device_errors(config, world), chosen_kernels(config.deterministic):
        train_run(world, config)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"
