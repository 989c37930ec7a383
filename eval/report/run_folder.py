"""Read a run folder without its weights: everything that is there, of runs of any age."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter

from dyad.data.base.json_text import LARGEST, parse_json
from dyad.data.base.secrets import redacted
from dyad.data.base.untrusted_paths import file_inside, inside
from dyad.eval.report.curves import column
from dyad.eval.results.shapes import CONFIG, RESULT, STATE, fitting, read_object
from dyad.eval.results.write import result_files
from dyad.train.run_folder.folder import saved_config

METRICS, LOG = "metrics.jsonl", "log.txt"
LONGEST = 1 << 20  # bytes of a line
GONE_ON = re.compile(rb"going on at step (\d{1,15}) from ")


@dataclass(frozen=True)
class RunFolder:
    """The content of a run folder, in the shapes of eval/results/shapes.py.

    config: the tree of config.yaml without secrets; config_text: the same as YAML. state: run_state.json, {} if it is
    missing. records: metrics.jsonl. results: eval/*.json. gone_on: the steps at which later starts continued. unread: a
    line for each part that could not be read.
    """

    path: Path
    config: Mapping[str, Any]
    config_text: str
    state: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]
    gone_on: Sequence[int]
    unread: Sequence[str] = ()

    @property
    def step(self) -> int:
        """The last step in run_state.json or metrics.jsonl."""
        logged = column(self.records, "step")
        return max([int(self.state.get("step") or 0), *(int(step) for step in list(logged)[-1:])])


def read_run(path: Path) -> RunFolder:
    """Read a run folder; raises ConfigError if it is none."""
    unread: list[str] = []
    config = redacted(saved_config(path))
    shown, wrong = fitting(CONFIG, config)
    unread += [f"config.yaml: {part} is left out: {said}" for part, said in wrong.items()]
    links = [name for name in ("eval", METRICS, LOG) if (path / name).exists() and not inside(path, name)]
    unread += [f"{name} is not read: it lies outside this folder" for name in links]
    return RunFolder(
        path,
        shown,
        OmegaConf.to_yaml(config),
        _object(path, "run_state.json", STATE, unread) or {},
        _records(path, unread),
        [found for name in result_files(path) if (found := _object(path, name, RESULT, unread))],
        _gone_on(path, unread),
        unread,
    )


def _object(path: Path, name: str, shape: TypeAdapter[Any], unread: list[str]) -> dict[str, Any] | None:
    if not (path / name).exists():
        return None
    found, lines = read_object(path, name, shape)
    unread += lines
    return found


def _records(path: Path, unread: list[str]) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; its last line may be incomplete after a kill."""
    found, others = [], 0
    for line in _lines(path, METRICS, unread):
        record = None
        with suppress(ValueError):
            record = parse_json(line)
        if isinstance(record, dict):
            found.append(record)
        else:
            others += line.endswith(b"\n")
    unread += [f"metrics.jsonl: {others:,} of its lines cannot be read"] if others else []
    return found


def _gone_on(path: Path, unread: list[str]) -> list[int]:
    """The steps at which later starts of the run continued, from log.txt."""
    return sorted({int(found[1]) for line in _lines(path, LOG, unread) if (found := GONE_ON.search(line))})


def _lines(path: Path, name: str, unread: list[str]) -> Iterator[bytes]:
    """The lines of a file in the folder, an empty line for each that is too long; none if there is no such file."""
    if file := file_inside(path, name):
        with file.open("rb") as lines:
            begins = True
            while lines.tell() < LARGEST and (line := lines.readline(LONGEST)):
                ends = line.endswith(b"\n")
                if begins:
                    yield line if ends or len(line) < LONGEST else b"\n"
                begins = ends
            if lines.read(1):
                unread.append(f"{name}: only its first {LARGEST:,} bytes are read")
