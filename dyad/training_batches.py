"""The batches of a training run in Python, with the tokenizer and the options of a loaded model."""

import os
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

import torch.distributed as dist

from dyad import inputs
from dyad.data.batch import Batch
from dyad.data.config import Mode
from dyad.data.loading.loader import build_loader
from dyad.model import Model
from dyad.training_data import build_data


def batches(
    train: str | PathLike[str], *, model: Model, global_batch_size: int = 256, seed: int = 0, steps: range | None = None
) -> Iterator[Batch]:
    """Return an iterator over the batches of a training run in their exact order.

    Step s has the same samples in every run with the same options data.*, seed and global batch size, except a run with
    data.mode=stream. Under torch.distributed each rank gets its own part of every batch. train: the data, as
    data.train. model: provides the tokenizer, the image size and the other options data.* of its run; as many processes
    prepare samples as it was loaded with (`workers`). steps: the steps to yield, for example range(100, 200), without
    gaps; None: one epoch. Missing indexes of the data are written. Raises ConfigError for steps or a batch size that
    cannot be, and for data that do not fit the model; DataError for damaged data.
    """
    if steps is not None:
        inputs.check_steps(steps)
    count = inputs.count_of(global_batch_size, "global_batch_size")
    named = os.fspath(train) if isinstance(train, PathLike) else train
    data = replace(model.config.data, train=named, mode=Mode.indexed)
    config = replace(model.config, data=data, seed=int(seed), global_batch_size=count)
    found: Any = build_data(config, model.loaded.model)
    steps = steps if steps is not None else range(found.order.steps_per_epoch)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part: Any = {"rank": rank, "world_size": size, "workers": model.encoder.workers, "drawn": found.drawn}
    return build_loader(found.dataset, found.order, first_step=steps.start, last_step=steps.stop, **part)
