"""The base of all objectives: a module that turns the embeddings of a global batch into a loss and metrics.

The global batch is the batch of all ranks together. The mean over ranks of the loss is the loss of the global batch.
Averaging gradients over ranks, also those of the objective's own parameters, gives its exact gradient. So a mean over
the B anchors of W ranks is computed as W / B times the sum over this rank's anchors.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.batch import KnownPositives
from dyad.train.losses.gathered.arguments import as_int64, as_relevance, dtype_name
from dyad.train.losses.gathered.batch import Columns, GatheredBatch, gather_batch
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.options.choices import CandidateSet, Duplicates, Similarity
from dyad.train.losses.options.common import ObjectiveOptions, TemperatureOptions
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import known_sizes
from dyad.train.losses.sums.functions import normalized


@dataclass(frozen=True)
class ObjectiveResult:
    """The result of calling an objective: the loss, 0-d with gradient, and metrics by name, 0-d without gradient.

    The mean over ranks of the loss, and of each metric, is its value on the global batch.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective(nn.Module):
    """An objective (loss function) of in-batch pairs, and the base class of all of them. Call it as `forward` says.

    Subclasses implement `of_batch` (from the batch gathered over ranks), or `of_embeddings` if they need no gathered
    columns. options: the ObjectiveOptions that configure the objective; subclasses narrow the type. takes: the optional
    arguments of forward that the objective accepts, in the words of ObjectiveOptions.takes; by default options.takes.
    sample_state: the objective's numbers for every training sample, of which state_dict() has those that this rank
    stores; None if it keeps none. gathers_ids: whether of_batch needs the sample ids of all ranks.
    """

    sample_state: SampleState | None
    gathers_ids = False
    options: Any

    def __init__(self, options: ObjectiveOptions) -> None:
        super().__init__()
        self.options, self.takes, self.sample_state = options, options.takes, None
        self._before: dict[str, Tensor] = {}  # the buffers before the last call of forward

    @torch.compiler.disable(reason="an objective runs as it is: its sums are in tiles, by kernels of its own")
    def forward(
        self,
        x_bD: Tensor,
        y_mD: Tensor | None,
        sample_ids_b: Tensor | None = None,
        negatives: Tensor | Columns | None = None,
        positives: Tensor | None = None,
        excluded: Tensor | None = None,
        x_keys: Tensor | None = None,
        y_keys: Tensor | None = None,
        known_positives: KnownPositives | None = None,
        x_target: Tensor | None = None,
        y_target: Tensor | None = None,
        relevance: Tensor | None = None,
        x_negatives: XNegatives | None = None,
        **more: Tensor | None,
    ) -> ObjectiveResult:
        """Return the loss of the global batch and its metrics. The arguments are this rank's part, maybe empty.

        x_bD: the embeddings of this rank's b rows, (b, D); y_mD: those of its m columns (y items), with m = b unless
        `positives` lists the pairs; Cpc and PartialAUC take others, see there. forward normalises them if the
        similarity is cosine. With options.matryoshka the losses of embeddings cut to these widths are added, and are
        metrics, such as loss_64. Only SimCLR takes y_mD=None: x_bD then holds both views. Scores are float32, or
        float64 for float64 embeddings. Every other argument is None if not given; ids, keys and lists of pairs are
        int64, or integers that torch.as_tensor takes. sample_ids_b: (b,), the indices of the samples in per-sample
        state or in a .npy file of numbers, for objectives that have one. negatives: (b, k, D), k hard negatives per
        row, or Columns (a list of further y items). positives, excluded: (P, 2), P pairs (local row, global column),
        where global columns are the y of all ranks in rank order, then the further y items of all ranks; without
        positives, row i of x and row i of y are a pair; excluded pairs are in no sum over candidates; the own term of a
        positive pair stays. x_keys, y_keys: (b,), equal for the same item; one of them is needed with duplicates=mask
        or positive, y_keys with a file of numbers by content key. known_positives: keys of items that are relevant to a
        row: columns with these keys are not among the row's negatives; y_keys must be given. x_target, y_target: (b,
        D), embeddings of the same x and y by a target network. x_negatives: x items of no pair, negatives of the y of
        pairs and no anchors. more: arguments that only some objectives take, see their classes: importance, lengths,
        teacher.

        relevance: a weight w in (0, 1] for each positive pair: (b,), of row i and column i; with `positives` (P,), in
        their order; Columns holds the weights of further positives. The weight multiplies the pair's terms in the loss,
        and a mean is divided by the same number as without weights, not by their sum: w = 1 gives the bits of the loss
        without weights. Terms that belong to no positive pair have no weight.

        Every rank must call it and give arguments of the same names, empty if it has none (k = 0). Per-sample state and
        running means change in training mode with gradients enabled, not under no_grad or inference_mode. Raises
        ValueError or ConfigError for inputs that are wrong or do not fit the options, DataError for an item that a file
        of numbers lacks, HardwareError if per-sample state finds no room, and RuntimeError within a transform of
        torch.func, and in a backward with create_graph=True where a second derivative would be wrong.
        """
        widths = getattr(self.options, "matryoshka", ())
        if widths and widths[-1] >= x_bD.shape[-1]:
            raise ConfigError(
                f"objective.matryoshka={widths}: embeddings have {x_bD.shape[-1]} numbers, and their loss is always "
                "there. Give smaller widths"
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"objective {self.options.name}: torch.func.grad, vmap and the like cannot transform it, as it forms "
                "its gradient itself, by tiles. Take torch.autograd.grad or backward; torch.func.functional_call works"
            )
        listed = negatives.embeddings_kD if isinstance(negatives, Columns) else negatives
        check_tensors(x=x_bD, y=y_mD, negatives=listed, x_target=x_target, y_target=y_target)
        targets = {name: e for name, e in (("x_target", x_target), ("y_target", y_target)) if e is not None}
        columns = None if negatives is None else Columns.of(negatives, len(x_bD))
        weighs = relevance is not None or (columns is not None and columns.relevance_k is not None)
        given = {
            "targets": targets or None,
            "relevance": weighs or None,
            "negatives": negatives,
            "negatives.importance_k": None if "importance" in self.takes else columns and columns.importance_k,
            "positives": positives,
            "excluded": excluded if known_positives is None else known_positives,  # these become excluded pairs
            **more,
        }
        for name, value in given.items():
            if value is not None and name not in self.takes:
                raise ValueError(f"objective {self.options.name} takes no {name}")
        if weighs and (reason := self.options.no_relevance_because):
            raise ConfigError(reason)
        if x_negatives is not None and (reason := self.options.no_x_negatives_because):
            raise ConfigError(reason)
        self._before = {name: buffer.clone() for name, buffer in self.named_buffers()}
        further = None if x_negatives is None else x_negatives.checked()
        device, pairs = x_bD.device, x_bD if y_mD is not None else x_bD[::2]
        x_type, y_type = x_bD.dtype, x_bD.dtype if y_mD is None else y_mD.dtype
        if (x_type is torch.float64) != (y_type is torch.float64):  # other types may differ: products widen them
            raise ValueError(f"x is {dtype_name(x_type)} and y {dtype_name(y_type)}: convert one of them")
        enabled = torch.is_grad_enabled()  # inference_mode(False) enables it
        with torch.inference_mode(False), torch.set_grad_enabled(enabled), torch.autocast(device.type, enabled=False):
            other = {
                "sample_ids_b": as_int64("sample_ids", sample_ids_b, device),
                "positives": as_int64("positives", positives, device, pairs=True),
                "excluded": as_int64("excluded", excluded, device, pairs=True),
                "x_keys": as_int64("x_keys", x_keys, device),
                "y_keys": as_int64("y_keys", y_keys, device),
                "known_positives": known_positives,
                "relevance": as_relevance("relevance", relevance, len(pairs if positives is None else positives), x_bD),
                **{name: value for name, value in more.items() if value is not None},
            }

            def of_width(width: int | None) -> ObjectiveResult:
                """Return the result for the first `width` numbers of each embedding; None: for all."""

                def comparable(e_bD: Tensor) -> Tensor:
                    return self._comparable(e_bD if width is None else e_bD[..., :width])

                embeddings = {"negatives": columns, "x_negatives": further}
                found = self.of_embeddings(
                    comparable(x_bD),
                    None if y_mD is None else comparable(y_mD),
                    **{n: e and replace(e, embeddings_kD=comparable(e.embeddings_kD)) for n, e in embeddings.items()},
                    **{name: comparable(e) for name, e in targets.items()},
                    **other,
                )
                return self._checked(found, x_bD)

            result = of_width(None)
            loss, metrics = result.loss, dict(result.metrics)
            for width in widths:
                narrow = of_width(width).loss
                loss, metrics[f"loss_{width}"] = loss + narrow, narrow
        return ObjectiveResult(loss, {name: value.detach() for name, value in metrics.items()})

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> ObjectiveResult:
        """Return the loss and metrics of the global batch. The caller must normalise first if the similarity is cosine.

        x_bD: the embeddings of this rank's b rows; y_mD: those of its m columns, None only for SimCLR. inputs: the
        other arguments of Objective.forward (ids, keys, lists of pairs) by name, negatives as Columns; None where not
        given, but targets and what forward calls `more` are then absent. Raises ValueError for wrong shapes,
        ConfigError for candidates=list without negatives. Every rank must call it.
        """
        if y_mD is None or x_bD.ndim != 2 or y_mD.ndim != 2 or x_bD.shape[1] != y_mD.shape[1]:
            raise ValueError(f"x must be (b, D) and y (m, D), not {shapes(x_bD, y_mD)}")
        columns: Columns | None = inputs["negatives"]
        for name, side in (("negatives", "y"), ("x_negatives", "x")):
            if (given := inputs[name]) and given.embeddings_kD.shape[1:] != y_mD.shape[1:]:
                width, found = y_mD.shape[1], shapes(given.embeddings_kD)
                raise ValueError(f"{name} must have the width of {side}, {width}, not {found}")
        duplicates = self.options.duplicates
        if duplicates is Duplicates.keep:
            inputs["x_keys"] = None
            if inputs["known_positives"] is None and not self.options.by_key:
                inputs["y_keys"] = None
        own_lists = getattr(self.options, "candidates", None) is CandidateSet.list
        inputs |= {"equal_is_positive": duplicates is Duplicates.positive, "gathers_ids": self.gathers_ids}
        inputs |= {"own_lists": own_lists}
        if own_lists and columns is None:
            raise ConfigError("objective.candidates=list: give each row further columns of its own, as negatives")
        return self.of_batch(gather_batch(x_bD, y_mD, **inputs))

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        """Return the loss and metrics for a batch whose columns (the y items) are gathered from all ranks.

        The result is that of forward: shares whose means over ranks are the values of the global batch. Every rank must
        call it. Each objective defines this method, or replaces `of_embeddings`, which calls it.
        """
        raise NotImplementedError

    def _checked(self, result: Any, x_bD: Tensor) -> ObjectiveResult:
        """Return `result` of of_embeddings or of_batch. Raises ConfigError for a mistake there of a subclass."""
        start = f"objective={self.options.name}: of_batch of {type(self).__name__} returns"
        if not isinstance(result, ObjectiveResult):
            raise ConfigError(f"{start} {type(result).__name__}. Return ObjectiveResult(loss, metrics)")
        for name, value in {"loss": result.loss, **result.metrics}.items():
            if not isinstance(value, Tensor) or value.ndim:
                found = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ConfigError(f"{start} {name} as {found}. Give one number, a 0-d tensor")
        if x_bD.requires_grad and torch.is_grad_enabled() and not result.loss.requires_grad:
            raise ConfigError(f"{start} a loss without gradient. Compute it from batch.x_bD and batch.y_MD by torch")
        return result

    def calibrate(self, logit_scale: float, logit_bias: float | None, names: Collection[str]) -> dict[str, float]:
        """Set the temperature 1/exp(logit_scale) and the bias logit_bias that pretrained weights bring.

        With these weights, the logit of a pair with cosine s is exp(logit_scale) · s + logit_bias. names: which of
        "temperature" and "init_bias" may be set. logit_bias: None if the weights were trained with a softmax. If τ is
        learned, it is clamped to its range. Returns name → value of what was set; {} for an objective without a
        temperature parameter, and for one whose logits have another bias than the weights, such as NCE. To be called
        before the first step, on every rank.
        """
        return {}

    def clamp_(self) -> None:
        """Clamp the objective's learned parameters (such as the temperature) to their ranges.

        To be called after every optimiser step. An objective without bounded parameters does nothing.
        """

    def undo(self) -> None:
        """Restore per-sample state and buffers, such as running means, to their values before the last call of forward.

        To be called, on every rank, if the optimiser step of that call is skipped. Parameters that an optimiser steps
        stay, except a ν (objective.nu=sgd) that this call gave its first value. State of a subclass that is no buffer
        stays, unless the subclass extends this method.
        """
        for name, before in self._before.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self.get_submodule(owner), own_name, before)
        if self.sample_state is not None:
            self.sample_state.undo()

    def _comparable(self, e_bD: Tensor) -> Tensor:
        """Convert x or y embeddings for the computation of scores; L2-normalise them if the similarity is cosine.

        The norm is computed in float32, or in float64 for float64. On a GPU the result has the dtype of the input, as a
        GPU multiplies half precision into float32. On a CPU half precision is converted to float32.
        """
        e_bD = e_bD.clone() if e_bD.is_inference() else e_bD  # autograd refuses inference tensors
        wide = e_bD.to(torch.promote_types(e_bD.dtype, torch.float32))
        wide = normalized(wide) if self.options.similarity is Similarity.cosine else wide
        return wide.to(e_bD.dtype) if e_bD.is_cuda else wide


