"""The sums and gradients of lse_one_shift.py as Triton kernels: scores stay in registers and never reach memory.

Legend: b rows of this rank, M columns of all ranks, D width; E_ij = exp(scale · <x_i, y_j> − shift), 0 for pairs that
are left out; u_i, v_j the upstream gradient of row i and of column j, each divided by its sum of E; G = ∂L/∂logits. The
caller has chosen a shift for which no E and no sum of E overflows.

Forward is one matmul whose epilogue is the exponential and the sums of rows and columns (2·b·M·D flops). Backward
recomputes E and writes G_ij = E_ij (u_i + v_j), one strip (a block of at most 8192 rows and columns) at a time, for two
matmuls of cuBLAS: dx += G y, dy += Gᵀ x.
A kernel that accumulates both gradients would not fit into a multiprocessor of the GPU at D ≥ 512, and one kernel for
each would compute the scores twice, at 10·b·M·D flops for forward and backward instead of 8.

Each program writes partial sums, and these are added in a fixed order, which the shape of a block decides. So the same
inputs give the same bits on the same machine. Shapes are timed once for each D and number of kinds of keys, and cached
on disk; deterministic=true takes the first shape everywhere.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyad.train.losses.sums.tiles import add_product, slices
from dyad.train.losses.sums.triton_setup import INSTALLED, INTERPRETED, compiled, compiles, tl, triton, tuned

STRIP = 8192  # rows and columns of a strip of G: 128 MB in bf16; with its operands it leaves room in the device's cache
WIDEST = 4096  # the largest D
KEYS = 2  # how many kinds of keys are compared, at most
BLOCK_ROWS = 128  # rows of a block, the same for all shapes that are tried: each block has one partial sum per column
WIDEST_BLOCK = 256  # most columns of a block in triton_setup.BLOCKS
PROGRAMS = 1024  # enough to keep every multiprocessor busy, few enough for partial sums of rows to be small
LOG2_E = 1.4426950408889634
Number = float | Tensor  # a tensor is 0-d, on the device of the embeddings: a kernel reads it there


@dataclass(frozen=True)
class KernelExclusion:
    """Pairs (row i, column j) that the sums leave out; the GPU kernels find them by comparing keys.

    keys: none, one or two kinds of key, each as (keys of the b rows, keys of the first columns, at most M), int64. A
    pair is left out when its row and column have an equal key of either kind; later columns have no key and equal none.
    first_own: row i's own column is first_own + i, which may be negative or beyond the last column: row i then has no
    own column here (first_own = M: no row has one). The pair of a row and its own column stays even with equal keys, or
    is left out if own_dropped.
    """

    keys: tuple[tuple[Tensor, Tensor], ...]
    first_own: int
    own_dropped: bool = False

    def within(self, rows: slice, columns: slice) -> KernelExclusion:
        """Return these pairs for a part of the score matrix, with rows and columns counted from the first of the part.

        rows, columns: the slices of the matrix that the part covers.
        """
        keys = tuple((of_rows[rows], of_columns[columns]) for of_rows, of_columns in self.keys)
        return KernelExclusion(keys, self.first_own + rows.start - columns.start, self.own_dropped)


NOTHING = KernelExclusion((), 0)


def available(x_bD: Tensor, y_MD: Tensor) -> bool:
    """Whether the kernels can take x and y: both bf16 or both fp16, on a CUDA device that Triton supports, D ≤ 4096.

    The first call for a device compiles a small kernel; if that fails, the reason is printed to stderr. float32 is
    excluded: tensor cores would round its products to tf32, and without them cuBLAS is as fast as a kernel. With
    TRITON_INTERPRET=1 Triton interprets the kernels on any device, very slowly.
    """
    if not INSTALLED or x_bD.dtype not in (torch.bfloat16, torch.float16) or y_MD.dtype != x_bD.dtype:
        return False
    if not 0 < x_bD.shape[1] <= WIDEST or x_bD.device != y_MD.device:
        return False
    recent = x_bD.is_cuda and torch.cuda.get_device_capability(x_bD.device) >= (8, 0)
    return INTERPRETED or (recent and compiles(x_bD.device))


def exp_sums(
    x_bD: Tensor, y_MD: Tensor, scale: Number, shift: Number, exclusion: KernelExclusion = NOTHING
) -> tuple[Tensor, Tensor]:
    """Return Σ_j E_ij of the rows (b,) and Σ_i E_ij of the columns (M,), float32.

    E_ij = exp(scale · <x_i, y_j> − shift), 0 for the pairs that `exclusion` leaves out. x_bD, y_MD: row embeddings of
    this rank and column embeddings of all ranks, bf16 or fp16. Memory: 64 float32 elements per column, and a few MB.
    """
    x_bD, y_MD = x_bD.contiguous(), y_MD.contiguous()
    row_sums_b = torch.zeros(len(x_bD), dtype=torch.float32, device=x_bD.device)
    column_sums_M = torch.zeros(len(y_MD), dtype=torch.float32, device=x_bD.device)
    if not len(y_MD):
        return row_sums_b, column_sums_M
    for rows in slices(len(x_bD), STRIP):
        x_rD, part = x_bD[rows], exclusion.within(rows, slice(0, len(y_MD)))
        row_blocks = triton.cdiv(len(x_rD), BLOCK_ROWS)
        widest_blocks = triton.cdiv(len(y_MD), WIDEST_BLOCK)
        group = WIDEST_BLOCK * triton.cdiv(widest_blocks, max(1, PROGRAMS // row_blocks))  # columns of one program
        of_rows = row_sums_b.new_empty(triton.cdiv(len(y_MD), group), len(x_rD))
        of_columns = row_sums_b.new_empty(row_blocks, len(y_MD))
        with torch.cuda.device_of(x_rD):
            _sums_kernel[(row_blocks, len(of_rows))](
                x_rD, y_MD, of_rows, of_columns, *_key_arguments(part, x_rD), part.first_own,
                len(x_rD), len(y_MD), group, _exponent(scale, shift, x_rD),
                D=x_rD.shape[1], KEYS=len(part.keys), OWN_DROPPED=part.own_dropped, INTERPRETED=INTERPRETED,
                enable_fp_fusion=True,
            )  # fmt: skip
        row_sums_b[rows] = of_rows.sum(0)
        column_sums_M += of_columns.sum(0)
    return row_sums_b, column_sums_M


def gradient_strip(
    x_rD: Tensor,
    y_cD: Tensor,
    scale: Number,
    shift: Number,
    u_r: Tensor,
    v_c: Tensor,
    exclusion: KernelExclusion = NOTHING,
    out: Tensor | None = None,
) -> Tensor:
    """Return G_ij = E_ij (u_i + v_j), the gradient of the loss in the logits, for r rows and c columns: (r, c).

    r and c are at most STRIP (8192). x_rD, y_cD: the embeddings of these rows and columns, bf16 or fp16; G has their
    type. E_ij = exp(scale · <x_i, y_j> − shift), 0 for pairs that are left out. u_r, v_c: float32, the upstream
    gradient of each row and column, divided by its sum of E. exclusion: the pairs to leave out; its row 0 and column 0
    are the first of x_rD and y_cD. out: flat memory for the result, at least r · _stride(c) elements, which the next
    call with the same `out` overwrites; None: new memory. In fp16, small G are lost unless u and v are multiplied by a
    power of two that brings the largest G near 2^14, as `gradients` does.
    """
    x_rD, y_cD = x_rD.contiguous(), y_cD.contiguous()
    rows, columns = len(x_rD), len(y_cD)
    stride = _stride(columns)
    g_rc = (x_rD.new_empty(rows * stride) if out is None else out[: rows * stride]).view(rows, stride)[:, :columns]
    if not g_rc.numel():
        return g_rc
    with torch.cuda.device_of(x_rD):
        _gradient_kernel[lambda shape: (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, shape["BLOCK_COLUMNS"]))](
            x_rD, y_cD, u_r.contiguous(), v_c.contiguous(), g_rc, *_key_arguments(exclusion, x_rD), exclusion.first_own,
            rows, columns, stride, _exponent(scale, shift, x_rD),
            D=x_rD.shape[1], KEYS=len(exclusion.keys), OWN_DROPPED=exclusion.own_dropped, INTERPRETED=INTERPRETED,
            enable_fp_fusion=True,
        )  # fmt: skip
    return g_rc


def gradients(
    x_bD: Tensor,
    y_MD: Tensor,
    scale: Number,
    shift: Number,
    u_b: Tensor,
    v_M: Tensor,
    exclusion: KernelExclusion = NOTHING,
) -> tuple[Tensor, Tensor]:
    """Return G y (b, D) and Gᵀ x (M, D) in float32: the gradients of x and y, not yet multiplied by the scale.

    G_ij = exp(scale · <x_i, y_j> − shift) (u_i + v_j), 0 for the pairs that `exclusion` leaves out. x_bD, y_MD: row
    embeddings of this rank and column embeddings of all ranks, bf16 or fp16. u_b, v_M: upstream gradient of the log-sum
    of each row and column, divided by its sum of exponentials. Only one block of G, at most 8192 rows and columns, is
    in memory at a time.
    """
    x_bD, y_MD = x_bD.contiguous(), y_MD.contiguous()
    factor = _into_range(x_bD, y_MD, scale, shift, u_b, v_M, exclusion) if x_bD.dtype == torch.float16 else None
    u_b, v_M = (u_b, v_M) if factor is None else (u_b * factor, v_M * factor)
    dx_bD, dy_MD = (torch.zeros_like(e, dtype=torch.float32) for e in (x_bD, y_MD))
    space = x_bD.new_empty(min(STRIP, len(x_bD)) * _stride(min(STRIP, len(y_MD))))
    for rows in slices(len(x_bD), STRIP):
        for columns in slices(len(y_MD), STRIP):
            x, y, part = x_bD[rows], y_MD[columns], exclusion.within(rows, columns)
            g = gradient_strip(x, y, scale, shift, u_b[rows], v_M[columns], part, out=space)
            add_product(dx_bD[rows], g, y)
            add_product(dy_MD[columns], g.T, x)
    return (dx_bD, dy_MD) if factor is None else (dx_bD.div_(factor), dy_MD.div_(factor))


def _into_range(
    x_bD: Tensor, y_MD: Tensor, scale: Number, shift: Number, u_b: Tensor, v_M: Tensor, exclusion: KernelExclusion
) -> Tensor:
    """Return the power of two, 0-d, by which u and v must be multiplied so that fp16 can hold G_ij = E_ij (u_i + v_j).

    E_ij = exp(scale · <x_i, y_j> − shift); arguments as in `gradients`. After the multiplication |G| ≤ 2^14, and
    elements above 2^-14 have the full precision of fp16. |G_ij| is at most |u_i| Σ_j E_ij + |v_j| Σ_i E_ij. The sums
    are computed anew, for 2·b·M·D flops: the caller has not kept those of the forward pass, and without the bound a
    gradient could silently become 0.
    """
    sums = exp_sums(x_bD, y_MD, scale, shift, exclusion)
    largest = torch.cat([value.abs() * total for value, total in zip((u_b, v_M), sums, strict=True)])
    largest = torch.cat([largest, largest.new_full((1,), 2.0**-100)]).max()
    return torch.exp2(13 - largest.log2().ceil())


def _exponent(scale: Number, shift: Number, like: Tensor) -> Tensor:
    """Return (scale, shift) · log₂e, (2,) float32, on the device of `like`, without making the host wait for it."""
    pair = (v if isinstance(v, Tensor) else like.new_full((), v, dtype=torch.float64) for v in (scale, shift))
    return (torch.stack([v.detach().double() for v in pair]) * LOG2_E).float()


def _stride(columns: int) -> int:
    """Return `columns` rounded up to a multiple of 64: the distance of two rows of a matrix in memory, in elements.

    cuBLAS is fast when rows start at multiples of 128 bytes (64 elements in half precision).
    """
    return 64 * triton.cdiv(columns, 64)


def _key_arguments(exclusion: KernelExclusion, unused: Tensor) -> list[Any]:
    """Return a kernel's arguments for keys: row keys, column keys and number of column keys, for each of two kinds.

    Kernels leave out pairs whose row and column have an equal key of one kind. If `exclusion` has fewer than two kinds
    of key, `unused` (any tensor) fills their places, with the number 0; the kernel does not read it.
    """
    arguments: list[Any] = []
    for of_rows, of_columns in exclusion.keys:
        arguments += [of_rows.contiguous(), of_columns.contiguous(), len(of_columns)]
    return arguments + [unused, unused, 0] * (2 - len(exclusion.keys))


@compiled
def _exponentials(
    x, y, first_row, first_column, row_count, column_count, exponent,
    row_keys_0, column_keys_0, keyed_0, row_keys_1, column_keys_1, keyed_1, first_own,
    D: tl.constexpr, KEYS: tl.constexpr, OWN_DROPPED: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute E_ij = exp2(exponent[0] · <x_i, y_j> − exponent[1]) of the block at (first_row, first_column).

    x, y: pointers to the embeddings of the rows and of the columns, D wide. exponent: pointer to the result of
    _exponent, so that E_ij = exp(scale · <x_i, y_j> − shift). E is 0 outside of the row_count × column_count score
    matrix. Row i's own column is first_own + i: this pair's E is 0 if OWN_DROPPED, else it stays. Of the other pairs, E
    is 0 where row and column have an equal key. row_keys_0, column_keys_0, …: pointers to the keys of the first and the
    second kind; KEYS: how many kinds are compared (0, 1 or 2); keyed_0, keyed_1: how many of the first columns have a
    key of this kind. INTERPRETED: whether Triton's interpreter runs the kernel. BLOCK_D: how many of the D elements are
    multiplied at a time.
    """
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    d = tl.arange(0, BLOCK_D)
    # threads beyond the edge read the last row or column again; their e is set to 0 below
    x_block = x + (tl.minimum(rows, row_count - 1).to(tl.int64) * D)[:, None] + d[None, :]
    y_block = y + (tl.minimum(columns, column_count - 1).to(tl.int64) * D)[None, :] + d[:, None]
    scale, shift = tl.load(exponent), tl.load(exponent + 1)
    scores = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            x_part, y_part = tl.load(x_block), tl.load(y_block)
        else:
            x_part = tl.load(x_block, mask=d[None, :] < D - start, other=0.0)
            y_part = tl.load(y_block, mask=d[:, None] < D - start, other=0.0)
        if INTERPRETED:  # the interpreter computes bf16 products wrongly
            x_part, y_part = x_part.to(tl.float32), y_part.to(tl.float32)
        scores = tl.dot(x_part, y_part, scores)
        x_block += BLOCK_D
        y_block += BLOCK_D
    e = tl.exp2(scores * scale - shift)
    # most blocks touch neither an edge nor an own column, so they skip these comparisons
    if (first_row + BLOCK_ROWS > row_count) | (first_column + BLOCK_COLUMNS > column_count):
        e = tl.where((rows < row_count)[:, None] & (columns < column_count)[None, :], e, 0.0)
    own = first_row + first_own
    near_own = (own < first_column + BLOCK_COLUMNS) & (own + BLOCK_ROWS > first_column)
    if OWN_DROPPED:  # noqa: SIM102 (OWN_DROPPED is known when the kernel is compiled)
        if near_own:
            e = tl.where((rows + first_own)[:, None] == columns[None, :], 0.0, e)
    if KEYS > 0:
        e = _without_equal(e, row_keys_0, column_keys_0, keyed_0, rows, columns, row_count, first_own, near_own)
    if KEYS > 1:
        e = _without_equal(e, row_keys_1, column_keys_1, keyed_1, rows, columns, row_count, first_own, near_own)
    return e


