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
    """The best checkpoint of a run so far, and when the run ends early because no better one came.

    A call after each evaluation compares its results. Rank 0 compares, and tells the other ranks whether they are
    better.

    metric: the name in metrics.jsonl of the metric to compare; None: evaluations are not compared, and the best of an
    earlier start is kept. higher: whether a higher value is better. folder: the run folder. wait: returns when no
    checkpoint is being written any more. log: called with a line for each new best. found: the best, then the best
    before it; kept up to date on rank 0 only. The second takes the place of the first if the checkpoint of the first
    cannot be written. patience: how many evaluations in a row may be not better before the run ends
    (checkpoint.patience); None: any number. later: the steps of the evaluations that count towards `patience`, those
    since the last that was better; the same on all ranks.
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

        Every rank must call it. results: metric → value. If the evaluation is better, it is put into `found` on rank 0,
        and logged. A value that is not finite is never better. If the attribute `metric` is None, nothing is compared,
        and the result is False. Raises ConfigError, on all ranks, if `results` lack the metric.
        """
        if (metric := self.metric) is None:
            return False
        is_better = from_rank_0(self.world, lambda: self._is_better(metric, step, results))
        self.later = () if is_better else (*self.later, step)
        return is_better

    def may_end(self, step: int) -> bool:
        """Return whether the run would end with the evaluation after `step` steps if that is not better.

        Call it before this evaluation is compared. The result is the same on all ranks; False without patience.
        """
        return self.patience is not None and len(self.later) + 1 >= self.patience

    def patience_is_used_up(self, step: int) -> bool:
        """Return whether the evaluation after `step` steps was the last that checkpoint.patience allows: the run ends.

        Call it after the call that compared this evaluation; for a step without an evaluation the result is False. The
        result is the same on all ranks; False without patience.
        """
        return self.patience is not None and len(self.later) >= self.patience and self.later[-1] == step

    def known(self, step: int) -> Best | None:
        """Return the best evaluation that the checkpoint of `step` is to record; None if there is none.

        It is the newest best whose checkpoint is on the disk, or the one at `step` itself, whose checkpoint is written
        next. On ranks other than 0 it may be out of date.
        """
        return next((b for b in self.found if b["step"] == step or folder_of(self.folder, b["step"]).is_dir()), None)

    def describe(self, step: int) -> list[str]:
        """Return a list with one line that names the best checkpoint known after `step` steps; [] if there is none."""
        best = self.known(step)
        named = f"{self.folder}{BEST_SUFFIX}"
        return [f"best: step {best['step']}, {best['metric']} {best['value']:.4f}: {named}"] if best else []

    def describe_end(self, step: int) -> str:
        """Return a line for the log that says why checkpoint.patience ended the run after `step` steps."""
        best, count = self.known(step), f"{len(self.later)} evaluation{'s' * (len(self.later) != 1)}"
        was = f"not finite in {count}"
        if best and best["metric"] == self.metric:  # else it is the best by an earlier checkpoint.best
            was = f"best at step {best['step']} ({best['value']:.4f}), {count} ago"
        return f"stopped early at step {step}: {self.metric} was {was} (checkpoint.patience={self.patience})"

    def _is_better(self, metric: str, step: int, results: Mapping[str, float]) -> bool:
        """Compare an evaluation with the best, as `__call__` says, and update `found`. Rank 0 alone calls it."""
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

    folder: the run folder. Without a best, all of them are returned; if the best is one of another metric, none. Raises
    OSError if metrics.jsonl cannot be read; if the file is missing, the result is ().
    """
    path = folder / "metrics.jsonl"
    if not path.exists() or (found and found[0]["metric"] != metric):
        return ()
    after = found[0]["step"] if found else -1
    records = (record for _, record in read_lines(path))
    return tuple(dict.fromkeys(r["step"] for r in records if metric in r and r["step"] > after))


def rankable_metrics(evaluators: Iterable[Evaluator]) -> dict[str, bool]:
    """Return metric → whether a higher value is better, for the metrics that checkpoint.best can name.

    A metric has its name in metrics.jsonl, such as val/image_to_text_R@1. Metrics of which their evaluator does not say
    what is better (`Evaluator.higher_is_better`) are left out.
    """
    return {f"{e.name}/{metric}": higher for e in evaluators for metric, higher in e.higher_is_better().items()}


def refuse_unknown_metric(metric: str | None, evaluators: Iterable[Evaluator]) -> None:
    """Raise ConfigError if `metric` is not one of the metrics that `rankable_metrics` returns.

    metric: the value of checkpoint.best; for None nothing is checked.
    """
    known = rankable_metrics(evaluators)
    if metric is not None and metric not in known:
        listed = ", ".join(known) or "none, as no evaluator says by higher_is_better what is better"
        hint = nearest(metric, known)
        raise ConfigError(f"checkpoint.best={metric}: no evaluation of this run ranks by it.{hint} Choices: {listed}")
