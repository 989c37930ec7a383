"""Stopwatch: the metrics of the time that steps take."""

import pytest

from dyad.train.monitor.stopwatch import Stopwatch
from dyad.train.run_schedule import RunSchedule


def test_times_are_means_over_the_window() -> None:
    watch = Stopwatch(RunSchedule(0, 9, 100, 4, log_every=1, evaluate_every=0, save_every=9))
    watch.add(waited=0.1, worked=0.3)
    watch.add(waited=0.3, worked=0.9)
    watch.saving += 2.0
    watch.saving += 0.5
    assert watch.read() == pytest.approx(
        {
            "data_time": 0.2,
            "batch_time": 0.8,
            "samples_per_second": 125.0,
            "samples_per_second_per_device": 31.25,
            "checkpoint_seconds": 2.5,
        }
    )
    watch.add(waited=0.0, worked=0.5)
    again = watch.read()
    assert (again["batch_time"], again["checkpoint_seconds"]) == (0.5, 0.0)
