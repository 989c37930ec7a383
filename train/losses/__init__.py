"""Exact contrastive objectives over the all-gathered batch, at memory linear in it, for any PyTorch loop.

    from dyad.train.losses import build_objective

    objective = build_objective("clip")
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()])
    loss = objective(model.x(x), model.y(y)).loss  # (b, D) each; under torch.distributed over the batch of all ranks
    loss.backward()  # average the gradients over ranks (as DDP does), of objective.parameters() too
    optimizer.step()
    objective.clamp_()

The route of one score, from embeddings to the loss and back, by file:

1. build_objective("clip") below: options/registry.py finds the preset "clip" of options/softmax.py, which names its
   formula, SoftmaxObjective in objectives/softmax.py.
2. objectives/base.py: Objective.forward checks the inputs and normalises the embeddings for a cosine; of_embeddings
   checks their shapes and gathers the batch.
3. gathered/batch.py: gather_batch makes the GatheredBatch: own rows x (b, D), columns y of all ranks (M, D), positives,
   keys. sums/all_gather.py: Layout knows which rank holds which rows; Layout.gather is an all-gather with an exact
   gradient.
4. objectives/softmax.py: SoftmaxObjective.of_batch asks gathered/candidates.py which columns each sum runs over:
   relations gives the Exclusion (sums/tiles.py) and the Anchors of both directions. Their share is W / anchors: with it
   the average of W ranks' gradients is that of the mean over all. gathered/duplicates.py counts equal keys.
5. sums/lse.py: log_partition, an autograd function, returns the log-sum-exp of rows (b,) and of columns (M,).
   sums/lse_one_shift.py: find_bound looks for one shift for all logits; one_shift_sums sums exp(a_ij − shift) by tiles.
   sums/lse_online.py: online_sums, an online softmax, takes over if there is no such shift or a sum underflows.
   sums/conditions.py: a trainer assumes what find_bound and one_shift_sums check, reads it once a step, and takes the
   step again if it does not hold; in your own loop it is read at once, for which the host waits for a GPU.
   sums/logits.py: from scores to logits. sums/tiles.py: Tiles.scores computes s_ij = <x_i, y_j> of one tile; the
   tiles are not kept, unless all take at most 128 MiB. sums/lse_triton.py has the kernels for half precision on a GPU.
6. objectives/softmax.py: core_terms, from these log-sums and the scores of the positives, gives the mean f_i/τ of both
   directions; symmetric_dpm combines them to the loss, and forward returns it as ObjectiveResult.
7. Backward: core_terms by autograd → _LogPartition.backward (sums/lse.py), with UpstreamGradients (sums/logits.py) →
   one_shift_gradients or online_gradients compute each tile again and add G y and Gᵀ x to tiles.Gradients →
   _Gather.backward (sums/all_gather.py) sums the gradients of y over ranks → the normalisation of objectives/base.py →
   the towers.

A loss of rows alone takes sums/row_losses.py in place of steps 5 and 7, if row i has no positive but y_i, columns have
no log-weights and scores are not computed from half precision. gathered/further_rows.py adds x items of no pair, such
as wrong images, to the sums of columns.

Each file of objectives/ that defines a loss opens with its formula on whole score matrices, in one process: code that a
test runs and compares. Read it first.

The other families: objectives/logistic.py and objectives/pair_losses.py sum any function of a score by sums/pair_sum.py
in place of step 5; oce.py and robust.py use pair_losses.py; oce.py selects thresholds by sums/row_select.py.
objectives/spectral.py needs the scores of pairs alone. objectives/distillation.py compares the scores of each row's own
list with a teacher's, and gathers nothing unless it adds a softmax loss; objectives/scored_pairs.py compares the scores
of pairs with given ones. objectives/cpc.py is step 5 for sequences. objectives/estimators.py keeps numbers per sample
in gathered/sample_state.py; gathered/importance.py reads importance weights from a file. nce_from_log_u of
objectives/logistic.py is NCE of given log-probabilities, for your own loop; items that a run draws as noise
(data/loading/drawn_items.py) come as further columns with log q. diagnostics.py computes metrics of the embeddings for
the trackers.

Importing the package does not import torch. The first objective that is built imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dyad.train.losses.options.registry import OBJECTIVES, configure

if TYPE_CHECKING:
    from dyad.train.losses.objectives.base import Objective

__all__ = ["OBJECTIVES", "build_objective"]


def build_objective(name: str, **options: Any) -> Objective:
    """Create the objective `name`, a torch module; OBJECTIVES lists the names.

    Its parameters, if it has any, are float32 on the CPU: move the module to the device of the embeddings. options: the
    fields of the objective's dataclass in train/losses/options. Raises ConfigError for an unknown name or option, a bad
    value, or options that exclude each other or lack one that your own loop must give, such as num_samples; ConfigError
    or DataError for a file of numbers, which the options name, that cannot be read.

    A function that torch.compile compiles may call the objective, which then runs uncompiled, after a graph break:
    compile the towers instead (fullgraph=True raises). The transforms of torch.func (grad, vmap, jvp …) raise, too;
    functional_call with torch.autograd.grad works.
    """
    config = configure(name, **options)
    formula = config.formula
    if isinstance(formula, str):
        names_it = next(options for options in type(config).__mro__ if "formula" in vars(options))
        folder = "dyad.train.losses.objectives." if names_it.__module__.startswith("dyad.") else ""  # else a plugin's
        module, _, formula = formula.partition(":")
        formula = getattr(import_module(folder + module), formula)
    return formula(config)
