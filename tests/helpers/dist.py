"""Starting a job of several processes from a test, forks of a process that has torch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from helpers.cli import server

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
HOLDS = "all checks hold"  # printed by each rank of a job when all its checks do
# A job whose cases meet some of the ways in which rows can lie on ranks, or with --soak each case all ways
in_ways = pytest.mark.parametrize("ways", ["some", pytest.param("all", marks=pytest.mark.soak)])


def share(cases: Sequence[T], turn: int) -> Sequence[T]:
    """In a job: every second case, by turns, or all of them when the job was started with "all"."""
    return cases if "all" in sys.argv else cases[turn % 2 :: 2]


def dealt(cases: Sequence[T]) -> Sequence[T]:
    """In a job: the cases that this rank computes in one process, for `joined`."""
    return cases[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]


def joined(found: list[T]) -> list[T]:
    """In a job that has its process group: what the ranks found in their `dealt` cases, in the order of all."""
    of_ranks: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, found)
    size = len(of_ranks)
    return [of_ranks[place % size][place // size] for place in range(sum(map(len, of_ranks)))]


def launch(script: str, world_size: int, *arguments: str) -> None:
    """Run tests/jobs/`script` in `world_size` processes, whose checks must all hold."""
    assert printed(script, world_size, *arguments).count(HOLDS) == world_size


def printed(script: str, world_size: int, *arguments: str) -> str:
    """Run tests/jobs/`script` in `world_size` processes without the seconds of imports; return what they print."""
    ended = server().world(world_size, f"jobs.{script.removesuffix('.py')}", *arguments)
    assert not any(rank.code for rank in ended), "\n".join(rank.out[-2000:] for rank in ended)
    return "".join(rank.out for rank in ended)
