"""Trackers: W&B for real, offline and against servers that fail; TensorBoard; neither holds up a run."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_metrics import ROOT, records

from data.errors import ConfigError
from train.config import TrackingConfig, Wandb
from train.tracking import check_tracking, redacted, wandb_mode

# Trackers are global to a process: one run of them. argv = run folder, W&B mode, id, step to begin at, how to end
TRACKED = """
import os, signal, sys
from pathlib import Path
from train.config import TrackingConfig, Wandb
from train.metrics import build_logger
folder, mode, wandb_id, first, how = sys.argv[1:]
folder, first = Path(folder), int(first)
logger = build_logger(
    folder, TrackingConfig(wandb=Wandb[mode], project="toys"), wandb_id=wandb_id or None, first_step=first,
    total_steps=8, steps_per_epoch=4, global_batch_size=100,
    run_config={"lr": 0.5, "login": {"api_token": "canary-7", "retries": 3}},
)
print("id", logger.wandb_id)
timing = {"train/data_time": 0.0, "train/batch_time": 0.1, "train/samples_per_second": 1e3,
          "train/samples_per_second_per_device": 1e3, "train/lr": 0.5}
for step in range(first + 1, 7):
    logger.log(step, {"train/loss": 8.0 - step, **timing})
    if step % 2 == 0:
        logger.log(step, {"val/image_to_text_R@1": step / 10, "val/image_to_text_mean_rank": 10.0 - step})
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""


def test_secrets_are_blacked_out() -> None:
    config = {"a": {"API_KEY": "x", "tokens": 3, "list": [{"password": "y", "lr": 1}]}, "secret": None, "lr": 0.1}
    expected = {"a": {"API_KEY": "[redacted]", "tokens": 3, "list": [{"password": "[redacted]", "lr": 1}]}}
    assert redacted(config) == {**expected, "secret": None, "lr": 0.1}


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    return tmp_path / "netrc"


