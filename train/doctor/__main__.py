"""python -m train.doctor [key=value …]: is this machine ready, and ready for this run? One line each, with the fix.

python -m train.doctor translate "<open_clip command line>": the same training as a command of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from data import errors
from data.errors import ConfigError, ExitCode, UserError, printable
from data.secrets import without_secrets
from train.config import Task, TrainConfig
from train.doctor import group, machine
from train.findings import Finding, Level, fail, ok

HELP = """\
python -m train.doctor                              this machine
python -m train.doctor experiment=emoji             … and all that this training needs: the words of python -m train
python -m train.doctor --json experiment=emoji      as JSON
python -m train.doctor translate "torchrun --nproc_per_node 4 -m open_clip_train.main --train-data … --batch-size 256"
                                                    an open_clip command line (or a SLURM script) as ours; gpus=N where
                                                    it does not say how many

Every line is ok, warn or fail, with what mends it. Nothing is written. Exit codes: 0 no failure, 2 configuration,
3 damaged data, 4 the machine"""
PICTURE = 3 * 224 * 224  # bytes of one in shared memory, where no size is said


def main() -> None:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(HELP)
    elif words[:1] == ["translate"]:
        from train.doctor.translate import run

        print(run(words[1:]))
    else:
        sys.exit(report(look([word for word in words if word != "--json"]), as_json="--json" in words))


def report(looked: Iterable[Finding], as_json: bool) -> int:
    """Print every finding as it comes; the exit code: 0, or the least of the failures'."""
    findings: list[Finding] = []
    for finding in _different(looked):
        findings.append(finding)
        if not as_json:
            print(printable(str(finding)), flush=True)
    told = [without_secrets(asdict(finding)) for finding in findings]
    print(json.dumps(told, indent=1) if as_json else _summary(findings))
    return min((finding.code for finding in findings if finding.level is Level.fail), default=ExitCode.OK)


def look(words: Sequence[str]) -> Iterator[Finding]:
    """All findings; those of the configuration only where words say one."""
    config = None
    if words:
        from train.command.compose import compose_config

        try:
            config = compose_config(words)
        except ConfigError as error:
            yield fail("words", str(error), code=ExitCode.CONFIG)
    groups = _start_groups()
    yield ok("checkout", str(machine.ROOT))
    yield from found("packages", machine.versions)
    yield from found("devices", lambda: machine.devices(config.precision.name if config else ""))
    yield from found("threads", machine.threads)
    yield from found("load", lambda: machine.load(os.getloadavg()[0]))
    yield from found("faiss", machine.faiss_kind)
    yield from found("/dev/shm", lambda: machine.shared_memory(*_loaders(config)))
    yield from found("open files", machine.open_files)
    yield from found("clock", lambda: machine.clock(time.time()))
    yield from found("run.dir", lambda: machine.disk("run.dir", Path(config.run.dir if config else "runs")))
    yield from found("cache", lambda: machine.disk("cache", _cache()))
    if config is not None:
        from train.doctor import run

        yield from found("data", lambda: run.data(config))
        yield from found("model", lambda: run.model(config))
        yield from found("batch norm", lambda: run.batch_norm(config))
        yield from found("wandb", lambda: run.tracking(config))
        yield from found("run", lambda: run.run(words, config))
    elif not words:
        yield ok("run", "not looked at: python -m train.doctor experiment=emoji looks at its data and model too")
    for check, started in groups:
        yield from found(started.backend, lambda check=check, started=started: check(started))


def found(topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; a mistake of the user is a failure with its own words, anything else is told as it is."""
    try:
        yield from check()
    except UserError as error:
        yield fail(topic, str(error), code=ExitCode(error.exit_code))
    except Exception as error:  # a doctor does not die of what it looks at
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        yield fail(topic, f"cannot be looked at: {reason}")


def _start_groups() -> list[tuple[group.Check, group.Group]]:
    """Started first: they import torch while the rest is looked at."""
    groups: list[tuple[group.Check, group.Group]] = [(group.gloo, group.Group("gloo", 2))]
    if gpus := machine.gpu_count():
        groups.append((group.nccl, group.Group("nccl", min(gpus, 2))))
    return groups


def _loaders(config: TrainConfig | None) -> tuple[int, int]:
    """Loader processes, and bytes of a batch of one process; 0 where nothing is known."""
    if config is None or config.task is Task.question_passage:
        return 0 if config is None else config.data.workers, 0
    side = config.model.image.image_size
    per_rank = config.global_batch_size // int(os.environ.get("WORLD_SIZE", "1"))
    return config.data.workers, per_rank * (3 * side * side if side else PICTURE)


def _cache() -> Path:
    return Path(os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def _different(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Without what was said before: a missing file is found by more than one check."""
    said: set[str] = set()
    for finding in findings:
        if finding.text not in said:
            said.add(finding.text)
            yield finding


def _summary(findings: Sequence[Finding]) -> str:
    count = {level: sum(finding.level is level for finding in findings) for level in Level}
    if count[Level.fail]:
        return f"\n{count[Level.fail]} to mend, {count[Level.warn]} to know of"
    return f"\nready, {count[Level.warn]} to know of" if count[Level.warn] else "\nready"


if __name__ == "__main__":
    errors.run(main)
