"""Asked to stop: at any moment, all ranks or one, once or twice. What was done is saved; the run goes on from it."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, Signals
from typing import Any

import pytest
from harness import Jobs, Launched, checkpoints, open_files
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, logged, records, state, wait_for
from test_kills import is_saving

Tiny = Callable[[dict[str, Any]], list[str]]
LISTENING, CONNECTED = "0A", "01"


def test_asked_while_it_waits_for_the_others(jobs: Jobs, tmp_path: Path) -> None:
    """By a scheduler, or by torchrun because the other was killed, which has left no exit code."""
    of_all = tmp_path / "code"
    of_all.touch()
    waiting = {75: jobs.start(2, {}, coming=[0]), 4: jobs.start(9, {}, coming=[0], DYAD_EXIT_CODE=str(of_all))}
    for job in waiting.values():
        job.until(lambda job=job: has_socket(job.ranks()[0], LISTENING), "the wait")
        job.signal(SIGTERM)
    for code, job in waiting.items():
        outcome = job.ends(within=25)
        assert outcome.codes == [code] and not outcome.orphans, outcome
    assert of_all.read_text() == "4"


def catches(pid: int, number: Signals) -> bool:
    """Whether a process has a handler, or a trap, for this signal."""
    (mask,) = re.findall(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> number - 1 & 1)


def has_socket(pid: int, state: str) -> bool:
    """Whether a process has a TCP socket in this state, as /proc/net/tcp writes it."""
    held = open_files(pid)
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return any(f"socket:[{row[9]}]" in held for row in rows if row[3] == state)


def test_one_rank_is_asked_before_the_first_step(jobs: Jobs) -> None:
    job = jobs.start(2, {"steps": 1000})
    job.until(job.run.exists, "its folder")
    job.signal(SIGTERM, rank=1)
    outcome = job.ends(within=60)
    assert outcome.codes == [75, 75] and not outcome.out.count("error:") and not outcome.orphans, outcome


def test_one_rank_is_asked_twice_during_an_evaluation(jobs: Jobs) -> None:
    keys = {"steps": 4, "eval.every": 2, "data.val": SHARD}
    job = jobs.start(2, {**keys, "eval.block": 1})
    job.reaches(2)
    time.sleep(0.3)  # the evaluation takes seconds
    for _ in range(2):
        job.signal(SIGTERM, rank=1)
    outcome = job.ends(within=60)
    assert outcome.codes == [75, 75] and not outcome.orphans, outcome
    assert checkpoints(job.run) == [2] and (state(job.run)["status"], state(job.run)["step"]) == ("preempted", 2)
    assert json.loads((job.run / "checkpoints" / "step_00000002" / "state.json").read_text())["evaluation_owed"]
    assert not any("val/image_to_text_R@1" in record for record in records(job.run))
    run = jobs.run(1, keys)
    assert [record["step"] for record in records(run)] == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("number", [SIGTERM, SIGINT, SIGUSR1, SIGHUP])
def test_the_launch_script_is_asked_before_there_is_a_trainer(jobs: Jobs, number: Signals) -> None:
    job = jobs.launch(2, {})
    job.until(lambda: catches(job.script.pid, SIGUSR1), "the script")
    os.kill(job.script.pid, number)
    outcome = job.ends(within=20)
    assert outcome.codes == [75] and not outcome.orphans and "Traceback" not in outcome.out, outcome


def test_its_terminal_is_closed(commands: Commands, tiny: Tiny, tmp_path: Path) -> None:
    """The terminal sends SIGHUP to all processes that it has started, and takes no output any more."""
    keyboard, screen = os.openpty()
    words = tiny({"steps": 5000, "data.workers": 1, "run.name": "a"})
    leader = commands.ask(start=words, cwd=".", out=os.ttyname(screen), env={})
    run = tmp_path / "runs" / "a"
    os.set_blocking(keyboard, False)
    wait_for(lambda: not unread(keyboard) and logged(run, 5), "no step")
    os.close(screen)
    os.close(keyboard)
    assert commands.ask(wait=leader) == 75
    assert checkpoints(run) == [state(run)["step"]] and state(run)["status"] == "preempted"


def unread(terminal: int) -> bytes:
    """What was written since the last look."""
    with suppress(BlockingIOError):
        return os.read(terminal, 1 << 16)
    return b""


@pytest.mark.soak
def test_asked_twice_during_a_save(jobs: Jobs) -> None:
    job = jobs.start(2, {"steps": 5000, "checkpoint.every": 5})
    job.until(lambda: is_saving(job.run), "a save")
    for _ in range(2):
        job.signal(SIGTERM)
    outcome = job.ends(within=60)
    assert outcome.codes == [75, 75] and not outcome.orphans, outcome
    assert checkpoints(job.run)[-1] == state(job.run)["step"] and not is_saving(job.run)


@pytest.mark.soak
@pytest.mark.parametrize("number", [SIGTERM, SIGUSR1])
def test_four_processes_and_their_launcher_are_asked(jobs: Jobs, number: Signals) -> None:
    """As a scheduler does: every process of the job, torchrun and loader processes too."""
    job: Launched = jobs.launch(4, {"steps": 5000, "data.workers": 1})
    job.reaches(5)
    job.signal(number)
    outcome = job.ends(within=120)
    assert outcome.codes == [75] and not outcome.orphans and outcome.seconds < 25, outcome
    assert checkpoints(job.run) == [state(job.run)["step"]] and state(job.run)["status"] == "preempted"


def test_many_signals_at_once_reach_the_launch_script_and_what_it_runs(jobs: Jobs) -> None:
    """As scancel sends them, to every process: those that stop the trainers may be killed by the next signal."""
    job = jobs.launch(1, {"steps": 100_000}, on=["setsid"])
    job.until(lambda: logged(job.run, 1), "a step")
    for _ in range(100):
        for number in (SIGUSR1, SIGTERM):
            with suppress(ProcessLookupError):
                os.killpg(job.script.pid, number)
        time.sleep(0.002)
    outcome = job.ends(within=60)
    assert outcome.codes == [75] and not outcome.orphans, outcome
    assert state(job.run)["status"] == "preempted"
