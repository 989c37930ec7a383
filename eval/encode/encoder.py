"""Encoding of items with a tower; the result does not depend on the number of processes.

Shape letters: N items, E items in a block, W processes, D embedding width.

Items are cut into blocks of E: block k has the items kE … (k+1)E − 1, and the last block has the rest. In each round
every process encodes one block: process r gets the blocks r, r + W, r + 2W, …. All processes make the same number of
tower calls (a surplus call repeats the last block), and after each round all processes have the embeddings of this
round. So a tower gets the same blocks for every W, every item counts once, and the device holds the embeddings of W
blocks at a time.

The last bits of an embedding depend on the other rows of its block. Equal items, which may be in different blocks, all
get the embedding of the first of them (`one_embedding_per_key`), so that their scores differ by the rounding of one
product at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.image_text.items import Items
from dyad.data.loading.loader import worker_count
from dyad.data.loading.workers import begin_item, prefetched
from dyad.data.shards.content_keys import content_key
from dyad.train.config import Precision, TrainConfig
from dyad.train.distributed.devices import AUTOCAST, evaluation_precision
from dyad.train.distributed.signals import Stopped
from dyad.train.distributed.world import World
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.models import TwoTowerModel
from dyad.train.towers.tower import Tower, tf32_products


@dataclass(frozen=True)
class Encoder:
    """Encodes items with the towers of a model: `encoder("x", items)` returns embeddings, float32 (N, D).

    Every process gets all N embeddings. towers: side, "x" or "y" → tower, on the device of `world`. block: items per
    tower call. workers: loader processes for each process, 0 for none. precision: autocast of the towers, fp32, bf16 or
    fp16. cosine: whether embeddings are L2-normalised. features: whether to return the output of a tower's trunk,
    before its projection; feature maps are averaged over height and width. width: each embedding is cut to its first
    `width` numbers, before it is normalised if `cosine` is true; None: it is not cut. With features, width is ignored.
    few_shapes: whether a short block is padded to a power of two of rows, at most `block`, since every new shape costs
    time for compiled towers and on GPUs. should_stop: called before each tower call, must return the same in all
    processes; if it returns True, encoding raises Stopped. timeout: seconds to wait for a block of a loader process; 0:
    no limit. weights: returns a context manager in which the towers hold the weights to evaluate; the encoder does not
    enter it, its caller must.
    """

    towers: dict[str, nn.Module]
    world: World
    block: int = 256
    workers: int = 0
    precision: str = "fp32"
    cosine: bool = True
    features: bool = False
    width: int | None = None
    few_shapes: bool = False
    should_stop: Callable[[], bool] = lambda: False
    timeout: float = 60.0
    weights: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of(
        cls, config: TrainConfig, model: TwoTowerModel, world: World, should_stop: Callable[[], bool] = lambda: False
    ) -> Encoder:
        """Return an Encoder with the towers of `model` and the options of `config`, except eval.width.

        So the Encoder returns whole embeddings. The towers of `model` are moved to the device of `world`. should_stop:
        as in Encoder.
        """
        towers = model.towers.to(world.device)
        return cls(
            {"x": towers.x_tower, "y": towers.y_tower},
            world,
            block=config.eval.block,
            workers=worker_count(config.data.workers, world.device),
            precision=str(evaluation_precision(config.precision, world.device)),
            cosine=config.objective.similarity is Similarity.cosine,
            few_shapes=config.compile or world.device.type == "cuda",
            should_stop=should_stop,
            timeout=config.data.timeout,
        )

    def __call__(self, side: Literal["x", "y"], items: Items) -> np.ndarray:
        """Encode N items with the tower of one side; return their embeddings, float32 (N, D), in order.

        All processes must call it together with the same items, at least one. side: the tower, "x" or "y". items: the
        inputs of this tower, read by index. D: embedding width. Equal inputs have equal embeddings. Raises DataError if
        the tower returns a value that is not finite, ConfigError for a `width` above that of the tower's embeddings,
        Stopped if should_stop returns True.
        """
        embeddings, keys = map(np.concatenate, zip(*self.rounds(side, items), strict=True))
        check_finite(embeddings, side)
        return one_embedding_per_key(embeddings, keys)

    @torch.no_grad()  # not inference_mode: features that a frozen trunk caches here are used in training too
    def rounds(self, side: Literal["x", "y"], items: Items) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Encode items with the tower of one side; yield their embeddings and content keys in order, round by round.

        side: the tower, "x" or "y". In each round each of W processes encodes one block of E items, and all processes
        get the embeddings of these W·E items, float32 (W·E, D) with D their width, and the keys, int64 (W·E,). Equal
        inputs have equal keys; their embeddings may differ in the last bits. Values that are not finite are yielded
        too. The last round may have fewer rows. Every process must iterate to the end. Raises ConfigError and Stopped
        as `__call__` does.
        """
        tower, world, left = self.towers[side], self.world, len(items)
        assert items, "nothing to encode"
        blocks = range(0, len(items), self.block)
        calls = -(-len(blocks) // world.size)  # the same on all ranks: a surplus call repeats the last block
        own = [blocks[min(n * world.size + world.rank, len(blocks) - 1)] for n in range(calls)]
        loaded = prefetched(
            partial(_block, items, self.block),
            own,
            where=lambda item: f"items {item} … {min(item + self.block, len(items)) - 1} of an evaluation",
            workers=min(self.workers, calls - 1),  # for one block, a process costs more than it saves
            timeout=self.timeout,
            rank=world.rank,
            pin=world.device.type == "cuda",
        )
        with _evaluating(tower):
            for inputs, keys in loaded:
                if self.should_stop():
                    raise Stopped
                embedding, rows = self._embed(tower, inputs), min(self.block, left)  # rows: of the round's first block
                embeddings = _gathered(embedding, rows, world)[:left]  # without surplus blocks and padding
                keys = _gathered(keys[:, None].to(world.device), rows, world)[:left, 0]
                left -= len(embeddings)
                yield embeddings, keys

    def _embed(self, tower: nn.Module, inputs: Tensor) -> Tensor:
        """Return the embeddings of the b items of a block, float32 (b, D), on the device of `world`.

        inputs: the tower inputs of these items, (b, …). D is `width`, if it is set and `features` is not. Raises
        ConfigError for a `width` above that of the tower's embeddings.
        """
        device, count = self.world.device, len(inputs)
        if self.few_shapes:
            missing = min(1 << (count - 1).bit_length(), self.block) - count
            inputs = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])
        dtype = AUTOCAST[Precision(self.precision)]
        with tf32_products(device), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            forward = cast(Tower, tower).features if self.features else tower
            embedding = forward(inputs.to(device, non_blocking=True))[:count]
        if embedding.dim() == 4:  # the trunk's feature maps, which a projection would pool
            embedding = embedding.mean(dim=(2, 3), dtype=torch.float32)
        if self.width and not self.features:
            if embedding.shape[1] < self.width:
                raise ConfigError(f"eval.width={self.width}: embeddings have {embedding.shape[1]} numbers. Lower it")
            embedding = embedding[:, : self.width]
        return F.normalize(embedding.float(), dim=-1) if self.cosine else embedding.float()


