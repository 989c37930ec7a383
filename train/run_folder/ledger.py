"""ledger.jsonl: the events that altered a run (replaced samples, skipped optimiser steps), one JSON object per line.

{"step": …, "kind": …, …}; step: number of finished optimiser steps, including the step of the event. Kinds:
    substitute         a sample could not be used. id, shard, key, reason: of that sample; by: the id tried instead
    nonfinite, spike   a step was skipped. first_id, last_id: lowest and highest sample id of its batch; loss, grad_norm
When a run resumes, entries after the step of its checkpoint are removed, as in metrics.jsonl. The file does not exist
before the first event.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dyad.data.base.files import LineFile, read_lines, write_bytes
from dyad.data.base.secrets import without_secrets

LEDGER = "ledger.jsonl"


class Ledger(AbstractContextManager["Ledger"]):
    """Appends the events that altered a run to its ledger.jsonl (replaced samples, skipped steps).

    run_dir: the run folder; None, as on ranks other than 0: nothing is written. step: the number of finished steps at
    the start; the constructor removes entries of later steps, and damaged ones, which an earlier start left. log:
    called with a line when an entry cannot be written, or when entries of an earlier start are damaged. Leaving the
    `with` block closes the file. The constructor raises OSError when it cannot read or rewrite the file.
    """

    def __init__(self, run_dir: Path | None, step: int, log: Callable[[str], None]) -> None:
        self.path = run_dir and run_dir / LEDGER
        self._log, self._file = log, None
        if self.path and self.path.exists():  # entries past `step` will come again
            valid = [line.rstrip() + b"\n" for line, entry in read_lines(self.path, log) if entry["step"] <= step]
            write_bytes(self.path, b"".join(valid))

    def write(self, step: int, kind: str, **fields: int | float | str | None) -> None:
        """Append one event to the run's ledger.jsonl. Does nothing without a run folder, as on ranks other than 0.

        An entry that cannot be written waits in memory for the next `write` or `sync`; no error is raised. step: number
        of finished optimiser steps, with that of the event. kind: "substitute" (a sample was replaced), "nonfinite" or
        "spike" (a step was skipped). fields: further fields of the entry, see the module docstring; credentials in
        their texts are redacted.
        """
        if self.path:
            self._file = self._file or LineFile(self.path, self._log)
            self._file.write(json.dumps({"step": step, "kind": kind, **without_secrets(fields)}))

    def sync(self) -> None:
        """Write entries that wait in memory, and sync ledger.jsonl to the disk. Raises OSError if that fails."""
        if self._file:
            self._file.sync()

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
