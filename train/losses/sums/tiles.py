"""The score matrix of this rank's rows against all columns, one tile at a time, and the pairs that sums leave out.

Legend: b rows of this rank, M columns of all ranks, D width; s_ij = <x_i, y_j>; a tile is a square block of scores,
(r, c) for r rows and c columns, as large as tile_size() allows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import torch
from torch import Tensor

from dyad.train.losses.sums.fused_tiles import fuses

TILE = 1024  # rows and columns of a tile: a tile of scores and its operands stay in cache
LARGE_TILE = 8192  # on GPUs, where fewer and larger operations are faster; 0.27 GB in float32
KEPT = 1 << 27  # bytes: if all scores of a call fit, they are kept for backward instead of computed again
ROOM = 40e9  # least bytes of a GPU for LARGE_TILE: up to six such tiles are in memory at once
MANY = 1 << 28  # pairs of a call from which float32 products on a GPU print a warning: 16384 rows and columns


Block = tuple[slice, slice, Tensor]  # rows and columns of a tile, and its scores or a function of them


def tile_size(device: torch.device) -> int:
    """Return the largest number of rows, and of columns, of a tile (block of the score matrix) on `device`.

    LARGE_TILE (8192) on GPUs with at least ROOM (40 GB) of memory, else TILE (1024).
    """
    if device.type != "cuda":
        return TILE
    return LARGE_TILE if torch.cuda.get_device_properties(device).total_memory >= ROOM else TILE


class Pairs:
    """A list of P pairs (row i of this rank, global column j), (P, 2) int64.

    own: if given, the list is (i, own + i) for all rows i of this rank, which methods then use; None: any list.
    """

    def __init__(self, pairs_P2: Tensor, own: int | None = None) -> None:
        self.pairs_P2, self.own = pairs_P2, own

    @staticmethod
    def own_columns(rows: int, first: int, device: torch.device) -> Pairs:
        """Return the list of the pairs (i, first + i) for i = 0 … rows − 1, on `device`.

        With `first` the global column of this rank's first y, the list pairs each row of this rank with its own y.
        """
        i = torch.arange(rows, device=device)
        return Pairs(torch.stack([i, i + first], 1), first)

    def joined(self, others: Pairs) -> Pairs:
        """Return the union of this list of (row, column) pairs and the list `others`, without repetition."""
        return Pairs(torch.cat([self.pairs_P2, others.pairs_P2]).unique(dim=0))

    def isin(self, others: Pairs, columns: int) -> Tensor:
        """Mark the (row, column) pairs of this list that are in the list `others` too: (P,) bool for P pairs.

        columns: the number of columns of the score matrix.
        """
        number, listed = (pairs.pairs_P2[:, 0] * columns + pairs.pairs_P2[:, 1] for pairs in (self, others))
        return torch.isin(number, listed)

    def within(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Return this list's pairs within a tile of the score matrix: (row indices, column indices), int64.

        rows, columns: the slices of the tile, which begin at multiples of TILE and end at one or at the end of the
        matrix. Indices count from the tile's first row and column. Returns None if no pair of the list is within the
        tile.
        """
        if self.own is not None:
            first, end = max(rows.start, columns.start - self.own), min(rows.stop, columns.stop - self.own)
            i = torch.arange(first, end, device=self.pairs_P2.device) if first < end else None
            return None if i is None else (i - rows.start, i + (self.own - columns.start))
        sorted_P2, part_of_tile = self._by_tile
        tile_rows, tile_columns = (range(s.start // TILE, -(-s.stop // TILE)) for s in (rows, columns))
        tiles = product(tile_rows, tile_columns)
        parts = [sorted_P2[part] for tile in tiles if (part := part_of_tile.get(tile)) is not None]
        if not parts:
            return None
        i, j = torch.cat(parts).unbind(1)
        return i - rows.start, j - columns.start

    def fill_(self, scores: Tensor, rows: slice, columns: slice, value: float) -> None:
        """Write `value` over this list's pairs in `scores`, (r, c), the tile of these slices of the score matrix."""
        if self.own is not None:
            scores.diagonal(self.own + rows.start - columns.start).fill_(value)
        elif (pairs := self.within(rows, columns)) is not None:
            scores[pairs] = value

    @cached_property
    def _by_tile(self) -> tuple[Tensor, dict[tuple[int, int], slice]]:
        """This list of P pairs sorted by tile, (P, 2), and where each tile's pairs are in the sorted list.

        Here a tile is a block of TILE × TILE scores. The second value is a dict: (tile row, tile column) → slice of the
        sorted list. A tile without pairs has no entry.
        """
        tile_row, tile_column = (self.pairs_P2 // TILE).unbind(1)
        width = int(tile_column.max()) + 1 if len(tile_column) else 1
        tile, order = (tile_row * width + tile_column).sort(stable=True)
        tiles, counts = torch.unique_consecutive(tile, return_counts=True)
        ends = counts.cumsum(0)
        parts = map(slice, (ends - counts).tolist(), ends.tolist())
        return self.pairs_P2[order], {divmod(t, width): part for t, part in zip(tiles.tolist(), parts, strict=True)}


@dataclass(frozen=True)
class KnownPairs:
    """The pairs (row i, column j) for which (id of i, id of j) is in a list of id pairs. All tensors are int64.

    rows_b: the ids of rows; columns_M: the ids of columns, equal for equal items; listed_P2: P pairs (row id, column
    id); a pair whose ids no row or no column has is ignored. spared: for each kind of key, (keys of the rows, keys of
    the first columns); a pair with equal keys of any kind does not belong to the known pairs.
    """

    rows_b: Tensor
    columns_M: Tensor
    listed_P2: Tensor
    spared: tuple[tuple[Tensor, Tensor], ...] = ()

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """Mark the known pairs of a tile of r rows and c columns: (r, c) bool. The host does not wait for a GPU.

        rows, columns: the slices of the score matrix that the tile covers.
        """
        ids = self.rows_b[rows], self.columns_M[columns]
        (i_r, i_P), (j_c, j_P) = (_places(of, listed) for of, listed in zip(ids, self.listed_P2.unbind(1), strict=True))
        # the last row and column take listed ids that are not in the tile
        table = i_r.new_zeros(len(j_c) + 1, len(i_r) + 1, dtype=torch.bool)
        table[j_P, i_P] = True
        mask = table[j_c].T[i_r]  # copies whole lines: table[j_c, i_r[:, None]] would take three times as long
        for keys in self.spared:
            if (equal := _equal(keys, rows, columns)) is not None:
                mask[:, : equal.shape[1]] &= ~equal
        return mask


@dataclass(frozen=True)
class Exclusion:
    """Pairs (row i, column j) that the sums leave out.

    keys: for each kind of key (content keys of x, of y), the keys of the b rows and of the first columns, at most M,
    int64. A pair is left out when its row and column have an equal key of any kind; later columns have no key and
    equal no row. kept: pairs that stay, even with equal keys or if in `known`. dropped: pairs that are left out always,
    even if in `kept`. known: pairs that are left out unless in `kept`. owners: a number for each of the b rows and each
    of the M columns, int64; a pair of different numbers is left out always, as the column is of another row's list;
    None: there are no lists.
    """

    keys: tuple[tuple[Tensor, Tensor], ...] = ()
    kept: Pairs | None = None
    dropped: Pairs | None = None
    known: KnownPairs | None = None
    owners: tuple[Tensor, Tensor] | None = None

    def mask(self, rows: slice, columns: slice) -> Tensor | None:
        """Return a bool mask (r, c) of a tile of r rows and c columns, True for pairs which the sums leave out.

        Sums leave out the pairs listed in `dropped` or of different owners, and also, unless `kept` lists them, the
        pairs that are known or of equal keys. Returns None if no rule applies to the tile. rows, columns: the slices of
        the score matrix that the tile covers.
        """
        by_rule = [*(_equal(keys, rows, columns) for keys in self.keys), self.known and self.known.mask(rows, columns)]
        found = [mask for mask in by_rule if mask is not None]
        dropped = self.dropped and self.dropped.within(rows, columns)
        others = None if self.owners is None else self.owners[0][rows, None] != self.owners[1][columns]
        given = [*found, *(dropped or ()), *(() if others is None else (others,))]
        if not given:
            return None
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        # a comparison of the whole tile serves as the mask; the others cover the first columns of the tile only
        whole = found.pop() if found and found[-1].shape == shape else None
        mask = torch.zeros(shape, dtype=torch.bool, device=given[0].device) if whole is None else whole
        for equal in found:
            mask[:, : equal.shape[1]] |= equal
        if self.kept:
            self.kept.fill_(mask, rows, columns, False)
        if others is not None:
            mask |= others
        if dropped:
            mask[dropped] = True
        return mask

    def counts(self, b: int, M: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Count the pairs of a score matrix (b, M) that sums leave out, per row, (b,), and per column, (M,), int64.

        device: the device of the tensors of this Exclusion.
        """
        of_rows_b, of_columns_M = (torch.zeros(n, dtype=torch.int64, device=device) for n in (b, M))
        for rows, columns in product(slices(b, tile_size(device)), slices(M, tile_size(device))):
            if (mask := self.mask(rows, columns)) is not None:
                of_rows_b[rows] += mask.sum(1)
                of_columns_M[columns] += mask.sum(0)
        return of_rows_b, of_columns_M


def _places(ids_n: Tensor, wanted_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number 0 … n − 1 for each id, (n,), equal for equal ids, and that of each of the wanted ids, (P,).

    A wanted id that is not among ids_n gets the number n. All tensors are int64.
    """
    sorted_n = ids_n.sort().values
    place_n, place_P = (torch.searchsorted(sorted_n, ids.contiguous()) for ids in (ids_n, wanted_P))
    return place_n, place_P.where(sorted_n[place_P.clamp(max=len(ids_n) - 1)] == wanted_P, len(ids_n))


def _equal(keys: tuple[Tensor, Tensor], rows: slice, columns: slice) -> Tensor | None:
    """Compare the keys of a tile's r rows with those of its columns: (r, k) bool, True where they are equal.

    keys: (row keys, column keys) of the score matrix. Its last columns may have no key, so k may be less than the
    number of the tile's columns. rows, columns: the slices of the tile. May return None if no two keys are equal.
    """
    row_keys, column_keys = keys[0][rows], keys[1][columns]
    # equal keys are rare, and isin costs far less than all pairs; not on a GPU, where the host would wait for it
    some = row_keys.is_cuda or torch.isin(row_keys, column_keys).any()
    return row_keys[:, None] == column_keys if some else None


class Tiles:
    """The score matrix <x_i, y_j> of x (b, D) and y (M, D), computed one tile (a block of scores) at a time.

    x_bD: row embeddings of this rank; y_MD: column embeddings of all ranks. exclusion: the pairs that sums over the
    scores leave out; None: no pair.
    """

    def __init__(self, x_bD: Tensor, y_MD: Tensor, exclusion: Exclusion | None = None) -> None:
        self.x_bD, self.y_MD, self.exclusion = x_bD, y_MD, exclusion
        self.dtype = torch.promote_types(x_bD.dtype, torch.float32)
        self.size = tile_size(x_bD.device)

    @cached_property
    def half(self) -> bool:
        """Whether matrix products take bf16 operands and sum in float32, and functions of scores are fused kernels.

        True for bf16 embeddings on GPUs that can compile; fp16 embeddings are converted to float32. A product of two
        bf16 numbers is exact in float32, so the scores are those of float32 operands.
        """
        some = len(self.x_bD) * len(self.y_MD) > 0
        return some and self.x_bD.dtype == self.y_MD.dtype == torch.bfloat16 and fuses(self.x_bD.device)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients in scores enter matrix products: bf16 if `half`, else float32 or float64."""
        return self.x_bD.dtype if self.half else self.dtype

    @property
    def keeps_scores(self) -> bool:
        """Whether a caller may keep all scores for backward: they take at most KEPT bytes (128 MiB), and not `half`."""
        return not self.half and len(self.x_bD) * len(self.y_MD) * self.dtype.itemsize <= KEPT

    def scores(
        self, scale: Tensor | None = None, shift: Tensor | None = None, *, kept: bool = False
    ) -> Iterator[Block]:
        """Compute the score matrix s_ij = <x_i, y_j> by tiles: yield (row slice, column slice, scale · s_ij − shift).

        scale: 0-d; None: 1. shift: 0-d; None: 0. If self.half, scale and shift must be None. The scores are float32 or
        float64, and include pairs that the sums leave out. The caller may overwrite them. kept: whether the caller
        keeps the tiles; else the next tile is computed into the same memory.
        """
        space = None if kept else self.scratch()
        for rows in slices(len(self.x_bD), self.size):
            x = self.operand(self.x_bD[rows])
            x = x if scale is None else x * scale
            for columns in slices(len(self.y_MD), self.size):
                y = self.operand(self.y_MD[columns])
                s = wide_product(x, y.T, None if space is None else shaped(space, len(x), len(y)))
                yield rows, columns, s if shift is None else s.sub_(shift)

    @property
    def strip(self) -> int:
        """How many rows to take at a time if all scores of a row are needed at once.

        As many as fit into KEPT bytes (128 MiB) of scores, in multiples of TILE, but at least TILE and at most the rows
        of a tile.
        """
        fitting = KEPT // (max(len(self.y_MD), 1) * self.dtype.itemsize)
        return max(TILE, min(self.size, fitting // TILE * TILE))

    def operand(self, embeddings: Tensor) -> Tensor:
        """Return embeddings in the dtype of operands of matrix products: bf16 if `half`, else float32 or float64.

        For MANY (2^28) pairs or more on a GPU, unless `half`, a line on stderr says once that bf16 would be faster.
        """
        if not self.half and self.x_bD.is_cuda and len(self.x_bD) * len(self.y_MD) >= MANY:
            _say_what_is_slow()
        return embeddings if self.half else embeddings.to(self.dtype)

    def leave_out_(self, rows: slice, columns: slice, value: float, *scores: Tensor) -> None:
        """Write `value` over the pairs of a tile that the sums leave out, in place, in each tensor of `scores`.

        rows, columns: the slices of the tile. scores: tensors (r, c) of the tile's r rows and c columns.
        """
        if (e := self.exclusion) is None:
            return
        alone = None if e.keys or e.known or e.owners else e.dropped
        mask = None if alone else e.mask(rows, columns)
        for s in scores:
            if alone:
                alone.fill_(s, rows, columns, value)
            elif mask is not None:
                s[mask] = value

    def left_out(self, rows: slice, columns: slice) -> Tensor | None:
        """Return a bool mask (r, c) of a tile, True for pairs that the sums leave out; None: no pair is left out.

        rows, columns: the slices of the score matrix that the tile covers.
        """
        return self.exclusion and self.exclusion.mask(rows, columns)

    def scratch(self) -> Tensor:
        """Allocate a flat tensor for the scores of one tile; the function `shaped` views it as a matrix."""
        return self.x_bD.new_empty(min(self.size, len(self.x_bD)) * min(self.size, len(self.y_MD)), dtype=self.dtype)


class Gradients:
    """The gradients of a loss L in x and y, G y and Gᵀ x, added up over tiles of G = ∂L/∂s, in float32 or float64.

    s: the scores <x_i, y_j>. tiles: the score matrix. found: (G y, Gᵀ x), if a GPU kernel has computed both already.
    """

    def __init__(self, tiles: Tiles, found: tuple[Tensor, Tensor] | None = None) -> None:
        self._tiles = tiles
        # the first tile of a row or column writes, so only a matrix without tiles must begin with zeros
        begin = torch.empty_like if len(tiles.x_bD) and len(tiles.y_MD) else torch.zeros_like
        self.dx_bD, self.dy_MD = found or (begin(e, dtype=tiles.dtype) for e in (tiles.x_bD, tiles.y_MD))

    def add(self, rows: slice, columns: slice, g: Tensor) -> None:
        """Add the contribution of one tile of scores to the stored gradients of x and of y.

        rows, columns: the slices of the score matrix that the tile covers; tiles must be added in the order of
        Tiles.scores. g: the gradient of the loss in the tile's scores, (r, c), of tiles.gradient_dtype.
        """
        y, x = self._tiles.y_MD[columns].to(g.dtype), self._tiles.x_bD[rows].to(g.dtype)
        add_product(self.dx_bD[rows], g, y, write=columns.start == 0)
        add_product(self.dy_MD[columns], g.T, x, write=rows.start == 0)

    def scaled(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (b, D) and y (M, D), times `scale` unless it is None, in the types of x and y.

        The stored gradients are multiplied in place.
        """
        pair = ((self.dx_bD, self._tiles.x_bD), (self.dy_MD, self._tiles.y_MD))
        dx_bD, dy_MD = ((d if scale is None else d.mul_(scale)).to(e.dtype) for d, e in pair)
        return dx_bD, dy_MD


def wide_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left @ right, summed and returned in float32, or float64 for float64 operands. out: memory to write to."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype != wide and left.is_cuda:
        return torch.mm(left, right, out_dtype=wide, out=out)
    return torch.mm(left.to(wide), right.to(wide), out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, write: bool = False) -> None:
    """Add left @ right to `total` (float32 or float64) in place, or overwrite `total` with it if `write`."""
    if left.dtype != total.dtype and total.is_cuda:
        torch.addmm(total, left, right, beta=int(not write), out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=int(not write))


def part_of(values: Tensor | None, part: slice) -> Tensor | None:
    """Return values[part]; None if `values` is None."""
    return None if values is None else values[part]


@cache
def _say_what_is_slow() -> None:
    line = "the loss of this many pairs is computed in float32, without the tensor cores"
    print(f"{line}: precision=bf16 would be several times as fast", file=sys.stderr)


def slices(count: int, size: int | None = None) -> Iterator[slice]:
    """Cut the indices 0 … count − 1 into slices of `size` indices, by default TILE; the last may be shorter."""
    size = size or TILE
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def shaped(space: Tensor, rows: int, columns: int) -> Tensor:
    """View the first rows · columns elements of the flat tensor `space` as a (rows, columns) matrix, without a copy."""
    return space[: rows * columns].view(rows, columns)