@dataclass(frozen=True)
class Report:
    """The result of one evaluator.

    task: a key of KINDS in eval/results/kinds.py, which says how to print the result; a result of any other task, as of
    a plugin, is not printed. metrics: name → value. chance: name → chance level (the metric of a random ranking); a
    classification also has "majority_class_share", which is no metric. details: further entries of the result's JSON
    file. files: ending of the name of a further file or folder beside this JSON file → function that writes it at a
    given path. details and files may be filled in process 0 only.
    """

    task: str
    metrics: dict[str, float]
    chance: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator(ABC):
    """Evaluates an encoder on one data set. All processes call `report` together and get the same metrics.

    name: "val" or "eval/<data set>", the prefix of its metrics. source: the value of data.val or the entry of
    eval.suite, as the user wrote it. untrained: function that makes the encoder with its weights before training; None
    without the baseline "untrained".
    """

    name: str
    source: str
    untrained: Callable[[], Encoder] | None = field(default=None, kw_only=True)

    @abstractmethod
    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        """Evaluate a model on the data set of this evaluator; return a Report with the metrics.

        All processes must call it together. encode: encodes items with the towers of the model. examples: how many
        example cases of each kind (best, worst, random) the report has at most. None, as for most evaluations during
        training: the report needs only metrics and chance levels. With a number, also 0, it has also 95 % intervals and
        further details, such as score histograms and how often classes were confused, if its evaluator has them.
        """

    def higher_is_better(self) -> dict[str, bool]:
        """Return metric → whether a higher value is better, for the metrics that checkpoint.best may name.

        Names are those in the report. It is called before anything is evaluated.
        """
        return {}


def _block(items: Items, size: int, start: int) -> tuple[Tensor, Tensor]:
    """Load a block of b items; return (the tower inputs, (b, …), the content keys of the items, int64 (b,)).

    The block has the items start … start + size − 1, fewer at the end of `items`. Equal inputs have equal keys; the
    padding of texts does not count.
    """
    begin_item(start)
    inputs = items.block(start, min(start + size, len(items)))
    padding = b"\xff"  # the bytes of PADDING; no token ends with it, and images of one size stay different without it
    return inputs, torch.tensor([content_key(row.tobytes().rstrip(padding)) for row in inputs.numpy()])


def one_embedding_per_key(embeddings: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return embeddings (N, D) in which each of N items has the embedding of the first item with the same key.

    embeddings: (N, D); returned as they are if no two keys are equal. keys: the content key of each item, (N,).
    """
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    return embeddings if len(first) == len(keys) else embeddings[first[number]]


@contextmanager
def _evaluating(tower: nn.Module) -> Iterator[None]:
    """Context manager: put the tower into eval mode, and at the end restore the mode of each of its modules.

    Modules are restored one by one because some may have been in eval mode before, for example those of a frozen trunk.
    """
    modes = {module: module.training for module in tower.modules()}
    tower.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _gathered(own_bD: Tensor, rows: int, world: World) -> np.ndarray:
    """Gather one block from each of W processes; return all rows, in rank order, as one NumPy array in every process.

    own_bD: the rows of this process, (b, D); rank order is also the order of the blocks. rows: the largest b of the
    round, to which each part is padded if W > 1. Returns (W · rows, D); (b, D) if W = 1. All processes must call it
    together.
    """
    if world.size > 1:
        whole = own_bD.new_empty(world.size * rows, own_bD.shape[1])
        padded = F.pad(own_bD, (0, 0, 0, rows - len(own_bD))).contiguous()
        dist.all_gather_into_tensor(whole, padded, group=world.group)
        own_bD = whole
    return own_bD.cpu().numpy()


def check_finite(embeddings: np.ndarray, side: str, first_id: int = 0) -> None:
    """Raise DataError if one of the embeddings has a value that is not finite.

    side: the tower, "x" or "y"; first_id: the index of the item in the first row. Both are for the message.
    """
    bad = ~np.isfinite(embeddings).all(axis=1)
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {len(embeddings)} embeddings of the {side} tower are not finite, the first is item "
            f"{first_id + int(bad.argmax())}: the weights have diverged, or fp16 overflowed (try precision=bf16)"
        )
