"""pytest -p gpu.plugin: what misses a package is not run, and figures are appended to RESULTS.md.

A figure is what a test gives to pytest's record_property(name, value). The value is a number or a text, or
(value, share, of): `share` is the value's share of what the hardware can do, `of` says what that is. DYAD_FIGURES names
the file that they go to.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

OURS = ("dyad", "tests", "helpers", "gpu", "gpu_less", "jobs", "faults")
_figures: list[tuple[str, str, object]] = []
_outcomes: dict[str, int] = {}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Turn the error of a file that imports a missing package into "not run"."""
    report: Any = yield
    error = getattr(report, "call", None) and report.call.excinfo
    missing = error and _missing_package(error.value)
    if report.failed and missing:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {missing}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn the failure of a test that imports a missing package into "not run"."""
    report: Any = yield
    missing = (
        call.excinfo and isinstance(call.excinfo.value, ModuleNotFoundError) and _missing_package(call.excinfo.value)
    )
    if report.failed and missing:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: needs {missing}")
    return report


def _missing_package(error: BaseException) -> str:
    """The package of others whose absence is the cause of `error`; "" if that is not the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name and cause.name.split(".")[0] not in OURS:
            return cause.name
        cause = cause.__cause__ or cause.__context__
    return ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.outcome] = _outcomes.get(report.outcome, 0) + 1
    if report.when == "call":
        _figures.extend((report.nodeid, name, value) for name, value in report.user_properties)


def pytest_sessionfinish() -> None:
    if _figures and "DYAD_FIGURES" in os.environ:
        with Path(os.environ["DYAD_FIGURES"]).open("a") as file:
            file.write(section())


def section() -> str:
    """The dated section: the machine, how many tests, and a line per figure with the command that measures it."""
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(_outcomes.items()))
    lines = [f"\n## On a GPU, {day}\n", f"{machine()}; {outcomes}.\n"]
    lines += ["| figure | value | share of what the hardware can do | command |", "|---|---|---|---|"]
    for test, name, value in _figures:
        value, share, of = value if isinstance(value, tuple | list) else (value, None, "")
        of_hardware = "" if share is None else f"{share:.2f} of {of}"
        lines.append(f"| {name} | {_shown(value)} | {of_hardware} | `bash tests/gpu.sh {shlex.quote(test)}` |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> str:
    """The GPUs, driver, torch and NCCL of this machine, in one line."""
    import torch
    import torch.cuda.nccl

    if not torch.cuda.is_available():
        return f"no GPU, {platform.machine()}, torch {torch.__version__}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        driver = "unknown"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    names = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return f"{names}, driver {driver}, torch {torch.__version__}, NCCL {nccl}"
