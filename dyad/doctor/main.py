"""python -m train.doctor [key=value …]: check that this machine is ready for training, or for the run of these keys.

Each check prints findings: lines marked ok, warn or fail, with a fix. The other form of the command, python -m
train.doctor translate "<open_clip command line>", prints our command for the same training.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dyad.data.base.errors import ConfigError, ExitCode, UserError, first_line, printable
from dyad.data.base.findings import Finding, Level, fail, ok
from dyad.data.base.secrets import without_secrets
from dyad.doctor import group, machine
from dyad.train.config import TrainConfig

HELP = """\
python -m train.doctor                              this machine
python -m train.doctor experiment=emoji             … and all that this training needs: the words of python -m train
python -m train.doctor --json experiment=emoji      as JSON
python -m train.doctor translate "torchrun --nproc_per_node 4 -m open_clip_train.main --train-data … --batch-size 256"
                                                    an open_clip command line (or a SLURM script) as ours; gpus=N where
                                                    it does not say how many

Installed by pip, the command is also: dyad doctor …
Every line is ok, warn or fail, with what mends it. Nothing is written. Exit codes: 0 no failure, 2 configuration,
3 damaged data, 4 the machine"""
USUAL_SIDE = 224  # pixels of an image, where the configuration does not say it


def main() -> None:
    """Run `python -m train.doctor`: print help, translate an open_clip command line, or check this machine.

    A check ends in SystemExit with the code of `report`. Raises ConfigError for a line that cannot be translated.
    """
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(HELP)
    elif arguments[:1] == ["translate"]:
        from dyad.doctor.translate import run

        print(run(arguments[1:]))
    else:
        sys.exit(report(run_checks([word for word in arguments if word != "--json"]), as_json="--json" in arguments))


def report(all_findings: Iterable[Finding], as_json: bool) -> int:
    """Print every finding (the result of one check) as soon as it is known, without duplicates, then a summary.

    as_json: print one JSON list instead, at the end and without a summary. Returns the exit code: 0, or the smallest
    exit code of the failures; warnings do not count.
    """
    findings: dict[str, Finding] = {}  # by text, as several checks may find the same file missing
    for finding in all_findings:
        if finding.text not in findings and not as_json:
            print(printable(str(finding)), flush=True)
        findings.setdefault(finding.text, finding)
    levels = [finding.level for finding in findings.values()]
    failed, warned = levels.count(Level.fail), levels.count(Level.warn)
    if as_json:
        print(json.dumps([without_secrets(asdict(finding)) for finding in findings.values()], indent=1))
    elif findings:  # under torchrun, ranks other than 0 mostly have no findings
        known = f", {warned} to know of" if warned or failed else ""
        print(f"\n{f'{failed} to mend' if failed else 'ready'}{known}")
    return min((found.code for found in findings.values() if found.level is Level.fail), default=ExitCode.OK)


def run_checks(arguments: Sequence[str]) -> Iterator[Finding]:
    """Run all checks of the machine and of the run, and yield their findings.

    arguments: key=value settings for `python -m train`; without any, only the machine is checked. An invalid
    configuration gives one failure with its error message, and the checks of the run are left out. Under torchrun each
    process must call it: all check their process group, and rank 0 alone does the other checks. These start two
    processes for gloo, and one per GPU of this machine for NCCL, at the beginning, and wait for them at the end.
    """
    config = None
    if arguments:
        from dyad.train.cli.compose import compose_config

        try:
            config = compose_config(arguments)
        except ConfigError as error:
            yield fail("words", str(error), code=ExitCode.CONFIG)
    gpus = machine.gpu_count()
    if "RANK" in os.environ:  # torchrun has started one doctor for each process of a run
        yield from findings_of("ranks", group.torchrun, "nccl" if gpus else "gloo")
        if os.environ["RANK"] != "0":
            return
    groups = [(group.gloo, group.ProcessGroup("gloo", 2))]  # they import torch while the rest is checked
    if gpus:
        groups.append((group.nccl, group.ProcessGroup("nccl", gpus)))
    yield ok("checkout", str(machine.ROOT))
    yield from findings_of("packages", machine.versions)
    yield from findings_of("torch", machine.torch_found)
    yield from findings_of("devices", machine.devices, config.precision.name if config else "")
    yield from findings_of("kernels", machine.kernels)
    yield from findings_of("threads", machine.threads)
    yield from findings_of("faiss", machine.faiss_kind)
    yield from findings_of("/dev/shm", machine.shared_memory, *_loaders(config))
    yield from findings_of("open files", machine.open_files)
    runs = Path(config.run.dir if config else "runs")
    yield from findings_of("run.dir", machine.disk, "run.dir", runs, "run.dir=FOLDER elsewhere")
    cache = Path(os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    yield from findings_of("cache", machine.disk, "cache", cache, "set HF_HOME or XDG_CACHE_HOME to a folder elsewhere")
    if config is not None:
        from dyad.doctor import configuration

        yield from findings_of("data", configuration.data, config)
        yield from findings_of("model", configuration.model, config)
        yield from findings_of("wandb", configuration.tracking, config)
        yield from findings_of("run", configuration.run, arguments, config)
    elif not arguments:
        yield ok("run", "not looked at: python -m train.doctor experiment=emoji looks at its data and model too")
    for check, started in groups:
        yield from findings_of(started.backend, check, started)


def findings_of(topic: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield the findings of `check(*arguments)`; if it raises an Exception, yield a failure with the reason instead.

    Findings before the error are yielded too. topic: the name of the check in that failure. A UserError keeps its
    message and exit code; another error gets the code of a failure of the machine.
    """
    try:
        yield from check(*arguments)
    except UserError as error:
        yield fail(topic, str(error), code=ExitCode(error.exit_code))
    except Exception as error:  # one broken check must not end the others
        yield fail(topic, f"cannot be looked at: {type(error).__name__}: {first_line(error)}")


def _loaders(config: TrainConfig | None) -> tuple[int | None, int]:
    """Return (number of data loader processes of a rank, estimated bytes of the images in one rank's batch).

    Without a configuration they are None and 0. The second counts the images of each sample (`images_of_sample`).
    Images of unknown size count as 224 × 224 pixels.
    """
    if config is None:
        return None, 0
    import torch

    from dyad.data.loading.loader import worker_count

    workers = worker_count(config.data.workers, torch.device("cuda" if machine.gpu_count() else "cpu"))
    samples, side = config.global_batch_size // int(os.environ.get("WORLD_SIZE", "1")), config.model.image.image_size
    return workers, samples * config.images_of_sample * 3 * (side or USUAL_SIDE) ** 2
