"""Contrastive predictive coding (CPC): from a context, identify the encodings of its own sequence some steps ahead.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def cpc(x_BTC, y_BTD, w_HDC, lengths_B, tau):  # w: one matrix for each horizon
    losses = []
    for u in range(1, x_BTC.shape[1]):
        there_B = lengths_B > u  # these sequences reach step u: anchors and candidates
        for steps, w_DC in enumerate(w_HDC[:u], 1):
            a_bb = x_BTC[there_B, u - steps] @ w_DC.T @ y_BTD[there_B, u].T / tau
            losses.append(a_bb.logsumexp(1) - a_bb.diagonal())
    return torch.cat(losses).mean()
```

Legend: b sequences on this rank, B on all W ranks, T steps per sequence, H horizons (how many steps ahead are
predicted), D width; step u = t + s is predicted from the context at step t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered.arguments import as_int64
from dyad.train.losses.objectives.base import ObjectiveResult, TemperatureObjective, shapes
from dyad.train.losses.objectives.softmax import softplus
from dyad.train.losses.options.logistic import CpcOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.functions import product
from dyad.train.losses.sums.lse import log_partition
from dyad.train.losses.sums.tiles import Exclusion, Pairs


@dataclass(frozen=True)
class GatheredSequences:
    """The contexts x and encodings y of a batch of sequences padded to T steps, as one tensor for each step.

    b sequences are on this rank, B on all. x_TbD: (b, Dx) per step, the contexts of this rank. y_TbD: (b, D) per step,
    the encodings of this rank. y_TBD: (B, D) per step, those of all ranks. lengths_b, lengths_B: the number of real
    steps of each sequence of this rank and of all ranks, int64; later steps are padding. layout: how the sequences are
    distributed over ranks.
    """

    x_TbD: tuple[Tensor, ...]
    y_TbD: tuple[Tensor, ...]
    y_TBD: tuple[Tensor, ...]
    lengths_b: Tensor
    lengths_B: Tensor
    layout: Layout

    @staticmethod
    def of(x_bTD: Tensor, y_bTD: Tensor, lengths_b: Tensor | None) -> GatheredSequences:
        """Make GatheredSequences from this rank's contexts and encodings, and gather y and the lengths of all ranks.

        x_bTD: contexts; y_bTD: encodings; T: the number of steps to which all sequences are padded. lengths_b: the
        number of steps of each sequence; None: T for all. Raises ValueError if there is not one length for each
        sequence, if a length is outside 0 … T and, on all ranks, if ranks have different T. Every rank must call it.
        """
        layout, steps = Layout.of(x_bTD, x_bTD.transpose(0, 1))
        if len(set(steps.sizes)) > 1:
            raise ValueError(f"ranks have sequences of {steps.sizes} steps: pad all to the same")
        if lengths_b is None:
            lengths_b = torch.full((len(x_bTD),), x_bTD.shape[1])
        lengths_b = as_int64("lengths", lengths_b, x_bTD.device)
        if len(lengths_b) != len(x_bTD) or ((lengths_b < 0) | (lengths_b > x_bTD.shape[1])).any():
            raise ValueError(f"lengths must be {len(x_bTD)} numbers from 0 to {x_bTD.shape[1]}, the steps of x and y")
        y_BTD, lengths_B = layout.gather(y_bTD), layout.gather(lengths_b)
        return GatheredSequences(x_bTD.unbind(1), y_bTD.unbind(1), y_BTD.unbind(1), lengths_b, lengths_B, layout)


def padded(x_SD: Tensor, y_SD: Tensor, lengths_b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad b sequences of contexts x (S, Dx) and encodings y (S, D) to one length T: (b, T, Dx), (b, T, D).

    x and y hold the steps of all sequences of this rank, one sequence after the other. lengths_b: the number of steps
    of each sequence, int64, with sum S. T: the steps of the longest sequence on all ranks, at least 1; shorter
    sequences are padded with zeros. Raises ValueError if the sum of lengths_b is not S, or one is negative. Every rank
    must call it.
    """
    lengths = lengths_b.tolist()
    total, least = sum(lengths), min(lengths, default=0)
    if total != len(x_SD) or least < 0:
        raise ValueError(f"lengths must be 0 or more, {len(x_SD)} in sum: their sum is {total}, the least {least}")
    longest = max(Layout.of(x_SD, x_SD.new_empty(max(lengths, default=0), 1))[1].sizes)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    place = torch.cat([torch.arange(length) for length in lengths] or [row])

    def whole(e_SD: Tensor) -> Tensor:
        empty = e_SD.new_zeros(len(lengths), max(longest, 1), e_SD.shape[1])
        return empty.index_put((row.to(e_SD.device), place.to(e_SD.device)), e_SD)

    return whole(x_SD), whole(y_SD)


