"""The score matrix of own rows against all columns, one tile at a time, and the pairs that are left out of it.

Legend: b rows of this rank, M columns of all ranks, D width; s_ij = <x_i, y_j>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 1024  # rows and columns of a tile: a tile of scores and its operands stay in cache


class Pairs:
    """(row i, column j) pairs of own rows and global columns, (P, 2) int64; a tile finds its own at once.

    own: the first column when these are the pairs (i, own + i) of all rows, else None.
    """

    def __init__(self, pairs_P2: Tensor, own: int | None = None) -> None:
        self.pairs_P2, self.own = pairs_P2, own

    @staticmethod
    def own_columns(rows: int, first: int, device: torch.device) -> Pairs:
        i = torch.arange(rows, device=device)
        return Pairs(torch.stack([i, i + first], 1), first)

    def joined(self, others: Pairs) -> Pairs:
        """These and the others, each once."""
        return Pairs(torch.cat([self.pairs_P2, others.pairs_P2]).unique(dim=0))

    def among(self, others: Pairs, columns: int) -> Tensor:
        """(P,) bool: which of these are among the others, of a matrix with so many columns."""
        number, listed = (pairs.pairs_P2[:, 0] * columns + pairs.pairs_P2[:, 1] for pairs in (self, others))
        return torch.isin(number, listed)

    def within(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Indices into the tile of those that lie in it, if any do."""
        if self.own is not None:
            first, end = max(rows.start, columns.start - self.own), min(rows.stop, columns.stop - self.own)
            i = torch.arange(first, end, device=self.pairs_P2.device) if first < end else None
            return None if i is None else (i - rows.start, i + (self.own - columns.start))
        sorted_P2, places = self._by_tile
        place = places.get((rows.start // TILE, columns.start // TILE))
        if place is None:
            return None
        i, j = sorted_P2[place].unbind(1)
        return i - rows.start, j - columns.start

    @cached_property
    def _by_tile(self) -> tuple[Tensor, dict[tuple[int, int], slice]]:
        """The pairs, sorted by tile, and where those of each tile are. Made when the first tile asks."""
        row_strip, column_strip = (self.pairs_P2 // TILE).unbind(1)
        width = int(column_strip.max()) + 1 if len(column_strip) else 1
        tile, order = (row_strip * width + column_strip).sort(stable=True)
        tiles, counts = torch.unique_consecutive(tile, return_counts=True)
        ends = counts.cumsum(0)
        places = map(slice, (ends - counts).tolist(), ends.tolist())
        return self.pairs_P2[order], {divmod(t, width): place for t, place in zip(tiles.tolist(), places, strict=True)}


@dataclass(frozen=True)
class Exclusion:
    """Pairs (row i, column j) that count for nothing.

    keys: (row keys (b,), column keys (≤ M,)) int64; a pair is left out when any of these has equal keys; columns
    beyond the keys given are not compared. kept: pairs that stay whatever their keys. dropped: pairs that are left out.
    """

    keys: tuple[tuple[Tensor, Tensor], ...] = ()
    kept: Pairs | None = None
    dropped: Pairs | None = None

    def places(self, rows: slice, columns: slice) -> Tensor | tuple[Tensor, Tensor] | None:
        """An index of the pairs of the tile that are left out: a mask, or a few places; None when none is."""
        return self.mask(rows, columns) if self.keys or not self.dropped else self.dropped.within(rows, columns)

    def mask(self, rows: slice, columns: slice) -> Tensor | None:
        """Whether each pair of the tile is left out; None when none is."""
        found = [pair for keys in self.keys if (pair := _equal(keys, rows, columns)) is not None]
        dropped = self.dropped and self.dropped.within(rows, columns)
        if not found and dropped is None:
            return None
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        device = found[0].device if found else dropped[0].device  # pyright: ignore[reportOptionalSubscript]
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
    """Rarely are there any: sparing a comparison of all pairs pays."""
    row_keys, column_keys = keys[0][rows], keys[1][columns]
    return row_keys[:, None] == column_keys if torch.isin(row_keys, column_keys).any() else None


class Tiles:
    """Iterates over tiles of a score matrix, in memory that the next tile overwrites."""

    def __init__(self, x_bD: Tensor, y_MD: Tensor, exclusion: Exclusion | None = None) -> None:
        self.x_bD, self.y_MD, self.exclusion = x_bD, y_MD, exclusion
        self.dtype = torch.promote_types(x_bD.dtype, torch.float32)

    def scores(self, scale: Tensor | None = None, shift: float = 0.0) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, columns, scale · s_ij − shift), float32 or better, nothing left out. The caller may overwrite it."""
        space = self.scratch()
        for rows in strips(len(self.x_bD)):
            x = self.x_bD[rows].to(self.dtype)
            x = x if scale is None else x * scale
            for columns in strips(len(self.y_MD)):
                y = self.y_MD[columns].to(self.dtype)
                s = torch.mm(x, y.T, out=shaped(space, len(x), len(y)))
                yield rows, columns, s.sub_(shift) if shift else s

    def mask(self, rows: slice, columns: slice) -> Tensor | None:
        return self.exclusion.mask(rows, columns) if self.exclusion else None

    def leave_out_(self, rows: slice, columns: slice, value: float, *scores: Tensor) -> None:
        """Put `value` in the places of the tile that are left out."""
        places = self.exclusion and self.exclusion.places(rows, columns)
        for s in scores if places is not None else ():
            s[places] = value

    def scratch(self) -> Tensor:
        """Memory for one tile, to be `shaped`."""
        return self.x_bD.new_empty(min(TILE, len(self.x_bD)) * min(TILE, len(self.y_MD)), dtype=self.dtype)


class Gradients:
    """Collects ∂L/∂x and ∂L/∂y from tiles of G = ∂L/∂s: G y and Gᵀ x, in float32 or better."""

    def __init__(self, tiles: Tiles, found: tuple[Tensor, Tensor] | None = None) -> None:
        self._tiles = tiles
        zeros = (torch.zeros_like(e, dtype=tiles.dtype) for e in (tiles.x_bD, tiles.y_MD))
        self.dx_bD, self.dy_MD = found or zeros

    def add(self, rows: slice, columns: slice, g: Tensor) -> None:
        self.dx_bD[rows].addmm_(g, self._tiles.y_MD[columns].to(g.dtype))
        self.dy_MD[columns].addmm_(g.T, self._tiles.x_bD[rows].to(g.dtype))

    def scaled(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Both times `scale`, in the type of the embeddings."""
        pair = ((self.dx_bD, self._tiles.x_bD), (self.dy_MD, self._tiles.y_MD))
        dx_bD, dy_MD = (d.mul_(scale).to(e.dtype) for d, e in pair)
        return dx_bD, dy_MD


def strips(count: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, count)) for start in range(0, count, TILE))


def shaped(space: Tensor, rows: int, columns: int) -> Tensor:
    return space[: rows * columns].view(rows, columns)
