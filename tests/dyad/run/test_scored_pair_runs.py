"""Runs that learn the scores of pairs, experiment=sts: any number of processes, what is learned, clear refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from helpers.cli import Commands
from helpers.tiny_runs import losses, records, refused
from helpers.topics import arguments

WORDS = ("lamb", "river", "king", "bread", "stone", "fire", "night", "horse")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of different words; the score is higher the nearer they are to each other in WORDS."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("scored") / "train.csv"
    lines = ["sentence1,sentence2,score"]
    for _ in range(160):
        first, second = draw.sample(range(len(WORDS)), 2)
        lines.append(f"{WORDS[first]},{WORDS[second]},{len(WORDS) - abs(first - second)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def keys_of(val: Path | str, **more: object) -> dict[str, object]:
    own = {"data.teacher": "score", "data.negatives.per_row": 0, "data.val": val, "tracking.report": "false"}
    return {**own, "eval.every": 0, **more}


@pytest.mark.parametrize("objective", ["cosent", "cosine_mse"])
def test_the_same_losses_on_any_number_of_processes(
    commands: Commands, exact_bert: Path, scored: Path, tmp_path: Path, objective: str
) -> None:
    for size, name, more in ((1, "one", {}), (2, "two", {"chunk_size": 2})):
        keys = keys_of("null", steps=3, objective=objective, **{"run.name": name}, **more)
        ended = commands.world(size, *arguments(exact_bert, scored, tmp_path / "runs", keys))
        assert [e.code for e in ended] == [0] * size, ended
        assert ("Set objective.divisor" in ended[0].out) == (objective == "cosine_mse"), ended  # of scores up to 7
    assert losses(tmp_path / "runs/two") == pytest.approx(losses(tmp_path / "runs/one"), abs=2e-6)


@pytest.mark.parametrize(("objective", "more"), [("cosent", {}), ("cosine_mse", {"objective.divisor": 8})])
def test_the_scores_are_learned_and_val_says_so(
    commands: Commands, exact_bert: Path, scored: Path, tmp_path: Path, objective: str, more: dict[str, int]
) -> None:
    size = {"steps": 40, "optim.lr": 0.01, "global_batch_size": 32, "run.name": "a"}
    keys = keys_of(scored, objective=objective, **size, **more) | {"eval.every": 20}
    ended = commands.run(*arguments(exact_bert, scored, tmp_path / "runs", keys))
    assert ended.code == 0, ended.out
    lines = records(tmp_path / "runs/a")
    found = [line["train/pair_correlation"] for line in lines if "train/pair_correlation" in line]
    assert sum(found[:3]) / 3 < 0.5 < 0.8 < sum(found[-5:]) / 5, found
    assert [line["val/spearman"] for line in lines if "val/spearman" in line][-1] > 0.8, ended.out
    result = json.loads((tmp_path / "runs/a/eval/val.json").read_text())
    assert result["task"] == "scored_pairs" and result["metrics"]["num_pairs"] == 160
    assert "spearman" in ended.out and "takes pairs only" not in ended.out
    assert "Set objective.divisor" not in ended.out
    evaluated = commands.run(
        "eval", f"checkpoint={tmp_path / 'runs/a'}", f"suite=[sts:{scored}]", f"out={tmp_path / 'e'}"
    )
    assert evaluated.code == 0, evaluated.out
    again = json.loads((tmp_path / "e/train.json").read_text())
    assert again["metrics"] == pytest.approx(result["metrics"], abs=1e-6)


def test_rows_with_negatives_are_no_pairs(commands: Commands, exact_bert: Path, tmp_path: Path) -> None:
    """One number is a margin there (MarginMSE); of a list, the scores of the negatives would not be learned."""
    margins, lists = tmp_path / "margins.csv", tmp_path / "lists.jsonl"
    margins.write_text("query,positive,negative,score\nlamb,river,king,0.5\nlamb,stone,fire,0.25\n")
    row = {"query": "lamb", "pos": ["river"], "neg": ["king"], "pos_score": [1], "neg_score": [0]}
    lists.write_text(f"{json.dumps(row)}\n" * 2)
    for path, objective, code in ((margins, "cosent", 2), (lists, "cosine_mse", 3)):
        keys = keys_of("null", steps=1, objective=objective, global_batch_size=2)
        told = commands.run(*arguments(exact_bert, path, tmp_path / "runs", keys))
        refused(told, code, path, objective, "margin_mse", "data.negatives.per_row=1")
    assert not (tmp_path / "runs").exists()


def test_no_run_folder_where_it_is_refused(commands: Commands, exact_bert: Path, scored: Path, tmp_path: Path) -> None:
    for more, named in (
        ({"data.teacher": "null"}, ("cosent", "data.teacher=FIELD")),
        ({"objective": "info_nce"}, ("info_nce", "cosent")),
        ({"data.negatives.per_row": 1}, ("cosent", "data.negatives.per_row=0")),
        ({"data.val": "null", "eval.suite": f"[dpr:{scored}@x]"}, ("eval.suite",)),
    ):
        keys = keys_of(scored, steps=1, objective="cosent") | more
        refused(commands.run(*arguments(exact_bert, scored, tmp_path / "runs", keys)), 2, *named)
    assert not (tmp_path / "runs").exists()
