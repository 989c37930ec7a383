"""Parse a command line of open_clip's trainer into its launcher (torchrun, SLURM, none) and its flags' values."""

import argparse
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from dyad.data.base.errors import ConfigError, nearest, raise_broken
from dyad.train.cli import open_clip_flags as flags

PROGRAM = re.compile(r"(?:-m\s+)?(?:\S*/)?(?:open_clip_train|training)(?:\.main|/main\.py)\b")
EXAMPLE = 'python -m train.doctor translate "python -m open_clip_train.main --…"'
GPUS_PER_MACHINE = 8  # assumed where neither the command nor gpus=N says it
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class Launch:
    """How the open_clip command line starts its processes: by which launcher, and how many.

    scheduler: "torchrun", "slurm" (srun), or "none" for plain python. nodes: number of machines. per_node: processes on
    each machine, one per GPU. address: host name of the first machine, "" if unknown.
    """

    scheduler: str
    nodes: int
    per_node: int
    address: str = ""

    @property
    def command(self) -> str:
        """The launcher part of the equivalent Dyad command, such as `sbatch … launch/slurm.sbatch`.

        This command starts as many processes as the open_clip command line. Training arguments are not included.
        """
        if self.scheduler == "slurm":
            return f"sbatch --nodes={self.nodes} --gpus-per-node={self.per_node} launch/slurm.sbatch"
        if self.scheduler == "none" and self.per_node == 1:
            return "python -m train"
        several = f"NNODES={self.nodes} MASTER_ADDR={self.address or 'FIRST_MACHINE'} " if self.nodes > 1 else ""
        return f"{several}NPROC={self.per_node} bash launch/torchrun.sh"


def read_line(line: str, gpus: int | None) -> tuple[Launch, dict[str, list[str]], list[str]]:
    """Parse an open_clip command line, or a script that contains one.

    gpus: the number of GPUs on all machines, None to read it from the line. Returns three things: the launcher with its
    numbers of machines and processes; flag without dashes → its values, [] for a switch; and the names of shell
    variables in the arguments that are not set in this environment, and whose names stand in place of their values.
    Variables that are set are expanded. Raises ConfigError for a line that cannot be parsed, for an unknown flag, and
    for a number of GPUs that is missing or does not fit.
    """
    launcher, text = _split(line)
    arguments = os.path.expandvars(text)
    unset = list(dict.fromkeys(VARIABLE.findall(arguments)))
    given = _parse(VARIABLE.sub(r"\1", arguments))  # an unset variable becomes its name
    return _launch(launcher, line, gpus), given, unset


def _split(line: str) -> tuple[str, str]:
    """Split a command or script at the open_clip program: return the text before it (the launcher) and its arguments.

    Arguments alone have the launcher "". Of a script, the launcher is the line with the program, up to the program, and
    the arguments go on over lines that end with a backslash or begin with a dash. Raises ConfigError if there is no
    open_clip program.
    """
    text = re.sub(r"\\\s*\n", " ", line)
    if (found := PROGRAM.search(text)) is None:
        if text.strip().startswith("--"):
            return "", text
        raise ConfigError(f"no open_clip command in it. Write: {EXAMPLE}")
    rest = re.split(r"\n(?!\s*-)", text[found.end() :], maxsplit=1)[0]  # a line that begins with a flag belongs to it
    return text[: found.start()].rpartition("\n")[2], rest


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        """Override ArgumentParser.error: raise ConfigError with `message` instead of printing the usage and exiting."""
        no_value = re.fullmatch(r"argument (--[\w-]+).*: expected .*", message)
        raise ConfigError(f"translate: {f'{no_value[1]} needs a value' if no_value else message}")


