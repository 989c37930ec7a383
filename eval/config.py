"""What can be said about evaluation. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from data.config import described
from data.errors import ConfigError


class Truth(Enum):
    keys = "keys"
    pairs = "pairs"


@dataclass
class EvalConfig:
    """Evaluation while training and by `python -m eval`."""

    every: int = described(0, "steps between evaluations; 0: at the end only")
    suite: list[str] = described(
        [], "what to evaluate besides data.val: retrieval:SHARDS, zero_shot:TASK.json, wds:FOLDER"
    )
    truth: Truth = described(Truth.keys, "right answers: equal content keys, or only the own pair")
    block: int = described(256, "items encoded at a time; results do not depend on the number of ranks")
    recall_k: list[int] = described([1, 5, 10], "the K of recall@K")

    def __post_init__(self) -> None:
        check(self.block, self.recall_k, "eval.")


@dataclass
class EvalCommand:
    """`python -m eval`: which checkpoint, on what."""

    checkpoint: str = described(MISSING, "a run folder (its newest checkpoint) or one checkpoint folder")
    suite: list[str] | None = described(None, "what to evaluate; without suite and val: the run's own")
    val: str | None = described(None, "shards for retrieval, as data.val of a run")
    truth: Truth | None = described(None, "keys: equal content is right too; pairs: only the own; null: the run's")
    block: int | None = described(None, "items encoded at a time; null: the run's")
    recall_k: list[int] | None = described(None, "the K of recall@K; null: the run's")
    workers: int | None = described(None, "loader processes per rank; null: the run's")
    examples: int = described(5, "queries per direction whose 5 best answers go into the JSON (needs FAISS); 0: none")
    out: str | None = described(None, "folder for the JSON results; null: eval/ of the run")

    def __post_init__(self) -> None:
        check(self.block, self.recall_k, "")


def check(block: int | None, recall_k: list[int] | None, section: str) -> None:
    """Raise ConfigError for numbers that cannot work; null is one that comes from elsewhere."""
    if block is not None and block < 1:
        raise ConfigError(f"{section}block={block}: must be 1 or more")
    if recall_k is not None and (not recall_k or min(recall_k) < 1):
        raise ConfigError(f"{section}recall_k={recall_k}: needs at least one K, each 1 or more, e.g. [1,5,10]")
