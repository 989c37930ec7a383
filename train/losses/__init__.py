"""Exact contrastive objectives over the all-gathered batch, at memory linear in it, for any PyTorch loop.

    from train.losses import build_objective

    objective = build_objective("clip")
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()])
    loss = objective(model.x(x), model.y(y)).loss  # (b, D) each; under torch.distributed over the batch of all ranks
    loss.backward()  # average the gradients over ranks (as DDP does), of objective.parameters() too
    optimizer.step()
    objective.clamp_()

The route of one score, from embeddings to the loss and back, by file:

1. registry.py: build_objective("clip") → its row in options/softmax.py → SoftmaxObjective of softmax.py.
2. base.py: Objective.forward checks the inputs and normalises the embeddings for a cosine; of_embeddings goes on.
3. strip.py: gather_batch makes the GatheredBatch: own rows x (b, D), columns y of all ranks (M, D), positives, keys.
   gather.py: Layout.gather is the all-gather that it uses, with an exact gradient; Layout knows who holds which rows.
4. softmax.py: SoftmaxObjective.of_batch asks candidates.py, which columns each sum runs over: relations gives the
   Exclusion (tiles.py) and the Anchors of both directions. duplicates.py counts equal keys for it.
5. pairwise.py: log_partition, an autograd function, returns the log-sum-exp of rows (b,) and of columns (M,).
   bounded.py: find_bound looks for one shift for all logits; bounded_sums sums exp(a_ij − shift) tile by tile.
   general.py: general_sums, an online softmax, takes over if there is no such shift. logits.py: from scores to logits.
   tiles.py: Tiles.scores computes s_ij = <x_i, y_j> of one tile; no b×M matrix exists. kernels.py does it on a GPU.
6. softmax.py: core_terms, from these log-sums and the scores of the positives, gives the mean f_i/τ of both directions;
   symmetric_dpm combines them to the loss, and forward returns it as ObjectiveResult.
7. Backward: core_terms by autograd → _LogPartition.backward (pairwise.py), with UpstreamGradients (logits.py) →
   bounded_gradients or general_gradients compute each tile again and add G y and Gᵀ x to tiles.Gradients →
   _Gather.backward (gather.py) sums the gradients of y over ranks → the normalisation of base.py → the towers.

Other families: logistic.py and oce.py sum any function of a score by pair_sum.py in place of step 5; levels.py selects
thresholds for oce.py, which robust.py uses; spectral.py needs no scores; cpc.py is step 5 for sequences; estimators.py
keeps numbers per sample in memory.py; importance.py reads such numbers from a file. diagnostics.py looks at embeddings.

Importing the package is light: torch comes with the first objective that is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.losses.registry import OBJECTIVES, build_objective

if TYPE_CHECKING:
    from train.losses.strip import Columns

__all__ = ["OBJECTIVES", "Columns", "build_objective"]


def __getattr__(name: str) -> Any:
    if name != "Columns":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.losses.strip import Columns

    return Columns
