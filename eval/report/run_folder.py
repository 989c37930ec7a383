"""What a run folder tells without its weights: read whole, whatever of it there is, of runs of any age."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data.errors import ConfigError
from data.secrets import redacted
from eval.report.curves import column
from eval.results import result_files
from train.tracking.metrics import read_lines

RESULT: Mapping[str, type] = {"dataset": str, "task": str, "metrics": dict}  # what every result has
GONE_ON = re.compile(r"going on at step (\d+) from ")


@dataclass(frozen=True)
class RunFolder:
    """config: the plain tree of config.yaml, redacted; state: of run_state.json, {} without; records: of metrics.jsonl.

    results: of eval/*.json; gone_on: steps where a later start went on; unread: what could not be read, a line each.
    """

    path: Path
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]
    gone_on: Sequence[int]
    unread: Sequence[str] = ()

    @property
    def step(self) -> int:
        """The last step that anything knows of."""
        logged = column(self.records, "step")
        return max([int(self.state.get("step") or 0), *(int(step) for step in list(logged)[-1:])])

    def pictures(self, dataset: str) -> Path:
        """The folder of the pictures that the gallery of a data set shows."""
        return self.path / "eval" / f"{dataset}.pictures"


def read_run(path: Path) -> RunFolder:
    """Raises ConfigError when this is no run folder."""
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"'{path}' is no run folder: it has no config.yaml. Give one, e.g. run=runs/NAME")
    try:
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}/config.yaml cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}/config.yaml is no configuration: it has no keys")
    unread: list[str] = []
    metrics = path / "metrics.jsonl"
    records = [record for _, record in read_lines(metrics)] if metrics.exists() else []
    state = _read_json(path / "run_state.json", unread) if (path / "run_state.json").exists() else None
    results = [found for file in result_files(path / "eval") if (found := _read_json(file, unread, RESULT))]
    return RunFolder(
        path,
        {str(key): value for key, value in redacted(config).items()},
        state or {},
        [record for record in records if isinstance(record, dict)],
        results,
        _gone_on(path / "log.txt"),
        unread,
    )


def _read_json(path: Path, unread: list[str], needed: Mapping[str, type] | None = None) -> dict[str, Any] | None:
    """The object in a file, or None and a line in `unread`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        unread.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return None
    keys = needed or {}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in keys.items()):
        unread.append(f"{path.name} is none of ours: it needs {', '.join(keys) or 'keys'}")
        return None
    return found


def _gone_on(log: Path) -> list[int]:
    """Steps at which a later start of the run went on, as log.txt has them."""
    if not log.exists():
        return []
    with log.open(encoding="utf-8", errors="replace") as lines:
        return sorted({int(found[1]) for line in lines if (found := GONE_ON.search(line))})