@compiled
def _without_equal(e, row_keys, column_keys, keyed, rows, columns, row_count, first_own, near_own):
    """Return e with 0 for pairs (i, j) of a block whose row key and column key are equal, except for own columns.

    e: the exponentials of the block. rows, columns: the indices of its rows and columns. row_keys, column_keys:
    pointers to the keys. The own column of row i is first_own + i, and its exponential stays. keyed: how many of the
    first columns have a key. near_own: whether the block may hold own columns.
    """
    of_rows = tl.load(row_keys + tl.minimum(rows, row_count - 1))
    of_columns = tl.load(column_keys + columns, mask=columns < keyed, other=0)
    equal = (of_rows[:, None] == of_columns[None, :]) & (columns < keyed)[None, :]
    if near_own:
        e = tl.where(equal & ((rows + first_own)[:, None] != columns[None, :]), 0.0, e)
    else:
        e = tl.where(equal, 0.0, e)
    return e


@tuned
def _sums_kernel(
    x, y, of_rows, of_columns, row_keys_0, column_keys_0, keyed_0, row_keys_1, column_keys_1, keyed_1, first_own,
    row_count, column_count, group, exponent,
    D: tl.constexpr, KEYS: tl.constexpr, OWN_DROPPED: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr = BLOCK_ROWS,
):  # fmt: skip
    """Sum E_ij (see _exponentials) over a group of columns, into of_rows, and over a block of rows, into of_columns.

    x, y: pointers to the embeddings of the rows and of the columns; other arguments as in _exponentials. group: the
    number of columns of a group. Each program handles one (block p of rows, group q of columns): of_rows[q, i] is its
    sum of row i, and of_columns[p, j] its sum of column j.
    """
    row_block, column_group = tl.program_id(0), tl.program_id(1)
    row_sums = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    last = tl.minimum((column_group + 1) * group, column_count)
    for start in tl.range(column_group * group, last, BLOCK_COLUMNS, disable_licm=True):
        e = _exponentials(
            x, y, row_block * BLOCK_ROWS, start, row_count, column_count, exponent,
            row_keys_0, column_keys_0, keyed_0, row_keys_1, column_keys_1, keyed_1, first_own,
            D, KEYS, OWN_DROPPED, INTERPRETED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D,
        )  # fmt: skip
        row_sums += tl.sum(e, 1)
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        address = of_columns + row_block.to(tl.int64) * column_count + columns
        tl.store(address, tl.sum(e, 0), mask=columns < column_count)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tl.store(of_rows + column_group * row_count + rows, row_sums, mask=rows < row_count)


