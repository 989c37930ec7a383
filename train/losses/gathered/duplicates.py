"""Duplicate items in the global batch: samples whose content keys (hashes of the image or text) are equal.

For each column (sample) of the batch, the number of its duplicates and the sum of a quantity over them are computed by
groups of equal keys, so that no list of all pairs of duplicates is built. candidates.py decides whether pairs of
duplicates are negatives, positives or left out.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor


class SameItem:
    """The relation i ~ j of M columns: i and j have an equal key of at least one kind, or are the same column.

    keys: for each kind of key (of x, of y), the keys of the first columns, int64 (≤ M,); later columns have no key of
    this kind and equal no other column. total: M. With two kinds of keys the relation is not transitive (i and j may
    share x, j and k share y). So a sum over {j : j ~ i} is found by inclusion and exclusion: the columns that share key
    1, plus those that share key 2, minus those that share both.
    """

    def __init__(self, keys: Sequence[Tensor], total: int) -> None:
        # each column beyond the keys given has a class of its own
        classes = [torch.cat([class_indices(k), torch.arange(len(k), total, device=k.device)]) for k in keys]
        self._groups = [
            ((-1) ** (size + 1), _intersection(chosen))
            for size in range(1, len(classes) + 1)
            for chosen in combinations(classes, size)
        ]

    def sums(self, values_M: Tensor, columns: slice) -> Tensor:
        """Sum values_M, for each column i of the slice `columns`, over all columns j ~ i (columns with an equal key).

        values_M: (M, …), one entry for each of M columns. Column i itself is included. The result is (b, …) for a slice
        of b columns. Differentiable in values_M. Memory is linear in values_M.
        """
        total = torch.zeros_like(values_M[columns])
        for sign, class_M in self._groups:
            of_class = torch.zeros_like(values_M).index_add(0, class_M, values_M)
            total = total + sign * of_class[class_M[columns]]
        return total

    def counts(self, first: int) -> Tensor:
        """Count, for each of the M columns, how many of the first `first` columns share a key with it: (M,) int64.

        A column that is itself among the first is counted too.
        """
        ones_M = torch.zeros_like(self._groups[0][1])
        ones_M[:first] = 1
        return self.sums(ones_M, slice(len(ones_M)))


def class_indices(keys_k: Tensor) -> Tensor:
    """Return for each key its index among the distinct keys in ascending order: (k,) int64, equal for equal keys.

    It is the inverse that torch.unique(return_inverse=True) returns, found without making the host wait for a GPU.
    """
    sorted_k, order_k = keys_k.sort()
    index_k = torch.cat([order_k.new_zeros(min(len(keys_k), 1)), (sorted_k.diff() != 0).long()]).cumsum(0)
    return torch.empty_like(order_k).scatter_(0, order_k, index_k)


def equal_pair_counts(row_keys_b: Tensor, column_keys_M: Tensor) -> Tensor:
    """Count, for each key of row_keys_b, how many of the keys column_keys_M equal it: (b,) int64."""
    sorted_keys = column_keys_M.sort().values
    first_b, end_b = (torch.searchsorted(sorted_keys, row_keys_b, right=right) for right in (False, True))
    return end_b - first_b


def equal_pairs(row_keys_b: Tensor, column_keys_M: Tensor) -> Tensor:
    """Return all pairs (i, j) with row_keys_i = column_keys_j, sorted by i: (P, 2) int64 for P pairs."""
    sorted_keys, order = column_keys_M.sort(stable=True)
    first_b, count_b = torch.searchsorted(sorted_keys, row_keys_b), equal_pair_counts(row_keys_b, column_keys_M)
    i = torch.arange(len(row_keys_b), device=order.device).repeat_interleave(count_b)
    # the n-th pair of row i has the column that is n-th among the equal keys, which begin at first_b[i]
    position = torch.arange(len(i), device=order.device) - (count_b.cumsum(0) - count_b)[i] + first_b[i]
    return torch.stack([i, order[position]], 1)


def _intersection(classes: Sequence[Tensor]) -> Tensor:
    """Intersect partitions of M columns: return class indices, equal for two columns if equal in all `classes`.

    classes: one or more tensors (M,) int64, each with a class index, 0 … M − 1, for every column. So is the result.
    """
    joint_M = classes[0]
    for class_M in classes[1:]:
        joint_M = class_indices(joint_M * len(class_M) + class_M)
    return joint_M
