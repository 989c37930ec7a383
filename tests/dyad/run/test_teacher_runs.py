"""Runs that learn from a teacher's scores, data.teacher: any number of processes, what is learned, clear refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from helpers.cli import Commands
from helpers.tiny_runs import losses, refused
from helpers.topics import arguments

WORDS = ("lamb", "river", "king", "bread", "stone", "fire", "night", "horse")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that likes passages by their word alone: the positive of a row is often not its best."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("taught") / "train.jsonl"
    rows = []
    for number in range(40):
        positive, *negatives = draw.sample(WORDS, 4)
        scores = [float(WORDS.index(word)) for word in (positive, *negatives)]
        rows.append({"query": f"question {number}", "pos": [positive], "neg": negatives[: number % 4]})
        rows[-1] |= {"pos_scores": scores[:1], "neg_scores": scores[1 : 1 + number % 4]}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


KEYS = {
    "data.teacher": "scores",
    "objective": "distill_kl",
    "data.negatives.per_row": 3,
    "data.val": "null",
    "eval.every": 0,
    "tracking.report": "false",
}


def test_the_same_losses_on_any_number_of_processes(
    commands: Commands, exact_bert: Path, taught: Path, tmp_path: Path
) -> None:
    """Of rows with no to three negatives, beside the softmax loss of the whole batch."""
    keys = {**KEYS, "steps": 3, "objective.contrastive": 0.5, "objective.temperature": 0.5}
    for size, name, more in ((1, "one", {}), (2, "two", {"chunk_size": 2})):
        ended = commands.world(
            size, *arguments(exact_bert, taught, tmp_path / "runs", {**keys, "run.name": name, **more})
        )
        assert [e.code for e in ended] == [0] * size, ended
    assert losses(tmp_path / "runs/two") == pytest.approx(losses(tmp_path / "runs/one"), abs=1e-6)


@pytest.mark.parametrize("objective", ["distill_kl", "margin_mse"])
def test_the_order_of_the_teacher_is_learned(
    commands: Commands, exact_bert: Path, taught: Path, tmp_path: Path, objective: str
) -> None:
    keys = {**KEYS, "objective": objective, "steps": 40, "optim.lr": 0.01, "tracking.every": 1, "run.name": "a"}
    ended = commands.run(*arguments(exact_bert, taught, tmp_path / "runs", keys))
    assert ended.code == 0, ended.out
    lines = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    best = [line["train/teacher_top1"] for line in lines if "train/teacher_top1" in line]
    assert best[0] < 0.5 and sum(best[-5:]) / 5 > 0.9, best


def test_no_run_folder_where_it_is_refused(commands: Commands, exact_bert: Path, taught: Path, tmp_path: Path) -> None:
    for more, named in (
        ({"data.teacher": "null"}, ("distill_kl", "data.teacher=FIELD")),
        ({"objective": "info_nce"}, ("info_nce", "distill_kl")),
        ({"data.negatives.per_row": 0}, ("distill_kl", "data.negatives.per_row")),
        ({"data.negatives.lists": "[mined]"}, ("data.teacher=scores", "data.negatives.lists")),
    ):
        keys = {**KEYS, "steps": 1, **more}
        refused(commands.run(*arguments(exact_bert, taught, tmp_path / "runs", keys)), 2, *named)
    assert not (tmp_path / "runs").exists()
