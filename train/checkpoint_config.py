"""The keys checkpoint.*: when checkpoints are written, and which are kept. Does not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from dyad.data.config import described


@dataclass
class CheckpointConfig:
    """Options of checkpoints. The constructor checks nothing: `keep_rules`, `best_rules` and `check_limits` do."""

    every: int = described(500, "steps between checkpoints; one is always written at the end", least=1)
    keep: int = described(3, "how many of the newest checkpoints stay", least=1)
    keep_every: int | None = described(
        None, "checkpoints whose step is a multiple of this are kept too, e.g. 10000; null: no others", least=1
    )
    best: str | None = described(
        None,
        "metric of the evaluations whose best checkpoint stays beside the newest, e.g. val/image_to_text_R@1, as in "
        "metrics.jsonl; RUN@best names it in init_from, eval, export",
    )
    patience: int | None = described(
        None, "evaluations in a row without a better checkpoint.best after which the run ends; null: never", least=1
    )


def keep_rules(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield an error message if checkpoint.keep_every is set and is no multiple of checkpoint.every."""
    every, kept = checkpoint.every, checkpoint.keep_every
    if kept is not None and kept % every:
        yield (
            f"checkpoint.keep_every={kept}: checkpoints are written every {every} steps (checkpoint.every). Set a "
            f"multiple of {every}"
        )


def best_rules(checkpoint: CheckpointConfig, eval_every: int, evaluates: bool) -> Iterator[str]:
    """Yield an error message if checkpoint.best or checkpoint.patience cannot work in the run.

    checkpoint.best needs several evaluations among which to choose; checkpoint.patience needs checkpoint.best. Whether
    the evaluations have the metric is not checked. eval_every: steps between evaluations; 0: at the end only.
    evaluates: whether the run has data to evaluate on.
    """
    start = f"checkpoint.best={checkpoint.best}"
    if checkpoint.best is None:
        if checkpoint.patience is not None:
            yield (
                f"checkpoint.patience={checkpoint.patience}: counts evaluations without a better checkpoint.best. Set "
                "checkpoint.best=METRIC and eval.every, e.g. checkpoint.best=val/image_to_text_R@1 eval.every=100"
            )
        return
    if not evaluates:
        yield f"{start}: this run evaluates nothing. Set data.val or eval.suite"
    elif eval_every == 0:
        yield (
            f"{start}, eval.every={eval_every}: evaluated at the end only, the newest checkpoint is the best. Set "
            "eval.every, e.g. eval.every=100"
        )
