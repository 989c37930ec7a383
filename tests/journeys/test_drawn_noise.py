"""NCE whose noise is drawn, by command: the density that it learns, resume, ranks, chunks, files, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import Commands, Ended
from helpers.density import Density
from helpers.tiny_runs import last_weights, losses, refused
from helpers.topics import arguments, write_topics

from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.data.shards.content_keys import content_key

SMALL = ["global_batch_size=64", "optim.schedule=const", "tracking.every=1"]


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> Density:
    return Density.write(tmp_path_factory.mktemp("density"), contexts=2, items=8, rows=150)


def train(commands: Commands, density: Density, name: str, *words: str, ranks: int = 1) -> list[float]:
    line = density.arguments(*SMALL, "objective.noise=unigram", *words, f"run.name={name}")
    for ended in commands.world(ranks, *line) if ranks > 1 else [commands.run(*line)]:
        assert ended.code == 0, ended.out
    return losses(density.folder / "runs" / name)


def test_a_known_density_and_its_normaliser_are_recovered(commands: Commands, density: Density) -> None:
    """On a small catalogue, in seconds; python -m tests.benchmarks.nce_density holds it to 0.02 on a larger one."""
    train(commands, density, "density", "objective.noise=uniform", "steps=120", "optim.schedule=cosine")
    variation, log_z = density.learnt("density")
    assert variation.max() < 0.06 and np.abs(log_z).max() < 0.1, (variation, log_z)


def test_resumed_runs_ranks_and_chunks_draw_the_same(commands: Commands, density: Density) -> None:
    words = ["objective.k=50", "optim.lr=0.01"]
    whole = train(commands, density, "whole", *words, "steps=6")
    train(commands, density, "parts", *words, "steps=3")
    assert train(commands, density, "parts", *words, "steps=6") == whole
    assert last_weights(density.folder / "runs/parts") == last_weights(density.folder / "runs/whole")
    np.testing.assert_allclose(train(commands, density, "two", *words, "steps=6", ranks=2), whole, rtol=2e-6)
    chunks = train(commands, density, "chunks", *words, "steps=6", "chunk_size=10", "data.workers=2")
    np.testing.assert_allclose(chunks, whole, rtol=2e-6)
    assert train(commands, density, "seed", *words, "steps=6", "seed=1")[0] != whole[0]


def write_file(density: Density, items: int, step: float = 0.3) -> Path:
    keys = np.sort(np.array([content_key(f"item {n}".encode()) for n in range(items)]))
    path = density.folder / f"{items}.safetensors"
    write_log_weights(LogWeights(str(path), LOG_Q, keys, np.arange(items) * np.float64(step)))
    return path


def test_a_file_of_log_q(commands: Commands, density: Density) -> None:
    """Other numbers in it are other data for a resumed run; a file of other items leaves no run folder."""

    def run(file: Path, *words: str) -> Ended:
        line = density.arguments(*SMALL, "objective.noise=file", f"objective.noise_file={file}", *words)
        return commands.run(*line)

    assert run(write_file(density, 8), "run.name=file", "steps=2").code == 0
    refused(run(write_file(density, 8, step=0.2), "run.name=file", "steps=4"), 2, "numbers by content key")
    assert run(write_file(density, 8), "run.name=file", "steps=4").code == 0
    for items in (7, 9):
        file = write_file(density, items)
        refused(run(file, "run.name=none", "steps=2"), 3, file)
    assert not (density.folder / "runs/none").exists()


def test_passages_of_questions(commands: Commands, models: Path, tmp_path: Path) -> None:
    """Noise of a corpus; what cannot be drawn is refused before there is a run folder."""
    topics = write_topics(tmp_path / "topics")
    keys = {"objective": "nce", "objective.noise": "unigram", "objective.k": 12, "steps": 2}
    ended = commands.run(*arguments(models / "bert", topics, tmp_path / "runs", keys))
    assert ended.code == 0, ended.out
    assert "noise: 12 items are drawn for each batch, from 192" in ended.out
    (run,) = (tmp_path / "runs").iterdir()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(
        np.isfinite(r["train/log_z"]) and 0 < r["train/noise_probability"] < 1 for r in logged if "train/loss" in r
    )
    for wrong, named in (
        ({"data.passage.positives": "all"}, "noise=unigram"),
        ({"task": "views", "data.items": "texts"}, "objective.noise=unigram"),
        ({"objective.density": "uniform"}, "objective.density"),
        ({"objective.k": 2.5}, "objective.k=2.5"),
        ({"objective.noise": "file"}, "objective.noise_file"),
        ({"objective.duplicates": "mask"}, "duplicates=mask"),
        ({"also.more": "'objective=nce objective.noise=uniform'", "objective.noise": "batch"}, "also.more"),
    ):
        ended = commands.run(*arguments(models / "bert", topics, tmp_path / "none", {**keys, **wrong}))
        refused(ended, 2, named)
    assert not (tmp_path / "none").exists()
