"""run_state.json and the lock of a run folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.train.run_folder.folder import FORMAT, saved_config
from dyad.train.run_folder.run_state import RunState, locked

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from pathlib import Path
from dyad.train.run_folder.run_state import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def state(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run_state.json").read_text())


def test_the_state_says_how_a_run_stands(tmp_path: Path) -> None:
    with RunState(tmp_path, 3, 10) as record:
        assert (state(tmp_path)["status"], state(tmp_path)["step"], state(tmp_path)["total_steps"]) == (
            "running",
            3,
            10,
        )
        record.write("preempted", 7)
    assert (state(tmp_path)["status"], state(tmp_path)["step"]) == ("preempted", 7)
    assert [p.name for p in tmp_path.iterdir()] == ["run_state.json"]


def test_the_state_names_the_job_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunState(tmp_path, 0, 10):
        assert "job" not in state(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with RunState(tmp_path, 0, 10) as record:
        record.write("finished", 10)
    assert state(tmp_path)["job"] == "7"


def test_an_error_leaves_failed_and_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), RunState(tmp_path, 0, 10):
        raise ConfigError("no such thing")
    assert state(tmp_path)["status"] == "failed"
    assert state(tmp_path)["error"] == "ConfigError: no such thing"
    assert (tmp_path / "log.txt").read_text().endswith(" | INFO | failed: ConfigError: no such thing\n")


def test_the_step_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    for rank in (0, 1):
        error = HardwareError("gone")
        error.ranks = [0]
        with pytest.raises(HardwareError), RunState(tmp_path, 3, 10, rank, ["a", "b"]) as record:
            record.write_running(5)
            assert rank or (state(tmp_path)["step"], state(tmp_path)["pid"]) == (5, os.getpid())
            (tmp_path / "checkpoints" / "step_00000007").mkdir(parents=True, exist_ok=True)
            raise error
        assert [state(tmp_path)[key] for key in ("status", "step", "first_step")] == ["failed", 7, 3]
        (tmp_path / "run_state.json").unlink()


def test_the_reason_in_the_log_needs_no_locale(tmp_path: Path) -> None:
    program = "from dyad.train.run_folder.run_state import *; append_to_log(Path(os.environ['RUN']), 'no \\u2026')"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "RUN": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=ascii_only, check=True)
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith(" | INFO | no …\n")


def test_a_hardware_failure_names_the_machines_and_the_next_rank_writes_for_a_lost_rank_0(tmp_path: Path) -> None:
    for rank, lost, elsewhere, written in ((1, [0, 2], False, True), (1, [0], True, False), (2, [1], False, False)):
        error = HardwareError("gone")
        error.ranks, error.printed_elsewhere = lost, elsewhere
        with pytest.raises(HardwareError), RunState(tmp_path, 3, 10, rank, ["a", "b", "c"]):
            assert not list(tmp_path.iterdir())
            raise error
        assert (tmp_path / "run_state.json").exists() is written
        if written:
            assert state(tmp_path)["hosts"] == ["a", "c"] and state(tmp_path)["status"] == "failed"
            assert "failed: HardwareError: gone" in (tmp_path / "log.txt").read_text()
            (tmp_path / "run_state.json").unlink()
            (tmp_path / "log.txt").unlink()
    with pytest.raises(HardwareError), RunState(tmp_path, 3, 10, 0, ["a", "b"]):
        raise HardwareError("out of memory")
    assert state(tmp_path)["hosts"] == ["a"]


def test_off_rank_0_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunState(None, 0, 10) as record:
        record.write("finished", 10)
    assert not list(tmp_path.iterdir())


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with raises(ConfigError, first.pid), locked(tmp_path):
            pass
        first.kill()
        first.wait()
    with locked(tmp_path):  # the lock died with its holder, though .lock is still there
        assert (tmp_path / ".lock").exists()


def test_a_folder_of_a_newer_program_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert saved_config(tmp_path) == {"steps": 3}  # without a number: of the first format
    with RunState(tmp_path, 0, 3):
        assert json.loads((tmp_path / "run_state.json").read_text())["format"] == FORMAT
        assert saved_config(tmp_path) == {"steps": 3}
    (tmp_path / "run_state.json").write_text(json.dumps({"format": FORMAT + 1}))
    with raises(ConfigError, FORMAT + 1, FORMAT):
        saved_config(tmp_path)