def test_the_mode_of_wandb_is_known_before_anything_starts(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mode(wanted: Wandb) -> str:
        return wandb_mode(TrackingConfig(wandb=wanted)).value

    assert [mode(m) for m in (Wandb.auto, Wandb.offline, Wandb.disabled)] == ["offline", "offline", "disabled"]
    with pytest.raises(ConfigError, match="wandb login"):
        check_tracking(TrackingConfig(wandb=Wandb.online))
    no_key.write_text("machine wandb.elsewhere login user password abc\n")
    assert mode(Wandb.auto) == "offline"
    no_key.write_text("machine wandb.example:8080 login user password abc\n")
    assert mode(Wandb.auto) == "online"
    no_key.write_text("not a netrc")
    assert mode(Wandb.auto) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert [mode(m) for m in Wandb] == ["online", "online", "offline", "disabled"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [mode(m) for m in Wandb] == ["disabled", "online", "offline", "disabled"]


def start(folder: Path, mode: str, wandb_id: str = "", first: int = 0, how: str = "close", **environment: str):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", TRACKED, str(folder), mode, wandb_id, str(first), how],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@cache
def inspect(path: Path, *flags: str) -> str:
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", *flags, "--json", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def history(path: Path) -> list[tuple[int, str]]:
    items = [json.loads(line)["history"]["item"] for line in inspect(path).splitlines() if '"type":"history"' in line]
    return [(item["trainer/global_step"], "train" if "train/loss" in item else "val") for item in items]


@pytest.mark.usefixtures("no_key")
def test_wandb_offline_is_complete_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    run = start(folder, "auto")
    told, complaints = run.communicate(timeout=60)
    assert (run.returncode, complaints) == (0, "")
    wandb_id = re.search(r"id (\w{8})", told)
    assert wandb_id
    assert f"wandb sync {folder}/wandb/offline-run-*-{wandb_id[1]}" in told
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    told = json.loads(inspect(file, "--summary"))
    assert (told["run_id"], told["project"], told["name"], told["state"]) == (wandb_id[1], "toys", "toy", "finished")
    assert told["config"] == {"lr": 0.5, "login": {"api_token": "[redacted]", "retries": 3}}
    assert told["summary"]["trainer/global_step"] == 6
    assert told["summary"]["trainer/samples_seen"] == 600
    assert told["summary"]["val/image_to_text_R@1"] == {"max": 0.6}
    assert told["summary"]["val/image_to_text_mean_rank"] == {"min": 4}
    everything = [(1, "train"), (2, "train"), (2, "val"), (3, "train"), (4, "train"), (4, "val"), (5, "train")]
    assert history(file) == [*everything, (6, "train"), (6, "val")]
    for metric in ('"name":"trainer/global_step","options":{"defined":true,"hidden":true}', '"glob_name":"*"'):
        assert metric in inspect(file)
    assert [(r["step"], "train" if "train/loss" in r else "val") for r in records(folder)] == history(file)
    # killed past the checkpoint of step 4, twice: the same id, and no step a second time
    for _ in range(2):
        run = start(folder, "auto", wandb_id[1], first=4, how="kill")
        run.communicate(timeout=60)
        assert run.returncode == -9
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)
    assert len(files) == 3
    assert {f.name for f in files} == {f"run-{wandb_id[1]}.wandb"}
    assert [history(f) for f in files[1:]] == [[], []]
    for path in folder.rglob("*"):
        assert path.is_dir() or b"canary-7" not in path.read_bytes(), path


class Hub(BaseHTTPRequestHandler):
    """Just enough of W&B's server to begin a run; after that it says nothing, or (`refuses`) it knows no key."""

    protocol_version = "HTTP/1.1"
    refuses = False
    silent = threading.Event()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers.get("content-length", 0))).decode(errors="replace")
        if self.refuses:
            return self._answer({"errors": [{"message": "user is not logged in"}]}, 401)
        if self.silent.is_set():
            time.sleep(60)
        run = {"id": "x", "name": "toy", "displayName": "toy", "config": "{}", "historyLineCount": 0}
        project = {"id": "p", "name": "toys", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket" in query:
            self._answer({"data": {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": True}}})
            self.silent.set()
        else:
            self._answer({"data": {"model": None}})

    def _answer(self, value: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub(refuses: bool) -> Iterator[tuple[str, threading.Event]]:
    """Its address, and whether it has fallen silent."""
    silent = threading.Event()
    handler = type("OneHub", (Hub,), {"silent": silent, "refuses": refuses})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", silent
    server.shutdown()
    server.server_close()


def test_a_tracker_that_fails_costs_seconds_and_nothing_else(tmp_path: Path) -> None:
    """Four at once, for time: one never answers, one falls silent after the start, one refuses the key, one is away."""
    with socket.socket() as mute, hub(False) as (silent, fell_silent), hub(True) as (refusing, _):
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = {"mute": f"http://127.0.0.1:{mute.getsockname()[1]}", "silent": silent, "refusing": refusing}
        address["away"] = "http://127.0.0.1:9"
        begun = time.perf_counter()
        runs = {
            name: start(tmp_path / name, "online", WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40)
            for name, url in address.items()
        }
        told = {name: run.communicate(timeout=60)[0] for name, run in runs.items()}
        assert (
            time.perf_counter() - begun < 80
        )  # 15 s on idle cores; a tracker left to itself waits 90 s and then for ever
    assert fell_silent.is_set()
    assert all(run.returncode == 0 for run in runs.values()), told
    for name in address:
        assert [r["step"] for r in records(tmp_path / name)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert "does not answer within 5 s: tracking offline" in told["mute"]
    assert "tracking offline" in told["away"]
    assert f"`wandb sync {tmp_path}/silent/wandb/run-" in told["silent"]
    assert "W&B does not start" in told["refusing"]
    for name in ("mute", "away"):
        (file,) = (tmp_path / name).glob("wandb/offline-run-*/*.wandb")
        assert len(history(file)) == 9


def test_tensorboard_shows_the_run_once(tmp_path: Path) -> None:
    import_module("tensorboard")
    code = """
import sys
from pathlib import Path
from tests.test_metrics import SHAPE, training
from train.config import TrackingConfig, Wandb
from train.metrics import build_logger
for first, last in ((0, 5), (2, 6)):
    config = TrackingConfig(wandb=Wandb.disabled, tensorboard=True)
    logger = build_logger(Path(sys.argv[1]), config, first_step=first, **SHAPE)
    for step in range(first + 1, last + 1):
        logger.log(step, training(step))
    logger.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard")
events.Reload()
print([(e.step, e.value) for e in events.Scalars("train/loss")])
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == str([(step, float(step)) for step in range(1, 7)])


def test_tensorboard_that_is_not_installed_is_said_at_once() -> None:
    code = """
import sys
sys.modules["tensorboard"] = None
from train.config import TrackingConfig, Wandb
from train.tracking import check_tracking
check_tracking(TrackingConfig(wandb=Wandb.disabled, tensorboard=True))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ConfigError: tracking.tensorboard=true needs the package" in run.stderr
