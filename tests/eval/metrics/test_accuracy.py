"""DPR's accuracy of the first k passages."""

import numpy as np

from dyad.eval.metrics.accuracy import top_k_accuracy


def test_top_k_accuracy_by_hand() -> None:
    hits = [[False, True, False], [True], [], [False] * 30 + [True]]
    found = top_k_accuracy(hits)
    assert list(found) == ["accuracy@1", "accuracy@5", "accuracy@20", "accuracy@100"]
    np.testing.assert_array_equal(
        np.stack(list(found.values())), [[0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]]
    )
