"""What python -m train.doctor finds: one line each, ok, warn or fail, with the fix. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from data.errors import ExitCode, UserError


class Level(Enum):
    ok = "ok"
    warn = "warn"
    fail = "fail"


@dataclass(frozen=True)
class Finding:
    """topic: what was looked at; fix: what to type or set; code: of the exit, when this is a failure."""

    level: Level
    topic: str
    text: str
    fix: str = ""
    code: ExitCode = ExitCode.HARDWARE

    def __str__(self) -> str:
        fix = f"\n{'':19}→ {self.fix}" if self.fix else ""
        return f"{self.level.value:<5} {self.topic:<13}{self.text}{fix}"

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "level": self.level.value, "code": int(self.code)}


def ok(topic: str, text: str) -> Finding:
    return Finding(Level.ok, topic, text)


def warn(topic: str, text: str, fix: str) -> Finding:
    return Finding(Level.warn, topic, text, fix)


def fail(topic: str, text: str, fix: str = "", code: ExitCode = ExitCode.HARDWARE) -> Finding:
    return Finding(Level.fail, topic, text, fix, code)


def found(topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; a mistake of the user is a failure with its own words, anything else is told as it is."""
    try:
        yield from check()
    except UserError as error:
        yield fail(topic, str(error), code=ExitCode(error.exit_code))
    except Exception as error:  # a doctor does not die of what it looks at
        yield fail(topic, f"cannot be looked at: {type(error).__name__}: {str(error).splitlines()[:1]}")


def size(count: float) -> str:
    """Bytes as people read them: 512 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
