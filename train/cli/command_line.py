"""The command line of `python -m train`: flags, arguments key=value, and the runs of a sweep. Imports no torch."""

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dyad.data.base.errors import ConfigError

# Launcher of Hydra → the start of a command that does its work here; the arguments of a run follow
LAUNCHERS = {"joblib": "-P2 python -m train", "submitit_slurm": "sbatch --gpus-per-node=8 launch/slurm.sbatch"}


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line of `python -m train`.

    words: the arguments key=value. sweep (-m): train once for each combination of the values that `words` list.
    show: what to print in place of training: "job" (--cfg job), the configuration; "runs" (--cfg runs), the arguments
    of each run; "": nothing, train.
    """

    words: list[str]
    sweep: bool
    show: str

    def runs(self) -> list[list[str]]:
        """Return one list of key=value arguments for each run: for each combination of a sweep (-m), else one run.

        Raises ConfigError for an invalid sweep, and with --cfg runs for a value of several lines.
        """
        for word in self.words if self.show == "runs" else ():
            if len(f"{word}.".splitlines()) > 1:  # each line of the output is a run
                key = word.partition("=")[0]
                raise ConfigError(f"{key}: --cfg runs cannot show a value of several lines. Put it in a recipe")
        if not self.sweep:
            return [self.words]
        return [list(words) for words in itertools.product(*map(_swept, self.words))]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of a `python -m train` command. The flags -m, --cfg and --resolve may stand anywhere.

    Unknown flags stay in `words` of the result; composing the configuration refuses them. Short keys are written in
    full there (`expand_short_keys`). Raises ConfigError for a --cfg other than `job` and `runs`, and for a launcher of
    Hydra other than `basic`: the message has a command that takes its place.
    """
    words: list[str] = []
    sweep, show, launcher = False, "", ""
    rest = iter(arguments)
    for word in rest:
        flag, _, value = word.partition("=")
        if word in ("-m", "--multirun"):
            sweep = True
        elif flag in ("-c", "--cfg"):
            show = value or next(rest, "")
            if show not in ("job", "runs"):
                raise ConfigError(f"'{flag} {show}': --cfg job prints the configuration, --cfg runs the runs of -m")
        elif flag == "hydra/launcher":
            launcher = value
        elif word != "--resolve":  # a flag of --cfg job, which always resolves
            words.append(word)
    if launcher not in ("", "basic"):  # basic: one run after the other, as -m does
        each = LAUNCHERS.get(launcher, LAUNCHERS["joblib"])
        fix = f"python -m train -m {shlex.join(words)} --cfg runs | xargs -r -L1 {each}"
        raise ConfigError(f"hydra/launcher={launcher}: Hydra's launchers are not used. Write:  {fix}")
    return CommandLine(expand_short_keys(words), sweep, show)


def _swept(word: str) -> list[str]:
    """Expand a sweep argument into one argument for each value: key=a,b,c → key=a, key=b, key=c.

    word: an argument of the command line; one that is no sweep is returned alone. Raises ConfigError if the argument
    cannot be parsed.
    """
    if word.startswith("-") or "=" not in word:
        return [word]
    override = parse_argument(word)
    if not override.is_sweep_override():
        return [word]
    key, _, values = word.partition("=")
    if {*values}.isdisjoint("'\"\\([{"):  # plain values stay as they are typed: Hydra makes 20240101 of 2024_01_01
        return [f"{key}={value.strip()}" for value in values.split(",")]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, AssertionError) as error:
        raise ConfigError(f"'{word}': a sweep is written key=a,b,c or key=range(1,4)") from error


def expand_short_keys(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with the short keys `resume` and `plan` written in full, resume.mode and plan.on.

    Longer keys, such as resume.allow_batch_change, and all other arguments stay as they are.
    """
    full = {"resume": "resume.mode", "plan": "plan.on"}
    return [re.sub(r"^(resume|plan)(?==|$)", lambda found: full[found[1]], argument) for argument in arguments]


def parse_argument(word: str) -> Override:
    """Parse one argument, such as key=value or ~key, with Hydra, and return Hydra's Override.

    If Hydra cannot, raises ConfigError that shows how to quote the value, or that names the key of a number that is too
    long.
    """
    key, _, value = word.partition("=")
    try:
        return OverridesParser.create().parse_override(word)
    except ValueError as error:  # of int()
        raise ConfigError(f"{key:.80}: has a number of more than 4,300 digits. Python reads no longer ones") from error
    except HydraException as error:
        quoted = value.strip("'\"")
        fixed = shlex.quote(f'{key}="{quoted}"')
        raise ConfigError(f"{key.lstrip('+~')}: cannot read {value!r} unquoted. Write:  {fixed}") from error
