"""What a run records and says: metrics.jsonl, log.txt, the console, W&B (really, offline and against servers), TensorBoard."""

import json
import math
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigError
from train.config import TrackingConfig, Wandb
from train.metrics import Logger, build_logger, cut
from train.progress import Lines
from train.tracking import check_tracking, redacted, wandb_mode

ROOT = Path(__file__).parent.parent
OFF = TrackingConfig(wandb=Wandb.disabled)
SHAPE: dict[str, Any] = {"total_steps": 8, "steps_per_epoch": 4, "global_batch_size": 100, "run_config": {}}
# A run of our own making for the trackers, which are global to a process: argv = run folder, W&B mode, id, step to begin at
TRACKED = """
import os, signal, sys, time
from pathlib import Path
from train.config import TrackingConfig, Wandb
from train.metrics import build_logger
folder, mode, wandb_id, first, how = Path(sys.argv[1]), Wandb[sys.argv[2]], sys.argv[3] or None, int(sys.argv[4]), sys.argv[5]
start = time.perf_counter()
logger = build_logger(
    folder, TrackingConfig(wandb=mode, project="toys"), wandb_id=wandb_id, first_step=first, total_steps=8,
    steps_per_epoch=4, global_batch_size=100, run_config={"lr": 0.5, "login": {"api_token": "canary-7", "retries": 3}},
)
print("id", logger.wandb_id, "start", time.perf_counter() - start)
timing = {"train/data_time": 0.0, "train/batch_time": 0.1, "train/samples_per_second": 1e3,
          "train/samples_per_second_per_device": 1e3, "train/lr": 0.5}
for step in range(first + 1, 7):
    logger.log(step, {"train/loss": 8.0 - step, **timing})
    if step % 2 == 0:
        logger.log(step, {"val/image_to_text_R@1": step / 10, "val/image_to_text_mean_rank": 10.0 - step})
if how == "kill":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
start = time.perf_counter()
logger.close()
print("close", time.perf_counter() - start)
"""


def training(loss: float, **more: float) -> dict[str, float]:
    timing = {"data_time": 0.012, "batch_time": 0.15, "samples_per_second": 1700.0, "samples_per_second_per_device": 850.0}
    values = {"loss": loss, "lr": 5e-4, "logit_scale": 14.2857, "mi_bound": 2.3, "log_k": 5.5, **timing, **more}
    return {f"train/{name}": value for name, value in values.items()}


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_scalar_is_in_metrics_jsonl_at_once(tmp_path: Path) -> None:
    logger = build_logger(tmp_path, OFF, first_step=0, **SHAPE)
    logger.log(1, training(3.5))
    logger.log(2, {"val/image_to_text_R@1": 0.25})
    expected = [
        {"step": 1, "samples_seen": 100, **training(3.5)},
        {"step": 2, "samples_seen": 200, "val/image_to_text_R@1": 0.25},
    ]
    assert records(tmp_path) == expected  # before close: every line is flushed
    logger.log(3, training(math.nan))
    logger.flush()
    logger.close()
    assert records(tmp_path)[2]["train/loss"] is None
    assert logger.wandb_id is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "metrics.jsonl"]


def test_off_rank_0_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    logger = Logger()
    logger.log(1, training(1.0))
    logger.print("x")
    logger.flush()
    logger.close()
    assert capsys.readouterr().out == ""


# open_clip's own line (src/open_clip_train/train.py), as log parsers read it
OPEN_CLIP = re.compile(
    r"Train Epoch: (?P<epoch>\d+) \[ *(?P<seen>\d+)/(?P<total>\d+) \((?P<percent>\d+)%\)\] "
    r"Data \(t\): (?P<data>[\d.]+) Batch \(t\): (?P<batch>[\d.]+), (?P<rate>[\d.]+)/s, (?P<per>[\d.]+)/s/\w+ "
    r"LR: (?P<lr>[\d.]+) Logit Scale: (?P<scale>[\d.]+) (?:.*?)Loss: (?P<loss>[\d.]+) \((?P<mean>[\d.]+)\)"
)


