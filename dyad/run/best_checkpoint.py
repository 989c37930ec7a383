"""Find the best checkpoint of a run by a metric of its evaluations (checkpoint.best).

Each evaluation is compared with the best so far; of equal ones the earlier stays. If it is better, its checkpoint is
written at once, records that it is the best (train/run_folder/best_record.py), and is kept until another one is better.
So a run that is killed continues from its newest checkpoint with the best that was known there, and ends with the same
best checkpoint as an uninterrupted run.

After checkpoint.patience evaluations in a row that are not better, the run ends early, as a finished run. A resumed run
counts those in metrics.jsonl, so it ends at the same step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.files import read_lines
from dyad.eval.encode.encoder import Evaluator
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.world import World
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.folder import BEST_SUFFIX, folder_of


@dataclass
class BestCheckpoint:
    """The best checkpoint of a run so far. Rank 0 alone keeps it up to date, and tells the other ranks whether a new
    one is better.

    metric: its name in metrics.jsonl; None: evaluations are not compared, and the best of an earlier start is kept.
    higher: whether a higher value is better. folder: the run folder. wait: waits for a checkpoint that is being
    written. log: called with a line for each new best. found: the best and the one before it, which is the best again
    if the checkpoint of the best cannot be written. patience: checkpoint.patience. later: the steps of the evaluations
    since the best, or since the start if there is none, the same on all ranks.
    """

    metric: str | None
    higher: bool
    folder: Path
    world: World
    wait: Callable[[], None]
    log: Callable[[str], None]
    found: list[Best]
    patience: int | None = None
    later: Sequence[int] = ()

    def __call__(self, step: int, results: Mapping[str, float]) -> bool:
        """Compare the evaluation after `step` steps with the best so far; return whether it is better.

        If it is, it is put into `found` on rank 0, and logged. A value that is not finite is never better. results:
        metric → value. Every rank must call it. Raises ConfigError, on all ranks, if `results` lack the metric.
        """
        if (metric := self.metric) is None:
            return False
        is_better = from_rank_0(self.world, lambda: self._is_better(metric, step, results))
        self.later = () if is_better else (*self.later, step)
        return is_better

    def may_end(self, step: int) -> bool:
        """Return whether the run ends with the evaluation after `step` steps if it is not better. The same on all
        ranks."""
        return self.patience is not None and len(self.later) + 1 >= self.patience

    def ends(self, step: int) -> bool:
        """Return whether the run ends after `step` steps: their evaluation is the last that checkpoint.patience allows.
        The same on all ranks."""
        return self.patience is not None and len(self.later) >= self.patience and self.later[-1] == step

    def known(self, step: int) -> Best | None:
        """Return the best evaluation that the checkpoint of `step` records: one at `step` itself, or the newest best
        whose checkpoint is on the disk; None if there is none. On ranks other than 0 it may be an older best."""
        return next((b for b in self.found if b["step"] == step or folder_of(self.folder, b["step"]).is_dir()), None)

    def describe(self, step: int) -> list[str]:
        """Return a list with one line that names the best checkpoint known after `step` steps; [] if there is none."""
        best = self.known(step)
        named = f"{self.folder}{BEST_SUFFIX}"
        return [f"best: step {best['step']}, {best['metric']} {best['value']:.4f}: {named}"] if best else []

    def describe_end(self, step: int) -> str:
        """Return a line for the log that says why the run ended early, after `step` steps."""
        best, count = self.known(step), f"{len(self.later)} evaluation{'s' * (len(self.later) != 1)}"
        was = f"best at step {best['step']} ({best['value']:.4f}), {count} ago" if best else f"not finite in {count}"
        return f"stopped early at step {step}: {self.metric} was {was} (checkpoint.patience={self.patience})"

    def _is_better(self, metric: str, step: int, results: Mapping[str, float]) -> bool:
        if metric not in results:
            raise ConfigError(f"checkpoint.best={metric}: not in this evaluation. Choices: {', '.join(results)}")
        self.wait()
        value, best = float(results[metric]), self.known(step)
        # values of another metric are not compared
        before = best["value"] if best and best["metric"] == metric else None
        if not isfinite(value) or (before is not None and not (value > before if self.higher else value < before)):
            return False
        self.found = [Best(metric=metric, value=value, step=step), *([best] if best else [])]
        self.log(f"the best so far: step {step}, {metric} {value:.4f}")
        return True


def evaluations_since(folder: Path, metric: str, found: Sequence[Best]) -> tuple[int, ...]:
    """Return the steps of the evaluations with `metric` in metrics.jsonl that are later than the best, found[0].

    Without a best, all of them are returned; if the best is one of another metric, none. folder: the run folder.
    """
    path = folder / "metrics.jsonl"
    if not path.exists() or (found and found[0]["metric"] != metric):
        return ()
    after = found[0]["step"] if found else -1
    records = (record for _, record in read_lines(path))
    return tuple(dict.fromkeys(r["step"] for r in records if metric in r and r["step"] > after))


def choices(evaluators: Iterable[Evaluator]) -> dict[str, bool]:
    """Return metric → whether a higher value is better, for the metrics that checkpoint.best can name."""
    return {f"{e.name}/{metric}": higher for e in evaluators for metric, higher in e.higher_is_better().items()}


def refuse_unknown_metric(metric: str | None, evaluators: Iterable[Evaluator]) -> None:
    """Raise ConfigError if `metric`, the value of checkpoint.best, is not one of the metrics that `choices` returns."""
    known = choices(evaluators)
    if metric is not None and metric not in known:
        listed = ", ".join(known) or "none, as no evaluator says by higher_is_better what is better"
        hint = nearest(metric, known)
        raise ConfigError(f"checkpoint.best={metric}: no evaluation of this run ranks by it.{hint} Choices: {listed}")
