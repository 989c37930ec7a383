"""log-sum-exp of rows and columns for logits of any size: an online softmax with a running maximum, two exp per score.

Each row and each column may have a scale of its own, which lse_one_shift.py does not allow.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.fused_tiles import log_sum_gradients, log_sums
from dyad.train.losses.sums.logits import Logits, Shares, UpstreamGradients, sum_of_products
from dyad.train.losses.sums.tiles import Gradients, Tiles, shaped


def online_sums(tiles: Tiles, logits: Logits, layout: Layout, shares: Shares) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp of this rank's rows (b,) and of all columns (M,), for logits of any size.

    A third result is the sum over ranks of shares(row log-sums), as in log_partition. Column sums run over the rows of
    all ranks. tiles: the score matrix. logits: the scales and log-weights that make logits of the scores. layout: the
    ranks over which to sum. Every rank must call it.
    """
    rows_b = tiles.x_bD.new_full((len(tiles.x_bD),), -math.inf, dtype=tiles.dtype)
    columns_M = tiles.y_MD.new_full((len(tiles.y_MD),), -math.inf, dtype=tiles.dtype)
    for rows, columns, of_rows, of_columns in _log_sums(tiles, logits):
        rows_b[rows] = torch.logaddexp(rows_b[rows], of_rows)
        columns_M[columns] = torch.logaddexp(columns_M[columns], of_columns)
    highest_M = layout.max_(columns_M.clone())
    highest_M.masked_fill_(highest_M == -math.inf, 0.0)  # −inf − (−inf) is NaN
    own = shares(rows_b)
    shared = layout.sum_(torch.cat([(columns_M - highest_M).exp_(), own.flatten()]))
    return rows_b, highest_M + shared[: len(highest_M)].log(), shared[len(highest_M) :].view_as(own)


def _log_sums(tiles: Tiles, logits: Logits) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield (row slice, column slice, log-sum-exp of the tile's rows (r,), of its columns (c,)) of each tile."""
    if tiles.half:
        for rows, columns, s in tiles.scores():
            yield rows, columns, *log_sums(s, logits.of_tile(rows, columns), tiles.left_out(rows, columns))
    else:
        for rows, columns, of_rows, of_columns, _ in _two_logits(tiles, logits):
            yield rows, columns, of_rows.logsumexp(1), of_columns.logsumexp(0)


def online_gradients(tiles: Tiles, logits: Logits, upstream: UpstreamGradients) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, row scale, column scale, row log-weights and column log-weights, in this order.

    A gradient is None where `logits` has None. tiles: the score matrix. upstream: the log-sums of rows and columns, and
    the gradients of the loss in these log-sums. With g_i, h_j the upstream gradients of the log-sums LSE_i of row i and
    LSE_j of column j, P_ij = g_i e^(row logit − LSE_i) and Q_ij = h_j e^(column logit − LSE_j), the gradient in the
    score s_ij = <x_i, y_j> is scale_i P_ij + scale_j Q_ij.
    """
    if tiles.half:
        return _fused_gradients(tiles, logits, upstream)
    gradients = Gradients(tiles)
    row_scale = logits.row_scale
    d_row_scale = torch.zeros_like(row_scale)
    d_column_scale_M, d_row_weights_b, d_column_weights_M = (
        None if v is None else torch.zeros_like(v)
        for v in (logits.column_scale_M, logits.row_weights_b, logits.column_weights_M)
    )
    for rows, columns, p, q, s in _two_logits(tiles, logits):
        # p and q may be one tensor: then q gets memory of its own, as p is still needed
        q = torch.sub(q, upstream.columns_M[columns], out=q if q is not p else None)
        q.exp_().mul_(upstream.column_gradient_M[columns])
        p.sub_(upstream.rows_b[rows, None]).exp_().mul_(upstream.row_gradient_b[rows, None])
        if d_column_weights_M is not None:
            d_column_weights_M[columns] += p.sum(0)
        if d_row_weights_b is not None:
            d_row_weights_b[rows] += q.sum(1)
        if d_column_scale_M is not None and logits.column_scale_M is not None:
            d_row_scale[rows] += (p * s).sum(1)
            d_column_scale_M[columns] += (q * s).sum(0)
            p.mul_(row_scale[rows, None])
            q.mul_(logits.column_scale_M[columns])
        gradients.add(rows, columns, p.add_(q))
    if d_column_scale_M is None:  # one scale for all: it is multiplied last, and Σ_ij G_ij s_ij = Σ_i <x_i, (G y)_i>
        d_row_scale = sum_of_products(tiles.x_bD, gradients.dx_bD).to(row_scale)
    of_embeddings = gradients.scaled(row_scale if d_column_scale_M is None else None)
    return *of_embeddings, d_row_scale, d_column_scale_M, d_row_weights_b, d_column_weights_M


def _fused_gradients(tiles: Tiles, logits: Logits, upstream: UpstreamGradients) -> tuple[Tensor | None, ...]:
    """Return the same gradients as online_gradients, for bf16 products (Tiles.half), by fused kernels."""
    gradients = Gradients(tiles)
    x_bD, y_MD = tiles.x_bD, tiles.y_MD
    of_scales, of_weights = ([e.new_zeros(len(e), dtype=tiles.dtype) for e in (x_bD, y_MD)] for _ in range(2))
    for rows, columns, s in tiles.scores():
        sums = upstream.rows_b[rows], upstream.columns_M[columns]
        of_sums = upstream.row_gradient_b[rows], upstream.column_gradient_M[columns]
        given = logits.of_tile(rows, columns), tiles.left_out(rows, columns), sums, of_sums
        g, *of_tile = log_sum_gradients(s, *given, tiles.gradient_dtype)
        gradients.add(rows, columns, g)
        for total, part, value in zip((*of_scales, *of_weights), (rows, columns) * 2, of_tile, strict=True):
            total[part] += value
    d_scales = of_scales if logits.column_scale_M is not None else (of_scales[0].sum() + of_scales[1].sum(), None)
    weights = logits.row_weights_b, logits.column_weights_M
    d_weights = (None if w is None else d for w, d in zip(weights, of_weights, strict=True))
    return *gradients.scaled(None), *d_scales, *d_weights


def _two_logits(tiles: Tiles, logits: Logits) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield (row slice, column slice, logits of the row sums, logits of the column sums, scores) of each tile.

    A tile is a block of the score matrix. Logits are −inf for pairs that the sums leave out. If row sums and column
    sums have the same logits (logits.shared), both logits are one tensor. The caller may overwrite all tensors.
    """
    spaces = [tiles.scratch() for _ in range(1 if logits.shared else 2)]
    for rows, columns, s in tiles.scores():
        of_rows = logits.of_rows(s, rows, columns, shaped(spaces[0], *s.shape))
        of_columns = of_rows if logits.shared else logits.of_columns(s, rows, columns, shaped(spaces[1], *s.shape))
        tiles.leave_out_(rows, columns, -math.inf, *([of_rows] if logits.shared else [of_rows, of_columns]))
        yield rows, columns, of_rows, of_columns, s
