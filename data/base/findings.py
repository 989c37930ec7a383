"""The results of health checks (ok, a warning or a failure, with a fix), for the command `doctor` and the report."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from dyad.data.base.errors import ExitCode

Level = StrEnum("Level", ["ok", "warn", "fail"])  # severity of a finding


@dataclass(frozen=True)
class Finding:
    """The result of one health check, for the command `doctor` and the HTML report. str() gives its printed lines.

    level: ok, warn or fail. topic: what was checked. text: what was found. fix: what to type or set, or "". code: the
    exit code of a command that this failed check ends.
    """

    level: Level
    topic: str
    text: str
    fix: str = ""
    code: ExitCode = ExitCode.HARDWARE

    def __str__(self) -> str:
        fix = f"\n{'':19}→ {self.fix}" if self.fix else ""
        return f"{self.level:<5} {self.topic:<13}{self.text}{fix}"


ok, warn, fail = (partial(Finding, level) for level in Level)
