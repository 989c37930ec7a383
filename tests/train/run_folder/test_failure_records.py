"""restarts.jsonl: which failures start a run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dyad.train.run_folder.folder import STEP_FILES
from dyad.train.run_folder.restarts import RESTARTS, UNKNOWN, after_failure


def failed(folder: Path, begun: int, saved: int, restarts: int | None = 2, **state: Any) -> Path:
    """The run after a start at step `begun` whose newest checkpoint is `saved`."""
    (folder / "checkpoints" / f"step_{saved:08d}").mkdir(parents=True)
    (folder / "checkpoints" / f".step_{saved + 9:08d}.partial").mkdir()
    (folder / "config.yaml").write_text("steps: 9\n" if restarts is None else f"dist: {{restarts: {restarts}}}\n")
    (folder / "run_state.json").write_text(
        json.dumps({"status": "failed", "step": saved, "first_step": begun, **state})
    )
    return folder


def again(folder: Path, begun: int, saved: int, job: str = "7", **state: Any) -> bool:
    return after_failure(failed(folder, begun, saved, **state), job)


def test_a_start_with_a_new_checkpoint_is_followed_by_another_up_to_the_limit(tmp_path: Path) -> None:
    assert [again(tmp_path, step, step + 5) for step in (0, 5, 10)] == [True, True, False]
    assert again(tmp_path, 15, 20, job="8")  # another job counts for itself
    entries = [json.loads(line) for line in (tmp_path / RESTARTS).read_text().splitlines()]
    assert [(entry["step"], entry["restart"]) for entry in entries] == [(5, 1), (10, 2), (15, 0), (20, 1)]


def test_without_a_new_checkpoint_there_is_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not again(tmp_path, 5, 5)
    assert capsys.readouterr().out == "no restart: no new checkpoint since step 5\n"


def test_older_runs_have_their_first_step_under_another_name(tmp_path: Path) -> None:
    failed(tmp_path, 0, 5)
    for step, restarted in ((0, True), (5, False)):
        (tmp_path / "run_state.json").write_text(json.dumps({"status": "failed", "step": step}))
        assert after_failure(tmp_path, "7") is restarted


@pytest.mark.parametrize(("restarts", "restarted"), [(0, False), (1, True), (None, True)])
def test_the_key_says_how_often(tmp_path: Path, restarts: int | None, restarted: bool) -> None:
    assert again(tmp_path, 0, 5, restarts=restarts) is restarted


def test_the_cause_is_the_first_line_of_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after_failure(failed(tmp_path / "a", 0, 1000, error="PeerFailure: rank 1 of 2: \x1b[31m gone\nmore"), "7")
    after_failure(failed(tmp_path / "b", 0, 5, status="running", time="2026"), "7", requeued=True)
    assert after_failure(tmp_path / "b", "7", requeued=True)  # it is recorded
    assert capsys.readouterr().out.splitlines() == [
        "restart 1 of 2 at step 1,000: rank 1 of 2: \\x1b[31m gone",
        f"restart 1, by the scheduler, at step 5: {UNKNOWN}",
    ]
    assert "restart 1 of 2 at step 1,000" in (tmp_path / "a" / "log.txt").read_text()


@pytest.mark.parametrize("job", ["7", None])
def test_a_node_of_slurm_that_fails_twice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    """Without SLURM the job has this machine alone."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    again(tmp_path, 0, 5, hosts=["n1"])
    again(tmp_path, 5, 10, hosts=["n2"])
    assert "node" not in capsys.readouterr().out
    again(tmp_path, 10, 15, hosts=["n1", "n3"])
    line = "node n1 has failed 2 times in this run: leave it out (SLURM: sbatch --exclude=n1)\n"
    assert (line in capsys.readouterr().out) is bool(job)


def test_a_run_that_begins_again_leaves_the_failures_behind() -> None:
    assert RESTARTS in STEP_FILES
