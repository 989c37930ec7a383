"""Rows of the global batch that are the same item, by content key: counts and sums, without a list of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor


class SameItem:
    """The relation i ~ j on B rows: equal in at least one of the keys. Every row is related to itself.

    keys: one or more (B,) int64. Not transitive with two keys (i and j may share x, j and k share y). A sum over
    {j : j ~ i} is found by inclusion and exclusion: the rows that share key 1, plus those that share key 2, minus
    those that share both.
    """

    def __init__(self, keys: Sequence[Tensor]) -> None:
        classes = [torch.unique(key_B, return_inverse=True)[1] for key_B in keys]
        self._groups = [
            ((-1) ** (size + 1), _all_equal(chosen))
            for size in range(1, len(classes) + 1)
            for chosen in combinations(classes, size)
        ]

    def sums(self, values_B: Tensor, rows: slice) -> Tensor:
        """Σ_{j ~ i} values_j for the rows i of the slice: (B, …) → (b, …). Differentiable; memory as values_B."""
        total = torch.zeros_like(values_B[rows])
        for sign, class_B in self._groups:
            of_class = torch.zeros_like(values_B).index_add(0, class_B, values_B)
            total = total + sign * of_class[class_B[rows]]
        return total

    def counts(self) -> Tensor:
        """How many rows are the same item as i, itself included: (B,) int64."""
        ones_B = torch.ones_like(self._groups[0][1])
        return self.sums(ones_B, slice(len(ones_B)))


def _all_equal(classes: Sequence[Tensor]) -> Tensor:
    """(B,) class numbers below B of the rows that are equal in every one of `classes`, themselves below B."""
    joint_B = classes[0]
    for class_B in classes[1:]:
        joint_B = torch.unique(joint_B * len(class_B) + class_B, return_inverse=True)[1]
    return joint_B
