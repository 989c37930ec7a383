"""python -m eval.mine of a run of images: what it writes, by its own embeddings; what it prints; what it refuses."""

import hashlib
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import Commands
from helpers.mining import read_lines
from helpers.tiny_runs import SHARD, VAL, refused, tiny_arguments

from dyad.data.base.command_line import parse_options
from dyad.eval.config import MineCommand
from dyad.evaluation.mine import training_command, with_mine_options
from dyad.train.cli.compose import compose_config

RULES = {"first_rank": 3, "last_rank": 40, "keep": 4, "margin": -0.05}
COMMAND = [f"{key}={value}" for key, value in RULES.items()]


@pytest.fixture(scope="module")
def run(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    ended = commands.run(*tiny_arguments(models, runs, {"run.name": "a", "steps": 8, "optim.lr": 0.01}))
    assert ended.code == 0, ended.out
    return runs / "a"


@pytest.fixture(scope="module")
def out(commands: Commands, run: Path) -> str:
    """What mining prints."""
    ended = commands.run("eval.mine", f"run={run}", *COMMAND)
    assert ended.code == 0, ended.out
    return ended.out


def samples() -> list[tuple[str, dict[str, Any]]]:
    """Name of the content key of each image, and its fields, read by tarfile."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(SHARD) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            found.setdefault(key, {})[suffix] = tar.extractfile(member).read()  # type: ignore[union-attr]
    names = [id_of(m.get("webp") or m["png"]) for m in found.values()]
    return [(name, json.loads(m["json"])) for name, m in zip(names, found.values(), strict=True)]


def id_of(payload: bytes) -> str:
    """The name of a content key, from its definition."""
    return hashlib.blake2b(payload, digest_size=8).digest()[::-1].hex()


def listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def test_what_is_kept_follows_from_the_embeddings(run: Path, out: str) -> None:
    """Each image against all captions in float64; those of its concept are right."""
    folder = run / "mined"
    lines, captions = read_lines(folder / "mined.jsonl"), [row["text"] for row in read_lines(folder / "captions.jsonl")]
    x, y = (np.load(folder / "embeddings" / name / "embeddings.npy").astype(float) for name in ("pictures", "captions"))
    of_text: dict[str, set[str]] = {}
    of_image: dict[str, set[str]] = {}
    for name, fields in samples():
        of_image.setdefault(name, set()).add(fields["concept"])
        for text in [*listed(fields["caption"]), *listed(fields["tagged"])]:
            of_text.setdefault(text, set()).add(fields["concept"])
    assert [line["query_id"] for line in lines] == [*of_image] and captions == [*of_text]
    kept = 0
    for line, scores in zip(lines, x @ y.T, strict=True):
        right = np.array([bool(of_text[text] & of_image[line["query_id"]]) for text in captions])
        limit = scores[right].max() + 0.05
        found = np.argsort(-scores)[2:40]
        expected = [i for i in found if not right[i] and scores[i] <= limit][:4]
        near = np.abs(np.subtract.outer(scores[found], [limit, *scores[found]])) < 1e-6
        if near.sum() == len(found):  # float32 orders as float64 does
            assert line["negatives"] == [captions[i] for i in expected]
            assert line["scores"] == pytest.approx(scores[expected].tolist(), abs=1e-5)
            kept += len(expected)
    assert kept > 100


def test_the_printed_command_trains(commands: Commands, run: Path, out: str) -> None:
    command = shlex.split(out.strip().splitlines()[-1])
    assert "data.negatives.per_row=1" in command
    assert command[:3] == ["python", "-m", "train"] and f"data.negatives.file={run / 'mined/mined.jsonl'}" in command
    ended = commands.run(*command[2:])
    assert ended.code == 0 and "finished at step 8" in ended.out, ended.out


def test_two_ranks_write_the_same_bytes(commands: Commands, run: Path, out: str, tmp_path: Path) -> None:
    first, other = commands.world(2, "eval.mine", f"run={run}", *COMMAND, f"out={tmp_path}")
    assert (first.code, other.code, other.out) == (0, 0, ""), first.out
    assert first.out.replace(str(tmp_path), str(run / "mined")) == out
    for name in ("mined.jsonl", "mined.json"):
        assert (tmp_path / name).read_bytes() == (run / "mined" / name).read_bytes()


def test_images_for_captions_and_the_printed_command(commands: Commands, run: Path) -> None:
    ended = commands.run("eval.mine", f"run={run}", "mine=pictures", "first_rank=1", "keep=2", "image_key=webp")
    assert ended.code == 0, ended.out
    names, fields = zip(*samples(), strict=True)
    lines = read_lines(run / "mined_pictures" / "mined.jsonl")
    texts = dict.fromkeys(text for each in fields for text in [*listed(each["caption"]), *listed(each["tagged"])])
    assert [line["query_id"] for line in lines] == [id_of(text.encode()) for text in texts]
    assert {name for line in lines for name in line["negatives"]} <= {*names}
    command = shlex.split(ended.out.strip().splitlines()[-1])
    assert "data.negatives.pictures=1" in command and "data.negatives.lists=[mined]" in command
    assert not any(word.startswith("objective") for word in command)  # that of the run
    ended = commands.run(*command[2:])
    assert ended.code == 0 and "finished at step 8" in ended.out, ended.out


def test_other_images_and_their_captions(commands: Commands, run: Path, tmp_path: Path) -> None:
    ended = commands.run("eval.mine", f"run={run}", f"queries={VAL}", f"out={tmp_path / 'new'}", "first_rank=1")
    assert ended.code == 0 and f"data.train={VAL}" in ended.out, ended.out


def test_the_printed_command_has_no_credentials() -> None:
    config = compose_config(["experiment=emoji", 'data.train="https://me:pw123456@host.example/a.tar?sig=abc"'])
    command = training_command(config, Path("run"), Path("mined"), None, None)
    assert "host.example/a.tar" in command and "pw123456" not in command and "abc" not in command


def test_null_unsets_the_rules_and_the_corpus_of_a_run() -> None:
    had = ["data.negatives.mining.margin=1", "data.negatives.mining.max_score=9", "data.negatives.mining.keep=3"]
    config = compose_config(["experiment=topics", "data.passage.corpus=c.jsonl", *had])
    typed = ["run=x", "margin=null", "corpus=null", "keep=null"]
    data = with_mine_options(config, parse_options(MineCommand, typed, "python -m eval.mine")).data
    rules = data.negatives.mining
    assert (rules.margin, rules.max_score, rules.keep, data.passage.corpus) == (None, 9, 3, None)


def test_options_of_questions_are_refused(commands: Commands, run: Path, tmp_path: Path) -> None:
    for option in ("corpus=x", "scores=x", "drop_answers=false", "regex_answers=true"):
        ended = commands.run("eval.mine", f"run={run}", option, f"out={tmp_path / 'none'}")
        refused(ended, 2, option.partition("=")[0], run)
    assert not (tmp_path / "none").exists()
