"""The control plane of two ranks, the listener's share of the store, and the medians that stragglers are judged by."""

import random
from statistics import median

import pytest
from helpers.dist import launch

from dyad.train.distributed.listener import poll_interval
from dyad.train.distributed.world import World
from dyad.train.monitor.stragglers import median_without


@pytest.mark.parametrize("failures", ["20", pytest.param("100", marks=pytest.mark.soak)])
def test_control_messages_and_aborts(failures: str) -> None:
    """Also: random failures, each followed by collectives of random memory, never blamed on a healthy rank."""
    launch("dist_control.py", 2, failures)


def test_the_store_gets_as_many_questions_from_a_thousand_ranks_as_from_eight() -> None:
    assert poll_interval(World(size=2)) == poll_interval(World(size=8)) == 0.02
    assert 1024 / poll_interval(World(size=1024)) == 8 / poll_interval(World(size=8))


def test_medians_without_one_number_are_those_of_the_rest() -> None:
    dice = random.Random(0)
    for size in range(2, 12):
        values = [dice.choice([0.1, 0.2, dice.random()]) for _ in range(size)]
        rest = [median(values[:i] + values[i + 1 :]) for i in range(size)]
        assert [median_without(value, sorted(values)) for value in values] == rest
