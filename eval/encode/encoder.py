"""Encoding of items with a tower, with a result that does not depend on the number of ranks.

Items are cut into blocks of E: block k has the items [kE, (k+1)E), and the last block is padded by repetition. Rank r
encodes the blocks k ≡ r mod W. All ranks make the same number of tower calls (a surplus call repeats the last block),
and after each round all ranks have the embeddings of that round. So a tower gets the same blocks for every W, every
item counts once, and the device holds W blocks at a time.

N items, E block size, W ranks, D embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.base.errors import DataError
from dyad.data.loading.workers import begin_item, prefetched
from dyad.train.config import Precision
from dyad.train.distributed.signals import Stopped
from dyad.train.losses.options.common import Similarity
from dyad.train.step.step import AUTOCAST

if TYPE_CHECKING:
    from pathlib import Path

    from dyad.data.image_text.dataset import Items
    from dyad.train.config import TrainConfig
    from dyad.train.distributed.world import World
    from dyad.train.towers.build import TwoTowerModel


@dataclass(frozen=True)
class Encoder:
    """`encoder("x", items)` → float32 (N, D) on every rank, L2-normalised when the score is the cosine.

    precision: fp32, bf16 or fp16, of the towers only. workers: loader processes of this rank, 0 for none. timeout:
    seconds to wait for a block of a worker, 0: without limit. should_stop: called before each round, with the same
    result on all ranks; if it is True, the encoding raises Stopped.
    """

    towers: dict[str, nn.Module]
    world: World
    block: int = 256
    workers: int = 0
    precision: str = "fp32"
    cosine: bool = True
    should_stop: Callable[[], bool] = lambda: False
    timeout: float = 60.0

    @classmethod
    def of(
        cls, config: TrainConfig, model: TwoTowerModel, world: World, should_stop: Callable[[], bool] = lambda: False
    ) -> Encoder:
        """The encoder of a run's towers, as its configuration says. Moves them to this rank's device."""
        towers = model.towers.to(world.device)
        return cls(
            {"x": towers.x_tower, "y": towers.y_tower},
            world,
            block=config.eval.block,
            workers=config.data.workers,
            precision=str(config.precision),
            cosine=config.objective.similarity is Similarity.cosine,
            should_stop=should_stop,
            timeout=config.data.timeout,
        )

    def __call__(self, side: Literal["x", "y"], items: Items) -> np.ndarray:
        """Encode all items. A collective. Raises DataError if the tower returns a value that is not finite."""
        embeddings = np.concatenate(list(self.rounds(side, items)))
        check_finite(embeddings, side)
        return embeddings

    @torch.no_grad()  # not inference_mode: features that a frozen trunk caches here are used in training too
    def rounds(self, side: Literal["x", "y"], items: Items) -> Iterator[np.ndarray]:
        """The embeddings in order on every rank, float32 (W·E, D) a round. A collective: iterate to the end."""
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
            for inputs in loaded:
                if self.should_stop():
                    raise Stopped
                embeddings = _gathered(self._embed(tower, inputs), world)[:left]  # without surplus blocks and padding
                left -= len(embeddings)
                yield embeddings

    def _embed(self, tower: nn.Module, inputs: Tensor) -> Tensor:
        device = self.world.device
        dtype = AUTOCAST[Precision(self.precision)]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            embedding = tower(inputs.to(device, non_blocking=True))
        return F.normalize(embedding.float(), dim=-1) if self.cosine else embedding.float()


@dataclass(frozen=True)
class Report:
    """The result of one evaluator. task: a key of KINDS in eval/results/kinds.py. chance: metrics of a random order.

    details: further parts of the JSON, on rank 0. files: end of the name → writer of a file or folder beside the JSON,
    on rank 0.
    """

    task: str
    metrics: dict[str, float]
    chance: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator(ABC):
    """The evaluation on one data set. All ranks call it together and get the same metrics.

    name: "val" or "eval/<data set>", the prefix of its metrics. source: the entry as the user wrote it.
    """

    name: str
    source: str

    @abstractmethod
    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        """The metrics. With `examples`, also intervals, score histograms, confusions, and so many cases of each kind.

        examples=0 gives no cases; None gives the metrics alone. A collective.
        """


def _block(items: Items, size: int, start: int) -> Tensor:
    """Items [start, start + size) as tower inputs. The last item is repeated if there are fewer."""
    begin_item(start)
    rows = items.block(start, min(start + size, len(items)))
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


@contextmanager
def _evaluating(tower: nn.Module) -> Iterator[None]:
    """Set eval mode, and restore the mode of each module: a frozen trunk may have been in eval mode before."""
    modes = {module: module.training for module in tower.modules()}
    tower.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _gathered(embedding_ED: Tensor, world: World) -> np.ndarray:
    """(E, D) of every rank → (W·E, D) in rank order, which is block order."""
    if world.size > 1:
        whole = embedding_ED.new_empty(world.size * embedding_ED.shape[0], embedding_ED.shape[1])
        dist.all_gather_into_tensor(whole, embedding_ED.contiguous(), group=world.group)
        embedding_ED = whole
    return embedding_ED.cpu().numpy()


def check_finite(embeddings: np.ndarray, side: str, first_id: int = 0) -> None:
    """Raise DataError for values that are not finite. first_id: the number of the first row's item."""
    bad = ~np.isfinite(embeddings).all(axis=1)
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {len(embeddings)} embeddings of the {side} tower are not finite, the first is item "
            f"{first_id + int(bad.argmax())}: the weights have diverged, or fp16 overflowed (try precision=bf16)"
        )
