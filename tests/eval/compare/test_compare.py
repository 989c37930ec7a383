"""python -m eval.compare: the keys that differ between runs, and their scores side by side."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises
from helpers.report import CONFIG, passages, records, retrieval, write_run, zero_shot

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.eval.compare.main import main
from dyad.eval.report.run_folder import read_run
from dyad.train.run_folder.run_state import append_to_log

METRIC = "image_to_text_R@1"


def valued(value: float, **more: Any) -> dict[str, Any]:
    """A result of data.val."""
    result = retrieval()
    return {**result, "metrics": {**result["metrics"], METRIC: value}, "intervals": {METRIC: [0.1, 0.9]}, **more}


def run(folder: Path, *results: dict[str, Any], loss: float = 2.0, state: dict[str, Any] | None = None, **keys: Any):
    return write_run(folder, records(loss=loss), results, {**CONFIG, **keys}, state)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command with some words; returns the lines that it prints, those on stderr last."""

    def compare(*words: object) -> list[str]:
        monkeypatch.setattr("sys.argv", ["eval.compare", *map(str, words)])
        main()
        return [" ".join(line.split()) for line in "".join(capsys.readouterr()).splitlines() if line.strip()]

    return compare


def test_a_run_whose_process_has_ended_is_cut_off(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"status": "running", "host": socket.gethostname(), "pid": ended.pid}
    states = {"cut off": {}, "finished": {"status": "finished"}}
    found = {status: read_run(run(tmp_path / status, state={**here, **more})) for status, more in states.items()}
    assert [read.status for read in found.values()] == list(states)
    for number, other in enumerate(({"host": "elsewhere"}, {"pid": os.getpid()})):
        assert read_run(run(tmp_path / f"{number}", state={**here, **other})).status == "running"


def test_keys_that_differ_and_scores_the_best_first(compared, tmp_path: Path) -> None:
    worse = run(tmp_path / "a", valued(0.25), zero_shot(), run={"name": "a"}, data={**CONFIG["data"], "workers": 3})
    better = run(tmp_path / "b", valued(0.5), optim={**CONFIG["optim"], "lr": 0.01, "ema": 0.9}, loss=1.0)
    state = {"status": "running", "step": 1500, "total_steps": 2000}
    siglip = {"name": "siglip", "init_bias": -10.0}  # an option of its own is no difference
    other = run(tmp_path / "c", objective={**CONFIG["objective"], **siglip}, state=state)
    lines = compared(worse, better, other)
    assert lines[0] == "key value runs" and lines[2:8] == [
        "objective.name clip a, b",
        "siglip c",
        "optim.lr 0.001 a, c",
        "0.01 b",
        "optim.ema null a, c",
        "0.9 b",
    ]
    assert lines[8:11] == ["val groups", "image → text top-1", "run status steps loss R@1 accuracy"]
    assert lines[12:17] == [
        "b finished 200 1.000 0.500* –",
        "0.100–0.900",
        "a finished 200 2 0.250 0.733",
        "0.100–0.900 0.600–0.850",
        "c running 1,500 2 – –",
    ]
    assert lines[17:] == ["* best of the column; below a value: its 95 % interval"]


def test_of_many_runs_the_commonest_value_counts_its_runs(compared, tmp_path: Path) -> None:
    """Beside a value of few runs; a later table has no row of a run without a score there."""
    sets = [valued(0.5, dataset=f"set-{n}") for n in range(4)]
    runs = [run(tmp_path / f"r{n}", *sets[: 1 if n else 4], seed=n % 4 == 1, from_weights=[n]) for n in range(6)]
    lines = compared(*runs)
    assert lines[2:4] == ["seed true r1, r5", "false the other 4"] and "from_weights" not in "".join(lines)
    tables = "\n".join(lines).split("\nrun status")
    assert "\nr5 finished" in tables[1] and "\nr5 " not in tables[2] and "\nr0 " in tables[2]


