"""Every command that the program prints is one that runs: those of --help are read, those after some work are run."""

import csv
import gzip
import re
import shlex
import subprocess
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import Commands, Ended
from helpers.shards import image
from helpers.topics import arguments, write_topics

from dyad.data.base.command_line import parse_options, split_arguments
from dyad.data.cli.main import VERBS, parse_verb
from dyad.data.cli.options import Target
from dyad.eval.config import CompareCommand, EvalCommand, MineCommand, ReportCommand
from dyad.eval.report.main import write_report
from dyad.export.main import ExportCommand
from dyad.train.cli import usage
from dyad.train.cli.compose import compose_config, words_for

OPTIONS = {"eval": EvalCommand, "eval.mine": MineCommand, "eval.report": ReportCommand, "train.export": ExportCommand}
OPTIONS |= {"eval.compare": CompareCommand}


def printed(out: str) -> list[list[str]]:
    """The commands of an output that stand on lines of their own or after a colon, as a shell splits them."""
    return [shlex.split(line)[2:] for line in re.findall(r"(?:^|: | )(python -m .*)$", out, re.MULTILINE)]


def instead(command: list[str], words: dict[str, Any]) -> list[str]:
    """The command with these words in place of those of the same keys."""
    kept = [word for word in command if word.partition("=")[0] not in words]
    return [*kept, *(f"{key}={value}" for key, value in words.items())]


@pytest.fixture
def small(models: Path, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What makes a printed training one of seconds, by task."""
    quiet = {"run.dir": tmp_path / "runs", "tracking": "local", "tracking.report": "false", "data.workers": 0}
    towers = {"model.name": models / "open_clip.json", "model.image.image_size": 32, "model.text.context_length": 16}
    return {"pictures": {**quiet, **towers, "epochs": 1}, "questions": {**quiet, "model.text.name": models / "bert"}}


def finished(ended: Ended) -> None:
    assert ended.code == 0 and "finished at step" in ended.out, ended.out


def images(folder: Path) -> Path:
    """Twelve of them with captions, as a table of open_clip's."""
    folder.mkdir()
    with (folder / "a table.csv").open("w") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["filepath", "title"])
        for number in range(12):
            (folder / f"{number}.png").write_bytes(image(number))
            rows.writerow([f"{number}.png", f"image {number}"])
    return folder / "a table.csv"


def test_what_pack_prints_trains_on_the_images(commands: Commands, small, tmp_path: Path) -> None:
    packed = commands.run("data", "pack", str(images(tmp_path / "in")), f"out={tmp_path / 'a {b}'}")
    (train,) = printed(packed.out)
    finished(commands.run(*instead(train, small["pictures"])))


# a table of rows, one of ids beside a corpus, a folder
KINDS = [t if t in ("shards", "tevatron_ids", "beir") else pytest.param(t, marks=pytest.mark.soak) for t in Target]


@pytest.mark.parametrize("target", KINDS, ids=str)
def test_what_pack_prints_trains_on_the_questions(commands: Commands, small, tmp_path: Path, target: Target) -> None:
    topics = write_topics(tmp_path / "topics", topics=6, passages=4)
    packed = commands.run("data", "pack", str(topics), f"out={tmp_path / 'a {b}'}", f"to={target.name}")
    (train,) = printed(packed.out)
    finished(commands.run(*instead(train, small["questions"])))


@pytest.mark.parametrize("recipe", [{}, {"experiment": "mnrl", "objective": "simclr"}], ids=["own", "recipe"])
def test_what_mine_prints_trains_on_what_was_mined(
    commands: Commands, models: Path, tmp_path: Path, recipe: dict[str, str]
) -> None:
    """Also where the objective of the run takes no negatives."""
    keys = {"run.name": "first", "steps": 2, "tracking.report": "false", "data.negatives.per_row": 0, **recipe}
    topics = write_topics(tmp_path / "a b", topics=8, passages=4)
    finished(commands.run(*arguments(models / "bert", topics, tmp_path / "runs", keys)))
    mined = commands.run("eval.mine", f"run={tmp_path / 'runs/first'}", "first_rank=1")
    assert mined.code == 0, mined.out
    (train,) = printed(mined.out)
    finished(commands.run(*train))


