"""What the checks for signs of failure look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from eval.report.curves import Records, Results, column, option
from train.tracking.headlines import finite

RECENT = 3  # records at the end whose median is what a number is "now"


@dataclass(frozen=True)
class Evidence:
    """config: the plain tree of config.yaml; records: lines of metrics.jsonl; results: files of eval/."""

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

    def sides(self, name: str) -> dict[str, float]:
        """What a metric of x and y is now, of the sides that have it."""
        return {side: value for side in "xy" if (value := self.now(f"{name}_{side}")) is not None}

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        steps = column(self.records, "train/loss")
        return bool(steps) and max(steps) > (self.number("optim.warmup") or 0)
