"""For each row of a matrix, the highest level that a condition on the values above it holds at.

The matrix is never there as a whole: every pass sees its tiles anew. Floats in their order are integers in their order,
so the level is found digit by digit, by counting how many values have which digit: exact, whatever the values are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

DIGIT = 11  # bits found in a pass: 3 passes for float32, 6 for float64
DIGITS = 1 << DIGIT
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

TilesOfValues = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Level:
    """Of each row: the level, how many values are above and at it, the sum of those above (0 if not asked for).

    Float64, but for the level, which is 0 in a row where no level was reached.
    """

    level_r: Tensor
    above_r: Tensor
    at_r: Tensor
    sum_above_r: Tensor


def highest_level(
    tiles: TilesOfValues, reached: Callable[[Tensor, Tensor, Tensor], Tensor], like_r: Tensor, *, summed: bool
) -> Level:
    """The largest float v of each row where reached(n = number of values ≥ v, their sum, v) holds.

    tiles(): a pass over all tiles (r, c) of values, −inf for none, to the bit the same in each. like_r: one number per
    row, for type and device. reached: elementwise on (r, levels) float64; true up to some v, false above it and where
    n = 0. summed: whether it needs the sums. Memory: r · 2¹¹ counts.
    """
    places = torch.arange(DIGITS, device=like_r.device)

    def digit(first_r1: Tensor, shift: int, unreached: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        counts, sums = _above(tiles(), first_r1, shift, summed)
        levels = _floats((first_r1 + places) << shift, like_r.dtype).double()
        holds = reached(counts[:, 1:-1], sums[:, 1:-1], levels) & (levels > -math.inf)
        digit_r1 = torch.where(holds, places, -1).amax(1, keepdim=True)
        return torch.where(digit_r1 < 0, unreached, digit_r1), counts, sums

    top, *shifts = range(DIGIT * ((torch.finfo(like_r.dtype).bits - 1) // DIGIT), 0, -DIGIT)
    zero = 1 << (torch.finfo(like_r.dtype).bits - 1 - top)  # the first digit of 0, from that of the lowest integer
    first_r1 = torch.full((len(like_r), 1), -zero, device=like_r.device)
    first_r1 = (first_r1 + digit(first_r1, top, zero)[0]) << DIGIT
    for shift in shifts:
        first_r1 = (first_r1 + digit(first_r1, shift)[0]) << DIGIT
    digit_r1, counts, sums = digit(first_r1, 0)
    at_or_above_r, above_r = (counts.gather(1, digit_r1 + k)[:, 0] for k in (1, 2))
    sum_above_r = sums.gather(1, digit_r1 + 2)[:, 0]
    return Level(_floats(first_r1 + digit_r1, like_r.dtype)[:, 0], above_r, at_or_above_r - above_r, sum_above_r)


def _above(tiles: Iterable[Tensor], first_r1: Tensor, shift: int, summed: bool) -> tuple[Tensor, Tensor]:
    """How many values are at or above each digit after `first`, and their sums: (r, 1 + digits + 1) float64.

    The columns at the ends are for all that is below, and above, every digit.
    """
    counts = first_r1.new_zeros(len(first_r1), DIGITS + 2, dtype=torch.int32)
    sums = torch.zeros_like(counts, dtype=torch.float64)
    for values in tiles:
        keys = _keys(values)
        below_r1 = (first_r1 - 1).to(keys.dtype)
        place = (keys >> shift).clamp_(below_r1, below_r1 + DIGITS + 1).sub_(below_r1).long()
        counts.scatter_add_(1, place, counts.new_ones(()).expand_as(place))
        if summed:
            sums.scatter_add_(1, place, values.double())
    counts = counts.flip(1).cumsum(1, dtype=torch.float64).flip(1)
    return counts, sums.flip(1).cumsum(1).flip(1) if summed else torch.zeros_like(counts)


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of the floats; −0 is 0."""
    integer = INTEGERS[values.dtype]
    return _flipped((values + 0.0).view(integer), integer)


def _floats(keys: Tensor, dtype: torch.dtype) -> Tensor:
    integer = INTEGERS[dtype]
    return _flipped(keys.to(integer), integer).view(dtype)


def _flipped(bits: Tensor, integer: torch.dtype) -> Tensor:
    """A float's bits are its sign and its magnitude; of integers, more negative ones have smaller magnitudes below."""
    info = torch.iinfo(integer)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