def test_what_mine_prints_trains_on_the_passages_of_a_table(commands: Commands, models: Path, tmp_path: Path) -> None:
    """A table names no corpus: its own passages are searched, and stand in a file that the printed command names."""
    (tmp_path / "t.csv").write_text("question,right\n" + "".join(f"what is {i}?,it is {i} of all\n" for i in range(16)))
    keys = {"run.name": "first", "steps": 2, "tracking.report": "false", "data.columns": "[question,right]"}
    finished(commands.run(*arguments(models / "bert", tmp_path / "t.csv", tmp_path / "runs", keys)))
    mined = commands.run("eval.mine", f"run={tmp_path / 'runs/first'}", "first_rank=1")
    assert mined.code == 0 and (tmp_path / "runs/first/mined/corpus.jsonl").is_file(), mined.out
    (train,) = printed(mined.out)
    assert any(word.startswith("data.passage.corpus=") for word in train)
    finished(commands.run(*train))


def test_what_translate_prints_trains(commands: Commands, small, tmp_path: Path) -> None:
    line = (
        f"python -m open_clip_train.main --train-data '{images(tmp_path / 'in')}' --batch-size 8 --epochs 1 "
        f"--precision fp32 --model {small['pictures']['model.name']} --csv-caption-key title"
    )
    (train,) = printed(commands.run("train.doctor", "translate", line).out)
    finished(commands.run(*instead(train, small["pictures"])))


def test_what_a_refusal_prints_does_what_it_says(commands: Commands, tiny, tmp_path: Path) -> None:
    """Names with a blank in them are quoted."""
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "x.tar").write_bytes(b"no tar at all" * 100)
    index, pack = printed(commands.run(*tiny({"data.train": f'"{folder}/x.tar"'})).out)
    listed, packed = commands.run(*index), commands.run(*pack)
    assert index[1] == "index" and listed.code == 3 and "x.tar" in listed.out
    assert pack[1] == "pack" and packed.code == 3 and "x.tar: no sample to write. skipped 1 of 1 rows" in packed.out
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    out = commands.run("data", "check", f"{folder}/x.jsonl.gz").out
    subprocess.run(shlex.split(out.rpartition(": ")[2]), check=True)
    assert (folder / "x.jsonl").read_bytes() == b"{}\n"


def test_what_the_page_of_a_run_prints_makes_it_anew(commands: Commands, tiny, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "runs" / "a b"
    finished(commands.run(*tiny({"run.name": "'a b'", "steps": 1})))
    monkeypatch.chdir(tmp_path)
    page = write_report(run)
    (again,) = re.findall(r"<code>(python -m eval\.report .*)</code>", page.read_text())
    assert shlex.split(unescape(again))[2:] == ["eval.report", "run=runs/a b"]
    assert write_report(Path("runs/a b")) == Path("runs/a b/report.html")


def help_examples() -> list[list[str]]:
    pages = [
        usage,
        *(
            import_module(f"dyad.{name}")
            for name in ("evaluation.main", "evaluation.mine", "eval.report.main", "eval.compare.main", "export.main")
        ),
    ]
    listed = [shlex.split(command) for page in pages for command in page.EXAMPLES.values()]
    return [*listed, *(["python", "-m", "data", *shlex.split(line)] for verb in VERBS for line in verb.examples)]


@pytest.mark.parametrize("words", help_examples(), ids=" ".join)
def test_what_help_prints_is_read(words: list[str]) -> None:
    program, *rest = words[2:]
    if program in OPTIONS:
        options = split_arguments(rest)[1] if program == "eval.compare" else rest  # it takes folders, too
        parse_options(OPTIONS[program], options, program)
    elif program == "data":
        parse_verb(next(verb for verb in VERBS if verb.name == rest[0]), rest[1:])
    else:  # python -m train, bash launch/torchrun.sh
        compose_config([word for word in words if "=" in word])


def test_the_words_for_a_configuration_compose_to_it() -> None:
    ask = r'data.question.prefix="Ask: \"it\" a\b \\"'
    for words in (
        ["experiment=emoji", "objective=siglip", "data.captions=[a,b]", "optim.lr=3e-4", "model.text.frozen=false"],
        ["task=question_passage", ask, 'data.train="a b/{0..9}.tar"', "steps=3"],
        ["experiment=topics", r'data.passage.prefix="\na\t\\nabla \\\\n \\\b \x"'],
        ["experiment=topics", 'data.passage.prefix="a\\\n"'],
        ["experiment=topics_mined", "init_from=x", "data.negatives.file=y", "model.embed_dim=null"],
    ):
        config = compose_config(words)
        assert compose_config(words_for(config)) == config, words
