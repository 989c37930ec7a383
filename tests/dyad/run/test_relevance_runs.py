"""Runs with the relevance of pairs, data.relevance: any number of processes, images and streams, clear refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import Commands
from helpers.messages import raises
from helpers.shards import image, write_tar
from helpers.tiny_runs import SHARD, losses, refused
from helpers.topics import arguments, write_topics

from dyad.data.base.errors import ConfigError
from dyad.run.checks import check_arguments
from dyad.run.components import build_components
from dyad.train.cli.compose import compose_config
from dyad.train.config_rules import validate
from dyad.train.distributed.world import World


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with judgements of the grades 1 to 3."""
    topics = write_topics(tmp_path_factory.mktemp("graded") / "topics")
    qrels = topics / "qrels" / "train.tsv"
    first, *lines = qrels.read_text().splitlines()
    graded = [f"{line.rpartition(chr(9))[0]}\t{1 + number % 3}" for number, line in enumerate(lines)]
    qrels.write_text("\n".join([first, *graded, ""]))
    return topics


def test_the_same_losses_on_any_number_of_processes(
    commands: Commands, exact_bert: Path, graded: Path, tmp_path: Path
) -> None:
    """Of own and further positives. The grades matter, and enter the name of a run."""
    runs, chosen = tmp_path / "runs", {"data.passage.positives": "all", "steps": 3, "tracking.report": "false"}
    keys = {**chosen, "data.relevance": "score"}
    for size, name, more in ((1, "one", {}), (2, "two", {"chunk_size": 2})):
        told = arguments(exact_bert, graded, runs, {**keys, "run.name": name, **more})
        ended = commands.world(size, *told)
        assert [e.code for e in ended] == [0] * size, ended
    assert losses(runs / "two") == pytest.approx(losses(runs / "one"), abs=1e-6)
    ended = commands.run(*arguments(exact_bert, graded, runs, chosen))
    assert ended.code == 0, ended.out
    (unnamed,) = {*runs.iterdir()} - {runs / "one", runs / "two"}
    assert abs(losses(unnamed)[0] - losses(runs / "one")[0]) > 0.1
    refused(commands.run(*arguments(exact_bert, graded, runs, {**chosen, "run.name": "one"})), 2, "data.relevance")


def test_no_run_folder_where_it_is_refused(commands: Commands, exact_bert: Path, graded: Path, tmp_path: Path) -> None:
    lines = tmp_path / "pairs.jsonl"
    rows = [{"anchor": f"a {n}", "positive": f"b {n}", "score": n / 8} for n in range(9)]
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {"data.relevance": "score", "data.train": lines}
    told = arguments(exact_bert, graded, tmp_path / "runs", keys)
    refused(commands.run(*told), 3, "pairs.jsonl", "line 1", "score", "0.0", "relevance=score on_error=skip")
    told = arguments(exact_bert, graded, tmp_path / "runs", {**keys, "objective.positives": "merge"})
    refused(commands.run(*told), 2, "objective.positives=merge", "each", "exclude")
    assert not (tmp_path / "runs").exists()
    packed = ["data", "pack", str(lines), f"out={tmp_path / 'packed'}", "to=dpr", "relevance=score", "on_error=skip"]
    done = commands.run(*packed)
    assert done.code == 0 and 'data.relevance="relevance"' in done.out.replace("'", ""), done.out
    keys = {"data.relevance": "relevance", "data.train": tmp_path / "packed" / "train.json", "steps": 1}
    ended = commands.run(*arguments(exact_bert, graded, tmp_path / "runs", keys))
    assert ended.code == 0, ended.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("objective=clip objective.duplicates=positive", ("objective.duplicates=positive", "mask")),
        ("objective=siglip objective.duplicates=positive", ("objective.duplicates=positive", "mask")),
        ("objective=clip objective.positives=merge", ("objective.positives=merge", "each", "exclude")),
        ("task=labelled objective=cross_entropy", ("data.relevance=w", "task=image_text or question_passage")),
        ("task=views objective=simclr data=simclr", ("data.relevance=w", "task=image_text or question_passage")),
    ],
)
def test_what_has_no_place_for_it_is_refused_before_anything_is_read(words: str, named: tuple[str, ...]) -> None:
    with raises(ConfigError, *named):
        check_arguments([*words.split(), "data.relevance=w", f"data.train={SHARD}", "steps=2"])


IMAGES = """experiment=emoji_scratch model.image.image_size=16 model.image.widths=[8,8] model.embed_dim=8 steps=2
    global_batch_size=8 eval.suite=[] data.captions=[caption] data.caption_weights=null data.text_key=null""".split()
FAMILIES = ["siglip", "coce", "spectral", "sogclr", "clip"]  # the others: tests/train/losses/objectives


def test_a_step_of_every_family(tmp_path: Path) -> None:
    """On images: weights of 1 give the bits of none, others another loss."""
    members: list[tuple[str, Any]] = []
    for n in range(8):
        fields = json.dumps({"caption": f"thing {n}", "similarity": (n + 1) / 8, "one": 1}).encode()
        members += [(f"{n}.png", image(n, (16, 16))), (f"{n}.json", fields)]
    shard = write_tar(tmp_path / "a.tar", members)
    run = [*IMAGES, f"data.train={shard}"]

    def loss(name: str, relevance: str) -> float:
        config = compose_config([*run, f"objective={name}", f"data.relevance={relevance}"])
        validate(config, 1)
        components = build_components(config, World())
        batch = components.data.dataset.__getitems__([(0, i) for i in range(8)])  # type: ignore[union-attr]
        assert (batch.relevance is None) == (relevance == "null")
        return components.step(batch, 0)["loss"]

    found = {name: loss(name, "similarity") for name in FAMILIES}
    assert all(map(math.isfinite, found.values()))
    assert loss("clip", "one") == loss("clip", "null") > found["clip"] + 0.1


def test_a_stream_has_it_too(tmp_path: Path) -> None:
    members: list[tuple[str, Any]] = []
    for n in range(12):
        fields = json.dumps({"caption": f"thing {n}", "similarity": 2.0 if n == 3 else (n + 1) / 16}).encode()
        members += [(f"{n:02d}.png", image(n, (16, 16))), (f"{n:02d}.json", fields)]
    shard = write_tar(tmp_path / "a.tar", members)
    run = [*IMAGES, f"data.train={shard}"]
    components = build_components(compose_config([*run, "data.mode=stream", "data.relevance=similarity"]), World())
    data: Any = components.data.dataset
    data.begin(0, 1, 0, None)
    (batch,) = data.batches(0, 1, workers=0, timeout=0.0)
    assert batch.relevance.dtype == torch.float32 and len(batch.relevance) == 8
    assert {*batch.relevance.tolist()} <= {(n + 1) / 16 for n in range(12) if n != 3}
