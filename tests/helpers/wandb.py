"""W&B runs of their own process, what `wandb leet inspect` reads back of them, and servers that fail."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.train.tracking.test_logger import ROOT

# Trackers are global to a process: one run of them. argv = run folder, W&B mode, id, step to begin at, how to end
TRACKED = """
import os, signal, sys
from pathlib import Path
from dyad.eval.results.panels import panels
from tests.helpers.report import finished
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.run_schedule import RunSchedule
from dyad.train.tracking.logger import build_logger
from dyad.train.tracking.wandb_mode import resolve_wandb_mode
folder, mode, wandb_id, first, how, _ = sys.argv[1:]
folder, first = Path(folder), int(first)
config = resolve_wandb_mode(TrackingConfig(wandb=Wandb[mode], project="toys"), folder, print)
run_config = {"lr": 0.5, "login": {"api_token": "canary-7", "retries": 3}, "train": "https://me:canary-7@host/x.tar"}
schedule = RunSchedule(first, 8, 100, 1, log_every=1, evaluate_every=0, save_every=9, steps_per_epoch=4)
logger = build_logger(folder, config, schedule, run_config, wandb_id or None)
print("id", logger.wandb_id)
timing = {"train/data_time": 0.0, "train/batch_time": 0.1, "train/samples_per_second": 1e3,
          "train/samples_per_second_per_device": 1e3, "train/lr": 0.5}
if how == "freeze":
    children = [c for task in Path("/proc/self/task").iterdir() for c in (task / "children").read_text().split()]
    (service,) = [int(c) for c in children if Path(f"/proc/{c}/comm").read_text().startswith("wandb-core")]
    os.kill(service, signal.SIGSTOP)
    print("frozen", service)
for step in range(first + 1, 6 if how == "kill" else 7):
    logger.log(step, {"train/loss": 8.0 - step, **timing})
    if step % 2 == 0:
        logger.log(step, {"val/image_to_text_R@1": step / 10, "val/image_to_text_mean_rank": 10.0 - step})
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
results, report = finished(folder)
logger.conclude([panels(result, folder) for result in results], report)
logger.close()
"""


@dataclass
class Started:
    """A run of its own process. Its words go to files: W&B's service may hold a pipe open longer than the run lives."""

    process: subprocess.Popen[bytes]
    told: Path
    complaints: Path

    def end(self) -> str:
        """Wait for the end of the run, and return what it printed."""
        self.process.wait(timeout=100)
        return self.told.read_text()


def start(
    folder: Path, mode: str, wandb_id: str = "", first: int = 0, how: str = "close", **environment: str
) -> Started:
    folder.mkdir(exist_ok=True)
    told, complaints = folder.with_suffix(".out"), folder.with_suffix(".err")
    with told.open("wb") as out, complaints.open("wb") as err:
        command = [
            sys.executable,
            "-c",
            TRACKED,
            str(folder),
            mode,
            wandb_id,
            str(first),
            how,
            "x=https://canary-7@host",
        ]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=out, stderr=err)
    return Started(process, told, complaints)


@cache
def inspect(path: Path, *flags: str) -> str:
    """Return what `wandb leet inspect --json` prints of the file of a run."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", *flags, "--json", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sent(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind, as "history" or "artifact", in the file of a run."""
    return [json.loads(line)[kind] for line in inspect(path).splitlines() if f'"type":"{kind}"' in line]


def steps(path: Path) -> list[tuple[int, str]]:
    """Return (step, "train" or "val") of each line of history in the file of a run."""
    items = [record["item"] for record in sent(path, "history")]
    return [
        (item["trainer/global_step"], "train" if "train/loss" in item else "val")
        for item in items
        if "train/loss" in item or "val/image_to_text_R@1" in item
    ]


class Hub(BaseHTTPRequestHandler):
    """Just enough of W&B's server to begin a run. then: what it does from then on.

    "silent": no answer; "drips": answers a byte a second; "refuses": it refuses every key from the start, and says
    which.
    """

    protocol_version = "HTTP/1.1"
    then = "silent"
    begun = threading.Event()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers.get("content-length", 0))).decode(errors="replace")
        if self.then == "refuses":
            basic = self.headers["authorization"].removeprefix("Basic ")
            return self._answer({"errors": [{"message": f"{basic}: {base64.b64decode(basic).decode()}"}]}, 401)
        if self.begun.is_set() and self.then == "silent":
            time.sleep(60)
        run = {"id": "x", "name": "toy", "displayName": "toy", "config": "{}", "historyLineCount": 0}
        project = {"id": "p", "name": "toys", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket" in query:
            self._answer({"data": {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": True}}})
            self.begun.set()
        else:
            self._answer({"data": {"model": None}})

    def _answer(self, value: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {code} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        drips = self.begun.is_set() and self.then == "drips"
        for part in [bytes([byte]) for byte in head + body] if drips else [head + body]:
            try:
                self.wfile.write(part)
            except OSError:  # the other end has given up
                return
            time.sleep(1.0 if drips else 0.0)


@contextmanager
def hub(then: str) -> Iterator[tuple[str, threading.Event]]:
    """Context manager: run a Hub in a thread; yield its address, and an Event that is set once a run has begun.

    then: what it does from then on, as in Hub.
    """
    begun = threading.Event()
    handler = type("OneHub", (Hub,), {"begun": begun, "then": then})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", begun
    server.shutdown()
    server.server_close()
