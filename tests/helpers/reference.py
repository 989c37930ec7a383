"""An independent reading of the softmax family: anchor by anchor, positive by positive, on dense float64 scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dyad.train.losses import build_objective

Related = Callable[[int, int], bool]
Weights = Mapping[tuple[int, int], float]  # of pairs (row, column); 1 for those that it lacks


def same_item(keys: Sequence[tuple[Tensor, Tensor]]) -> Related:
    """keys: (of rows, of columns); rows and columns beyond those that have a key are related to none but their own."""

    listed = [(rows.tolist(), columns.tolist()) for rows, columns in keys]

    def equal(i: int, j: int, rows: list[int], columns: list[int]) -> bool:
        return i < len(rows) and j < len(columns) and rows[i] == columns[j]

    return lambda i, j: i == j or any(equal(i, j, *of) for of in listed)


def reference_direction(
    scores: Tensor,
    tau: Tensor,
    positive: Related,
    left_out: Related,
    omega: Tensor | None = None,
    *,
    candidates: str = "all",
    positives: str = "each",
    partition: str = "sum",
    relevance: Callable[[int, int], float] = lambda i, p: 1.0,
    rho: float = 0.0,
) -> Tensor:
    """mean_i (f_i/τ + ρ) over anchors i (rows of scores) that have a candidate and a positive, each pair weighted."""
    values = []
    everyone = range(scores.shape[1])
    for i in range(len(scores)):
        mine = [p for p in everyone if positive(i, p)]
        chosen = [j for j in everyone if not left_out(i, j) and not (candidates == "negatives" and j in mine)]
        sums = {p: chosen for p in mine}
        if positives == "exclude" and candidates == "all":
            sums = {p: [j for j in chosen if j not in mine] + [p] for p in mine}
        if not mine or not sums[mine[0]]:
            continue
        logits = scores[i] / tau
        weighted = logits if omega is None else logits + omega
        count = len(sums[mine[0]])
        c = math.log(count) if partition == "mean" else 0.0
        if positives == "merge":
            f = torch.logsumexp(weighted[chosen], 0) - torch.logsumexp(logits[mine], 0) - c + rho
        else:
            terms = {p: torch.logsumexp(weighted[sums[p]] - logits[p], 0) - c + rho for p in mine}
            f = torch.stack([relevance(i, p) * term for p, term in terms.items()]).mean()
        values.append(f)
    return torch.stack(values).mean() if values else 0.0 * scores.sum()


def reference_loss(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    same: Related = lambda i, j: i == j,
    *,
    further: Tensor | None = None,
    wrong: Tensor | None = None,
    listed: Collection[tuple[int, int]] | None = None,
    excluded: Collection[tuple[int, int]] = (),
    omega: Tensor | None = None,
    similarity: str = "cosine",
    candidates: str = "all",
    positives: str = "each",
    partition: str = "sum",
    tau_scaled: bool = False,
    rho: float = 0.0,
    directions: str = "mean",
    duplicates: str = "keep",
    relevance: Weights | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of a global batch. same: whether a row and a column are one item.

    further: columns beyond y. wrong: rows beyond x, without a positive. listed: positives (row, column), instead of
    (i, i). excluded: pairs that do not count. omega: log weights of columns. Other options are those of objectives.
    """
    weight_of, pairs = relevance or {}, len(x)
    x = x if wrong is None else torch.cat([x, wrong])
    columns = y if further is None else torch.cat([y, further])
    if similarity == "cosine":
        x, columns = (F.normalize(e, dim=1) for e in (x, columns))
    scores, tau = x @ columns.T, torch.exp(-logit_scale)
    own = {(i, i) for i in range(pairs)} if listed is None else set(listed)

    def positive(i: int, j: int) -> bool:
        return (i, j) in own or (duplicates == "positive" and i < pairs and same(i, j))

    def left_out(i: int, j: int) -> bool:
        compared = duplicates == "mask" or (duplicates == "positive" and i >= pairs)
        return (i, j) in excluded or (compared and same(i, j) and (i, j) not in own)

    core: dict[str, Any] = dict(candidates=candidates, positives=positives, partition=partition, rho=rho)
    row_weight, column_weight = (lambda i, j: weight_of.get((i, j), 1.0)), (lambda j, i: weight_of.get((i, j), 1.0))
    row = reference_direction(scores, tau, positive, left_out, omega, relevance=row_weight, **core)
    flipped = (lambda j, i: positive(i, j)), (lambda j, i: left_out(i, j))
    column = reference_direction(scores.T[: len(y)], tau, *flipped, relevance=column_weight, **core)
    if tau_scaled:
        row, column = tau * row, tau * column
    return {"sum": row + column, "mean": (row + column) / 2, "x": row, "y": column}[directions]


def embeddings(n: int = 9, width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def build(name: str, **options: Any) -> Any:
    """In float64 to the last digit; τ learns where it may."""
    stays = options.get("tau_scaled", name in ("symmetric_dpm", "gcl", "one_sided_dpm")) and "rho" not in options
    objective = cast(Any, build_objective(name, **{"learnable": not stays, **options}).double())
    objective.logit_scale.data.fill_(-math.log(objective.options.temperature))
    return objective


def on_scores(scores: Tensor, name: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and G = ∂L/∂S for any square S: dot scores of the rows of S with unit vectors."""
    x = scores.double().clone().requires_grad_()
    loss = build(name, similarity="dot", **options)(x, torch.eye(len(scores), dtype=torch.float64)).loss
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


def close(got: Tensor, want: float | Tensor, tolerance: float = 1e-12, context: object = "") -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{context} {m}")


def close_with_gradients(got: Tensor, want: Tensor, leaves: Sequence[Tensor], rtol: float, atol: float) -> None:
    """The losses and their gradients of all leaves."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    gradients = (torch.autograd.grad(loss, leaves) for loss in (got, want))
    torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of the whole tensor, in its norm."""
    got, want = (v.detach().double() for v in (got, want))
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def used_path(log_sums: Tensor) -> str:
    """Which way an output of log_partition was summed."""
    return "general" if cast(Any, log_sums.grad_fn).bound is None else "bounded"


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out
