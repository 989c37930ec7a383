"""Make a rank's batches from parts of at most ITEM samples, which loader processes prepare.

Parts are small so that all workers share the first batch, and so that a worker soon begins its next sample, for which
the parent waits at most data.timeout. The parts of a batch are copied into one as they come. Parts are made ahead for
at most two batches, and the shared memory of a part is freed before the next part is taken. So the shared memory of all
workers never exceeds two batches (or one part for each worker and one more, if that is larger).
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

from dyad.data.batch import PADDING, Batch, map_tensors
from dyad.data.loading.workers import prefetched

ITEM = 256  # the most samples of a part
SIDES = ("x", "y")  # fields of a Batch that may be images

B = TypeVar("B", bound=Batch)
# (step, number of the part over all steps, its rows of the batch) → a part; nothing else may keep its images
MakePart = Callable[[int, int, slice], B]


def batches_of_parts(
    make: MakePart[B], steps: range, rows: int, workers: int, noise_later: bool = False, **options: Any
) -> Iterator[B]:
    """Yield this rank's batch of each step, put together from the parts that `make` returns.

    With CUDA it lies in pinned memory. make(step, number, rows): returns a part: the samples `rows` (a slice) of the
    step's batch. number: number of the part, counted from 0 over all steps; worker processes make parts in turn. rows:
    number of samples of a batch. workers: number of loader processes; 0: this process makes the parts. noise_later:
    whether noise is left to be added on the device, by Batch.with_noise. options: the arguments where, timeout and rank
    of `prefetched`, whose errors are raised here too.
    """
    count = max(min(max(-(-rows // ITEM), workers + 1), rows), 1)
    bounds = [number * rows // count for number in range(count + 1)]
    numbers = range(steps.start * count, steps.stop * count)
    ahead = max((2 * count - 1) // max(workers, 1), 1)  # parts of two batches, minus the part being copied
    parts = prefetched(partial(_packed, make, bounds, noise_later), numbers, workers=workers, ahead=ahead, **options)
    for _ in steps:
        yield assembled(islice(parts, count), rows, torch.cuda.is_available())


def _packed(make: MakePart[B], bounds: Sequence[int], noise_later: bool, number: int) -> B:
    """Make the part with number `number` (counted over all steps), in the form that `assembled` takes.

    A loader process calls it, or this process if there are none. Tensors are converted to numpy arrays: torch would
    send each small tensor through a shared-memory file of its own, which takes longer than copying it. Only images in x
    and y stay tensors, and only if the batch has no sequences. bounds: first row of each part of a batch, and the
    number of rows. Other arguments as of `batches_of_parts`.
    """
    step, place = divmod(number, len(bounds) - 1)
    part = make(step, number, slice(bounds[place], bounds[place + 1]))
    part = part if noise_later else part.with_noise()
    packed = map_tensors(part, Tensor.numpy)
    for side in SIDES if part.x_places is None else ():  # parts of sequences differ in their number of rows
        if getattr(part, side).dim() > 2:
            setattr(packed, side, getattr(part, side))
    return packed


def assembled(parts: Iterator[B], rows: int, pin: bool) -> B:
    """Return the batch that is put together from `parts`, all parts of one batch as `_packed` returns them.

    rows: number of samples of the batch. pin: whether the batch lies in pinned memory. Images of a part that are
    tensors are copied to their place in the batch as soon as the part comes, and the part's shared memory is freed. The
    parts are changed, and cannot be used afterwards. If the batch has only one part and `pin` is False, its images are
    not copied.
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
        while copied:  # after both sides were copied, because they may share their memory
            _give_back(copied.pop())
        taken.append(part)
    batch = _joined(taken, firsts)
    return batch.pin_memory() if pin else batch


def _give_back(copied: Tensor) -> None:
    """Free the memory of a tensor of a part at once, if it is shared memory, by truncating its file. The worker that
    sent the tensor may close the file only after it made its next part."""
    if copied.is_shared():
        os.ftruncate(copied.untyped_storage()._share_fd_cpu_()[0], 0)


def _joined(records: Sequence[Any], firsts: Sequence[int]) -> Any:
    """Return one dataclass object, such as a Batch, from those of consecutive parts of a batch.

    Arrays are concatenated to tensors (lengths, places and draws to numpy arrays), tuples are concatenated, counts are
    added. Other fields, such as images and None, are taken from the first part. firsts: the row of the batch where each
    part begins, which is added to the part's fields named `row`.
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
            whole[name] = concatenated([torch.from_numpy(value) for value in moved])
        elif is_dataclass(values[0]):
            whole[name] = _joined(values, firsts)
        elif isinstance(values[0], tuple):
            whole[name] = tuple(replace(one, row=one.row + first) for part, first in placed for one in part)
        elif isinstance(values[0], dict):
            whole[name] = Counter[Any]()
            for counts in values:
                whole[name].update(counts)
    return replace(records[0], **whole)


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension. Rows of tokens, (n, L) each, may differ in L.

    They are first padded at the right with PADDING to the largest L.
    """
    if tensors[0].dim() > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, width - tensor.shape[1]), value=PADDING) for tensor in tensors]
    return torch.cat(list(tensors))
