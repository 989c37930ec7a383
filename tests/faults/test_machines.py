"""Two machines that lose each other."""

from pathlib import Path

import pytest
from harness import Jobs
from machines import ADDRESSES, two_machines

TIMEOUT = 10  # of the group, in seconds
LIMIT = TIMEOUT + 60  # 15 on an idle machine: torchrun's agents end last


@pytest.mark.machines
def test_the_cable_between_two_machines_is_cut(jobs: Jobs, tmp_path: Path) -> None:
    keys = {"steps": 100_000, "dist.timeout": TIMEOUT, "data.workers": 1}
    meet = {"NNODES": "2", "MASTER_ADDR": ADDRESSES["one"]}
    with two_machines(tmp_path) as (one, two):
        first, second = (
            jobs.launch(1, keys, on=machine.command(), GLOO_SOCKET_IFNAME=machine.name, **meet)
            for machine in (one, two)
        )
        first.reaches(7)
        two.do("ip", "link", "set", "two", "down")
        ends = [first.ends(within=LIMIT), second.ends(within=LIMIT)]
    assert [(end.codes, end.orphans) for end in ends] == [([4], [])] * 2
    for end, gone in zip(ends, ("rank 1 of 2 did not come to", "rank 0 of 2, or its machine, is gone"), strict=True):
        assert [gone in line for line in end.out.splitlines() if line.startswith("error:")] == [True], end.out