def test_the_console_speaks_open_clip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = build_logger(tmp_path, OFF, first_step=0, **SHAPE)
    logger.print("two\nlines")
    logger.log(4, training(3.0))
    logger.log(5, training(4.0))
    logger.log(6, training(5.0))
    logger.log(8, {"val/image_to_text_R@1": 0.25, "eval/wds/acc1": 0.5})
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert out[3] == (
        "Train Epoch: 1 [100/400 (25%)] Data (t): 0.012 Batch (t): 0.150, 1700.00/s, 850.000/s/device "
        "LR: 0.000500 Logit Scale: 14.286 Loss: 4.0000 (4.0000) MI: 2.30 of 5.50 ETA 0:00:00"
    )
    parsed = [match.groupdict() for line in out if (match := OPEN_CLIP.match(line))]
    assert [(p["epoch"], p["seen"], p["loss"], p["mean"]) for p in parsed] == [
        ("0", "400", "3.0000", "3.0000"),
        ("1", "100", "4.0000", "4.0000"),
        ("1", "200", "5.0000", "4.5000"),
    ]
    assert out[-1] == "Eval Epoch: 1 image_to_text_R@1: 0.2500\teval/wds/acc1: 0.5000"
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" | INFO | ")[1] for line in log] == out
    assert all(re.match(r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d \| INFO \| ", line) for line in log)


def test_what_an_objective_lacks_is_left_out_of_the_line() -> None:
    record = {k: v for k, v in training(1.0, batch_time=30.0).items() if k.split("/")[1] not in ("logit_scale", "mi_bound")}
    line = Lines(total_steps=1000, steps_per_epoch=10, global_batch_size=4)({"step": 10, **record})
    assert "Scale" not in line
    assert "MI" not in line
    assert line.endswith("ETA 8:15:00")


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.test_metrics import OFF, SHAPE, training
from train.metrics import build_logger
logger = build_logger(Path(sys.argv[1]), OFF, first_step=2, **SHAPE)
logger.log(4, training(3.0))
logger.log(4, {"val/image_to_text_R@1": 0.25})
logger.close()
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=theirs, env=environment) as run:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert run.returncode == 0
    text = re.sub(r"\x1b\[[\d;?]*\w", "", seen.decode())
    assert "4/8 Loss: 3.0000 1700./s ETA 0:00:01" in text
    assert "Train Epoch: 0 [" not in text
    assert "Eval Epoch: 0 image_to_text_R@1: 0.2500" in text
    assert "Train Epoch: 0 [400/400 (100%)]" in (tmp_path / "log.txt").read_text()


def test_a_resumed_run_takes_back_what_is_past_its_checkpoint(tmp_path: Path) -> None:
    first = build_logger(tmp_path, OFF, first_step=0, **SHAPE)
    for step in range(1, 7):
        first.log(step, training(step))
        if step % 2 == 0:
            first.log(step, {"val/R@1": step})
    first.close()
    whole = (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # torn by a kill
    again = build_logger(tmp_path, OFF, first_step=4, **SHAPE)
    assert [(r["step"], "val/R@1" in r) for r in records(tmp_path)] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]
    for step in (5, 6):
        again.log(step, training(step))
    again.log(6, {"val/R@1": 6})
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert not list(tmp_path.glob(".*"))


def test_an_evaluation_that_is_owed_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "train/loss": 1}\n{"step": 2, "val/R@1": 1}\n')
    assert cut(path, 2) == set()
    assert len(records(tmp_path)) == 2
    assert cut(path, 2, evaluation_owed=True) == {(2, False)}
    assert records(tmp_path) == [{"step": 2, "train/loss": 1}]
    assert cut(path, 0) == {(2, True)}
    assert path.read_text() == ""


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


def track(folder: Path, mode: str, wandb_id: str = "", first: int = 0, how: str = "close", **environment: str):
    """Run TRACKED; (its output, seconds it took, from outside)."""
    folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", TRACKED, str(folder), mode, wandb_id, str(first), how],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return run, time.perf_counter() - start


def inspect(path: Path, *flags: str) -> str:
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", *flags, "--json", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def history(path: Path) -> list[tuple[int, str]]:
    items = [json.loads(line)["history"]["item"] for line in inspect(path).splitlines() if '"type":"history"' in line]
    return [(item["trainer/global_step"], "train" if "train/loss" in item else "val") for item in items]


@pytest.mark.usefixtures("no_key")
def test_wandb_offline_is_complete_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    run, _ = track(folder, "auto")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    wandb_id = re.search(r"id (\w{8})", run.stdout)
    assert wandb_id
    assert f"wandb sync {folder}/wandb/offline-run-*-{wandb_id[1]}" in run.stdout
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
        run, _ = track(folder, "auto", wandb_id[1], first=4, how="kill")
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


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    handler = type("OneHub", (Hub,), {"silent": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield handler
    server.shutdown()
    server.server_close()


def assert_complete(folder: Path) -> None:
    assert [r["step"] for r in records(folder)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_server_that_never_answers_costs_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run, seconds = track(tmp_path / "toy", "online", WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40)
    assert run.returncode == 0, run.stderr
    assert "does not answer within 5 s: tracking offline" in run.stdout
    assert seconds < 30
    assert_complete(tmp_path / "toy")
    (file,) = (tmp_path / "toy").glob("wandb/offline-run-*/*.wandb")
    assert len(history(file)) == 9


def test_a_server_that_falls_silent_costs_seconds(tmp_path: Path, hub) -> None:
    run, seconds = track(tmp_path / "toy", "online", WANDB_BASE_URL=hub.address, WANDB_API_KEY="k" * 40)
    assert run.returncode == 0, run.stderr
    assert hub.silent.is_set()
    assert "W&B is left out from here" in run.stdout
    assert seconds < 35  # the tracker's 30 s and the start of Python
    assert_complete(tmp_path / "toy")


def test_a_key_that_is_refused_costs_seconds(tmp_path: Path, hub) -> None:
    hub.refuses = True
    run, seconds = track(tmp_path / "toy", "online", WANDB_BASE_URL=hub.address, WANDB_API_KEY="k" * 40)
    assert run.returncode == 0, run.stderr
    assert "W&B does not start" in run.stdout
    assert seconds < 35
    assert_complete(tmp_path / "toy")


def test_tensorboard_shows_the_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
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
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
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
