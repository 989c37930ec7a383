"""A real step of a planned run on the CPU: what torch's allocator gives at most, and what collectives send."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dyad.data.batch import Batch
from dyad.plan.measure import Measured
from dyad.plan.objective import planned_objective
from dyad.plan.towers import planned_inputs
from dyad.train.cli.compose import compose_config
from dyad.train.config import Parallel, TrainConfig
from dyad.train.distributed.sharded_tensors import local
from dyad.train.distributed.world import World
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_model
from dyad.train.towers.text.rows import Grouped

MODELS = {
    "tiny_clip_gn": "model=tiny_clip_gn global_batch_size=16",
    "in chunks": "model=tiny_clip_gn global_batch_size=16 chunk_size=4 keep_graphs=1 optim.ema=0.99",
    "frozen in chunks": "model=tiny_clip_gn model.image.frozen=true model.image.unlocked_groups=2 global_batch_size=12 "
    "chunk_size=3 optim.ema=0.99",
    "minilm": "experiment=topics global_batch_size=4 model.text.from_scratch=true",
    "small_bert": "experiment=topics global_batch_size=4",  # and the folder of the model
    "byte_lm": "experiment=lm_nll global_batch_size=4",
    "small_cnn": "task=views model=small_cnn data=simclr objective=simclr global_batch_size=64",
}


def planned(name: str, *words: str) -> TrainConfig:
    """Compose a configuration of MODELS, without a cache of frozen features. words: further arguments."""
    config = compose_config([*MODELS[name].split(), "steps=10", *words])
    return replace(config, model=replace(config.model, frozen_cache_mb=0))


def measured_step(config: TrainConfig, world: World) -> tuple[float, Counter[str]]:
    """Return (the most bytes that a rank holds in a real step, kind of collective → bytes), of the second step.

    Every rank of `world` must call it.
    """
    model = build_model(config, load_pretrained=False)
    count = config.global_batch_size // world.size
    inputs = planned_inputs(config, model, world.size, count)
    x, y = (torch.randint(200, rows.shape, dtype=rows.dtype) for rows in inputs)
    sides = ((model.towers.x_tower, x), (model.towers.y_tower, y))
    lengths = [np.full(len(rows), rows.shape[1]) if isinstance(t.trunk, Grouped) else None for t, rows in sides]
    ids = torch.arange(count)
    batch = Batch(x, y, ids, ids, ids, x_lengths=lengths[0], y_lengths=lengths[1])
    step = TrainStep(
        [LossTerm(model.towers, planned_objective(config, 4096), config, 10, world, (count,) * world.size)]
    )
    with Measured() as measured:
        step(batch, 0)
    step.optimizer.zero_grad()
    slots = step.optimizer.state.values()
    there = [*model.towers.parameters(), *model.towers.buffers(), batch.x, batch.y, *step.average.tensors.values()]
    there += [value for slot in slots for value in slot.values()]
    trained = sum(p.nbytes for p in model.towers.parameters() if p.requires_grad)
    before = sum(local(tensor).nbytes for tensor in there)
    before += trained * (world.size > 1 and config.dist.name is Parallel.ddp)  # the buckets of DDP
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, LetGo():
        step(batch, 1)
    return before + _peak(profiled), measured.sent


class LetGo(TorchDispatchMode):
    """A mode in which each collective ends only when gloo's thread no longer holds its tensors.

    torch's profiler counts what a thread of its own frees. What gloo's thread is the last to hold counted as never
    freed, each time that thread got no processor between the end of a collective and letting go.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(of, DTensor) for of in types):
            return NotImplemented  # it comes again, as operations on this rank's parts
        if func.namespace != "c10d" or func.overloadpacket.__name__ == "allreduce_":  # of DDP's buckets, which stay
            return func(*args, **kwargs or {})
        storages = [leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        held = [*map(torch._C._storage_Use_Count, storages)]
        *results, work = func(*args, **kwargs or {})
        Work.unbox(work).wait()
        del work
        while held != [*map(torch._C._storage_Use_Count, storages)]:
            time.sleep(1e-4)
        return *results, FakeWork().boxed()


def _peak(profiled: Any) -> int:
    """The most bytes allocated at one time, by the events of torch's CPU allocator."""
    sizes: list[tuple[int, int]] = []
    nodes = list(profiled.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == _EventType.Allocation:
            sizes.append((node.start_time_ns, node.extra_fields.alloc_size))
    return int(np.cumsum([size for _, size in sorted(sizes, key=lambda event: event[0])]).max())