def _parse(text: str) -> dict[str, list[str]]:
    """Parse the arguments of open_clip, up to the end of the shell command, into flag without dashes → its values.

    As in open_clip, a unique prefix of a flag stands for it. Raises ConfigError for unknown flags, a line each, for an
    argument that belongs to no flag, for a flag without its value, and for an open quote.
    """
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for name in sorted(flags.ALL):
        kind: dict[str, Any] = {"nargs": "+" if name in flags.MANY_VALUES else 1}
        if name in flags.NO_VALUE:
            kind = {"action": "store_const", "const": []}
        parser.add_argument(f"--{name}", *flags.FORMER.get(name, []), dest=name, **kind)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"translate: the line is cut or a quote is open ({error}): {text.strip()[-60:]}") from error
    given, unknown = parser.parse_known_args([*takewhile(lambda word: word not in (";", "&&", "&", "|"), words)])
    if unknown and not unknown[0].startswith("--"):
        raise ConfigError(f"translate: '{unknown[0]}' belongs to no flag. Quote values that have spaces")
    raise_broken(_unknown(word[2:].partition("=")[0]) for word in unknown if word.startswith("--"))
    return vars(given)


def _unknown(name: str) -> str:
    """Return the error message for --`name`, a flag that flags.ALL lacks: a flag of other models, or of nothing."""
    for part, why in flags.OTHER_MODELS.items():
        if part in name:
            return f"--{name}: not here: {why}"
    hint = nearest(name, flags.ALL).replace("'", "--", 1).replace("'", "")
    return f"--{name}: open_clip's trainer has no such flag.{hint} Correct it or leave it out"


def _launch(launcher: str, script: str, gpus: int | None) -> Launch:
    """Read the number of machines and processes from the options of the launcher, for srun also from #SBATCH lines.

    launcher: the text before the program. script: the whole line or script. gpus: the number of GPUs on all machines,
    None to read it from the options; with plain python that is 1. If gpus is given and the machines are not, they are
    taken to have 8 GPUs each, or to be one with fewer. Raises ConfigError if the number of GPUs is missing or does not
    fit the machines.
    """
    slurm = "srun" in launcher
    header = re.findall(r"^#SBATCH\s+(\S.*?)\s*$", script, re.MULTILINE) if slurm else []
    text = " ".join([*header, launcher])
    per_node = _option(text, ["nproc-per-node", "ntasks-per-node", "gpus-per-node", "gres"])
    nodes = _option(text, ["nnodes", "nodes", "N"])
    scheduler = "slurm" if slurm else "torchrun" if re.search(r"torchrun|torch\.distributed", launcher) else "none"
    if gpus is not None:
        machines = nodes or max(gpus // GPUS_PER_MACHINE, 1)  # each with that many, or a single one with fewer
        if gpus < 1 or gpus % machines or (nodes is None and gpus > GPUS_PER_MACHINE and gpus % GPUS_PER_MACHINE):
            raise ConfigError(
                f"gpus={gpus}: must be as many on each machine. Say: srun --nodes=N or torchrun --nnodes=N"
            )
        nodes, per_node = machines, gpus // machines
    if scheduler != "none" and per_node is None:
        raise ConfigError("translate: the line does not say how many GPUs, and --batch-size is per GPU. Add gpus=N")
    address = re.search(r"--(?:rdzv[-_]endpoint|master[-_]addr)[ =]([^\s:]+)", launcher)
    return Launch(scheduler, nodes or 1, per_node or 1, address[1] if address else "")


def _option(text: str, names: Iterable[str]) -> int | None:
    """Return the integer value of the first of the options `names` that `text`, a launcher's command, sets.

    names: options without dashes, in the order in which they are looked for; "-" also stands for "_". Of values such
    as gpu:a100:4, the number at the end is taken. Returns None if `text` sets none of these options to an integer.
    """
    patterns = (name.replace("-", "[-_]") for name in names)
    found = (re.search(rf"(?:^|\s)--?{name}(?:=|\s+)(?:[\w-]+:)*(\d+)", text) for name in patterns)
    return next((int(option[1]) for option in found if option), None)
