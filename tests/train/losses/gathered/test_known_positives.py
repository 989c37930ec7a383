"""Items that are known to be right for a row, by content key, are excluded from its sums, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.messages import raises
from torch import Tensor

from dyad.data.batch import KnownPositives
from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.sums import tiles

B, D = 6, 4
KEYS = torch.tensor([10, 11, 12, 13, 10, 15])  # rows 0 and 4 have the same item
FURTHER_ROW = torch.tensor([0, 0, 3])
FURTHER_KEYS = torch.tensor([12, 21, 11])
KNOWN = KnownPositives(torch.tensor([0, 0, 1, 3, 3, 5]), torch.tensor([10, 12, 11, 11, 99, 21]))
# Row 0: its own item also in column 4, and item 12 in columns 2 and 6; row 1: its own alone, and column 8 has it too
EXCLUDED = [(0, 4), (0, 2), (0, 6), (1, 8), (3, 1), (3, 8), (5, 7)]

ROW_1 = torch.tensor([(1, 4)])


def embeddings(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(name: str, positive: bool, **given: Any) -> Tensor:
    torch.manual_seed(0)
    columns = Columns(embeddings(3, 3), FURTHER_ROW, FURTHER_KEYS, torch.tensor([positive, False, False]))
    objective = build_objective(name).double()
    return objective(embeddings(1, B), embeddings(2, B), negatives=columns, y_keys=KEYS, **given).loss


@pytest.mark.parametrize("name", ["dpr", "clip", "symmetric_dpm", "siglip", "coce", "one_sided_dpm"])
@pytest.mark.parametrize("positive", [False, True])
def test_known_items_are_excluded_where_they_stand(name: str, positive: bool) -> None:
    listed = [pair for pair in EXCLUDED if not (positive and pair == (0, 6))]  # a further positive stays one
    assert torch.equal(loss(name, positive, known_positives=KNOWN), loss(name, positive, excluded=torch.tensor(listed)))
    assert not torch.equal(loss(name, positive, known_positives=KNOWN), loss(name, positive))


@pytest.mark.parametrize("tile", [2, 4, tiles.TILE])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"duplicates": which}) for name in ("dpr", "clip", "siglip", "nce") for which in ("keep", "mask")),
        ("clip", {"positives": "exclude"}),
        ("clip", {"candidates": "negatives"}),
        ("coce", {"directions": "mean"}),
        ("coce", {"directions": "mean", "setting": "semi"}),
    ],
)
def test_every_tile_leaves_out_what_a_list_of_pairs_would(
    name: str, options: dict[str, str], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients, to the bit; some keys are of no column, some columns of several rows' lists."""
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "KEPT", 400)
    generator = torch.Generator().manual_seed(5)
    row, of_item, y_keys = (torch.randint(most, (n,), generator=generator) for most, n in ((9, 30), (12, 30), (8, 9)))
    listed = [(int(i), j) for i, key in zip(row, of_item, strict=True) for j in range(9) if y_keys[j] == key and i != j]
    found = []
    for given in {"known_positives": KnownPositives(row, of_item)}, {"excluded": torch.tensor(sorted({*listed}))}:
        x, y = (embeddings(seed, 9).requires_grad_() for seed in (1, 2))
        torch.manual_seed(0)
        objective = build_objective(name, **options).double()
        of_batch = objective(x, y, x_keys=torch.arange(9) // 2, y_keys=y_keys, **given).loss
        found.append([of_batch, *torch.autograd.grad(of_batch, [x, y])])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["dpr", "clip", "siglip"])
@pytest.mark.parametrize("positives", ["each", "merge"])
def test_what_equal_keys_make_a_positive_stays_in_the_sum(name: str, positives: str) -> None:
    """Else nothing would hold its score back, and the loss had no lower bound. Rows 0 and 1 are the same question."""
    options = {} if name == "siglip" else {"positives": positives}
    objective = build_objective(name, duplicates="positive", **options).double()
    keys = {"x_keys": torch.tensor([1, 1, 2, 3, 4, 5]), "y_keys": KEYS}
    x, y = embeddings(1, B), embeddings(2, B)
    of_both = KnownPositives(torch.tensor([0, 0, 1, 1]), torch.tensor([10, 11, 10, 11]))
    others = KnownPositives(torch.cat([of_both.row, torch.tensor([2])]), torch.cat([of_both.keys, torch.tensor([15])]))
    # column 4 has item 10 too: known for row 1, whose key it does not have
    assert torch.equal(
        objective(x, y, **keys, known_positives=of_both).loss, objective(x, y, **keys, excluded=ROW_1).loss
    )
    more = torch.cat([ROW_1, torch.tensor([(2, 5)])])
    assert torch.equal(
        objective(x, y, **keys, known_positives=others).loss, objective(x, y, **keys, excluded=more).loss
    )


def test_both_kinds_of_exclusion_add_up() -> None:
    both = loss("dpr", False, known_positives=KNOWN, excluded=torch.tensor([(2, 0)]))
    assert torch.equal(both, loss("dpr", False, excluded=torch.tensor([*EXCLUDED, (2, 0)])))


def test_nothing_known_changes_nothing() -> None:
    nothing = KnownPositives(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    torch.testing.assert_close(loss("dpr", False, known_positives=nothing), loss("dpr", False), rtol=1e-15, atol=0)


def test_keys_are_needed_and_the_objective_must_know_exclusion() -> None:
    x, y = embeddings(1, B), embeddings(2, B)
    with raises(ValueError, "y_keys"):
        build_objective("dpr").double()(x, y, known_positives=KNOWN)
    with raises(ValueError, "spectral", "excluded"):
        build_objective("spectral").double()(x, y, y_keys=KEYS, known_positives=KNOWN)