def check_tensors(**embeddings: object) -> None:
    """Raise ValueError, with the name, for embeddings that are neither a tensor nor None."""
    for name, e in embeddings.items():
        if not isinstance(e, Tensor | None):
            raise ValueError(f"{name} is a {type(e).__name__}, not a tensor: torch.as_tensor makes one of it")


def shapes(*tensors: Tensor | None) -> str:
    """Return the shapes of tensors as text for an error message, such as "(8, 4) and None"."""
    return " and ".join(str(None if e is None else tuple(e.shape)) for e in tensors)


def check_pairs(x_bD: Tensor, y_mD: Tensor | None, **others: Tensor | None) -> tuple[Tensor, Layout]:
    """Check that x and y are pairs (x_i, y_i), both (b, D); return y and the Layout of the pairs over ranks.

    For objectives that gather no columns. others: name → further embeddings of the pairs. Every rank must call it.
    Raises ValueError unless all embeddings are (b, D) alike, and for a global batch without a pair.
    """
    embeddings = x_bD, y_mD, *others.values()
    if y_mD is None or x_bD.ndim != 2 or any(e is None or e.shape != x_bD.shape for e in embeddings):
        raise ValueError(f"{' and '.join(['x', 'y', *others])} must be (b, D) alike, not {shapes(*embeddings)}")
    layout = sizes.rows if (sizes := known_sizes()) else Layout.of(x_bD)[0]
    if layout.total == 0:
        raise ValueError("the global batch has no pair")
    return y_mD, layout


