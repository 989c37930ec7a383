"""Distillation: the scores of a row's own list become like those that a teacher gave the same list.

A teacher is another model, such as a cross-encoder.

The formulas on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs them:

```python
def distill_kl(s_BK, t_BK, tau, teacher_tau):  # K scores of each row's list, of the student and of the teacher
    log_p_BK, log_q_BK = (s_BK / tau).log_softmax(1), (t_BK / teacher_tau).log_softmax(1)
    return (log_q_BK.exp() * (log_q_BK - log_p_BK)).sum(1).mean()

def margin_mse(s_BK, t_BK, tau, teacher_tau):  # the first of a list is the row's own y
    d_BK, of_teacher_BK = (s_BK[:, :1] - s_BK[:, 1:]) / tau, (t_BK[:, :1] - t_BK[:, 1:]) / teacher_tau
    return (d_BK - of_teacher_BK).square().mean()
```
"""

from typing import Any

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.arguments import as_teacher
from dyad.train.losses.gathered.batch import Columns, check_indices
from dyad.train.losses.objectives.base import ObjectiveResult, check_pairs
from dyad.train.losses.objectives.softmax import SoftmaxObjective
from dyad.train.losses.options.choices import Matched
from dyad.train.losses.options.distillation import DistillationOptions


class Distillation(SoftmaxObjective):
    """L = (1/B) Σ_i l_i + c · L_softmax, where l_i compares the scores s of row i's list with a teacher's scores t.

    The list of row i is y_i and the further columns of i, in any number. With p = softmax(s/τ) and q = softmax(t/τ')
    over the list: matched=kl has l_i = KL(q ‖ p), the loss of Ren et al. 2021 (arXiv 2110.07367) for fixed q;
    matched=margin has l_i = mean_j ((s_ii − s_ij)/τ − (t_ii − t_ij)/τ')² over the further columns j (Hofstätter et al.
    2020, arXiv 2010.02666). l_i = 0 for a row without further columns. τ': options.teacher_temperature. c:
    options.contrastive; L_softmax is the loss of SoftmaxObjective over the columns of all ranks. With c = 0 it is not
    computed, and nothing but the number of rows is sent. forward needs teacher, t_ii of each row, (b,), and negatives,
    Columns with teacher_k, t_ij of each further column; without them it raises ConfigError. The metric teacher_top1 is
    the share of rows whose best item is the teacher's best.
    """

    def __init__(self, options: DistillationOptions) -> None:
        super().__init__(options)
        self._each = divergence if options.matched is Matched.kl else squared_difference
        self._teacher_temperature, self._contrastive = options.teacher_temperature, options.contrastive

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        teacher_b, columns = inputs.pop("teacher", None), inputs["negatives"]
        y_bD, layout = check_pairs(x_bD, y_mD)
        if teacher_b is None or columns is None or columns.teacher_k is None:
            raise ConfigError(
                f"objective={self.options.name}: give teacher=(b,), a teacher's scores of the pairs, and negatives as "
                "Columns with teacher_k; a run reads them from the field data.teacher"
            )
        teacher_b = as_teacher("teacher", teacher_b, len(x_bD), x_bD)
        check_indices("negatives.row_k: no row", columns.row_k, len(x_bD))
        differences = self._differences(x_bD, y_bD, teacher_b, columns)
        loss = layout.share * self._each(*differences, columns.row_k, len(x_bD)).sum()
        with torch.no_grad():
            metrics = {"teacher_top1": layout.share * same_best(*differences, columns.row_k, len(x_bD)).sum()}
        if self._contrastive:
            softmax = super().of_embeddings(x_bD, y_bD, **inputs)
            metrics |= {**softmax.metrics, "distillation": loss, "contrastive": softmax.loss}
            loss = loss + self._contrastive * softmax.loss
        return ObjectiveResult(loss, metrics)

    def _differences(self, x_bD: Tensor, y_bD: Tensor, teacher_b: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the logit of y_i minus that of each further column j of row i, (k,), by the scores and by the teacher.

        These are (s_ii − s_ij)/τ and (t_ii − t_ij)/τ', in the order of `columns`. teacher_b: t_ii.
        """
        scale, row_k, teacher_k = self.scale(x_bD), columns.row_k, columns.teacher_k
        assert teacher_k is not None
        x_bD, y_bD, further_kD = (e.to(scale.dtype) for e in (x_bD, y_bD, columns.embeddings_kD))
        d_k = scale * ((x_bD * y_bD).sum(1)[row_k] - (x_bD[row_k] * further_kD).sum(1))
        of_teacher_k = teacher_b.to(d_k)[row_k] - teacher_k.to(d_k)
        return d_k, of_teacher_k / self._teacher_temperature


def divergence(d_k: Tensor, t_k: Tensor, row_k: Tensor, rows: int) -> Tensor:
    """Return KL(q ‖ p) of each row's list, (rows,), with p the softmax of the scores, q that of the teacher's scores.

    d_k, t_k: the differences from Distillation._differences: log p of item k is that of y_i minus d_k, and log q of it
    that of y_i minus t_k. row_k: the row i of each item k. rows: the number of rows. 0 for a row without further items.
    KL = log(1 + Σ_k e^−d_k) − log(1 + Σ_k e^−t_k) + Σ_k q_k (d_k − t_k), as Σ q = 1.
    """
    log_p_b, log_q_b = (_log_sum(each_k, row_k, rows) for each_k in (d_k, t_k))
    q_k = (-t_k - log_q_b[row_k]).exp()
    return (log_p_b - log_q_b).index_add(0, row_k, q_k * (d_k - t_k))


def squared_difference(d_k: Tensor, t_k: Tensor, row_k: Tensor, rows: int) -> Tensor:
    """Return the mean of (d − t)² over the further columns of each row, (rows,), 0 for a row without any.

    Arguments as in `divergence`.
    """
    zero_b = d_k.new_zeros(rows)
    count_b = zero_b.index_add(0, row_k, torch.ones_like(d_k)).clamp(min=1)
    return zero_b.index_add(0, row_k, (d_k - t_k).square()) / count_b


def same_best(d_k: Tensor, t_k: Tensor, row_k: Tensor, rows: int) -> Tensor:
    """Mark the rows in whose list the scores and the teacher have the same best item: (rows,) bool.

    With ties, one common best item suffices. Arguments as in `divergence`; y_i has the difference 0.
    """
    smallest = [each_k.new_zeros(rows).scatter_reduce(0, row_k, each_k, "amin") for each_k in (d_k, t_k)]
    is_best = [each_k == least_b[row_k] for each_k, least_b in zip((d_k, t_k), smallest, strict=True)]
    both_b = d_k.new_zeros(rows).index_add(0, row_k, (is_best[0] & is_best[1]).to(d_k))
    return (both_b > 0) | ((smallest[0] == 0) & (smallest[1] == 0))


def _log_sum(d_k: Tensor, row_k: Tensor, rows: int) -> Tensor:
    """Return log(1 + Σ_k e^−d_k) over the items k of each row, (rows,): −log p of y_i. row_k: the row of each item."""
    highest_b = d_k.new_zeros(rows).scatter_reduce(0, row_k, -d_k.detach(), "amax")
    sums_b = (-highest_b).exp().index_add(0, row_k, (-d_k - highest_b[row_k]).exp())
    return highest_b + sums_b.log()
