"""Problems for log_partition and its dense sums, one by one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.lse import Scales
from dyad.train.losses.sums.tiles import Exclusion, Pairs

PATHS = ["bounded", "general"]


def problem(b: int, m: int, path: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (b, 6), y (m, 6) and a scale with moderate logits, for one path of log_partition.

    For the general path two coordinates that meet a zero make the norms, and so the bound, huge.
    """
    generator = torch.Generator().manual_seed(b + m)
    x, y = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (b, m))
    if path == "general":
        x[:, 0], y[:, 0], x[:, 1], y[:, 1] = 100.0, 0.0, 0.0, 100.0
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(), torch.tensor(2.5, dtype=dtype).requires_grad_()


def alone(y: Tensor) -> Layout:
    return Layout((len(y),), 0)


def dense(
    x: Tensor,
    y: Tensor,
    scale: Tensor | Scales,
    left_out: set[tuple[int, int]],
    row_weights: Tensor | None = None,
    column_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of all rows and of all columns, each sum by itself; −∞ where nothing is left."""
    s, pairs = x @ y.T, (scale.rows_b[:, None], scale.columns_M) if isinstance(scale, Scales) else (scale, scale)
    of_rows, of_columns = (s * each for each in pairs)
    of_rows = of_rows if column_weights is None else of_rows + column_weights
    of_columns = of_columns if row_weights is None else of_columns + row_weights[:, None]
    rows = [[of_rows[i, j] for j in range(len(y)) if (i, j) not in left_out] for i in range(len(x))]
    columns = [[of_columns[i, j] for i in range(len(x)) if (i, j) not in left_out] for j in range(len(y))]
    r, c = (
        torch.stack([torch.logsumexp(torch.stack(line), 0) if line else s.new_tensor(-math.inf) for line in lines])
        for lines in (rows, columns)
    )
    return r, c


def gradients(rows: Tensor, columns: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a sum of `rows` and `columns` with uneven weights; −∞ entries do not count."""
    weighted = [
        torch.linspace(0.5, 2.0, len(v), dtype=v.dtype)[v.isfinite()] @ v[v.isfinite()] for v in (rows, columns)
    ]
    nothing = sum(0.0 * v.sum() for v in inputs)
    return torch.autograd.grad(weighted[0] + weighted[1] + nothing, inputs)


def modulo(b: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Return keys of b rows and m columns, their numbers mod n."""
    return torch.arange(b) % n, torch.arange(m) % n


def left_out_by(b: int, m: int, numbers: tuple[int, ...], own: bool) -> Exclusion:
    """Equal keys, the row number mod each of `numbers`, are left out; own columns too, or they stay."""
    diagonal = Pairs.own_columns(min(b, m), 0, torch.device("cpu"))
    keys = tuple(modulo(b, m, n) for n in numbers)
    return Exclusion(keys, dropped=diagonal) if own else Exclusion(keys, kept=diagonal)
