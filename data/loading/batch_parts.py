"""A rank's batches, which loader processes make in parts: at most ITEM samples at a time.

A part is small so that a slow storage is not taken for a lost one, and so that all workers share the first batch. The
parts of a batch are copied together as they come. Only as many are made ahead as two batches have, and the memory of
one is given back before the next is taken: so the shared memory of all workers never exceeds two batches (or a part for
each worker and one, if that is more).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.batch import PADDING, Batch, mapped
from dyad.data.loading.workers import prefetched

ITEM = 256  # samples of a part, at the most
SIDES = ("x", "y")  # of a batch, which may be images

B = TypeVar("B", bound=Batch)
# (step, number of the part over all steps, its rows of the batch) → a part, whose images nothing else keeps
MakePart = Callable[[int, int, slice], B]


def batches_of_parts(
    make: MakePart[B], steps: range, rows: int, workers: int, noise_later: bool = False, **options: Any
) -> Iterator[B]:
    """Yield this rank's batch of each step, put together from the parts that `make` returns. With CUDA it lies in
    pinned memory.

    make(step, number, rows): returns a part, the given rows of the step's batch. number: counts the parts of all steps;
    worker processes make them in turn. rows: size of a batch. noise_later: as in `build_loader`.
    options, and the errors: as in `prefetched`.
    """
    count = max(min(max(-(-rows // ITEM), workers + 1), rows), 1)
    bounds = [number * rows // count for number in range(count + 1)]
    numbers = range(steps.start * count, steps.stop * count)
    ahead = max((2 * count - 1) // max(workers, 1), 1)  # of two batches, one part is being copied
    parts = prefetched(partial(_packed, make, bounds, noise_later), numbers, workers=workers, ahead=ahead, **options)
    for _ in steps:
        yield assembled(islice(parts, count), rows, torch.cuda.is_available())


def _packed(make: MakePart[B], bounds: Sequence[int], noise_later: bool, number: int) -> B:
    """Make part `number` in a worker. Its tensors become arrays, except images: torch would send each of them through
    a file of its own in shared memory, which takes longer than to copy it."""
    step, place = divmod(number, len(bounds) - 1)
    part = make(step, number, slice(bounds[place], bounds[place + 1]))
    part = part if noise_later else part.with_noise()
    packed = mapped(part, Tensor.numpy)
    for side in SIDES if part.x_places is None else ():  # of sequences, the number of rows differs from part to part
        if getattr(part, side).dim() > 2:
            setattr(packed, side, getattr(part, side))
    return packed


def assembled(parts: Iterator[B], rows: int, pin: bool) -> B:
    """Copy the parts of a batch together, each as soon as it comes. rows: size of the batch; pin: whether its memory is
    pinned.

    Images are copied to their place at once, which frees the shared memory of the part.
    """
    taken: list[B] = []
    images, firsts = dict[str, Tensor](), [0]
    for part in parts:
        firsts.append(firsts[-1] + len(part))
        copied: list[Tensor] = []
        for side in SIDES:
            found = getattr(part, side)
            if isinstance(found, Tensor) and (pin or len(part) < rows):
                if side not in images:
                    images[side] = torch.empty(rows, *found.shape[1:], dtype=found.dtype, pin_memory=pin)
                images[side][firsts[-2] : firsts[-1]] = found
                setattr(part, side, images[side])
                copied.append(found)
            del found
        while copied:  # when both are copied: they may lie in one memory
            _give_back(copied.pop())
        taken.append(part)
    batch = _joined(taken, firsts)
    return batch.pin_memory() if pin else batch


def _give_back(copied: Tensor) -> None:
    """Free the memory of a tensor of a part, if it is shared. The worker that sent it closes its file when it comes to
    it, which may be later than the next part; a file that was emptied takes no memory from now on."""
    if copied.is_shared():
        os.ftruncate(copied.untyped_storage()._share_fd_cpu_()[0], 0)


def _joined(records: Sequence[Any], firsts: Sequence[int]) -> Any:
    """Return one dataclass object from those of consecutive parts of a batch: arrays become one tensor, tuples are
    concatenated, counts added.

    firsts: the row of the batch where each part begins; fields named `row` count from there.
    """
    whole: dict[str, Any] = {}
    for name in (field.name for field in fields(records[0])):
        values = [getattr(record, name) for record in records]
        placed = list(zip(values, firsts, strict=False))
        if name.endswith(("lengths", "places", "draws")):  # stay on the host
            whole[name] = None if values[0] is None else np.concatenate(values)
        elif name == "positives" and isinstance(values[0], int):
            whole[name] = sum(values)
        elif isinstance(values[0], np.ndarray):
            moved = [value + first for value, first in placed] if name == "row" else values
            whole[name] = stacked([torch.from_numpy(value) for value in moved])
        elif is_dataclass(values[0]):
            whole[name] = _joined(values, firsts)
        elif isinstance(values[0], tuple):
            whole[name] = tuple(replace(one, row=one.row + first) for part, first in placed for one in part)
        elif isinstance(values[0], dict):
            whole[name] = Counter[Any]()
            for counts in values:
                whole[name].update(counts)
    return replace(records[0], **whole)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension. Rows of tokens are filled up at the right with PADDING."""
    if tensors[0].dim() > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, width - tensor.shape[1]), value=PADDING) for tensor in tensors]
    return torch.cat(list(tensors))
