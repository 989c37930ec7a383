"""DPR's retrieval accuracy: whether one of the first k passages has an answer (Karpukhin et al. 2020)."""

from collections.abc import Sequence

import numpy as np

TOP_K = (1, 5, 20, 100)


def top_k_accuracy(hits: Sequence[Sequence[bool]]) -> dict[str, np.ndarray]:
    """Return "accuracy@k" → float64 (n,) for each k in TOP_K: 1 if one of the first k passages has an answer, else 0.

    hits: for each of n questions, whether each of its passages, best first, contains an answer. A row may be shorter
    than k.
    """
    first = np.array([next((i for i, hit in enumerate(row) if hit), np.inf) for row in hits])
    return {f"accuracy@{k}": (first < k).astype(np.float64) for k in TOP_K}
