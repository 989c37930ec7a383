"""A radix select on the rows of a matrix that comes in tiles, such as one of scores.

For each row it finds the largest float v such that a condition on the row's values at or above v holds.

The matrix is never in memory as a whole: each pass asks the caller for its tiles again. Floats are mapped to integers
that sort in the same order. The integer of a threshold is found digit by digit, from the highest, by counting the
values that have each digit; each digit takes one pass. No value is rounded, so ties and subnormal numbers are told
apart; sums of values are rounded to float64. Sorting whole rows is slower from a few thousand columns on and needs
several times the memory.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

DIGIT = 11  # bits of a digit: 3 passes for float32, 6 for float64
DIGITS = 1 << DIGIT
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

TilesOfValues = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class RowThreshold:
    """The result of row_threshold: for each of r rows, a threshold, and counts and a sum in float64.

    threshold_r: in the type of the values, 0 in a row where the condition holds nowhere. above_r, at_r: how many values
    of the row are above the threshold, and equal to it. sum_above_r: the sum of the values above the threshold, 0 if
    sums were not asked for.
    """

    threshold_r: Tensor
    above_r: Tensor
    at_r: Tensor
    sum_above_r: Tensor


def row_threshold(
    tiles: TilesOfValues, condition: Callable[[Tensor, Tensor, Tensor], Tensor], like_r: Tensor, *, summed: bool
) -> RowThreshold:
    """Find, for each of r rows, the largest float v at which condition(n, total, v) holds.

    n is how many values of the row are ≥ v, `total` their sum. tiles(): yields tiles (r, c) that together hold all
    values of the rows (−inf for no value), equal to the bit in every call. condition: elementwise on float64 tensors;
    it must be true up to a v and false above it, and false where n = 0. like_r: a tensor (r,) with the type and device
    of the values. summed: whether the condition needs the sums; else `total` is 0. Returns a RowThreshold: v of each
    row (0 if the condition holds nowhere), how many values are above v and how many equal v, and the sum of those
    above. Memory: r · 2¹¹ counts and sums.
    """
    digits = torch.arange(DIGITS, device=like_r.device)

    def next_digit(first_r1: Tensor, shift: int, default: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Find the largest next digit of each row's threshold at which `condition` holds; `default` if at no digit.

        first_r1: the integer of the digits found so far, with a 0 in the place of the next digit. shift: how many bits
        lie below this digit. Returns the digit (r, 1), and the counts and sums of the values at or above each possible
        digit, (r, DIGITS + 2), as _at_or_above returns them.
        """
        counts, sums = _at_or_above(tiles(), first_r1, shift, summed)
        values = _floats((first_r1 + digits) << shift, like_r.dtype).double()
        holds = condition(counts[:, 1:-1], sums[:, 1:-1], values) & (values > -math.inf)
        digit_r1 = torch.where(holds, digits, -1).amax(1, keepdim=True)
        return torch.where(digit_r1 < 0, default, digit_r1), counts, sums

    top, *shifts = range(DIGIT * ((torch.finfo(like_r.dtype).bits - 1) // DIGIT), 0, -DIGIT)
    zero = 1 << (torch.finfo(like_r.dtype).bits - 1 - top)  # the first digit of 0, counted from the lowest integer
    first_r1 = torch.full((len(like_r), 1), -zero, device=like_r.device)
    first_r1 = (first_r1 + next_digit(first_r1, top, zero)[0]) << DIGIT
    for shift in shifts:
        first_r1 = (first_r1 + next_digit(first_r1, shift)[0]) << DIGIT
    digit_r1, counts, sums = next_digit(first_r1, 0)
    at_or_above_r, above_r = (counts.gather(1, digit_r1 + k)[:, 0] for k in (1, 2))
    sum_above_r = sums.gather(1, digit_r1 + 2)[:, 0]
    threshold_r = _floats(first_r1 + digit_r1, like_r.dtype)[:, 0]
    return RowThreshold(threshold_r, above_r, at_or_above_r - above_r, sum_above_r)


def _at_or_above(tiles: Iterable[Tensor], first_r1: Tensor, shift: int, summed: bool) -> tuple[Tensor, Tensor]:
    """Do one pass of a radix select per row: count, and sum, the values at or above each candidate of the next digit.

    Values are compared by their order-preserving integer codes, shifted right by `shift` bits. tiles: blocks that
    together hold all values of the rows. first_r1: the shifted code of candidate 0, that is the digits found so far
    followed by a 0. summed: whether to sum; else the sums are 0. Returns counts and sums, (r, 1 + DIGITS + 1) float64:
    column 0 for all values, column 1 + d for shifted codes of first_r1 + d or more, the last for those beyond all
    candidates.
    """
    counts = first_r1.new_zeros(len(first_r1), DIGITS + 2, dtype=torch.int32)
    sums = torch.zeros_like(counts, dtype=torch.float64)
    for values in tiles:
        keys = _keys(values)
        below_r1 = (first_r1 - 1).to(keys.dtype)
        column = (keys >> shift).clamp_(below_r1, below_r1 + DIGITS + 1).sub_(below_r1).long()
        counts.scatter_add_(1, column, counts.new_ones(()).expand_as(column))
        if summed:
            sums.scatter_add_(1, column, values.double())
    counts = counts.flip(1).cumsum(1, dtype=torch.float64).flip(1)
    return counts, sums.flip(1).cumsum(1).flip(1) if summed else torch.zeros_like(counts)


def _keys(values: Tensor) -> Tensor:
    """Convert float32 to int32, or float64 to int64, that sort in the same order as the floats; −0 is taken as 0."""
    integer = INTEGERS[values.dtype]
    return _flipped((values + 0.0).view(integer), integer)


def _floats(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert integers that _keys returned back to floats of type `dtype`."""
    integer = INTEGERS[dtype]
    return _flipped(keys.to(integer), integer).view(dtype)


def _flipped(bits: Tensor, integer: torch.dtype) -> Tensor:
    """Return `bits`, integers of the type `integer`, with all bits except the sign flipped in the negative ones.

    Floats store sign and magnitude, integers the two's complement; after the flip both sort in the same order.
    """
    info = torch.iinfo(integer)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
