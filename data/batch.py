"""The batches that data sets give to the trainer: inputs of two sides, x and y (such as image and text), ids and
keys.

Letters in shapes: b samples of this rank; m items of side y of this rank; k extra items of the y side, such as hard
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
PADDING = -1  # in rows of tokens, where the mask of a tokenizer says padding: its own padding token may stand in texts


@dataclass
class Extra:
    """Further items of the y side (such as the texts of image-text pairs) in a batch, concatenated over the batch's
    rows: k ≥ 0 items in all, any number per row.

    y (k, …): tower inputs. row (k,) int64: the row of the local batch that each item belongs to. keys (k,) int64:
    content keys (64-bit hashes). positive (k,) bool: True for a further positive of the row, False for a hard negative.
    positives: how many are True, which is counted before the tensors leave the host. lengths: as Batch.y_lengths.
    log_q (k,) float32: log of the probability with which each item was drawn; None: they were not drawn from a density.
    relevance (k,) float: as Batch.relevance, 1 for a hard negative.
    """

    y: Tensor
    row: Tensor
    keys: Tensor
    positive: Tensor
    positives: int = -1
    lengths: Lengths | None = None
    log_q: Tensor | None = None
    relevance: Tensor | None = None

    def __post_init__(self) -> None:
        if self.positives < 0:
            self.positives = int(self.positive.sum())


@dataclass
class ExtraX:
    """Further items of the x side in a batch, which are wrong for the y of their row (such as images, for a text): k
    ≥ 0 items in all, any number per row.

    x (k, …): tower inputs, like those of Batch.x. row (k,) int64: the row of the local batch that each item belongs to.
    keys (k,) int64: content keys. noise: what is still to be added to x.
    """

    x: Tensor
    row: Tensor
    keys: Tensor
    noise: "Noise | None" = None

    def with_noise(self) -> "ExtraX":
        return self if self.noise is None else replace(self, x=self.noise.added(self.x), noise=None)


@dataclass
class KnownPositives:
    """P pairs of a row and an item of the y side (such as a passage) that is known to be relevant to the row. The item
    may lie outside the batch.

    The loss never uses such an item as a negative of the row. row (P,) int64: row of the local batch; keys (P,) int64:
    content key (64-bit hash) of the item.
    """

    row: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Noise:
    """Noise of the inputs of one side, such as blur of images, that is still to be added.

    add(inputs, draws): returns the inputs with noise, on their device. draws (b, k): random numbers of each row, kept
    on the host.
    """

    add: Callable[[Tensor, np.ndarray], Tensor]
    draws: np.ndarray

    def __getitem__(self, rows: Tensor) -> "Noise":
        return replace(self, draws=self.draws[rows.numpy()])

    def added(self, inputs: Tensor) -> Tensor:
        return self.add(inputs, self.draws)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be used. row: its row in the local batch; id: its sample id; shard, key: where it is
    stored; reason: the error message; replaced_by: id of the sample tried next."""

    row: int
    id: int
    shard: str
    key: str
    reason: str
    replaced_by: int


@dataclass
class Batch:
    """One rank's part of a global batch: b samples, each with an item on side x and one on side y.

    x, y (b, …): tower inputs, either uint8 images (b, 3, H, W) or int64 tokens (b, L), L tokens per text. Side y may
    have m items of its own, y (m, …), such as classes. positives (b,) int64: then the item of each sample, counted over
    side y of all ranks in rank order; None: sample i has item i, or no sample has one. sample_ids (b,) int64: ids 0, 1,
    … of samples; they index state that is kept per sample and nothing else. x_keys (b,), y_keys (m,) int64: content
    keys (64-bit hashes); equal keys are the same item on any rank. extra, extra_x: further items of side y and of x.
    known_positives: relevant items that must not serve as negatives. bad: samples that were replaced. auxiliary: the
    batches of auxiliary losses of the same step (also.NAME). x_lengths, y_lengths: the number of tokens of each row,
    kept on the host; None for a side that is no text, or whose tokenizer does not tell. x_places: the place of each row
    of x in its sequence, from 0, kept on the host; None: rows of x are embedded one by one. x_noise, y_noise: what is
    still to be added to x and y. y_log_q (m,): as Extra.log_q, of the items of side y. relevance (b,) float: a weight
    in (0, 1] of each sample as a positive pair; None: 1.
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

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def to(self: B, device: torch.device, non_blocking: bool = True) -> B:
        return mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def with_noise(self: B) -> B:
        """Return the batch with its noise added, on the device where it is."""
        sides = (self.x, self.x_noise), (self.y, self.y_noise)
        x, y = (inputs if noise is None else noise.added(inputs) for inputs, noise in sides)
        extra_x = self.extra_x and self.extra_x.with_noise()
        return replace(self, x=x, y=y, x_noise=None, y_noise=None, extra_x=extra_x)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator of a GPU that `stream` reads the batch, which another stream has filled."""
        mapped(self, lambda tensor: tensor.record_stream(stream))  # nobody reads the copy

    def pin_memory(self) -> "Batch":
        return mapped(self, Tensor.pin_memory)


def with_auxiliary(batch: Batch, *auxiliary: Batch) -> Batch:
    """Return `batch` with those of auxiliary losses; it names their bad samples too."""
    return replace(batch, auxiliary=auxiliary, bad=sum((of.bad for of in auxiliary), batch.bad))


def lengths_by(tokenize: Any, tokens: Tensor) -> Lengths | None:
    """Return the number of tokens of each row of `tokens`, (b, L) on the host, without padding.

    tokenize: the tokenizer that made them. Returns None if it has no method `lengths`, or its tower takes all tokens.
    """
    lengths = getattr(tokenize, "lengths", None)
    return lengths and lengths(tokens)


def mapped(record: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of the dataclass `record`, such as a Batch, with `change` applied to every tensor, also in
    dataclasses that are fields of `record`."""
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
    changed |= {name: mapped(part, change) for name, part in parts.items() if is_dataclass(part)}
    return replace(record, **changed)
