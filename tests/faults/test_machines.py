"""Two machines that lose each other."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import IMAGES, Jobs
from helpers.cli import ROOT
from machines import ADDRESSES, Machine, two_machines

TIMEOUT = 5  # of the group, in seconds
LIMIT = TIMEOUT + 60  # 15 on an idle machine: torchrun's agents end last

# The launch script's own functions, with a trainer that lives on for a second after the exit code is written
WATCH = """
eval "$(sed -n '/^trainers() {/,/^}/p; /^watch() {/,/^}/p' launch/torchrun.sh)"
bash -c 'setsid sleep 1 & exec sleep 1000' &
agent=$!
watch 2>/dev/null &
wait "$agent"
"""


@pytest.mark.machines
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_cable_between_two_machines_is_cut(launched: bool, jobs: Jobs, tmp_path: Path) -> None:
    """launched: by torchrun.sh, whose agents wait for each other in turn."""
    keys = {**IMAGES, "steps": 100_000, "dist.timeout": TIMEOUT, "data.workers": 1}

    def start(rank: int, machine: Machine) -> Any:
        place = {"GLOO_SOCKET_IFNAME": machine.name, "MASTER_ADDR": ADDRESSES["one"]}
        if launched:
            return jobs.launch(1, keys, on=machine.command(), NNODES="2", **place)
        return jobs.on_machine(rank, keys, machine.command(), WORLD_SIZE="2", MASTER_PORT="29500", **place)

    with two_machines(tmp_path) as (one, two):
        first, second = start(0, one), start(1, two)
        first.reaches(7)
        two.do("ip", "link", "set", "two", "down")
        ends = [first.ends(within=LIMIT), second.ends(within=LIMIT)]
    assert [(end.codes, end.orphans) for end in ends] == [([4], [])] * 2
    for end, gone in zip(ends, ("rank 1 of 2 did not come to", "rank 0 of 2, or its machine, is gone"), strict=True):
        assert [gone in line for line in end.out.splitlines() if line.startswith("error:")] == [True], end.out


@pytest.mark.linux
def test_an_agent_that_waits_for_a_machine_out_of_reach_is_killed(tmp_path: Path) -> None:
    """Three seconds after its last trainer has left with an exit code."""
    (tmp_path / "code").write_text("4")
    environment = {**os.environ, "DYAD_EXIT_CODE": str(tmp_path / "code")}
    begin = time.monotonic()
    script = subprocess.Popen(["bash", "-c", WATCH], cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert script.wait(timeout=60) == 128 + signal.SIGKILL and time.monotonic() > begin + 3
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
