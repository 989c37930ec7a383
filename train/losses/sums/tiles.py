"""The score matrix of this rank's rows against all columns, one tile at a time, and the pairs that sums leave out.

Legend: b rows of this rank, M columns of all ranks, D width; s_ij = <x_i, y_j>; a tile is a block of at most TILE ×
TILE scores, (r, c) for r rows and c columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 1024  # rows and columns of a tile: a tile of scores and its operands stay in cache


class Pairs:
    """A list of P pairs (row i of this rank, global column j), (P, 2) int64. The first call of `within` sorts it.

    own: if the list is (i, own + i) for all rows i, the column of row 0; else None.
    """

    def __init__(self, pairs_P2: Tensor, own: int | None = None) -> None:
        self.pairs_P2, self.own = pairs_P2, own

    @staticmethod
    def own_columns(rows: int, first: int, device: torch.device) -> Pairs:
        """Make the list of pairs (i, first + i) for `rows` rows i: each row with its own column."""
        i = torch.arange(rows, device=device)
        return Pairs(torch.stack([i, i + first], 1), first)

    def joined(self, others: Pairs) -> Pairs:
        """Return the union of both lists, without repetition."""
        return Pairs(torch.cat([self.pairs_P2, others.pairs_P2]).unique(dim=0))

    def isin(self, others: Pairs, columns: int) -> Tensor:
        """Whether each of these pairs is in `others` too, (P,) bool. columns: the number of columns of the matrix."""
        number, listed = (pairs.pairs_P2[:, 0] * columns + pairs.pairs_P2[:, 1] for pairs in (self, others))
        return torch.isin(number, listed)

    def within(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Return the pairs in a tile as (row indices, column indices) from the tile's corner; None if it has none."""
        if self.own is not None:
            first, end = max(rows.start, columns.start - self.own), min(rows.stop, columns.stop - self.own)
            i = torch.arange(first, end, device=self.pairs_P2.device) if first < end else None
            return None if i is None else (i - rows.start, i + (self.own - columns.start))
        sorted_P2, part_of_tile = self._by_tile
        part = part_of_tile.get((rows.start // TILE, columns.start // TILE))
        if part is None:
            return None
        i, j = sorted_P2[part].unbind(1)
        return i - rows.start, j - columns.start

    @cached_property
    def _by_tile(self) -> tuple[Tensor, dict[tuple[int, int], slice]]:
        """The pairs sorted by tile, and the slice of this list for each (tile row, tile column) that has pairs."""
        tile_row, tile_column = (self.pairs_P2 // TILE).unbind(1)
        width = int(tile_column.max()) + 1 if len(tile_column) else 1
        tile, order = (tile_row * width + tile_column).sort(stable=True)
        tiles, counts = torch.unique_consecutive(tile, return_counts=True)
        ends = counts.cumsum(0)
        parts = map(slice, (ends - counts).tolist(), ends.tolist())
        return self.pairs_P2[order], {divmod(t, width): part for t, part in zip(tiles.tolist(), parts, strict=True)}


@dataclass(frozen=True)
class Exclusion:
    """Pairs (row i, column j) that the sums leave out.

    keys: (row keys (b,), column keys (≤ M,)) int64, for each kind of key. A pair is left out when its keys of some kind
    are equal; columns beyond the keys given are not compared. kept: pairs that stay, even with equal keys. dropped:
    pairs that are left out in any case, also where they are listed in kept.
    """

    keys: tuple[tuple[Tensor, Tensor], ...] = ()
    kept: Pairs | None = None
    dropped: Pairs | None = None

    def index(self, rows: slice, columns: slice) -> Tensor | tuple[Tensor, Tensor] | None:
        """Return an index of the left-out pairs of a tile: a mask, or (rows, columns) of a few pairs.

        Returns None if no pair of the tile is left out.
        """
        return self.mask(rows, columns) if self.keys or not self.dropped else self.dropped.within(rows, columns)

    def mask(self, rows: slice, columns: slice) -> Tensor | None:
        """Return whether each pair of the tile is left out, (r, c) bool; None if no pair is."""
        found = [pair for keys in self.keys if (pair := _equal(keys, rows, columns)) is not None]
        dropped = self.dropped and self.dropped.within(rows, columns)
        if not found and dropped is None:
            return None
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        device = found[0].device if found else dropped[0].device  # pyright: ignore[reportOptionalSubscript]
        # a comparison of the whole tile serves as the mask; the others cover the first columns of the tile only
        whole = found.pop() if found and found[-1].shape == shape else None
        mask = torch.zeros(shape, dtype=torch.bool, device=device) if whole is None else whole
        for equal in found:
            mask[:, : equal.shape[1]] |= equal
        if self.kept and (kept := self.kept.within(rows, columns)):
            mask[kept] = False
        if dropped:
            mask[dropped] = True
        return mask


def _equal(keys: tuple[Tensor, Tensor], rows: slice, columns: slice) -> Tensor | None:
    """Return whether each pair of the tile has equal keys, (r, ≤ c) bool; None if no pair has."""
    row_keys, column_keys = keys[0][rows], keys[1][columns]
    # isin first: equal keys are rare, and it costs far less than comparing all pairs
    return row_keys[:, None] == column_keys if torch.isin(row_keys, column_keys).any() else None


class Tiles:
    """The tiles of a score matrix. Each tile is computed into the same memory, which the next tile overwrites."""

    def __init__(self, x_bD: Tensor, y_MD: Tensor, exclusion: Exclusion | None = None) -> None:
        self.x_bD, self.y_MD, self.exclusion = x_bD, y_MD, exclusion
        self.dtype = torch.promote_types(x_bD.dtype, torch.float32)

    def scores(self, scale: Tensor | None = None, shift: float = 0.0) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows, columns, scale · s_ij − shift) of each tile, float32 or better; also for left-out pairs.

        The caller may overwrite the scores.
        """
        space = self.scratch()
        for rows in slices(len(self.x_bD)):
            x = self.x_bD[rows].to(self.dtype)
            x = x if scale is None else x * scale
            for columns in slices(len(self.y_MD)):
                y = self.y_MD[columns].to(self.dtype)
                s = torch.mm(x, y.T, out=shaped(space, len(x), len(y)))
                yield rows, columns, s.sub_(shift) if shift else s

    def leave_out_(self, rows: slice, columns: slice, value: float, *scores: Tensor) -> None:
        """Set the left-out pairs of a tile to `value`, in place, in each tensor of `scores`."""
        index = self.exclusion and self.exclusion.index(rows, columns)
        for s in scores if index is not None else ():
            s[index] = value

    def scratch(self) -> Tensor:
        """Allocate flat memory for one tile; `shaped` views it as a matrix."""
        return self.x_bD.new_empty(min(TILE, len(self.x_bD)) * min(TILE, len(self.y_MD)), dtype=self.dtype)


class Gradients:
    """The sums ∂L/∂x = G y and ∂L/∂y = Gᵀ x over tiles of G = ∂L/∂s, in float32 or better.

    s: the scores, L the loss. found: both sums, if a kernel has computed them already.
    """

    def __init__(self, tiles: Tiles, found: tuple[Tensor, Tensor] | None = None) -> None:
        self._tiles = tiles
        zeros = (torch.zeros_like(e, dtype=tiles.dtype) for e in (tiles.x_bD, tiles.y_MD))
        self.dx_bD, self.dy_MD = found or zeros

    def add(self, rows: slice, columns: slice, g: Tensor) -> None:
        """Add the part of one tile to both sums. g: the gradient G = ∂L/∂s of the tile."""
        self.dx_bD[rows].addmm_(g, self._tiles.y_MD[columns].to(g.dtype))
        self.dy_MD[columns].addmm_(g.T, self._tiles.x_bD[rows].to(g.dtype))

    def scaled(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both sums times `scale`, if there is one, in the type of the embeddings. The sums are overwritten."""
        pair = ((self.dx_bD, self._tiles.x_bD), (self.dy_MD, self._tiles.y_MD))
        dx_bD, dy_MD = ((d if scale is None else d.mul_(scale)).to(e.dtype) for d, e in pair)
        return dx_bD, dy_MD


def slices(count: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices of `size` (by default TILE) that cut 0 … count; the last may be shorter."""
    size = size or TILE
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def shaped(space: Tensor, rows: int, columns: int) -> Tensor:
    """View the first elements of flat memory as a (rows, columns) matrix, without a copy."""
    return space[: rows * columns].view(rows, columns)
