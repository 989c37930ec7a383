"""Offline, quiet, and without the tests of hardware that is not here: those are left out, not skipped.

So are the long ones, marked soak, unless asked for: pytest --soak.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

import pytest
from helpers import durations
from helpers.cli import Commands, server, share_tables
from helpers.tiny_runs import make_models, tiny_arguments

gc.set_threshold(100_000, 20, 10)  # as commands have it, for the same reason: the many objects of imports
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# nohup and a background job of a script have these ignored by all that is started here
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def commands() -> Commands:
    """Starts `python -m …` without the seconds of its imports."""
    return server()


@pytest.fixture(scope="session", autouse=True)
def closed_server() -> Iterator[None]:
    """What started commands ends with the tests, and well."""
    yield
    if server.cache_info().currsize:
        server().close()


@pytest.fixture(scope="session")
def models(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with open_clip.json and a transformers folder bert/, both tiny."""
    return make_models(commands, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def exact_bert(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/bert without dropout, which draws anew for each number of processes."""
    folder = shutil.copytree(models / "bert", tmp_path_factory.mktemp("exact") / "bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tiny(models: Path, tmp_path: Path) -> Callable[[dict[str, Any]], list[str]]:
    """The arguments of a run of seconds, with run folders in tmp_path/runs; keys as they are typed override."""
    return lambda keys: tiny_arguments(models, tmp_path / "runs", keys)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that is not there, neither before nor after."""
    yield tmp_path / "canary"
    assert not list(tmp_path.rglob("canary*"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws without a generator of its own draws the same numbers each time."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_mask() -> Iterator[None]:
    """A command that runs inside a test (dyad.process.run) hides its files from others; the next test's are its own."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


def _found(program: str) -> bool:
    return shutil.which(program) is not None


def _serves(package: str) -> bool:
    """Is apt here, and is this the version that its sources offer?"""
    command = ["apt-cache", "show", package]
    return _found("apt-get") and _found("dpkg-deb") and not subprocess.run(command, capture_output=True).returncode


def _mounts() -> bool:
    command = ["unshare", "--mount", "--map-root-user", "true"]
    return _found("unshare") and not subprocess.run(command, capture_output=True).returncode


def _joins_machines() -> bool:
    command = "ip link add one type veth peer name two && hostname one"
    spaces = ["unshare", "--map-root-user", "--net", "--uts", "--mount"]
    return _mounts() and not subprocess.run([*spaces, "sh", "-c", command], capture_output=True).returncode


def _compiles_our_kernels() -> bool:
    """Is Triton here, and do its loops know the option of ours? That of torch 2.8 does not."""
    if find_spec("triton") is None:
        return False
    import triton.language as tl

    return "disable_licm" in signature(tl.range).parameters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also what takes minutes: many kills, long runs")
    parser.addoption("--durations-table", action="store_true", help="write tests/durations.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--durations-table") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


class Durations:
    """Adds up the seconds of each file, as the processes report them."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.location[0]][report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # not of a part, after Ctrl-C
            durations.write({path: list(tests.values()) for path, tests in self.seconds.items()})


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of imports and items, which each full collection would visit


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton prints a page at the exit if its objects are still there


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch
    from torch._C import _distributed_c10d as c10d

    if tokenizer := sys.modules.get("open_clip.tokenizer"):
        share_tables(tokenizer.SimpleTokenizer)
    here = {
        "gpu": torch.cuda.is_available(),
        "triton": _compiles_our_kernels(),
        "pretended": _found("gcc") and sys.platform == "linux" and hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
        "fake_gpu": hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
        "flight_recorder": hasattr(c10d, "_dump_fr_trace_file"),
        "uniform_ranks": hasattr(c10d.FakeProcessGroup.Options, "simulate_uniform_ranks"),
        "npm": _found("npm"),
        "workspaces": find_spec("wandb_workspaces") is not None,
        "linux": sys.platform == "linux",
        "compiler": _found("g++"),
        "mounts": _mounts(),
        "machines": _joins_machines(),
        "chromium": Path("/usr/bin/chromium").exists(),
        "soak": bool(config.getoption("soak")),
        "debian": any(i.get_closest_marker("debian") for i in items) and _serves("sword-text-web=426.0-1"),
    }
    absent = [i for i in items if any(i.get_closest_marker(name) and not found for name, found in here.items())]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]
    if hasattr(config, "workerinput"):  # one of several processes, which take the files in this order
        seconds = {row.path: row.seconds for row in durations.read()}
        items.sort(key=lambda item: -seconds.get(item.location[0], inf))
