"""The radix search for levels against sorted lists, for any floats."""

import math

import pytest
import torch
from torch import Tensor

from dyad.train.losses.sums.row_select import RowThreshold, row_threshold

DTYPES = [torch.float32, torch.float64]


def rows_of_all_kinds(dtype: torch.dtype) -> Tensor:
    """(8, 40): moderate, huge, tiny, tied, of both signs; holes are −inf."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    v = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(dtype)
    v[1] *= 1e30
    v[2] *= info.tiny  # of which some are subnormal
    v[3] = v[3].round()  # ties, 0 and −0 among them
    v[4] = torch.nextafter(v[4, :1], v[4, :1] + torch.arange(40) % 2)  # neighbours
    v[5] = 10.0 ** torch.arange(-20, 20) * v[5].sign()
    v[6, 3:] = -math.inf
    v[7] = -v[7].abs()
    return v


def search(v: Tensor, reached: object, summed: bool = False) -> RowThreshold:
    return row_threshold(lambda: v.split(7, 1), reached, v[:, 0], summed=summed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_kth_largest_and_its_ties(rank: int, dtype: torch.dtype) -> None:
    v = rows_of_all_kinds(dtype)
    found = search(v, lambda n, total, level: n >= rank)
    want = v.sort(1, descending=True).values[:, rank - 1]
    assert torch.equal(found.threshold_r, want + 0.0)
    assert torch.equal(found.above_r, (v > want[:, None]).sum(1).double())
    assert torch.equal(found.at_r, (v == want[:, None]).sum(1).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_every_rank_of_a_row(share: float, dtype: torch.dtype) -> None:
    v = rows_of_all_kinds(dtype)
    m = v.isfinite().sum(1)
    rank = (share * m).ceil().long()
    found = search(v, lambda n, total, level: n >= rank[:, None])
    assert torch.equal(found.threshold_r, v.sort(1, descending=True).values.gather(1, rank[:, None] - 1)[:, 0] + 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("volume", [1e-3, 1.0, 300.0])
def test_the_water_level(volume: float, dtype: torch.dtype) -> None:
    """Σ (v − t)₊ = volume has its root between the level and the next float."""
    v = rows_of_all_kinds(dtype)[[0, 3, 4, 6, 7]]
    found = search(v, lambda n, total, level: total - n * level >= volume, summed=True)
    exact, level = v.double(), found.threshold_r.double()
    following = torch.nextafter(found.threshold_r, torch.full_like(found.threshold_r, math.inf)).double()
    slack = 1e-13 * (volume + exact.masked_fill(exact == -math.inf, 0.0).abs().sum(1))

    def filled(t: Tensor) -> Tensor:
        return (exact - t[:, None]).clamp(min=0.0).sum(1)

    assert (filled(level) >= volume - slack).all() and (filled(following) < volume + slack).all()
    assert torch.equal(found.above_r, (exact > level[:, None]).sum(1).double())
    torch.testing.assert_close(found.sum_above_r, torch.where(exact > level[:, None], exact, 0.0).sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_values(dtype: torch.dtype) -> None:
    found = search(torch.full((2, 9), -math.inf, dtype=dtype), lambda n, total, level: n >= 0.1)
    assert not found.threshold_r.any() and not found.above_r.any() and not found.at_r.any()
