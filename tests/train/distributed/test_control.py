"""The control plane of two ranks, and the listener's share of the store."""

import pytest
from helpers.dist import launch

from dyad.train.distributed.listener import poll_interval
from dyad.train.distributed.world import World


@pytest.mark.parametrize("failures", ["20", pytest.param("100", marks=pytest.mark.soak)])
def test_control_messages_and_aborts(failures: str) -> None:
    """Also: random failures, each followed by collectives of random memory, never blamed on a healthy rank."""
    launch("dist_control.py", 2, failures)


def test_the_store_gets_as_many_questions_from_a_thousand_ranks_as_from_eight() -> None:
    assert poll_interval(World(size=2)) == poll_interval(World(size=8)) == 0.02
    assert 1024 / poll_interval(World(size=1024)) == 8 / poll_interval(World(size=8))
