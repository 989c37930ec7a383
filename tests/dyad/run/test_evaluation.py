"""What a run leaves: cases at its end alone, its page, and results for whoever shows them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.eval import encoder
from helpers.report import records

from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.run.evaluation import Evaluation, try_write_report
from dyad.train.tracking.logger import Logger
from dyad.train.tracking.panel_types import Panels
from dyad.train.tracking.progress import Sink


@dataclass(frozen=True)
class Counted(Evaluator):
    """Remembers with how many examples it was asked."""

    asked: list[int | None] = field(default_factory=list)

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        self.asked.append(examples)
        metrics = {"acc1": float(len(self.asked)), "mean_per_class_recall": 0.5, "num_samples": 3.0}
        chance = {"acc1": 0.1, "mean_per_class_recall": 0.1, "majority_class_share": 0.5}
        files: dict[str, Callable[[Path], None]] = {} if examples is None else {".pictures": lambda path: path.mkdir()}
        return Report("zeroshot_classification", metrics, chance, {"truth": "keys"}, files)


class Heard(Sink):
    """A sink that keeps lines and results."""

    def __init__(self) -> None:
        self.concluded: list[tuple[Sequence[Panels], Path | None]] = []
        self.lines: list[str] = []

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        self.concluded.append((panels, report))

    def print(self, line: str) -> None:
        self.lines.append(line)


def evaluation(folder: Path, evaluator: Evaluator, log: Callable[[str], None] = print) -> Evaluation:
    return Evaluation([evaluator], encoder(), folder, may_be_last=lambda step: step == 4, examples=7, log=log)


def test_the_weights_to_evaluate_are_in_the_towers_meanwhile(tmp_path: Path) -> None:
    held: list[str] = []

    @contextmanager
    def weights() -> Iterator[None]:
        held.append("average")
        yield
        held.append("trained")

    class Asked(Counted):
        def report(self, encode: Encoder, examples: int | None = None) -> Report:
            held.append("scored")
            return super().report(encode, examples)

    evaluate = evaluation(tmp_path, Asked("eval/animals", "zero_shot:animals.json"))
    evaluate.encoder = replace(evaluate.encoder, weights=weights)
    evaluate(2)
    assert held == ["average", "scored", "trained"]


def test_only_the_last_evaluation_shows_cases(tmp_path: Path) -> None:
    counted = Counted("eval/animals", "zero_shot:animals.json")
    evaluate = evaluation(tmp_path, counted)
    assert evaluate(2) == {
        "eval/animals/acc1": 1,
        "eval/animals/mean_per_class_recall": 0.5,
        "eval/animals/num_samples": 3,
    }
    assert [p.name for p in (tmp_path / "eval").iterdir()] == ["animals.json"]
    evaluate(4)
    assert counted.asked == [None, 7]
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == ["animals.json", "animals.pictures"]
    assert json.loads((tmp_path / "eval" / "animals.json").read_text())["metrics"]["acc1"] == 2


def test_results_are_shown_also_by_a_start_that_only_finds_them(tmp_path: Path) -> None:
    first, later = Heard(), Heard()
    evaluate = evaluation(tmp_path, Counted("val", "a.tar"))
    evaluate(4)
    evaluate.conclude(Logger([first]))
    evaluation(tmp_path, Counted("val", "a.tar")).conclude(Logger([later]), with_report=False)
    ((panels, report),) = first.concluded
    assert later.concluded == [(panels, None)] and report is None
    assert [shown.dataset for shown in panels] == ["val"] and panels[0].final["acc1"]["value"] == 1


def test_results_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "eval").write_text("in the way")
    said: list[str] = []
    assert evaluation(tmp_path, Counted("val", "a.tar"), said.append)(2)["val/acc1"] == 1
    (line,) = said
    assert line.startswith(f"{tmp_path}/eval cannot be written: File exists: the results of step 2 are in metrics")


def test_a_page_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    heard = Heard()
    evaluation(tmp_path, Counted("val", "a.tar")).conclude(Logger([heard]))
    (line,) = heard.lines
    assert line.startswith("report.html could not be made (ConfigError: ") and "config.yaml" in line
    assert heard.concluded == [([], None)]


def test_panels_that_cannot_be_made_do_not_end_a_finished_run(tmp_path: Path) -> None:
    heard = Heard()
    evaluate = evaluation(tmp_path, Counted("val", "a.tar"))
    evaluate(4)
    evaluate.results[0]["histograms"] = evaluate.results[0]["metrics"] = 5
    evaluate.conclude(Logger([heard]))
    assert heard.concluded == [([], None)] and heard.lines[-1].startswith("no panels of the results (")


def test_a_sign_of_failure_is_a_line_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: image_text\nsteps: 200\n")
    lines = map(json.dumps, records(uniformity_x=-0.001, uniformity_y=-0.001))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    try_write_report(tmp_path, said.append)
    assert len(said) == 2 and said[0].startswith("Embeddings have collapsed: ") and "optim.lr" in said[0]


def test_a_page_is_made_and_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: image_text\nsteps: 4\n")
    said: list[str] = []
    assert try_write_report(tmp_path, said.append) == tmp_path / "report.html"
    assert said == [f"to look at: {tmp_path}/report.html"] and (tmp_path / "report.html").stat().st_size > 1000