def test_a_temperature_that_weights_brought_is_the_one_compared(compared, tmp_path: Path) -> None:
    """Of the run, not of an auxiliary loss; config.yaml has what was typed."""
    said = "model.pretrained=w.pt knows temperature 0.01 (logit scale 100). Taken: objective.temperature={}"
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    for line in (said.format(0.01), f"also.slip: {said.format(0.2)}"):
        append_to_log(second, line)
    assert compared(first, second)[2:4] == ["objective.temperature 0.07 a", "0.01 b"]


def test_every_line_fits_where_names_are_long_and_metrics_many(compared, tmp_path: Path) -> None:
    results = [valued(0.5, dataset=f"set-{n}") for n in range(3)]
    runs = [run(tmp_path / f"experiment-of-today-{n}", *results, model={"n": [n] * 40}) for n in range(2)]
    lines = compared(*runs)
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    assert all(sum(f"set-{n}" in line for line in lines) == 1 for n in range(3))


def test_a_direction_that_is_not_known_marks_and_sorts_nothing(compared, tmp_path: Path) -> None:
    """Of an evaluator of a plugin."""
    closeness = {"dataset": "val", "task": "closeness", "metrics": {"distance": 1.0}}
    first, second = run(tmp_path / "a", closeness), run(tmp_path / "b", {**closeness, "metrics": {"distance": 2.0}})
    lines = compared(first, second)
    assert lines[0] == "No key that changes the weights differs."
    assert lines[-3:-1] == ["a finished 200 2 1.000", "b finished 200 2 2"]


def test_scores_of_other_data_are_told_and_not_marked(compared, tmp_path: Path) -> None:
    few = valued(0.5)
    few["metrics"] |= {"num_images": 6.0}
    seen = [{"seen": "keep", "history": ["train.csv", "val.csv"]}, {"seen": "drop", "history": ["train.csv"]}]
    none, some = valued(0.25), valued(0.5)
    none["metrics"] |= {"num_unknown": 0.0}
    some["metrics"] |= {"num_unknown": 1.0, "num_repeats": 3.0}  # which an older result lacks: no difference
    others = {
        "source: shards/val.tar (a0), other.tar (b0)": (valued(0.25), valued(0.5, source="other.tar")),
        "images: 60 (a1), 6 (b1)": (valued(0.25), few),
        "history: train.csv val.csv (a2), train.csv (b2); seen: keep (a2), drop (b2)": (
            valued(0.25, **seen[0]),
            valued(0.5, **seen[1]),
        ),
        "truth: keys (a3), pairs (b3)": (valued(0.25, truth="keys"), valued(0.5, truth="pairs")),
        "width: None (a4), 64 (b4)": (valued(0.25, width=None), valued(0.5, width=64)),
        "index: Flat (a5), PQ8 (b5)": (
            valued(0.25),  # exact search of pictures is not told
            valued(0.5, search={"image_to_text": {"index": "PQ8"}}),
        ),
        "unknown: 0 (a6), 1 (b6)": (none, some),
    }
    for n, (told, (worse, better)) in enumerate(others.items()):
        lines = compared(run(tmp_path / f"a{n}", worse), run(tmp_path / f"b{n}", better))
        assert " ".join(lines).endswith(f"val: no run is marked, as they were evaluated differently: {told}")
        assert not any("0.500*" in line or "0.250*" in line for line in lines)
        assert [line[0] for line in lines if "finished" in line] == ["a", "b"]


def test_what_an_older_result_lacks_is_no_difference(compared, tmp_path: Path) -> None:
    new = valued(0.5, seen="drop", answers="regex", width=64, probe={"features": "embeddings", "k": 5})
    lines = compared(run(tmp_path / "a", valued(0.25)), run(tmp_path / "b", new))
    assert "differently" not in " ".join(lines) and any("0.500*" in line for line in lines)


def test_runs_that_were_evaluated_differently_are_counted_where_they_are_many(compared, tmp_path: Path) -> None:
    runs = [run(tmp_path / f"r{n}", valued(n / 8, seen="drop" if n == 2 else "keep")) for n in range(6)]
    assert " ".join(compared(*runs)).endswith("seen: drop (r2), keep (the other 5)")


