"""Evaluation of a run while it trains, and its report at the end."""

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
    """Scores the current weights with all evaluators. Rank 0 writes the newest results to `eval/*.json`.

    examples: queries of each kind that the evaluation after `last_step` also shows. log: prints a line for files that
    cannot be written; they do not stop the run. All ranks call every method.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        encode: Encoder,
        folder: Path,
        last_step: int,
        examples: int,
        log: Callable[[str], None],
    ) -> None:
        self._evaluators, self._encode, self._folder = evaluators, encode, folder
        self._last_step, self._examples, self._log = last_step, examples, log
        self._results: list[dict[str, Any]] = []

    def __call__(self, step: int) -> dict[str, float]:
        examples = self._examples if step == self._last_step else None
        reports = [evaluator.report(self._encode, examples) for evaluator in self._evaluators]
        pairs = list(zip(reports, self._evaluators, strict=True))
        self._results = rank_0_only(self._encode.world, lambda: self._write(pairs, step)) or []
        return {f"{e.name}/{metric}": value for report, e in pairs for metric, value in report.metrics.items()}

    def _write(self, pairs: Sequence[tuple[Report, Evaluator]], step: int) -> list[dict[str, Any]]:
        results = [result(report, evaluator, {"step": step}) for report, evaluator in pairs]
        try:
            for content, (report, _) in zip(results, pairs, strict=True):
                write(self._folder / "eval", content, report.files)
        except HardwareError as error:
            self._log(f"{error}: the results of step {step} are in metrics.jsonl alone. The run goes on")
        return results

    def conclude(self, logger: Logger) -> None:
        """At the end of a finished run: write report.html, and give trackers the last evaluation."""

        def write() -> None:
            logger.flush()
            report = written_report(self._folder, logger.print)
            # a run that was killed after its last evaluation finds the results on the disk
            results = self._results or saved_results(self._folder)
            logger.conclude([panels(result, self._folder) for result in results], report)

        rank_0_only(self._encode.world, write)

    def print_tables(self) -> None:
        print_tables(self._results)


def written_report(run: Path, log: Callable[[str], None]) -> Path | None:
    """Write report.html of a run. Any error is one line of `log`, and None is returned: it must not end the run."""
    try:
        from eval.report.__main__ import write_report

        report = write_report(run)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        log(f"report.html could not be made ({type(error).__name__}: {reason})")
        return None
    log(f"to look at: {report}")
    return report
