"""What the formats of an export share: what is exported, and how a library's embeddings are compared with our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from train.config import TrainConfig
from train.towers import Model

TOLERANCE = 1e-5  # of unit embeddings: another order of summation, not another model
PROBES = ["a red circle", "Grüße aus Köln", "wheel of dharma, religion, Buddhist"]


@dataclass(frozen=True)
class Source:
    """A trained model. name: of its run; logit_scale: log 1/τ as it was learnt, None to keep the library's own."""

    name: str
    config: TrainConfig
    model: Model
    logit_scale: float | None = None


@dataclass(frozen=True)
class Library:
    """One format. name: of the library that loads it; front: the card's metadata (YAML); kind: what the card calls it.

    write: fills a folder, ConfigError when it has no place for such a model; difference: the largest one between unit
    embeddings of the model and of what the library loads from the folder; snippet: how to load it.
    """

    name: str
    front: str
    kind: str
    write: Callable[[Path, Source], None]
    difference: Callable[[Path, Source], float]
    snippet: Callable[[Path, Source], str]


def largest_difference(library: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Of unit embeddings, ours and theirs. An AssertionError when it is more than rounding."""
    difference = max(float((F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).abs().max()) for a, b in pairs)
    assert difference <= TOLERANCE, f"{library} gives other embeddings than the run, by up to {difference}"
    return difference
