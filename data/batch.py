"""The batches that data sets give to the trainer: inputs of two sides, x and y (such as image and text), sample ids
and content keys.

Letters in shapes: b samples of this rank; m items of side y of this rank; k extra items of one side, such as hard
negatives; P pairs of a row of the batch and an item known to be relevant to this row; L tokens of a text; H, W height
and width of an image.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

B = TypeVar("B", bound="Batch")
Lengths = npt.NDArray[np.int64]
PADDING = -1  # replaces padding tokens in rows of tokens: a tokenizer's own padding token may also occur in a text


@dataclass
class Extra:
    """Further items of the y side of a batch (such as texts of image-text pairs), k ≥ 0 in all, any number per row.

    The items of all rows are concatenated. y (k, …): tower inputs. row (k,) int64: the row of the local batch that each
    item belongs to. keys (k,) int64: content keys (64-bit hashes). positive (k,) bool: True for a further positive of
    the row, False for a hard negative or an item drawn for noise contrastive estimation (NCE). positives: the number of
    True in `positive`, counted while the tensors are on the host; -1: the constructor counts it, which waits for the
    device if `positive` lies there. lengths: as Batch.y_lengths. log_q (k,) float32: log of the probability with which
    each item was drawn; None: the items were not drawn with known probabilities. relevance (k,) float: as
    Batch.relevance; 1 for a hard negative. teacher (k,) float: as Batch.teacher.
    """

    y: Tensor
    row: Tensor
    keys: Tensor
    positive: Tensor
    positives: int = -1
    lengths: Lengths | None = None
    log_q: Tensor | None = None
    relevance: Tensor | None = None
    teacher: Tensor | None = None

    def __post_init__(self) -> None:
        if self.positives < 0:
            self.positives = int(self.positive.sum())


@dataclass
class ExtraX:
    """Hard negatives on the x side of a batch, such as images that do not match the caption of their row: k ≥ 0 in all.

    A row may have any number of them; those of all rows are concatenated. x (k, …): tower inputs, like those of
    Batch.x. row (k,) int64: the row of the local batch that each item belongs to. keys (k,) int64: content keys (64-bit
    hashes). noise: the augmentation still to be applied to x (class Noise); None: none.
    """

    x: Tensor
    row: Tensor
    keys: Tensor
    noise: "Noise | None" = None

    def with_noise(self) -> "ExtraX":
        """Return these items with the noise added to x and with `noise` None; the object itself if it has no noise."""
        return self if self.noise is None else replace(self, x=self.noise.added(self.x), noise=None)


@dataclass
class KnownPositives:
    """P pairs of a row and an item of the y side (such as a passage) that is known to be relevant to the row.

    An objective that has "excluded" in its `takes` (train/losses/options) never uses this item as a negative of this
    row; others ignore these pairs. The item may lie outside the batch. row (P,) int64: row of the local batch. keys
    (P,) int64: content key (64-bit hash) of the item.
    """

    row: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Noise:
    """Augmentation after the crop, such as flips and blur, still to be applied to the b images of one side of a batch.

    It is called noise, and applying it "adding". noise[rows], with row indices or a mask as a CPU tensor, is the noise
    of these rows. add(inputs, draws): returns the augmented inputs, on the device of `inputs`. draws (b, n): n random
    numbers for each row, kept on the host.
    """

    add: Callable[[Tensor, np.ndarray], Tensor]
    draws: np.ndarray

    def __getitem__(self, rows: Tensor) -> "Noise":
        """Return the noise of the given rows. rows: indices (int64) or a mask (bool), a tensor on the CPU."""
        return replace(self, draws=self.draws[rows.numpy()])

    def added(self, inputs: Tensor) -> Tensor:
        """Return `inputs` (b, …) with the noise added. The row count must be that of `draws`."""
        return self.add(inputs, self.draws)


@dataclass(frozen=True)
class BadSample:
    """A sample, or a part of a shard, that could not be used.

    row: the row of the local batch for which it was read; no meaning for a part of a shard. id: its sample id. shard:
    path of the shard in which it is stored. key: its key there; "" for a part of a shard. reason: the error message.
    replaced_by: id of the sample that was tried instead. Both ids are -1 in streams (data.mode=stream), which take the
    next sample of the stream.
    """

    row: int
    id: int
    shard: str
    key: str
    reason: str
    replaced_by: int


@dataclass
class Batch:
    """One rank's part of a global batch: b samples, each with an item on side x and one on side y.

    x, y: tower inputs: uint8 images (b, 3, H, W), int64 tokens (b, L), int64 item numbers (b,), or float32 frames (b,
    features). Side y may instead have m items of its own, such as classes: y (m, …). positives (b,) int64: in that case
    the index of each sample's item among the y items of all ranks, concatenated in rank order; None: y[i] is the item
    of sample i, or no sample has an item of its own. sample_ids (b,) int64: indices, from 0, of state that objectives
    keep per sample; -1 in a stream without data.id_key. x_keys (b,), y_keys (m,) int64: content keys (64-bit hashes);
    equal keys are the same item on any rank. extra, extra_x: further items of sides y and x. known_positives: relevant
    items that must not serve as negatives. bad: samples that could not be used. auxiliary: batches of the auxiliary
    losses of the same step (configuration keys also.NAME). x_lengths, y_lengths (one per row of x, y): the number of
    tokens, kept on the host; None: the side is no text, or its tokenizer gives no lengths. x_places (b,): the place of
    each row of x in its window (consecutive steps of a sequence), from 0, kept on the host; None: each row of x is
    embedded by itself. x_noise, y_noise: noise still to be added to x and y; None: none. y_log_q (m,) float32: log of
    the probability with which one draw of the noise items of NCE gives each y item; None: no such items are drawn.
    relevance (b,) float: the weight in (0, 1] of each sample as a positive pair; None: 1 for all. teacher (b,) float:
    the score that a teacher or people gave each sample's x and y; None: none is given.
    """

    x: Tensor
    y: Tensor
    sample_ids: Tensor
    x_keys: Tensor
    y_keys: Tensor
    extra: Extra | None = None
    known_positives: KnownPositives | None = None
    bad: tuple[BadSample, ...] = ()
    auxiliary: tuple["Batch", ...] = ()
    x_lengths: Lengths | None = None
    y_lengths: Lengths | None = None
    x_places: Lengths | None = None
    positives: Tensor | None = None
    x_noise: Noise | None = None
    y_noise: Noise | None = None
    y_log_q: Tensor | None = None
    relevance: Tensor | None = None
    extra_x: ExtraX | None = None
    teacher: Tensor | None = None

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def to(self: B, device: torch.device, non_blocking: bool = True) -> B:
        """Return a copy of the batch with its tensors on `device`. non_blocking: as for Tensor.to.

        The batches in the field `auxiliary` are not moved; neither are arrays kept on the host (lengths, places, draws
        of noise).
        """
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def with_noise(self: B) -> B:
        """Return a copy of the batch with the noise of x, y and extra_x added, on the device of these tensors. The
        batches in the field `auxiliary` are not changed."""
        sides = (self.x, self.x_noise), (self.y, self.y_noise)
        x, y = (inputs if noise is None else noise.added(inputs) for inputs, noise in sides)
        extra_x = self.extra_x and self.extra_x.with_noise()
        return replace(self, x=x, y=y, x_noise=None, y_noise=None, extra_x=extra_x)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the batch's tensors from being reused before `stream` has read them.

        It calls Tensor.record_stream of each, which is needed for CUDA tensors that another stream has filled. The
        batches in the field `auxiliary` are left out.
        """
        map_tensors(self, lambda tensor: tensor.record_stream(stream))  # nobody reads the copy

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch with its tensors in pinned memory. The batches in the field `auxiliary` are not
        copied."""
        return map_tensors(self, Tensor.pin_memory)


def with_auxiliary(batch: Batch, *auxiliary: Batch) -> Batch:
    """Return a copy of `batch` with its field `auxiliary` set to the given batches, those of the auxiliary losses."""
    return replace(batch, auxiliary=auxiliary)


def text_lengths(tokenize: Any, tokens: Tensor) -> Lengths | None:
    """Return how many entries of each row of `tokens` the tower reads: int64 (b,) in NumPy; or None.

    tokenize: the tokenizer that made `tokens`; its method `lengths` counts. tokens (b, L): on the host. Padding is not
    counted, nor, for causal towers of open_clip, what follows the end token. None: the tokenizer has no such method, or
    the tower needs all L tokens, because it gives its model no padding mask.
    """
    lengths = getattr(tokenize, "lengths", None)
    return lengths and lengths(tokens)


def map_tensors(record: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of the dataclass `record`, such as a Batch, with change(tensor) in place of each tensor.

    Tensors in fields that are dataclasses are changed too. Other fields are kept, also tensors inside tuples, as in
    Batch.auxiliary.
    """
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
    changed |= {name: map_tensors(part, change) for name, part in parts.items() if is_dataclass(part)}
    return replace(record, **changed)
