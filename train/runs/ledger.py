"""ledger.jsonl: what did not go as planned and changed the run all the same, one JSON object a line.

{"step": …, "kind": …, …}; step: the finished optimiser steps with the one that it happened in. Kinds:
    substitute   a sample could not be used: id, shard, key, reason; by: the id that was tried in its stead
    nonfinite, spike   a step was not taken: first_id, last_id of its batch, loss, grad_norm
Like metrics.jsonl it is cut where the run goes on. There is no file as long as there is nothing to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from data.files import LineFile, read_lines, write_bytes
from data.secrets import without_secrets

LEDGER = "ledger.jsonl"


class Ledger:
    """Of rank 0; of a folder None, on the other ranks, it does nothing. say: hears that the disk takes no lines."""

    def __init__(self, run_dir: Path | None, step: int, say: Callable[[str], None]) -> None:
        self.path = run_dir and run_dir / LEDGER
        self._say, self._file = say, None
        if self.path and self.path.exists():
            _cut(self.path, step, say)

    def note(self, step: int, kind: str, **facts: int | float | str | None) -> None:
        if self.path:
            self._file = self._file or LineFile(self.path, self._say)
            self._file.write(json.dumps({"step": step, "kind": kind, **without_secrets(facts)}))

    def sync(self) -> None:
        """Wait until the disk holds every line. Raises OSError when it does not take them."""
        if self._file:
            self._file.sync()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def _cut(path: Path, step: int, say: Callable[[str], None]) -> None:
    """Take back, in one move, the lines past `step`, which will come again, and damaged ones."""
    kept = [line.rstrip() + b"\n" for line, record in read_lines(path, say) if record["step"] <= step]
    write_bytes(path, b"".join(kept))