class Cpc(TemperatureObjective):
    """Contrastive predictive coding: L = mean of −log (e^{a_ii} / Σ_j e^{a_ij}) (van den Oord et al. 2018, eq. 3, 4).

    a_ij = <y_j,t+s, W_s x_i,t>/τ. x_i,t: the context of sequence i at step t; y_j,t+s: the encoding of sequence j at
    step t + s; W_s: a learned matrix for s steps ahead; τ: the temperature. The mean is over all (i, t, s), s = 1..H
    (options.horizons), for which sequence i reaches step t + s. The sum is over the sequences j of the global batch
    that reach step t + s.

    x: (b, T, Dx) and y: (b, T, D), padded to one T on all ranks; lengths: (b,) int64, by default T. Or x and y of all
    steps, one sequence after the other: (S, Dx) and (S, D), and lengths, whose sum is S. Raises ValueError if no
    sequence of any rank has two steps. y is gathered over ranks once, for all steps. w_HDD: W_s of every horizon (only
    one matrix if options.shared_w), (D, Dx), which starts as the identity; for Dx ≠ D as its upper left part.
    """

    options: CpcOptions

    def __init__(self, options: CpcOptions) -> None:
        super().__init__(options)
        if options.width is None:
            raise ConfigError("objective.width is missing: the width of encodings")
        self.widths = options.context_width or options.width, options.width
        of_width = torch.eye(self.widths[1], self.widths[0])
        self.w_HDD = nn.Parameter(of_width.repeat(1 if options.shared_w else options.horizons, 1, 1))

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        lengths_b: Tensor | None = inputs.get("lengths")
        if y_mD is None or x_bD.shape[:-1] != y_mD.shape[:-1] or (x_bD.shape[-1], y_mD.shape[-1]) != self.widths:
            of_x, of_y = self.widths
            raise ValueError(f"x must be (b, T, {of_x}) and y (b, T, {of_y}), not {shapes(x_bD, y_mD)}")
        if x_bD.ndim == 2 and lengths_b is not None:
            x_bD, y_mD = padded(x_bD, y_mD, as_int64("lengths", lengths_b, x_bD.device))
        if x_bD.ndim != 3:
            raise ValueError(f"x and y must be (b, T, D), or (S, D) with lengths, not {shapes(x_bD, y_mD)}")
        sequences = GatheredSequences.of(x_bD, y_mD, lengths_b)
        reached = sequences.lengths_B[:, None] > torch.arange(x_bD.shape[1], device=x_bD.device)
        candidates = {u: count for u, count in enumerate(reached.sum(0).tolist()) if u and count}
        anchors = {u: count * min(u, self.options.horizons) for u, count in candidates.items()}
        total = sum(anchors.values())
        if not total:
            raise ValueError("no sequence of the global batch has two steps: nothing can be predicted")
        sums = torch.stack([self._step(sequences, u, count) for u, count in candidates.items()]).sum(0)
        loss, positive = sequences.layout.world_size / total * sums
        log_k = loss.new_tensor(sum(anchors[u] * math.log(count) for u, count in candidates.items()) / total)
        return ObjectiveResult(loss, {"positive_score": positive, "mi_bound": log_k - loss, "log_k": log_k})

    def _step(self, sequences: GatheredSequences, u: int, candidates: int) -> Tensor:
        """Return (2,): the sum of the losses of this rank's predictions of step u, and the sum of their scores.

        A prediction of step u is made from the context of one earlier step of a sequence i. Its loss is log(1 +
        Σ_{j≠i} e^{a_ij − a_ii}), with j the other sequences and a the logits; its score is that with the encoding of
        sequence i. sequences: the batch. candidates: how many sequences of all ranks reach step u. Every rank must call
        it.
        """
        layout, lengths_B, y_BD = sequences.layout, sequences.lengths_B, sequences.y_TBD[u]
        contexts = sequences.x_TbD[max(0, u - self.options.horizons) : u]
        scale = self.scale(y_BD)
        w_HDD = self.w_HDD.to(scale.dtype).expand(self.options.horizons, -1, -1)
        nearest_first = [x_bD.to(scale.dtype) for x_bD in reversed(contexts)]
        predictions = self._comparable(torch.cat([product(x, w.T) for x, w in zip(nearest_first, w_HDD, strict=False)]))
        log_weights_B = None
        if candidates < layout.total:  # sequences that end before this step are no candidates
            log_weights_B = torch.zeros_like(lengths_B, dtype=scale.dtype).masked_fill(lengths_B <= u, -math.inf)
        i = torch.arange(len(predictions), device=predictions.device)
        own = Exclusion(dropped=Pairs(torch.stack([i, i % len(sequences.lengths_b) + layout.own.start], 1)))
        y_BD = y_BD.to(scale.dtype)
        log_sums, _ = log_partition(predictions, y_BD, scale, layout, own, column_weights_M=log_weights_B)
        scores = (predictions * sequences.y_TbD[u].repeat(len(contexts), 1)).sum(1)
        reaches = (sequences.lengths_b > u).repeat(len(contexts))
        return torch.stack([softplus(log_sums - scale * scores)[reaches].sum(), scores[reaches].sum()])
