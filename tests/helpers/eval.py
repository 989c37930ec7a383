"""What the evaluation tests share: a world of one, small towers, small item sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.search.index import Hits, Index
from dyad.train.distributed.world import World
from dyad.train.eval_config import Truth

ROOT = Path(__file__).resolve().parents[2]
Keys = tuple[np.ndarray, np.ndarray, np.ndarray]
LOCAL = World(rank=0, size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Rows:
    """Items that are rows of a tensor; remembers nothing, so it can be pickled and shared."""

    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, start: int, stop: int) -> Tensor:
        return self.rows[start:stop]


@dataclass(frozen=True)
class Shown(Rows):
    """Images as `data.image_text.Images` has them."""

    def decoded(self, i: int) -> Tensor:
        return self.rows[i]

    def key(self, i: int) -> str:
        return f"image {i}"


class Words(nn.Module):
    """Tokens (b, L) → (b, D): the mean of word vectors."""

    def __init__(self, words: int = 64, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)

    def forward(self, tokens_bL: Tensor) -> Tensor:
        return self.embed(tokens_bL).mean(dim=1)


class Pixels(nn.Module):
    """Images (b, 3, H, W) uint8 → (b, D), with dropout, so that train and eval mode differ."""

    def __init__(self, side: int = 4, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * side * side, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.linear(self.dropout(self.features(pixels)))

    def features(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1).float() / 255


def tokenize(texts: Sequence[str]) -> Tensor:
    """(n, 6) int64: letters, so that equal texts are equal rows."""
    return torch.tensor([[ord(c) % 64 for c in text.ljust(6)[:6]] for text in texts], dtype=torch.int64)


def towers(seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {"x": Pixels(), "y": Words()}


def encoder(seed: int = 0, **options: object) -> Encoder:
    """Return an Encoder of the small `towers` in one process. options: of Encoder."""
    return Encoder(towers(seed), **{"world": LOCAL, "block": 16, **options})  # type: ignore[arg-type]


def random_images(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def unit_rows(count: int, width: int, seed: int) -> np.ndarray:
    """Return random rows of length 1, float32 (count, width)."""
    rows = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def clustered(count: int, width: int, seed: int, clusters: int = 40) -> np.ndarray:
    """Unit rows around common centres, as embeddings of texts lie."""
    centres = unit_rows(clusters, width, 12345)
    rng = np.random.default_rng(seed)
    rows = centres[rng.integers(0, clusters, count)] + 0.1 * rng.standard_normal((count, width), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def search(queries: np.ndarray, corpus: np.ndarray, k: int, spec: str = "Flat", **options: Any) -> Hits:
    return Index(corpus, spec, **options).search(queries, k)


def recall_against_exact(hits: Hits, queries: np.ndarray, corpus: np.ndarray, **options: Any) -> float:
    world = options.pop("world", LOCAL)
    return Index(corpus, world=world).recall_against_exact(hits, queries, **options)


def check_ranking(evaluator: Evaluator, report: Report) -> None:
    """Check that checkpoint.best may name the metrics of the report, but for counts and what an index finds."""
    found = {m for m in report.metrics if not m.startswith("num_") and "recall_against_exact" not in m}
    assert evaluator.higher_is_better() == {metric: not metric.endswith("_rank") for metric in found}


def some_captions() -> Keys:
    """owner, image_keys, text_keys of 40 images with 1 to 4 captions, some images and captions alike."""
    rng = np.random.default_rng(0)
    owner = np.sort(np.concatenate([np.arange(40), rng.integers(0, 40, 50)]))
    return owner, rng.integers(0, 30, 40), rng.integers(-5, 60, 90)


def right_matrix(owner: np.ndarray, image_keys: np.ndarray, text_keys: np.ndarray, truth: Truth) -> np.ndarray:
    """Return which of M texts are right for which of N images, (N, M) bool, by the definition, pair by pair."""
    right = np.zeros((len(image_keys), len(owner)), dtype=bool)
    for i in range(len(image_keys)):
        for j in range(len(owner)):
            right[i, j] = owner[j] == i
            if truth is Truth.keys:
                right[i, j] |= image_keys[owner[j]] == image_keys[i]
                right[i, j] |= any(text_keys[j] == text_keys[c] for c in range(len(owner)) if owner[c] == i)
    return right
