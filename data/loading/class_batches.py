"""Batches for task=labelled: samples against all classes, or the samples of one class against all others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError, SampleError, nearest
from dyad.data.batch import Batch, text_lengths
from dyad.data.config import DataConfig
from dyad.data.loading.loader import BatchSource, Positions
from dyad.data.loading.order import Ids, Order, local_rows
from dyad.data.shards.shards import Shards


def class_key(name: str) -> str:
    """Return the form of a class name by which names are compared: Unicode's NFC. A Mac writes é in the names of
    folders as two characters. Names themselves stay as they are, since a model may have been trained on prompts with
    them."""
    return normalize("NFC", name)


def distinct(names: Iterable[str]) -> list[str]:
    """Return each class name once, sorted: of names with one `class_key`, the last one."""
    return sorted({class_key(name): name for name in sorted(set(names))}.values())


@dataclass(frozen=True)
class ClassNumbers:
    """The names of C classes. A call converts n names to class numbers 0 … C − 1, int64 (n,) on the CPU.

    If C is 1, every name other than that of the class gets the number 1. If C is more than 1, a call raises SampleError
    for a name that is not in `names`. where, of a call: text with which this message begins.
    """

    names: Sequence[str]

    @cached_property
    def places(self) -> dict[str, int]:
        """`class_key` of the name → number of each class."""
        return {class_key(name): place for place, name in enumerate(self.names)}

    def __call__(self, names: Sequence[str], where: str = "") -> Tensor:
        if strangers := [name for name in names if len(self.names) > 1 and class_key(name) not in self.places]:
            raise SampleError(f"{where}'{strangers[0]}' is none of the classes.{nearest(strangers[0], self.names)}")
        return torch.tensor([self.places.get(class_key(name), 1) for name in names], dtype=torch.int64)


@dataclass(frozen=True)
class Labelled:
    """The training data set of task=labelled. Its pairs are samples and classes, or class 0 and all others.

    In the second case x are samples of class 0, the rare one, and y the samples of all other classes. Its batches
    become such pairs by `completed`, which the loader calls. samples: the data set of all samples, whose batches have
    the class number of each sample as y. classes: a name or text for each of C classes; None: the second case.
    tokenize(classes): returns the inputs of the y tower for the classes; not used if `classes` is None.
    """

    samples: BatchSource
    classes: list[str] | None = None
    tokenize: Any = None

    def __getitems__(self, positions: Positions) -> Batch:
        return self.samples.__getitems__(positions)

    def where(self, sample_id: int) -> str:
        return self.samples.where(sample_id)

    @cached_property
    def _inputs(self) -> Tensor:
        return self.tokenize(self.classes)

    def completed(self, batch: Batch, rank: int, world_size: int) -> Batch:
        """Return `batch`, a batch of `samples`, with the sides x and y that the losses need.

        If self.classes is not None, y becomes this rank's share of the inputs of all classes, with class numbers as
        y_keys, and Batch.positives the class number of each sample. Otherwise x becomes the samples of class 0, and y
        the other samples; sample_ids are those of x. No collective is called.
        """
        if self.classes is not None:
            own = local_rows(len(self.classes), rank, world_size)
            y, keys = self._inputs[own], torch.arange(own.start, own.stop)
            return replace(batch, y=y, y_keys=keys, y_lengths=text_lengths(self.tokenize, y), positives=batch.y)
        own, other, lengths = batch.y == 0, batch.y != 0, batch.x_lengths
        of_sides = {"x": batch.x[own], "y": batch.x[other], "x_keys": batch.x_keys[own], "y_keys": batch.x_keys[other]}
        if lengths is not None:
            of_sides |= {"x_lengths": lengths[own.numpy()], "y_lengths": lengths[other.numpy()]}
        if batch.x_noise is not None:
            of_sides |= {"x_noise": batch.x_noise[own], "y_noise": batch.x_noise[other]}
        return replace(batch, sample_ids=batch.sample_ids[own], **of_sides)


class RareOrder(Order):
    """The order of samples in which each global batch has data.rare_per_batch samples of the class data.rare.

    They are spread evenly over its rows. A bad one is replaced by another rare one (Replacements.kinds). The rare
    samples and the others are ordered separately, so a rare sample may come again before all others came once; an epoch
    is a pass over the others, and samples_per_epoch counts these alone. is_rare: (n,) bool, whether each of the n
    samples of `shards` is of the rare class. how: the arguments of Order other than sizes and weights. The constructor
    raises ConfigError if there are too few samples of either kind. `ids` are not sorted. `local` returns the step in
    place of the epoch, so that a rare sample is augmented anew each time.
    """

    def __init__(self, shards: Shards, is_rare: np.ndarray, data: DataConfig, **how: Any) -> None:
        super().__init__(shards.sizes, shards.weights, **how)
        total, ends = self.global_batch_size, [0, *accumulate(shards.sizes)]
        shares = np.arange(total + 1) * data.rare_per_batch // total
        self._orders: list[tuple[np.ndarray, np.ndarray, Order]] = []
        for kind, what in ((True, data.rare), (False, "others")):
            ids, rows = np.flatnonzero(is_rare == kind), np.flatnonzero((np.diff(shares) > 0) == kind)
            if len(ids) < len(rows):
                raise ConfigError(
                    f"data.rare={data.rare}: {len(ids):,} samples of {what}, and each batch needs {len(rows)} of them. "
                    "Set data.rare_per_batch, or global_batch_size, to less"
                )
            own = {**how, "seed": f"{self.seed}/{what}", "global_batch_size": len(rows)}
            self._orders.append((rows, ids, Order(np.diff(np.searchsorted(ids, ends)).tolist(), shards.weights, **own)))
        self._others = self._orders[1][2]
        self.steps_per_epoch, self.samples_per_epoch = self._others.steps_per_epoch, self._others.samples_per_epoch

    @property
    def left_out(self) -> float:
        """The share of the samples of other classes that an epoch leaves out."""
        return self._others.left_out

    def ids(self, step: int) -> Ids:
        found = np.empty(self.global_batch_size, np.int64)
        for rows, ids, order in self._orders:
            found[rows] = ids[order.ids(step)]
        return found

    def local(self, step: int, rank: int, world_size: int) -> tuple[int, Ids]:
        return step, super().local(step, rank, world_size)[1]  # a rare sample is augmented anew each time
