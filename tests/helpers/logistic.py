"""An independent reading of the logistic family: pair by pair, on dense float64 scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.train.losses import build_objective

KEYS = (torch.tensor([1, 2, 3, 4, 4, 5, 6, 7, 8]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5, 5]))  # 3~4~5 but not 3~5
N, WIDTH = 9, 5


def embeddings(n: int = N, width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random x and y, float64 (n, width), that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def build(name: str, **options: Any) -> Any:
    """Build an objective in float64 with an exact scale, and a bias that learns, so that its gradient is compared."""
    objective: Any = build_objective(name, **{"bias_learnable": True, "temperature": 0.3, **options}).double()
    objective.logit_scale.data.fill_(-math.log(objective.options.temperature))
    objective.bias.data.fill_(objective.options.init_bias or 0.0)
    return objective


def sp(a: Tensor) -> Tensor:
    """Return softplus, log(1 + e^a)."""
    return torch.logaddexp(a, torch.zeros_like(a))


def close(got: Tensor, want: float | Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean() if values else torch.tensor(0.0).double()


Pairs = dict[tuple[int, int], Tensor]


def told_apart(s: Tensor, keys: Sequence[Tensor], duplicates: str, data: set, excluded: set) -> tuple[Pairs, Pairs]:
    """Return the scores of the data pairs and of the noise pairs, (row, column) → score."""
    of_data, of_noise = {}, {}
    for i, j in itertools.product(range(s.shape[0]), range(s.shape[1])):
        equal = duplicates != "keep" and any(j < len(key) and key[i] == key[j] for key in keys)
        if (i, j) in data or (equal and duplicates == "positive" and (i, j) not in excluded):
            of_data[i, j] = s[i, j]
        elif (i, j) not in excluded and not equal:
            of_noise[i, j] = s[i, j]
    return of_data, of_noise


def reference(
    name: str,
    objective: Any,
    x: Tensor,
    y: Tensor,
    keys: Sequence[Tensor] = KEYS,
    data: set | None = None,
    excluded: set | None = None,
    log_q: Tensor | None = None,
    relevance: Mapping[tuple[int, int], float] | None = None,
) -> Tensor:
    """Return the loss of objective `name` on a whole batch, pair by pair.

    objective: gives options, scale and bias. data: the right pairs (row, column); None: (i, i). excluded: pairs that do
    not count. log_q: of each column. relevance: weights of right pairs.
    """
    options, weights = objective.options, relevance or {}
    if options.similarity.value == "cosine":
        x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    n, m = len(x), len(y)
    own = {(i, i) for i in range(n)}
    of_data, of_noise = told_apart(x @ y.T, keys, options.duplicates.value, data or own, excluded or set())
    t, b = objective.logit_scale.exp(), objective.bias
    if name in ("siglip", "local_nce"):
        b = b - (math.log(m - 1) if options.init_bias is None else 0.0)
        terms = [weights.get(pair, 1.0) * sp(-(t * s + b)) for pair, s in of_data.items()]
        return torch.stack(terms + [sp(t * s + b) for s in of_noise.values()]).sum() / n
    if name == "binary_nce":
        of_positives = mean([weights.get(pair, 1.0) * sp(-t * s - b) for pair, s in of_data.items()])
        return (of_positives + mean([sp(t * s + b) for s in of_noise.values()])) / 2
    k = options.k or len(of_noise) / len(of_data)
    log_q = torch.zeros(m).double() if log_q is None else log_q
    a_data, a_noise = (
        [t * s + b - log_q[j] - math.log(k) for (_, j), s in pairs.items()] for pairs in (of_data, of_noise)
    )
    of_positives = mean([weights.get(pair, 1.0) * sp(-a) for pair, a in zip(of_data, a_data, strict=True)])
    return of_positives + k * mean([sp(a) for a in a_noise])


def same_value_and_gradients(objective: Any, loss: Tensor, want: Tensor, *inputs: Tensor) -> None:
    """Check that two losses are equal, and their gradients of the inputs and of the objective."""
    close(loss, want)
    leaves = [*inputs, *(p for p in objective.parameters() if p.requires_grad)]
    for got, expected in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
        close(got, expected, 1e-9)
