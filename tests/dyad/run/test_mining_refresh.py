"""Negatives mined anew while training: undisturbed, killed, gone on with inside a segment, and without its file."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import Commands
from helpers.mining import read_lines
from helpers.tiny_runs import last_weights, logged, losses, refused, wait_for
from helpers.topics import arguments, write_topics

from dyad.run.mining_refresh import _problem

ANCE = {
    "data.negatives.lists": "[mined]",
    "data.negatives.per_row": 1,
    "data.negatives.refresh_every": 4,
    "data.negatives.mining.first_rank": 1,
    "data.negatives.mining.last_rank": 20,
    "data.negatives.mining.keep": 3,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def inputs(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model bert/ and the questions topics/."""
    folder = tmp_path_factory.mktemp("inputs")
    made = commands.run("helpers.tiny_bert", str(folder / "bert"))
    assert made.code == 0, made.out
    write_topics(folder / "topics")
    return folder


@pytest.fixture
def run_of(inputs: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The arguments of a run with this name below tmp_path."""

    def made(name: str, **keys: Any) -> list[str]:
        typed = {key.replace("__", "."): value for key, value in keys.items()}
        return arguments(inputs / "bert", inputs / "topics", tmp_path, {**ANCE, **typed, "run.name": name})

    return made


@pytest.fixture(scope="module")
def quiet(commands: Commands, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 12 steps that keeps every checkpoint."""
    folder = tmp_path_factory.mktemp("quiet")
    keys = {**ANCE, "checkpoint.keep": 9, "run.name": "quiet"}
    ended = commands.run(*arguments(inputs / "bert", inputs / "topics", folder, keys))
    assert ended.code == 0, ended.out
    assert [line.split(":")[0] for line in ended.out.splitlines() if line.startswith("Mined")] == [
        "Mined at step 0",
        "Mined at step 4",
        "Mined at step 8",
    ]
    return folder / "quiet"


def mined(run: Path, step: int) -> dict[str, list[str]]:
    return {line["query_id"]: line["negatives"] for line in read_lines(segment(run, step) / "mined.jsonl")}


def segment(run: Path, step: int) -> Path:
    return run / "negatives" / f"step_{step:08d}"


def test_each_segment_has_negatives_of_its_own(quiet: Path) -> None:
    first, second, third = (mined(quiet, step) for step in (0, 4, 8))
    assert len(first) == len(second) == len(third) == 24
    assert first != second != third
    for name, negatives in [*first.items(), *second.items(), *third.items()]:
        assert len(negatives) == 3 and not any(p.startswith(f"p{name[1:]}-") for p in negatives)
        assert name != "t0" or "copy" not in negatives
    assert sorted(p.name for p in (quiet / "negatives").iterdir()) == [segment(quiet, s).name for s in (0, 4, 8)]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_they_are_what_eval_mine_finds_with_the_weights_of_that_step(
    commands, quiet: Path, tmp_path: Path, size: int
) -> None:
    out = tmp_path / "out"
    checkpoint = quiet / "checkpoints" / "step_00000008"
    first, *others = commands.world(size, "eval.mine", f"run={checkpoint}", f"out={out}")
    assert first.code == 0 and all((o.code, o.out) == (0, "") for o in others), first.out
    assert (out / "mined.jsonl").read_bytes() == (segment(quiet, 8) / "mined.jsonl").read_bytes()
    assert "72 negatives for 24 questions" in first.out and f"data.negatives.file={out / 'mined.jsonl'}" in first.out


@pytest.mark.parametrize("moment", [pytest.param(5, marks=pytest.mark.soak), 7], ids="after step {}".format)
def test_killed_and_gone_on_with(commands, run_of, quiet: Path, tmp_path: Path, moment: int) -> None:
    """It goes on from 4, where a segment begins, or from 6, in the middle of one; or later, if it was quick."""
    killed = tmp_path / "killed"
    running = commands.start(*run_of("killed"))
    wait_for(lambda: logged(killed, moment), f"step {moment}")
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    ended = commands.run(*run_of("killed"))
    assert ended.code == 0 and "going on at step" in ended.out, ended.out
    assert losses(killed) == losses(quiet)
    assert last_weights(killed) == last_weights(quiet)
    assert mined(killed, 8) == mined(quiet, 8)


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.soak) for step in (2, 4)), 6])
def test_another_run_goes_on_inside_a_segment(commands, run_of, quiet: Path, tmp_path: Path, step: int) -> None:
    middle = quiet / "checkpoints" / f"step_{step:08d}"
    ended = commands.run(*run_of("other", resume=middle, checkpoint__keep=1))
    assert ended.code == 0, ended.out
    assert ended.out.count("Mined at step") == len(range(-(-step // 4) * 4, 12, 4))
    trained = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert [r["train/loss"] for r in trained] == losses(quiet)[step:]
    assert last_weights(tmp_path / "other") == last_weights(quiet)


def test_any_number_of_processes(commands, run_of, inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "bert", tmp_path / "bert")  # without dropout, which is drawn for each rank
    config = tmp_path / "bert" / "config.json"
    config.write_text(config.read_text().replace('dropout_prob": 0.1', 'dropout_prob": 0.0'))
    for size in (1, 2):
        ended = commands.world(size, *run_of(f"of{size}", steps=6, model__text__name=tmp_path / "bert"))
        assert [e.code for e in ended] == [0] * size and not any(e.out for e in ended[1:]), ended[0].out
    one, two = tmp_path / "of1", tmp_path / "of2"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for step in (0, 4):
        assert mined(two, step) == mined(one, step)


def test_a_segment_without_its_file(commands, run_of, quiet: Path, tmp_path: Path) -> None:
    run = tmp_path / "a"
    shutil.copytree(quiet, run)
    (run / "run_state.json").unlink()
    for step in (8, 10, 12):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    (segment(run, 4) / "mined.jsonl").unlink()
    code = tmp_path / "code"
    ended = commands.world(2, *run_of("a"), DYAD_EXIT_CODE=str(code))
    assert code.read_text() == "3"
    said = "".join(e.out for e in ended)
    border = run / "checkpoints" / "step_00000004"
    assert said.count("error:") == 1 and f"resume={border} or resume=never" in said, said
    assert f"{segment(run, 4) / 'mined.jsonl'} is missing: steps 4 to 7 " in said and "step 6" in said
    assert commands.run(*run_of("a", resume=border)).code == 0  # the way out
    assert mined(run, 8) == mined(quiet, 8) and last_weights(run) == last_weights(quiet)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "": lambda folder: None,
    "is missing": lambda folder: (folder / "mined.jsonl").unlink(),
    "has lost its mined.json": lambda folder: (folder / "mined.json").unlink(),
    "has changed since it was mined": lambda folder: (folder / "mined.jsonl").write_text("\n"),
    "cannot be read": lambda folder: (folder / "mined.json").write_text("{"),
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_what_is_wrong_with_a_file_is_said(quiet: Path, tmp_path: Path, problem: str) -> None:
    shutil.copytree(segment(quiet, 4), tmp_path / "4")
    DAMAGES[problem](tmp_path / "4")
    said = _problem(tmp_path / "4")
    assert said.startswith(problem) and bool(said) == bool(problem)


def test_only_what_a_kept_checkpoint_needs_stays(commands, run_of, tmp_path: Path) -> None:
    """When it is mined at 8, the newest checkpoint is of 7, inside the segment that begins at 4."""
    ended = commands.run(*run_of("a", steps=10, checkpoint__every=7, checkpoint__keep=1))
    assert ended.code == 0, ended.out
    assert sorted(p.name for p in (tmp_path / "a" / "negatives").iterdir()) == ["step_00000004", "step_00000008"]


def test_a_given_file_serves_until_the_first_refresh(commands, run_of, quiet: Path, tmp_path: Path) -> None:
    given = {"data__negatives__file": segment(quiet, 0) / "mined.jsonl"}
    ended = commands.run(*run_of("a", **given))
    assert ended.code == 0 and "Mined at step 0" not in ended.out, ended.out
    assert losses(tmp_path / "a") == losses(quiet)
    assert not segment(tmp_path / "a", 0).exists()


def test_what_cannot_work_is_refused(commands, run_of, quiet: Path, tmp_path: Path) -> None:
    refused(commands.run(*run_of("a", data__negatives__lists="[negatives]")), 2, "refresh_every=4", "lists=[mined]")
    rows = tmp_path / "rows.jsonl"
    passage = {"title": "", "text": "a b"}
    rows.write_text(json.dumps({"question": "a", "answers": [], "positive_ctxs": [passage]}) + "\n")
    refused(commands.run(*run_of("a", data__train=rows, global_batch_size=1)), 2, "data.passage.corpus")
    two = "::".join(str(write_topics(tmp_path / f"{n}", topics=n)) for n in (3, 4))
    refused(commands.run("eval.mine", f"run={quiet}", f"queries={two}"), 2, f"queries={two}", "corpus=")
    refused(commands.run("eval.mine", f"run={quiet}", "first_rank=9", "last_rank=2"), 2, "first_rank=9, last_rank=2")
    refused(commands.run("eval.mine", f"run={quiet}", "margn=1"), 2, "'margin'")
