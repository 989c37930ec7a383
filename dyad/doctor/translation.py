"""The state of a translation: an open_clip command, and the Dyad command that translate.py builds from it."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dyad.data.base.errors import ConfigError
from dyad.doctor.open_clip_line import Launch
from dyad.train.arguments import as_argument
from dyad.train.cli import open_clip_flags as flags

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")


@dataclass
class Translation:
    """An open_clip command and the Dyad command that replaces it, built by the functions RULES of translate.py in turn.

    launch: the processes that the command starts. given: flag without dashes → its values in the open_clip command.
    keys: key → value for `python -m train`; a text that is a number stands for this number. notes: lines for the user.
    implied: key → whether its value is a default of open_clip, and not from a flag in the command. refused: why the
    command cannot be translated, a line each.
    """

    launch: Launch
    given: Mapping[str, list[str]]
    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    implied: dict[str, bool] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The keys translated from the open_clip command line, as key=value arguments for `python -m train`."""
        return [*map(self.argument, self.keys)]

    def __str__(self) -> str:
        """Return the translation to print: the Dyad shell command, then the notes as shell comments."""
        return "\n".join([f"{self.launch.command} {shlex.join(self.arguments)}", *(f"# {note}" for note in self.notes)])

    def argument(self, key: str) -> str:
        """Return key=value of a key that is set; a number stays as it is typed on the open_clip command line."""
        value = self.keys[key]
        return f"{key}={value if NUMBER.fullmatch(str(value)) else as_argument(value)}"

    @property
    def world_size(self) -> int:
        """The number of processes that the open_clip command line starts on all machines; each has one GPU."""
        return self.launch.nodes * self.launch.per_node

    @property
    def steps_per_epoch(self) -> int | None:
        """The optimiser steps per epoch as open_clip counts them for shards; None if they are unknown.

        open_clip rounds batches up so that every loader worker has the same number of them. They are unknown with
        --dataset-type csv, or without --train-num-samples. Raises ConfigError for a flag that is no whole number.
        """
        if "train-num-samples" not in self.given or self.text("dataset-type") == "csv":
            return None
        workers = max(self.number("workers", 0), 1)
        batches = math.ceil(self.number("train-num-samples") / (self.number("batch-size") * self.world_size))
        return max(math.ceil(batches / workers) * workers // self.number("accum-freq"), 1)

    def text(self, flag: str) -> str:
        """Return the values of an open_clip flag on the command line being translated, joined by spaces.

        flag: without dashes. If the command line lacks it: returns open_clip's default value if the table DEFAULTS of
        train/cli/open_clip_flags.py lists one (it lists those that differ from our defaults), else "".
        """
        return " ".join(self.given[flag]) if flag in self.given else flags.DEFAULTS.get(flag, "")

    def number(self, flag: str, least: int = 1) -> int:
        """Return the value of an open_clip flag, or open_clip's default, as int.

        Raises ConfigError if the value is not a whole number of `least` or more, or if there is none.
        """
        text = self.text(flag)
        if not NUMBER.fullmatch(text) or not float(text).is_integer() or float(text) < least:
            raise ConfigError(f"--{flag} {text}: must be a whole number, {least} or more")
        return int(float(text))

    def set(self, key: str, value: object, implied: bool = False) -> None:
        """Set the Dyad configuration key `key` to `value` in the translation of an open_clip command line.

        An earlier value is replaced. implied: whether it is a default of open_clip, and not from a flag on the command
        line.
        """
        self.keys[key] = value
        self.implied[key] = implied

    def note(self, flag: str, text: str) -> None:
        """Add a note to print with the translation: the open_clip flag with its values, then `text`."""
        self.notes.append(f"{self._shown(flag)}: {text}")

    def drop(self, names: Iterable[str], why: str) -> None:
        """Remove the keys that were set from the open_clip flags `names`, and add a note for each such flag.

        Flags that are not on the command line are skipped. For flags that have no effect in this command line. why: the
        text of the notes.
        """
        for flag in sorted(self.given.keys() & {*names}):
            self.keys.pop(flags.KEYS.get(flag, ""), None)
            self.note(flag, why)

    def note_given(self, texts: Mapping[str, str], prefix: str = "") -> None:
        """Add a note for each open_clip flag of `texts` (flag → text) that the command line being translated has.

        prefix: put before each text.
        """
        for flag in sorted(self.given.keys() & texts.keys()):
            self.note(flag, f"{prefix}{texts[flag]}")

    def refuse(self, flag: str, why: str) -> None:
        """Refuse an open_clip flag that changes the training and has no Dyad key: add a line to `refused`.

        Nothing is raised here: `translate` raises after all rules. why: the reason to show.
        """
        self.refused.append(f"{self._shown(flag)}: not here, and it changes what is learned: {why}. Or leave it out")

    def _shown(self, flag: str) -> str:
        """Return "--FLAG VALUES" for a message, with the values on the open_clip command line; cut to 60 characters.

        If the flag is not on the command line, or has no values, returns "--FLAG".
        """
        shown = f"--{flag} {self.text(flag)}".strip() if flag in self.given else f"--{flag}"
        return shown if len(shown) <= 60 else f"{shown[:57]}…"