def test_the_table_as_csv_is_safe_in_a_spreadsheet(compared, tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "=1+1", valued(0.5), experiment="emoji"),
        run(tmp_path / "x/\x1b[2Jb", passages(), experiment="@SUM(A1)"),
    ]
    lines = compared(*runs, f"out={tmp_path}/runs.csv")
    assert lines[-1] == f"Written: {tmp_path}/runs.csv" and "\x1b" not in "".join(lines)
    with (tmp_path / "runs.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["run", "status", "steps", "loss", f"val {METRIC}", "topics nDCG@10", "experiment"]
    assert rows == [
        ["'=1+1", "finished", "200", "2.0", "0.5", "", "emoji"],
        [r"x/\x1b[2Jb", "finished", "200", "2.0", "", "0.3517", "'@SUM(A1)"],
    ]
    with raises(HardwareError, "nowhere/runs.csv"):
        compared(*runs, f"out={tmp_path}/nowhere/runs.csv")


def test_parts_that_are_missing_or_damaged_leave_gaps(compared, tmp_path: Path) -> None:
    bare, damaged = tmp_path / "bare", run(tmp_path / "damaged", valued(0.5))
    bare.mkdir()
    (bare / "config.yaml").write_text("task: image_text\nsince: 2026-01-01\n")
    (damaged / "eval/val.json").write_text("[")
    lines = compared(bare, damaged)
    assert lines[-3:-1] == ["bare – 0 –", "damaged finished 200 2"]
    assert "damaged: eval/val.json cannot be read" in lines[-1]


@pytest.mark.parametrize("words", [[], ["a"], ["a", "a/"]], ids=["none", "one", "one twice"])
def test_fewer_than_two_runs_are_refused(compared, tmp_path: Path, monkeypatch, words: list[str]) -> None:
    run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "two run folders"):
        compared(*words)


def test_a_folder_that_is_no_run_is_left_out_and_a_wrong_path_refused(
    compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval-model").mkdir()
    with raises(ConfigError, "two run folders"):
        compared(run(tmp_path / "a"), tmp_path / "eval-model")
    assert "left out:" in capsys.readouterr().err
    with raises(ConfigError, tmp_path / "nowhere", "config.yaml"):
        compared(tmp_path / "a", tmp_path / "nowhere")
    with raises(ConfigError, "outt", "out"):
        compared(tmp_path / "a", "outt=x.csv")


def test_runs_that_differ_in_their_seed_alone_are_a_group(compared, tmp_path: Path) -> None:
    slow, fast = ({**CONFIG["optim"], "lr": lr} for lr in (0.001, 0.01))
    values = [(slow, 0, 0.25), (slow, 1, 0.5), (fast, 0, 0.5), (fast, 1, 0.625), (fast, 2, 0.75)]
    runs = [run(tmp_path / f"{n}", valued(v), seed=seed, optim=optim) for n, (optim, seed, v) in enumerate(values)]
    lone = run(tmp_path / "f", valued(0.875), optim={**CONFIG["optim"], "lr": 0.1})
    lines = compared(*runs, lone)
    begin = lines.index("over seeds keys runs mean deviation")
    assert lines[begin + 2 :] == [
        "val image → text R@1 optim.lr=0.01 3 0.625 0.125",
        "optim.lr=0.001 2 0.375 0.177",
    ]
    assert compared(*runs[:2])[-1] == "val image → text R@1 all runs 2 0.375 0.177"
    assert compared(*runs[:2], lone)[-1] == "val image → text R@1 optim.lr=0.001 2 0.375 0.177"
    again = run(tmp_path / "g", valued(0.25), seed=0, optim=slow)
    for others in ((runs[0], lone), (runs[0], again), (runs[0], again, runs[3])):
        assert not any("over seeds" in line for line in compared(*others))


def test_seeds_of_other_data_are_no_group(compared, tmp_path: Path) -> None:
    for n, differing in enumerate(({"source": "elsewhere.tar"}, {"truth": "pairs"})):
        one, other = valued(0.25, truth="keys"), valued(0.5, **{"truth": "keys", **differing})
        lines = compared(run(tmp_path / f"a{n}", one, seed=0), run(tmp_path / f"b{n}", other, seed=1))
        assert not any("over seeds" in line for line in lines)
