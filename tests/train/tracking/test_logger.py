"""What a run records and says: metrics.jsonl, log.txt, the console."""

import json
import math
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dyad.train.config import TrackingConfig, Wandb
from dyad.train.run_schedule import RunSchedule
from dyad.train.tracking.logger import Logger, build_logger, drop_after
from dyad.train.tracking.progress import Lines

ROOT = Path(__file__).parents[3]
OFF = TrackingConfig(wandb=Wandb.disabled)


def schedule(first_step: int, total_steps: int = 8) -> RunSchedule:
    return RunSchedule(first_step, total_steps, 100, 1, log_every=1, evaluate_every=0, save_every=9, steps_per_epoch=4)


def training(loss: float, **more: float) -> dict[str, float]:
    timing = {
        "data_time": 0.012,
        "batch_time": 0.15,
        "samples_per_second": 1700.0,
        "samples_per_second_per_device": 850.0,
    }
    values = {"loss": loss, "lr": 5e-4, "logit_scale": 14.2857, "mi_bound": 2.3, "log_k": 5.5, **timing, **more}
    return {f"train/{name}": value for name, value in values.items()}


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_scalar_is_in_metrics_jsonl_at_once(tmp_path: Path) -> None:
    begun = time.time() - 1
    logger = build_logger(tmp_path, OFF, schedule(0), {})
    logger.log(1, training(3.5))
    logger.log(2, {"val/image_to_text_R@1": 0.25})
    expected = [
        {"step": 1, "samples_seen": 100, "epoch": 0.25, **training(3.5)},
        {"step": 2, "samples_seen": 200, "epoch": 0.5, "val/image_to_text_R@1": 0.25},
    ]
    written = records(tmp_path)  # before close: every line is flushed
    times = [record.pop("time") for record in written]
    assert written == expected and begun <= times[0] <= times[1] <= time.time() + 1
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
    logger = build_logger(tmp_path, OFF, schedule(0, 9), {})
    logger.print("two\nlines")
    logger.log(4, training(3.0))
    logger.log(5, training(4.0))
    logger.log(6, training(5.0))
    logger.log(8, {"val/image_to_text_R@1": 0.25, "eval/wds/acc1": 0.5})
    logger.log(9, {"val/image_to_text_R@1": 0.75})  # the last step: tables of it follow
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert out[3] == (
        "Train Epoch: 1 [100/400 (25%)] Data (t): 0.012 Batch (t): 0.150, 1700.00/s, 850.000/s/device "
        "LR: 0.000500 Logit Scale: 14.286 Loss: 4.0000 (4.0000) MI: 2.30 of 5.50 ETA 0:00:01"
    )
    parsed = [match.groupdict() for line in out if (match := OPEN_CLIP.match(line))]
    assert [(p["epoch"], p["seen"], p["loss"], p["mean"]) for p in parsed] == [
        ("0", "400", "3.0000", "3.0000"),
        ("1", "100", "4.0000", "4.0000"),
        ("1", "200", "5.0000", "4.5000"),
    ]
    assert out[-1] == "Eval Epoch: 1 image_to_text_R@1: 0.2500\teval/wds/acc1: 0.5000"
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" | INFO | ")[1] for line in log] == [*out, "Eval Epoch: 2 image_to_text_R@1: 0.7500"]
    assert all(re.match(r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d \| INFO \| ", line) for line in log)


def test_what_an_objective_lacks_is_left_out_of_the_line() -> None:
    record = {
        k: v for k, v in training(1.0, batch_time=30.0).items() if k.split("/")[1] not in ("logit_scale", "mi_bound")
    }
    line = Lines(schedule(0, 1000))({"step": 10, **record})
    assert "Scale" not in line
    assert "MI" not in line
    assert line.endswith("ETA 8:15:00")


def test_a_loss_that_is_not_finite_is_left_out_of_the_mean() -> None:
    lines = Lines(schedule(0, 1000))
    said = [lines({"step": step, **training(loss)}) for step, loss in enumerate((math.nan, 3.0, math.nan, 4.0), 1)]
    means = [re.findall(r"Loss: (\S+) \((\S+)\)", line)[0] for line in said]
    assert means == [("nan", "nan"), ("3.0000", "3.0000"), ("nan", "3.0000"), ("4.0000", "3.5000")]


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.train.tracking.test_logger import OFF, schedule, training
from dyad.train.tracking.logger import build_logger
logger = build_logger(Path(sys.argv[1]), OFF, schedule(2), {})
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
    first = build_logger(tmp_path, OFF, schedule(0), {})
    for step in range(1, 7):
        first.log(step, training(step))
        if step % 2 == 0:
            first.log(step, {"val/R@1": step})
    first.close()
    whole = [{**record, "time": 0} for record in records(tmp_path)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # torn by a kill
    again = build_logger(tmp_path, OFF, schedule(4), {})
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
    assert [{**record, "time": 0} for record in records(tmp_path)] == whole
    assert not list(tmp_path.glob(".*"))


def test_an_evaluation_that_is_owed_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "train/loss": 1}\n{"step": 2, "val/R@1": 1}\n')
    assert drop_after(path, 2, print) == set()
    assert len(records(tmp_path)) == 2
    assert drop_after(path, 2, print, evaluation_owed=True) == {(2, False)}
    assert records(tmp_path) == [{"step": 2, "train/loss": 1}]
    assert drop_after(path, 0, print) == {(2, True)}
    assert path.read_text() == ""


NO_RECORDS = [b"\xff\xfe\x80", b"7", b"{}", b"[1]", b'{"step": "2"}', b'{"step": 1e999}', b"1" * 5000, b"[" * 100_000]


def test_a_line_that_is_no_record_is_left_out_and_said(tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", list[str]()
    sound = [json.dumps({"step": step, "train/loss": step}).encode() for step in (1, 2)]
    path.write_bytes(b"\n".join([sound[0], *NO_RECORDS, sound[1], b'{"step": 3, "tr' + bytes(9)]))
    drop_after(path, 2, told.append)
    assert path.read_bytes() == b"\n".join([*sound, b""])
    assert told == [f"{path}: damaged, left out: line 2, 3, 4, 5, 6, 7, 8, 9"]


def test_a_run_goes_on_with_a_damaged_metrics_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build_logger(tmp_path, OFF, schedule(0), {}) as logger:
        logger.log(1, training(1))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "train/\xff": 1}\n')
    build_logger(tmp_path, OFF, schedule(1), {}).close()
    line = f"{tmp_path}/metrics.jsonl: damaged, left out: line 2"
    assert line in (tmp_path / "log.txt").read_text() and line in capsys.readouterr().out
    assert [r["step"] for r in records(tmp_path)] == [1]
