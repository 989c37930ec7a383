"""Evaluate a run while it trains, and write its HTML report at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyad.data.base.errors import HardwareError, first_line
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.results.panels import panels
from dyad.eval.results.write import result, saved_results, write
from dyad.train.distributed.agreement import rank_0_only
from dyad.train.tracking.logger import Logger


@dataclass
class Evaluation:
    """Evaluates the weights of a run: `evaluation(step)` runs all evaluators and returns their metrics, name → value.

    The weights are those in the context of `encoder.weights`: the current ones, or their moving averages (optim.ema).

    All ranks must call every public method. Rank 0 writes the results of the newest evaluation to eval/*.json in
    `folder`, the run folder. may_be_last(step): whether the run may end after `step` steps, the same on all ranks; only
    the results of such a step contain example cases. examples: how many cases of each kind they contain. log: called
    with a line if files cannot be written, which does not stop the run. results: on rank 0, the results of the newest
    evaluation in the form of their files, one per evaluator; [] before the first evaluation, and on other ranks.
    """

    evaluators: Sequence[Evaluator]
    encoder: Encoder
    folder: Path
    may_be_last: Callable[[int], bool]
    examples: int
    log: Callable[[str], None]
    results: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __call__(self, step: int) -> dict[str, float]:
        examples = self.examples if self.may_be_last(step) else None
        with self.encoder.weights():
            reports = [(evaluator, evaluator.report(self.encoder, examples)) for evaluator in self.evaluators]
        rank_0_only(self.encoder.world, lambda: self._write(reports, step))
        return {f"{e.name}/{metric}": value for e, report in reports for metric, value in report.metrics.items()}

    def _write(self, reports: Sequence[tuple[Evaluator, Report]], step: int) -> None:
        """Set `results`, and write them and the further files of the reports. Rank 0 alone calls it."""
        self.results = [result(report, evaluator, {"step": step}) for evaluator, report in reports]
        try:
            for content, (_, report) in zip(self.results, reports, strict=True):
                write(self.folder / "eval", content, report.files)
        except HardwareError as error:
            self.log(f"{error}: the results of step {step} are in metrics.jsonl alone. The run goes on")

    def conclude(self, logger: Logger, with_report: bool = True) -> None:
        """Finish a completed run: write report.html if `with_report`, and send the last results to the trackers.

        logger: the run's logger, which sends the results and the report. Every rank must call it; rank 0 does the work.
        An error in the report or in the form of the results gives a line in the log, and is not raised.
        """

        def write() -> None:
            logger.flush()
            report = try_write_report(self.folder, logger.print) if with_report else None
            try:  # a run that was killed after its last evaluation finds the results on the disk
                shown = [panels(result, self.folder) for result in self.results or saved_results(self.folder)]
            except Exception as error:  # what trackers show must not end a finished run
                logger.print(f"no panels of the results ({type(error).__name__}: {first_line(error)})")
                shown = []
            logger.conclude(shown, report)

        rank_0_only(self.encoder.world, write)


def try_write_report(run: Path, log: Callable[[str], None]) -> Path | None:
    """Write report.html of the run folder `run` and return its path; return None if an error prevents that.

    log: called with a line for each sign of the report that is a failure, such as collapsed embeddings, and with one
    that names the path or the error. The error is not raised, since a report must not end a run.
    """
    try:
        from dyad.data.base.findings import Level
        from dyad.eval.report.health_checks import health_checks
        from dyad.eval.report.main import write_report
        from dyad.eval.report.run_folder import read_run

        report, read = write_report(run), read_run(run)
        signs = health_checks(read.options, read.history, read.results)
        failed = [f"{sign.topic}: {sign.text} {sign.fix}" for sign in signs if sign.level is Level.fail]
    except Exception as error:
        log(f"report.html could not be made ({type(error).__name__}: {first_line(error)})")
        return None
    for line in [*failed, f"to look at: {report}"]:
        log(line)
    return report