class TemperatureObjective(Objective):
    """An objective with a temperature τ, fixed or learned.

    logit_scale: log 1/τ, a parameter that has a gradient only if τ is learned.
    """

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__(options)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(options.temperature)), options.learnable)

    def scale(self, like: Tensor) -> Tensor:
        """Return 1/τ (τ: the temperature), 0-d, in float32, or in float64 if the tensor `like` is float64."""
        return self.logit_scale.to(torch.promote_types(like.dtype, torch.float32)).exp()

    def calibrate(self, logit_scale: float, logit_bias: float | None, names: Collection[str]) -> dict[str, float]:
        if "temperature" not in names:
            return {}
        self.logit_scale.data.fill_(logit_scale)
        TemperatureObjective.clamp_(self)
        return {"temperature": math.exp(-self.logit_scale.item())}

    def clamp_(self) -> None:
        """Clamp the temperature τ to [min_temperature, 1], if τ is learned. To be called after every optimiser step."""
        super().clamp_()
        if self.options.learnable:
            self.logit_scale.data.clamp_(0.0, -math.log(self.options.min_temperature))


def score_means(batch: GatheredBatch) -> dict[str, Tensor]:
    """Return positive_score, the mean score of the pairs (x_i, y_i), and negative_score, that of all (x_i, y_j), j ≠ i.

    Both are 0-d, and this rank's shares, whose means over ranks are the means over the global batch. Returns {} if the
    caller has listed the positive pairs, or if the batch has y items beside the pairs. Only the scores of the pairs
    (x_i, y_i) are computed: the sum of all scores is <Σ_i x_i, Σ_j y_j>.
    """
    if batch.positives.own is None or len(batch.y_MD) != batch.rows.total:
        return {}
    own, per_pair = batch.pair_scores().sum(), batch.rows.share
    others = (batch.x_bD.to(own.dtype) @ batch.y_MD.sum(0, dtype=own.dtype)).sum() - own
    per_other = per_pair / max(batch.rows.total - 1, 1)
    return {"positive_score": own * per_pair, "negative_score": others * per_other}
