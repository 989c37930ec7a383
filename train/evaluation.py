"""What a run is scored on while it trains, and what it leaves for people at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.errors import HardwareError
from eval.encode import Encoder, Evaluator, Report
from eval.panels import panels
from eval.results import print_tables, result, saved_results, write
from train.distributed.agreement import rank_0_only
from train.tracking.metrics import Logger


class Evaluation:
    """Scores the weights as they are on everything, and leaves the JSON files of the newest scores in `eval/`.

    last_step: the evaluation after which also shows `examples` queries of each kind. say: hears of files that cannot be
    written, which are never worth a run. All ranks call everything.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        encode: Encoder,
        folder: Path,
        *,
        last_step: int,
        examples: int,
        say: Callable[[str], None],
    ) -> None:
        self._evaluators, self._encode, self._folder = evaluators, encode, folder
        self._last_step, self._examples, self._say = last_step, examples, say
        self._results: list[dict[str, Any]] = []

    def __call__(self, step: int) -> dict[str, float]:
        examples = self._examples if step == self._last_step else None
        reports = [evaluator.report(self._encode, examples) for evaluator in self._evaluators]
        pairs = list(zip(reports, self._evaluators, strict=True))
        self._results = rank_0_only(self._encode.world, lambda: self._written(pairs, step)) or []
        return {f"{e.name}/{metric}": value for report, e in pairs for metric, value in report.metrics.items()}

    def _written(self, pairs: Sequence[tuple[Report, Evaluator]], step: int) -> list[dict[str, Any]]:
        results = [result(report, evaluator, {"step": step}) for report, evaluator in pairs]
        try:
            for content, (report, _) in zip(results, pairs, strict=True):
                write(self._folder / "eval", content, report.files)
        except HardwareError as error:
            self._say(f"{error}: the results of step {step} are in metrics.jsonl alone. The run goes on")
        return results

    def conclude(self, logger: Logger) -> None:
        """Of a run that is through: report.html, and the last evaluation for the trackers."""
        rank_0_only(self._encode.world, lambda: self._conclude(logger))

    def _conclude(self, logger: Logger) -> None:
        """A run that was killed between its last evaluation and here finds the results on disk."""
        logger.flush()
        report = written_report(self._folder, logger.print)
        results = self._results or saved_results(self._folder)
        logger.conclude([panels(result, self._folder) for result in results], report)

    def print_tables(self) -> None:
        print_tables(self._results)


def written_report(run: Path, say: Callable[[str], None]) -> Path | None:
    """The page of a run, said in one line; None where it could not be made: a page is never worth a run."""
    try:
        from eval.report.__main__ import write_report

        report = write_report(run)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        say(f"report.html could not be made ({type(error).__name__}: {reason})")
        return None
    say(f"to look at: {report}")
    return report
