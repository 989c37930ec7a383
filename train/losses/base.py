"""What every objective is: a module that turns the embeddings of a global batch into a loss and metrics.

An objective returns a loss whose mean over ranks is the loss of the global batch; averaging gradients over ranks, of
its own parameters too, gives the exact gradient. Per-anchor sums therefore enter as W / B times this rank's sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batch import KnownPositives
from train.losses.options.common import Duplicates, ObjectiveOptions, Similarity, TemperatureOptions
from train.losses.strip import Columns, Strip, build_strip, integers, named

if TYPE_CHECKING:
    from train.losses.memory import SampleState


@dataclass(frozen=True)
class Result:
    """loss: 0-d; metrics: detached 0-d tensors. The mean over ranks of each is its value on the global batch."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective(nn.Module):
    """An objective of in-batch pairs. Subclasses implement `of_strip`, or `of_embeddings` if they need no columns.

    memory: per-sample state, if it has any.
    """

    takes: ClassVar[frozenset[str]] = frozenset()  # which of negatives, positives, excluded, importance it knows
    memory: SampleState | None = None
    options: Any  # a dataclass of ObjectiveOptions; subclasses say which

    def __init__(self, options: ObjectiveOptions) -> None:
        super().__init__()
        self.options = options

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
        known: KnownPositives | None = None,
        **more: Tensor | None,
    ) -> Result:
        """Loss of the global batch of which these are this rank's pairs; ranks may hold different numbers, also 0.

        x_bD, y_mD: embeddings, normalised here if the similarity is cosine; scores are float32, or float64 for float64.
        Whole numbers may be any that torch.as_tensor takes.
        sample_ids_b: index of per-sample state. negatives: (b, k, D) hard negatives, or Columns. positives, excluded:
        int64 (P, 2) pairs (local row, global column); without positives, column i is the positive of row i. x_keys,
        y_keys (b,) int64: rows with an equal key are the same item; needed (one of them) unless duplicates are kept.
        known: y items, by key, that are right for a row: where they are columns, they are none of its negatives.
        A collective: every rank calls it, and what is given on one rank is given on all, if only as nothing (k = 0).
        State and running means move in training mode with gradients enabled, and not under no_grad or inference_mode.
        There is a first derivative: with create_graph=True backward raises where it would be without the second.
        """
        given = {
            "negatives": negatives,
            "positives": positives,
            "excluded": excluded if known is None else known,
            **more,
        }
        for name, value in given.items():
            if value is not None and name not in self.takes:
                raise ValueError(f"objective {self.options.name} takes no {name}")
        columns, device = None if negatives is None else Columns.of(negatives), x_bD.device
        _check_types(x_bD, y_mD)
        enabled = torch.is_grad_enabled()  # inference_mode(False) enables it
        with torch.inference_mode(False), torch.set_grad_enabled(enabled), torch.autocast(device.type, enabled=False):
            y_mD = None if y_mD is None else self._comparable(y_mD)
            result = self.of_embeddings(
                self._comparable(x_bD),
                y_mD,
                sample_ids_b=integers("sample_ids", sample_ids_b, device),
                negatives=columns and replace(columns, embeddings_kD=self._comparable(columns.embeddings_kD)),
                positives=integers("positives", positives, device, pairs=True),
                excluded=integers("excluded", excluded, device, pairs=True),
                x_keys=integers("x_keys", x_keys, device),
                y_keys=integers("y_keys", y_keys, device),
                known=known,
                **{name: value for name, value in more.items() if value is not None},
            )
        return Result(result.loss, {name: value.detach() for name, value in result.metrics.items()})

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: Any) -> Result:
        if y_mD is None or x_bD.ndim != 2 or y_mD.ndim != 2 or x_bD.shape[1] != y_mD.shape[1]:
            shape = None if y_mD is None else tuple(y_mD.shape)
            raise ValueError(f"x must be (b, D) and y (m, D), not {tuple(x_bD.shape)} and {shape}")
        columns: Columns | None = inputs["negatives"]
        if columns and columns.embeddings_kD.shape[1:] != y_mD.shape[1:]:
            shape = tuple(columns.embeddings_kD.shape)
            raise ValueError(f"negatives must have the width of y, {y_mD.shape[1]}, not {shape}")
        duplicates = getattr(self.options, "duplicates", Duplicates.keep)
        if duplicates is Duplicates.keep:
            inputs["x_keys"] = None
            if inputs["known"] is None:
                inputs["y_keys"] = None
        more = {name: inputs.pop(name) for name in list(inputs) if name in MORE}
        strip = build_strip(x_bD, y_mD, equal_is_positive=duplicates is Duplicates.positive, **inputs)
        return self.of_strip(strip, **more)

    def of_strip(self, strip: Strip, **more: Tensor) -> Result:
        raise NotImplementedError

    def clamp_(self) -> None:
        """Bring what learns back into its range; to be called after every optimiser step."""

    def undo(self) -> None:
        """Restore what the last call changed."""
        if self.memory is not None:
            self.memory.undo()

    def _comparable(self, e_bD: Tensor) -> Tensor:
        """Normalised in float32. A GPU multiplies half precision as it is, into float32; elsewhere it gains nothing."""
        e_bD = e_bD.clone() if e_bD.is_inference() else e_bD  # autograd takes none, not even for a gradient inside
        wide = e_bD.to(torch.promote_types(e_bD.dtype, torch.float32))
        wide = F.normalize(wide, dim=-1) if self.options.similarity is Similarity.cosine else wide
        return wide.to(e_bD.dtype) if e_bD.is_cuda else wide


def _check_types(x_bD: Tensor, y_mD: Tensor | None) -> None:
    """Half precision is widened to float32; float64 is a type of its own."""
    x_type, y_type = x_bD.dtype, x_bD.dtype if y_mD is None else y_mD.dtype
    if torch.promote_types(x_type, torch.float32) != torch.promote_types(y_type, torch.float32):
        raise ValueError(f"x is {named(x_type)} and y {named(y_type)}: convert one of them")


MORE = ("importance",)  # inputs that are not of the strip


class TemperatureObjective(Objective):
    """An objective with a temperature. logit_scale: log 1/τ, a parameter that has a gradient only if τ learns."""

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__(options)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(options.temperature)), options.learnable)

    def scale(self, like: Tensor) -> Tensor:
        """1/τ, 0-d, in float32 or better."""
        return self.logit_scale.to(torch.promote_types(like.dtype, torch.float32)).exp()

    def clamp_(self) -> None:
        """Keep a learning τ in [min_temperature, 1]; to be called after every optimiser step."""
        super().clamp_()
        if self.options.learnable:
            self.logit_scale.data.clamp_(0.0, -math.log(self.options.min_temperature))
