"""Maximum likelihood: the loss of scores that are log-likelihoods of answers.

The formula on whole matrices, in one process; tests/train/losses/objectives/test_dense_formulas.py runs it:

```python
def nll(x_BD, y_BD, w_B):  # w: the relevance of each pair
    return -(w_B * (x_BD * y_BD).sum(1)).mean()
```
"""

from torch import Tensor

from dyad.train.losses.objectives.base import ObjectiveResult
from dyad.train.losses.objectives.spectral import MomentObjective
from dyad.train.losses.options.likelihood import NllOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.functions import weighted


class NegativeLogLikelihood(MomentObjective):
    """L = −(1/B) Σ_i w_i s(x_i, y_i), for B pairs with scores s = <x_i, y_i> and relevances w_i, 1 if not given.

    With s = 1/|y| Σ_t log p(y_t | x, y_<t) it is the mean over answers of the mean cross-entropy of a token.
    """

    options: NllOptions

    def of_pairs(
        self, x_bD: Tensor, y_bD: Tensor, layout: Layout, relevance_b: Tensor | None = None
    ) -> ObjectiveResult:
        scale, own_b = layout.share, (x_bD * y_bD).sum(1)
        return ObjectiveResult(-scale * weighted(own_b, relevance_b).sum(), {"positive_score": scale * own_b.sum()})
