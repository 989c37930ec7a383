"""Encode items with a tower so that the result does not depend on the number of ranks.

Items are cut into fixed blocks of E; block k = items [kE, (k+1)E), the last one padded by repetition. Rank r
encodes the blocks k ≡ r mod W, every rank makes the same number of tower calls (a surplus call repeats the last
block), and after each round all ranks hold the embeddings of that round. A tower therefore sees the same blocks
whatever W is, every item counts once, and the device holds W blocks at a time.

N items, E block size, W ranks, D embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data.errors import DataError
from data.workers import begin_item, prefetched
from train.signals import Stopped

if TYPE_CHECKING:
    from pathlib import Path

    from data.image_text import Items
    from train.distributed.world import World

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Encoder:
    """`encoder("x", items)` → float32 (N, D) on every rank, L2-normalised when the score is the cosine.

    precision: fp32, bf16 or fp16, of the towers alone. workers: loader processes of this rank, 0 for none;
    timeout: seconds to wait for a block of theirs, 0 for ever.
    should_stop: asked before each round, the same answer on all ranks; where it is True, the encoding raises Stopped.
    """

    towers: dict[str, nn.Module]
    world: World
    block: int = 256
    workers: int = 0
    precision: str = "fp32"
    cosine: bool = True
    should_stop: Callable[[], bool] = lambda: False
    timeout: float = 60.0

    def __call__(self, side: Literal["x", "y"], items: Items) -> np.ndarray:
        """Raises DataError when the tower returns a value that is not finite."""
        embeddings = np.concatenate(list(self.rounds(side, items)))
        check_finite(embeddings, side)
        return embeddings

    @torch.no_grad()  # not inference_mode: what a frozen trunk remembers here must serve in training too
    def rounds(self, side: Literal["x", "y"], items: Items) -> Iterator[np.ndarray]:
        """The embeddings in order, float32 (W·E, D) at a time and the rest at last, on every rank. Take all of them."""
        tower, world = self.towers[side], self.world
        blocks = _Blocks(items, self.block, world.rank, world.size)
        left = len(items)
        with _evaluating(tower):
            for inputs in self._load(blocks):
                if self.should_stop():
                    raise Stopped
                embeddings = _gathered(self._embed(tower, inputs), world)[:left]
                left -= len(embeddings)
                yield embeddings

    def _embed(self, tower: nn.Module, inputs: Tensor) -> Tensor:
        device = self.world.device
        dtype = AUTOCAST[self.precision]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            embedding = tower(inputs.to(device, non_blocking=True))
        return F.normalize(embedding.float(), dim=-1) if self.cosine else embedding.float()

    def _load(self, blocks: _Blocks) -> Iterator[Tensor]:
        workers = min(self.workers, len(blocks) - 1)  # one block: a process would only cost its start
        rank, pin = self.world.rank, self.world.device.type == "cuda"
        indices = range(len(blocks))
        return prefetched(
            blocks.__getitem__, indices, where=blocks.where, workers=workers, timeout=self.timeout, rank=rank, pin=pin
        )


@dataclass(frozen=True)
class Report:
    """What one evaluator found. chance: what a random order would score; details: more for the JSON, on rank 0.

    files: beside the JSON, on rank 0: the end of the name → what writes it, a file or a folder.
    """

    task: str
    metrics: dict[str, float]
    chance: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator(ABC):
    """One data set and how it is scored. All ranks call it together and hold the same numbers afterwards.

    name: "val" or "eval/<data set>", the prefix of its scalars; source: what the user wrote.
    """

    name: str
    source: str

    @abstractmethod
    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        """Metrics; with `examples`, also what people look at: intervals, how scores are spread, what is confused, and
        so many cases of each kind (0: none).
        """

    def run(self, encode: Encoder) -> dict[str, float]:
        """The scalars alone, as the training loop wants them; names without the evaluator's own."""
        return self.report(encode).metrics


def build_encode(
    x_tower: nn.Module,
    y_tower: nn.Module,
    world: World,
    *,
    block: int = 256,
    workers: int = 0,
    precision: str = "fp32",
    cosine: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
    timeout: float = 60.0,
) -> Encoder:
    """The encoder of two towers, which may be wrapped for data parallelism or compiled."""
    return Encoder({"x": x_tower, "y": y_tower}, world, block, workers, precision, cosine, should_stop, timeout)


class _Blocks:
    """The blocks of one rank. A surplus index repeats the last block; its rows are cut off after the gathering."""

    def __init__(self, items: Items, block: int, rank: int, size: int) -> None:
        assert len(items) > 0, "nothing to encode"
        self.items, self.block, self.rank, self.size = items, block, rank, size
        self.total = -(-len(items) // block)

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def where(self, item: int) -> str:
        return f"items {item} … {min(item + self.block, len(self.items)) - 1} of an evaluation"

    def __getitem__(self, index: int, /) -> Tensor:
        k = min(index * self.size + self.rank, self.total - 1)
        start, stop = k * self.block, min((k + 1) * self.block, len(self.items))
        begin_item(start)
        rows = self.items.block(start, stop)
        missing = self.block - (stop - start)
        return rows if missing == 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


@contextmanager
def _evaluating(tower: nn.Module) -> Iterator[None]:
    """eval(), and back to the mode of each part: a frozen trunk may have been in eval() all along."""
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


def check_finite(embeddings: np.ndarray, side: str, first: int = 0) -> None:
    """Raise DataError for values that are not finite. first: which item the first row is."""
    bad = ~np.isfinite(embeddings).all(axis=1)
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {len(embeddings)} embeddings of the {side} tower are not finite, the first is item "
            f"{first + int(bad.argmax())}: the weights have diverged, or fp16 overflowed (try precision=bf16)"
        )
