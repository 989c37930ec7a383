"""The objective of a plugin is tried on several ranks before the first step."""

import pytest
from helpers.dist import launch


@pytest.mark.parametrize("world", [2, 3])
def test_exact_objectives_pass_and_one_over_own_rows_does_not(world: int) -> None:
    launch("dist_objective_trial.py", world)
