"""The keys checkpoint.*: when checkpoints are written, and which stay. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from dyad.data.config import described


@dataclass
class CheckpointConfig:
    every: int = described(500, "steps between checkpoints; one is always written at the end", least=1)
    keep: int = described(3, "how many of the newest checkpoints stay", least=1)
    best: str | None = described(
        None,
        "metric of the evaluations whose best checkpoint stays beside the newest, e.g. val/image_to_text_R@1, as in "
        "metrics.jsonl; RUN@best names it in init_from, eval, export",
    )


def best_rules(checkpoint: CheckpointConfig, eval_every: int, evaluates: bool) -> Mapping[str, bool]:
    """Return the rules of checkpoint.best as error message → whether it is broken. evaluates: whether the run has
    something to evaluate on."""
    start, is_set = f"checkpoint.best={checkpoint.best}", checkpoint.best is not None
    return {
        f"{start}: this run evaluates nothing. Set data.val or eval.suite": is_set and not evaluates,
        f"{start}, eval.every={eval_every}: evaluated at the end only, the newest checkpoint is the best. Set "
        "eval.every, e.g. eval.every=100": is_set and evaluates and eval_every == 0,
    }
