"""Starting a job of several processes from a test, forks of a process that has torch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from helpers.cli import server

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
HOLDS = "all checks hold"  # printed by each rank of a job when all its checks do
# A job whose cases meet some of the ways in which rows can lie on ranks, or with --soak each case all ways
in_ways = pytest.mark.parametrize("ways", ["some", pytest.param("all", marks=pytest.mark.soak)])


def share(cases: Sequence[T], turn: int) -> Sequence[T]:
    """In a job: every second case, by turns, or all of them when the job was started with "all"."""
    return cases if "all" in sys.argv else cases[turn % 2 :: 2]


def launch(script: str, world_size: int, *arguments: str) -> None:
    """Run tests/jobs/`script` in `world_size` processes, whose checks must all hold."""
    assert printed(script, world_size, *arguments).count(HOLDS) == world_size


def printed(script: str, world_size: int, *arguments: str) -> str:
    """Run tests/jobs/`script` in `world_size` processes without the seconds of imports; return what they print."""
    ended = server().world(world_size, f"jobs.{script.removesuffix('.py')}", *arguments)
    assert not any(rank.code for rank in ended), "\n".join(rank.out[-2000:] for rank in ended)
    return "".join(rank.out for rank in ended)
