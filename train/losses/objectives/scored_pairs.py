"""Objectives of pairs that have a score, such as the similarity of two sentences that people gave (STS).

No other pair of the batch is a negative. The formulas on whole vectors, in one process;
tests/train/losses/objectives/test_dense_formulas.py runs them:

```python
def cosent(s_B, t_B, tau):  # s: cosines of the pairs, t: their scores
    a_B = s_B / tau
    of_pairs = (a_B[None, :] - a_B[:, None])[t_B[:, None] > t_B[None, :]]
    return (1 + of_pairs.exp().sum()).log()

def cosine_mse(s_B, t_B, divisor):
    return (s_B - t_B / divisor).square().mean()
```
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.arguments import as_teacher
from dyad.train.losses.objectives.base import Objective, ObjectiveResult, TemperatureObjective, check_pairs


class ScoredPairs(Objective):
    """Base of the objectives that compare the score s_i = x_i · y_i of each pair with a given score t_i.

    forward needs the argument teacher, t_i of this rank's pairs, (b,) float; without it it raises ConfigError. Only two
    numbers of each pair are sent between ranks. The metric pair_correlation is Pearson's correlation of s and t in the
    global batch, 0 where one of them is constant.
    """

    @abstractmethod
    def of_scores(self, s_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the loss of the B pairs of the global batch, 0-d, on every rank the whole loss.

        s_B: the scores s of all pairs, with gradient. t_B: the given scores. Both are float32 or float64.
        """

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        teacher_b = inputs.get("teacher")
        y_bD, layout = check_pairs(x_bD, y_mD)
        if teacher_b is None:
            raise ConfigError(
                f"objective={self.options.name}: give teacher=(b,), the score of each pair; a run reads it from the "
                "field data.teacher"
            )
        teacher_b = as_teacher("teacher", teacher_b, len(x_bD), x_bD)
        wide = torch.promote_types(x_bD.dtype, torch.float32)
        s_b = (x_bD.to(wide) * y_bD.to(wide)).sum(1)
        s_B, t_B = layout.gathered(s_b, teacher_b)
        return ObjectiveResult(self.of_scores(s_B, t_B), {"pair_correlation": correlation(s_B.detach(), t_B)})


class CoSENT(ScoredPairs, TemperatureObjective):
    """L = log(1 + Σ_{i,j: t_i > t_j} e^((s_j − s_i)/τ)) over the pairs i, j of the global batch.

    The loss grows with the similarity of a pair minus that of any pair of a higher score; pairs of equal scores are not
    compared (Huang et al. 2024, CoSENT: consistent sentence embedding via similarity ranking, IEEE/ACM TASLP 32). The
    sum over j of one i is a prefix of the pairs sorted by t, so memory is linear in B.
    """

    def of_scores(self, s_B: Tensor, t_B: Tensor) -> Tensor:
        t_B, order = t_B.sort(stable=True)
        a_B = (self.scale(s_B) * s_B)[order]
        lower_B = torch.searchsorted(t_B, t_B)  # how many pairs have a lower score
        log_sum_B = a_B.logcumsumexp(0)[(lower_B - 1).clamp(min=0)] - a_B
        log_sum_B = log_sum_B.masked_fill(lower_B == 0, -torch.inf)
        return torch.cat([log_sum_B.new_zeros(1), log_sum_B]).logsumexp(0)


class SquaredError(ScoredPairs):
    """L = (1/B) Σ_i (s_i − t_i/c)², the regression objective of Sentence-BERT (Reimers and Gurevych 2019, section 3).

    c: options.divisor.
    """

    def of_scores(self, s_B: Tensor, t_B: Tensor) -> Tensor:
        return (s_B - t_B / self.options.divisor).square().mean()


def correlation(a_B: Tensor, b_B: Tensor) -> Tensor:
    """Return Pearson's correlation of two vectors, 0-d; 0 if one of them is constant."""
    a_B, b_B = (v_B - v_B[0] for v_B in (a_B, b_B))  # exactly 0 for a constant, whose mean would be rounded
    a_B, b_B = a_B - a_B.mean(), b_B - b_B.mean()
    product = a_B.norm() * b_B.norm()
    return torch.where(product > 0, (a_B @ b_B) / product.where(product > 0, 1.0), 0.0)
