"""What the checks for signs of failure look at, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from eval.report.curves import Records, Results, column, finite, option

RECENT = 3  # records at the end whose median is what a number is "now"
Level = Literal["bad", "warn", "good"]


@dataclass(frozen=True)
class Sign:
    """detail: the numbers, and what they mean; fix: the key to change."""

    level: Level
    title: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Evidence:
    """What the checks look at. config: the plain tree of config.yaml."""

    config: Mapping[str, Any]
    records: Records
    results: Results

    def option(self, key: str, default: Any = None) -> Any:
        return option(self.config, key, default)

    def number(self, key: str) -> float | None:
        return finite(self.option(key))

    def values(self, name: str) -> list[float]:
        return list(column(self.records, f"train/{name}").values())

    def now(self, name: str) -> float | None:
        """The median of the last few values."""
        values = self.values(name)
        return median(values[-RECENT:]) if values else None

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        steps = column(self.records, "train/loss")
        return bool(steps) and max(steps) > (self.number("optim.warmup") or 0)
