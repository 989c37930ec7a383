"""Parser of a command line of open_clip's trainer: its launcher and the values of its flags."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NoReturn

from dyad.data.base.errors import ConfigError, nearest
from dyad.train.cli import open_clip_flags as flags

PROGRAM = re.compile(r"(?:-m\s+)?(?:\S*/)?(?:open_clip_train|training)(?:\.main|/main\.py)\b")
GPUS_PER_MACHINE = 8  # assumed where neither the command nor gpus=N says it
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
NOT_HERE = {"clap": "hears audio", "genlip": "generates text", "genlap": "generates text", "coca": "generates captions"}


@dataclass(frozen=True)
class Launch:
    """The processes of a command. scheduler: torchrun, slurm or none; address: of the first machine, "" if unknown."""

    scheduler: str
    nodes: int
    per_node: int
    address: str = ""

    @property
    def command(self) -> str:
        """Our launcher for as many processes, without the arguments of the training."""
        if self.scheduler == "slurm":
            return f"sbatch --nodes={self.nodes} --gpus-per-node={self.per_node} launch/slurm.sbatch"
        if self.scheduler == "none" and self.per_node == 1:
            return "python -m train"
        several = f"NNODES={self.nodes} MASTER_ADDR={self.address or 'FIRST_MACHINE'} " if self.nodes > 1 else ""
        return f"{several}NPROC={self.per_node} bash launch/torchrun.sh"


@dataclass(frozen=True)
class OpenClipCommand:
    """A parsed command. given: flag → its values; unset: shell variables in it that have no value here."""

    launch: Launch
    given: dict[str, list[str]]
    unset: tuple[str, ...]


def read_line(line: str, gpus: int | None) -> OpenClipCommand:
    """Parse a command line, or a script that contains one.

    gpus: number of GPUs over all machines, where the line does not say it. Raises ConfigError for a line that cannot be
    parsed, an unknown flag, and a command that does not train a pair of towers.
    """
    launcher, arguments = _split(line)
    given = {
        name: [VARIABLE.sub(r"\1", os.path.expandvars(value)) for value in values]  # an unset variable: its name
        for name, values in _parse(arguments).items()
    }
    launch = _launch(launcher, line, gpus)
    _check_model_and_data(given)
    return OpenClipCommand(launch, given, tuple(dict.fromkeys(VARIABLE.findall(os.path.expandvars(arguments)))))


def _split(line: str) -> tuple[str, str]:
    """(launcher and environment before the program, arguments after it)."""
    text = re.sub(r"\\\s*\n", " ", line)
    found = PROGRAM.search(text)
    if found is None:
        if text.strip().startswith("--"):
            return "", text
        raise ConfigError(
            'no open_clip command in it. Write: python -m train.doctor translate "python -m open_clip_train.main --…"'
        )
    rest = re.split(r"\n(?!\s*-)", text[found.end() :], maxsplit=1)[0]  # a line that begins with a flag belongs to it
    return text[: found.start()].rpartition("\n")[2], rest


class _Parser(argparse.ArgumentParser):
    """open_clip's flags with their number of values. Abbreviations that fit one flag only are accepted, as there."""

    def __init__(self) -> None:
        super().__init__(add_help=False, argument_default=argparse.SUPPRESS)
        former = {name: old for old, name in flags.FORMER.items()}
        for name in sorted(flags.ALL):
            spellings = [f"--{name}", *([f"--{former[name]}"] if name in former else [])]
            if name in flags.NO_VALUE:
                self.add_argument(*spellings, dest=name, action="store_const", const=[])
            else:
                self.add_argument(*spellings, dest=name, nargs="+" if name in flags.MANY_VALUES else 1)

    def error(self, message: str) -> NoReturn:
        no_value = re.fullmatch(r"argument (--[\w-]+).*: expected .*", message)
        raise ConfigError(f"translate: {f'{no_value[1]} needs a value' if no_value else message}")


def _parse(text: str) -> dict[str, list[str]]:
    """Flag → its values, up to the end of the shell command."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"translate: the line is cut or a quote is open ({error}): {text.strip()[-60:]}") from error
    given, unknown = _Parser().parse_known_args([*takewhile(lambda word: word not in (";", "&&", "&", "|"), words)])
    for word in unknown:
        if not word.startswith("--"):
            raise ConfigError(f"translate: '{word}' belongs to no flag. Quote values that have spaces")
        name = word[2:].partition("=")[0]
        hint = nearest(name, flags.ALL).replace("'", "--", 1).replace("'", "")
        raise ConfigError(f"--{name}: open_clip's trainer has no such flag.{hint} Correct it or leave it out")
    return vars(given)


def _launch(launcher: str, script: str, gpus: int | None) -> Launch:
    """The launcher's options; with srun also those in the #SBATCH lines of the script."""
    slurm = "srun" in launcher
    header = re.findall(r"^#SBATCH\s+(\S.*?)\s*$", script, re.MULTILINE) if slurm else []
    text = " ".join([*header, launcher])
    per_node = _option(text, ["nproc_per_node", "ntasks_per_node", "gpus_per_node", "gres"])
    nodes = _option(text, ["nnodes", "nodes", "N"])
    scheduler = "slurm" if slurm else "torchrun" if re.search(r"torchrun|torch\.distributed", launcher) else "none"
    if gpus is not None:
        nodes, per_node = _spread(gpus, nodes)
    if scheduler != "none" and per_node is None:
        raise ConfigError("translate: the line does not say how many GPUs, and --batch-size is per GPU. Add gpus=N")
    address = re.search(r"--(?:rdzv[-_]endpoint|master[-_]addr)[ =]([^\s:]+)", launcher)
    return Launch(scheduler, nodes or 1, per_node or 1, address[1] if address else "")


def _spread(gpus: int, nodes: int | None) -> tuple[int, int]:
    """(machines, GPUs of each). Without `nodes`, machines of GPUS_PER_MACHINE, or one with fewer."""
    machines = nodes or max(gpus // GPUS_PER_MACHINE, 1)
    if gpus < 1 or gpus % machines or (nodes is None and gpus > GPUS_PER_MACHINE and gpus % GPUS_PER_MACHINE):
        raise ConfigError(
            f"gpus={gpus}: must be as many on each of {nodes or 'several'} machines. Say in the line how many: "
            "srun --nodes=N, torchrun --nnodes=N"
        )
    return machines, gpus // machines


def _option(text: str, names: Iterable[str]) -> int | None:
    """The number that the first of these launcher options has; hyphens and underscores are alike."""
    for name in names:
        dashes = "--?" if len(name) == 1 else "--"
        if found := re.search(rf"(?:^|\s){dashes}{name.replace('_', '[-_]')}(?:=|\s+)(?:\w+:)*(\d+)", text):
            return int(found[1])
    return None


def _check_model_and_data(given: Mapping[str, list[str]]) -> None:
    """Raise ConfigError for models and data that are not pictures with texts, and for a command that only evaluates."""
    (model,) = given.get("model", [""])
    (data_type,) = given.get("dataset-type", [""])
    for part, does in NOT_HERE.items():
        if part in model.lower():
            raise ConfigError(f"--model {model}: it {does}; here are pairs of towers only, like ViT-B-32")
    if data_type.endswith("-audio"):
        raise ConfigError(f"--dataset-type {data_type}: audio is not read; pictures and texts are")
    if "train-data" not in given and data_type != "synthetic":
        raise ConfigError(
            "there is no --train-data: the line only evaluates. Runs of python -m train are evaluated by: "
            "python -m eval checkpoint=RUN suite=[wds:FOLDER]"
        )
