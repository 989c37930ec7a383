"""Evenly spaced indices."""

import numpy as np
import pytest

from dyad.data.base.arrays import evenly_spaced


def test_indices_are_evenly_spaced() -> None:
    assert evenly_spaced(10, 3).tolist() == [0, 4, 9] and evenly_spaced(3, 10).tolist() == [0, 1, 2]
    assert evenly_spaced(0, 5).tolist() == [] and evenly_spaced(7, 1).tolist() == [0]


@pytest.mark.parametrize("most", [100, 1000, 2000])
def test_each_index_is_there_once(most: int) -> None:
    for count in (*range(most - 1, most + 5), 2 * most - 1, 100_000, 10**12):
        found = evenly_spaced(count, most)
        assert len(found) == min(count, most) and (np.diff(found) > 0).all()
        assert (found[0], found[-1]) == (0, count - 1)
