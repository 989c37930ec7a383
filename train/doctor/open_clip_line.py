"""Reading a command line of open_clip's trainer: how it is launched, and its flags as argparse would read them."""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass

from data.errors import ConfigError, nearest
from train.command import open_clip_flags as flags

PROGRAM = re.compile(r"(?:-m\s+)?(?:\S*/)?(?:open_clip_train|training)(?:\.main|/main\.py)\b")
OF_MACHINE = 8  # GPUs
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
NOT_HERE = {"clap": "hears audio", "genlip": "generates text", "genlap": "generates text", "coca": "generates captions"}


@dataclass(frozen=True)
class Launch:
    """How many processes on how many machines; scheduler: torchrun, slurm or none; address: of the first machine."""

    scheduler: str
    nodes: int
    per_node: int
    address: str = ""

    @property
    def command(self) -> str:
        if self.scheduler == "slurm":
            return f"sbatch --nodes={self.nodes} --gpus-per-node={self.per_node} launch/slurm.sbatch"
        if self.scheduler == "none" and self.per_node == 1:
            return "python -m train"
        several = f"NNODES={self.nodes} MASTER_ADDR={self.address or 'FIRST_MACHINE'} " if self.nodes > 1 else ""
        return f"{several}NPROC={self.per_node} bash launch/torchrun.sh"


@dataclass(frozen=True)
class Line:
    """launch: as far as the line says; given: the values by flag; unset: shell variables without a value here."""

    launch: Launch
    given: dict[str, list[str]]
    unset: tuple[str, ...]


def read_line(line: str, gpus: int | None) -> Line:
    """gpus: in all, where the line does not say it. Raises ConfigError for what cannot be read or is not here."""
    launched, rest = _split(line)
    given = {name: [_shell(value) for value in values] for name, values in _parse(rest).items()}
    launch = _launch(launched, line, gpus)
    _refuse(given)
    return Line(launch, given, tuple(dict.fromkeys(VARIABLE.findall(os.path.expandvars(rest)))))


def _split(line: str) -> tuple[str, str]:
    """(what starts the program, its flags)."""
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


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"translate: the line is cut or a quote is open ({error}): {text.strip()[-60:]}") from error


def _parse(text: str) -> dict[str, list[str]]:
    """Values by flag, as argparse reads them: --flag value, --flag=value, a beginning that fits one flag only."""
    given: dict[str, list[str]] = {}
    words = _words(text)
    while words:
        word = words.pop(0)
        if word in (";", "&&", "&", "|"):
            break
        if not word.startswith("--"):
            raise ConfigError(f"translate: '{word}' belongs to no flag. Quote values that have spaces")
        written, attached, value = word[2:].partition("=")
        name = _known(written)
        values = [value] if attached else []
        count = 0 if name in flags.NO_VALUE else math.inf if name in flags.MANY_VALUES else 1
        while words and not words[0].startswith("--") and len(values) < count:
            values.append(words.pop(0))
        if len(values) < min(count, 1):
            raise ConfigError(f"translate: --{name} needs a value")
        given[name] = values
    return given


def _known(written: str) -> str:
    written = flags.FORMER.get(written, written)
    begins = [name for name in flags.ALL if name.startswith(written)]
    if written in flags.ALL or len(begins) == 1:
        return written if written in flags.ALL else begins[0]
    hint = nearest(written, flags.ALL).replace("'", "--", 1).replace("'", "")
    raise ConfigError(f"--{written}: open_clip's trainer has no such flag.{hint} Correct it or leave it out")


def _shell(value: str) -> str:
    """Variables of the shell by their values; an unknown one by its name, so that it can be seen and replaced."""
    return VARIABLE.sub(r"\1", os.path.expandvars(value))


def _launch(starter: str, script: str, gpus: int | None) -> Launch:
    """The launcher before the program; of SLURM the #SBATCH lines of a whole script as well."""
    slurm = "srun" in starter
    header = " ".join(re.findall(r"^#SBATCH\s+(\S.*?)\s*$", script, re.MULTILINE))
    text = f"{header} {starter}" if slurm else starter
    per_node = _option(text, "nproc_per_node", "ntasks_per_node", "gpus_per_node", "gres")
    nodes = _option(text, "nnodes", "nodes", "N")
    scheduler = "slurm" if slurm else "torchrun" if re.search(r"torchrun|torch\.distributed", starter) else "none"
    if gpus is not None:
        nodes, per_node = _shared_out(gpus, nodes)
    if scheduler != "none" and per_node is None:
        raise ConfigError("translate: the line does not say how many GPUs, and --batch-size is per GPU. Add gpus=N")
    address = re.search(r"--(?:rdzv_endpoint|master_addr)[ =]([^\s:]+)", starter.replace("-", "_").replace("__", "--"))
    return Launch(scheduler, nodes or 1, per_node or 1, address[1].replace("_", "-") if address else "")


def _shared_out(gpus: int, nodes: int | None) -> tuple[int, int]:
    """(machines, GPUs of each): where the line says no machines, one of up to OF_MACHINE, or several of OF_MACHINE."""
    machines = nodes or max(gpus // OF_MACHINE, 1)
    if gpus < 1 or gpus % machines or (nodes is None and gpus > OF_MACHINE and gpus % OF_MACHINE):
        raise ConfigError(
            f"gpus={gpus}: must be as many on each of {nodes or 'several'} machines. Say in the line how many: "
            "srun --nodes=N, torchrun --nnodes=N"
        )
    return machines, gpus // machines


def _option(text: str, *names: str) -> int | None:
    """The number of the first of some options of a launcher; hyphens and underscores are alike."""
    for name in names:
        dashes = "--?" if len(name) == 1 else "--"
        found = re.search(rf"(?:^|\s){dashes}{name.replace('_', '[-_]')}(?:=|\s+)(?:\w+:)*(\d+)", text)
        if found:
            return int(found[1])
    return None


def _refuse(given: dict[str, list[str]]) -> None:
    model = given.get("model", [""])[0].lower()
    for part, does in NOT_HERE.items():
        if part in model:
            raise ConfigError(f"--model {given['model'][0]}: it {does}; here are pairs of towers only, like ViT-B-32")
    if given.get("dataset-type", [""])[0].endswith("-audio"):
        raise ConfigError(f"--dataset-type {given['dataset-type'][0]}: audio is not read; pictures and texts are")
    if "train-data" not in given and given.get("dataset-type") != ["synthetic"]:
        raise ConfigError(
            "there is no --train-data: the line only evaluates. Runs of python -m train are evaluated by: "
            "python -m eval checkpoint=RUN suite=[wds:FOLDER]"
        )
