"""plan.dry_run=W: build the whole run as rank 0 of W and take its first step, on the CPU and without a network."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dyad.data.base.errors import ConfigError
from dyad.data.image_text.stream import Stream
from dyad.data.loading.class_batches import Labelled
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.plan.objective import first_step
from dyad.run.class_names import resolve_classes
from dyad.run.components import build_components, describe_batch_norms
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.world import World

ENOUGH = 32  # pairs; with fewer, the expected loss is inexact: a column's own pair occurs once, not W times
SOFTMAX = ("clip", "info_nce", "dpr")  # losses with a log-sum-exp over all columns: W copies of the columns add ln W


def dry_run(config: TrainConfig) -> Iterator[str]:
    """Yield the lines of a dry run: the loss of the first step, the loss to expect, and the bytes that the step sends.

    All other ranks are assumed to hold the pairs of rank 0. A loss to expect is given for clip, info_nce and dpr if
    rank 0 has at least ENOUGH (32) pairs, without extra items and classes. No run folder is made; shards without an
    index get one. This process must not be in a process group. Raises ConfigError for several losses (also.NAME), for
    streamed data, and, for more than one rank, with torch before 2.15; and the errors of `build_components`.
    """
    size, precision = config.plan.dry_run or 1, config.precision
    precision = Precision.fp32 if precision is Precision.auto else precision
    config = resolve_classes(replace(config, precision=precision, compile=False), World())
    components = build_components(config, World())
    towers, objective, data = components.model.towers, components.step.objective, components.data
    if not isinstance(data.order, Order) or isinstance(data.dataset, Stream) or config.also:
        raise ConfigError("plan.dry_run: takes a single loss (no also.NAME), and data with an index")
    describe_batch_norms(config, towers, size)
    how: dict[str, Any] = {"rank": 0, "world_size": size, "first_step": 0, "last_step": 1, "workers": 0}
    batch = next(build_loader(data.dataset, data.order, drawn=data.drawn, **how))
    if isinstance(data.dataset, Labelled) and batch.positives is not None:
        # every simulated rank holds as many classes as this one, so it takes the largest share, that of the last rank
        batch = data.dataset.completed(replace(batch, y=batch.positives), size - 1, size)
    before, config = copy.deepcopy(objective), replace(config, steps=components.total_steps)
    plain = batch.extra is batch.extra_x is batch.positives is None
    batch.sample_ids = torch.arange(len(batch))
    step, measured = first_step(towers, objective, config, World(0, size), batch)
    yield f"rank 0 of {size}, {precision}: {len(batch):,} of {config.global_batch_size:,} pairs"
    yield f"loss {step.scalars['loss']:.6g} of step 1 of {components.total_steps:,}"
    if config.objective.name in SOFTMAX and plain and len(batch) >= ENOUGH:
        x, y = step.terms[0].embeddings
        alone = before(x, y, batch.sample_ids, x_keys=batch.x_keys, y_keys=batch.y_keys).loss.item()
        yield f"  expected: {alone:.6g} of these pairs alone + ln {size} = {alone + math.log(size):.6g}"
    yield "sent, bytes of the whole tensors:"
    yield from (f"  {kind}: {count:,}" for kind, count in measured.sent.items())
