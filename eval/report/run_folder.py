"""Read a run folder for the HTML report, except the weights. Files may be missing, damaged, or of an older version."""

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dyad.data.base.files import file_inside, leads_inside, open_foreign
from dyad.data.base.json_text import LARGEST, parse_json
from dyad.data.base.secrets import without_secrets
from dyad.eval.report.curves import History, last_value, read_history
from dyad.eval.results.shapes import RESULT, STATE, read_object
from dyad.eval.results.write import result_files
from dyad.train.run_folder.folder import flat, saved_config
from dyad.train.run_folder.restarts import RESTARTS

METRICS, LOG = "metrics.jsonl", "log.txt"
LONGEST = 1 << 20  # bytes of a line
FAILURES = 1000  # how many of the last hardware failures are read
RESUMED = re.compile(rb"going on at step (\d{1,15}) from ")
TAKEN = b". Taken: objective."  # of dyad/run/calibrate.py
NUMBER = re.compile(rb"(objective\.(?:temperature|init_bias))=(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)")


@dataclass(frozen=True)
class RunFolder:
    """The content of a run folder.

    config_text: config.yaml without secrets. options: its values, dotted key → value; but the temperature and bias that
    the run took from its initial weights, as log.txt says. state: run_state.json, {} if it is missing or cannot be
    used. history: metric → step → value, from metrics.jsonl. results: the results in eval/*.json, without files for
    other tools. state and results have the form defined in eval/results/shapes.py. resumed_at: the steps at which the
    run was started again. failures: the last records of restarts.jsonl, at most FAILURES. unread: a line of text for
    each part that could not be read.
    """

    path: Path
    config_text: str
    options: Mapping[str, Any]
    state: Mapping[str, Any]
    history: History
    results: Sequence[Mapping[str, Any]]
    resumed_at: Sequence[int]
    failures: Sequence[Mapping[str, Any]]
    unread: Sequence[str]

    @property
    def status(self) -> str | None:
        """The status in run_state.json; "cut off" for "running" of a process of this machine that has ended."""
        status, pid = self.state.get("status"), self.state.get("pid")
        if status == "running" and pid and self.state.get("host") == socket.gethostname():
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return "cut off"
            except PermissionError:
                pass  # it is another user's
        return status

    @property
    def step(self) -> int:
        """The last training step in run_state.json or metrics.jsonl, whichever is higher; 0 if neither has one."""
        return max(self.state.get("step") or 0, int(last_value(self.history, "step") or 0))


def read_run(path: Path) -> RunFolder:
    """Read all of the run folder `path` except the weights.

    Raises ConfigError if config.yaml is missing, leads out of the folder or cannot be read, or if a newer Dyad made the
    folder. Other files or parts that cannot be read are left out, with a line in RunFolder.unread.
    """
    config = without_secrets(saved_config(path), by_name=True)
    names = ("eval", METRICS, LOG, RESTARTS)
    links = [name for name in names if (path / name).exists() and not leads_inside(path / name, path)]
    unread = [f"{name} is not read: it lies outside this folder" for name in links]
    resumed_at, taken = _read_log(path, unread.append)
    return RunFolder(
        path,
        OmegaConf.to_yaml(config),
        flat(config) | taken,
        read_object(path, "run_state.json", STATE, unread.append) or {},
        read_history(_records(path, METRICS, unread.append)),
        [found for name in result_files(path) if (found := read_object(path, name, RESULT, unread.append))],
        resumed_at,
        list(deque(_records(path, RESTARTS, unread.append), FAILURES)),
        unread,
    )


def _read_log(path: Path, log: Callable[[str], None]) -> tuple[list[int], dict[str, float]]:
    """Read log.txt; return (the steps at which the run was started again, what it took from its initial weights).

    The latter is dotted key → value, without those of auxiliary losses (also.NAME). log: called as by `_lines`.
    """
    steps, taken = set[int](), dict[str, float]()
    for line in _lines(path, LOG, log):
        if found := RESUMED.search(line):
            steps.add(int(found[1]))
        if TAKEN in line and b" | also." not in line:
            taken |= {key.decode(): float(value) for key, value in NUMBER.findall(line, line.index(TAKEN))}
    return sorted(steps), taken


def _records(path: Path, name: str, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of the file `name`, such as metrics.jsonl, in the run folder `path`.

    log: called as by `_lines`, and with one line of text that counts the damaged lines, if there are any. An incomplete
    last line, which remains if the run is killed, does not count as damaged.
    """
    damaged = 0
    for line in _lines(path, name, log):
        record = None
        with suppress(ValueError):
            record = parse_json(line)
        if isinstance(record, dict):
            yield record
        else:
            damaged += line.endswith(b"\n")
    if damaged:
        log(f"{name}: {damaged:,} of its lines cannot be read")


def _lines(path: Path, name: str, log: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the lines of the file `name` in the run folder `path`, each with its newline.

    Yields nothing if the file does not exist or leads out of the folder. In place of a line of more than LONGEST bytes,
    an empty line is yielded. Only about the first LARGEST bytes are read. If the file is larger, or cannot be read,
    `log` is called with a line of text.
    """
    if file := file_inside(path, name):
        try:
            with open_foreign(file) as lines:
                begins = True
                while lines.tell() < LARGEST and (line := lines.readline(LONGEST)):
                    ends = line.endswith(b"\n")
                    if begins:
                        yield line if ends or len(line) < LONGEST else b"\n"
                    begins = ends
                if lines.read(1):
                    log(f"{name}: only its first {LARGEST:,} bytes are read")
        except OSError as error:
            log(f"{name} cannot be read: {error.strerror}")
