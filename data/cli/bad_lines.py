"""Counts of the messages about bad rows, by fault, of which the first is printed."""

from __future__ import annotations

import re

from dyad.data.base.progress import print_line

SHOWN = 20  # the most kinds of faults that are printed
VARYING = re.compile(r"'[^']*'|[\d,.]+")  # parts in which messages about one fault may differ


class BadLines(dict[str, tuple[int, str]]):
    """Fault → (number of messages, first message). Messages that differ only in numbers and quoted names are about one
    fault. After SHOWN faults, all further ones count as one fault, "others"."""

    @property
    def count(self) -> int:
        """The number of all messages."""
        return sum(count for count, _ in self.values())

    def add(self, line: str, fault: str | None = None, count: int = 1) -> None:
        """Count `count` messages about one fault; `line` is the first. fault: its name; None: made of `line`."""
        fault = VARYING.sub("…", line) if fault is None else fault
        fault = fault if fault in self or len(self) < SHOWN else "others"
        before, first = self.get(fault, (0, line))
        self[fault] = before + count, first

    def __iadd__(self, other: BadLines) -> BadLines:
        for fault, (count, first) in other.items():
            self.add(first, fault, count)
        return self

    def print(self, kind: str = "bad") -> None:
        """Print the first message about each fault, after the word `kind`, and how many others there are."""
        for count, first in self.values():
            print_line(f"{kind}: {first}{f' … and {count - 1:,} more like this' if count > 1 else ''}")