@tuned
def _gradient_kernel(
    x, y, u, v, g, row_keys_0, column_keys_0, keyed_0, row_keys_1, column_keys_1, keyed_1, first_own,
    row_count, column_count, stride, exponent,
    D: tl.constexpr, KEYS: tl.constexpr, OWN_DROPPED: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr = BLOCK_ROWS,
):  # fmt: skip
    """Compute G_ij = E_ij (u_i + v_j), one block per program, and write it to `g`.

    g: pointer to a matrix whose rows are `stride` elements apart. u, v: pointers to the upstream gradient of each row
    and column, divided by its sum of E. E_ij and the other arguments are those of _exponentials.
    """
    first_row, first_column = tl.program_id(0) * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    e = _exponentials(
        x, y, first_row, first_column, row_count, column_count, exponent,
        row_keys_0, column_keys_0, keyed_0, row_keys_1, column_keys_1, keyed_1, first_own,
        D, KEYS, OWN_DROPPED, INTERPRETED, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_D,
    )  # fmt: skip
    rows, columns = first_row + tl.arange(0, BLOCK_ROWS), first_column + tl.arange(0, BLOCK_COLUMNS)
    u_rows = tl.load(u + rows, mask=rows < row_count, other=0.0)
    v_columns = tl.load(v + columns, mask=columns < column_count, other=0.0)
    e *= u_rows[:, None] + v_columns[None, :]
    if INTERPRETED and g.dtype.element_ty == tl.bfloat16:
        e = _rounded_to_bf16(e)
    # columns up to the stride are written: with a limit that is a multiple of 16, a thread can write 16 bytes at once
    within = (rows < row_count)[:, None] & (columns < stride)[None, :]
    tl.store(g + rows[:, None] * stride + columns[None, :], e.to(g.dtype.element_ty), mask=within)


@compiled
def _rounded_to_bf16(value):
    """Round the float32 `value` to the nearest bf16, ties to even; Triton's interpreter would truncate."""
    bits = value.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16 << 16).to(tl.float32, bitcast=True)
