"""The losses of a run on any number of processes and with any chunks, also of towers with batch norms."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs
from helpers_tiny import losses

RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 32}  # 19 batch norms
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2}
SCRATCH = {
    "experiment": "emoji_scratch",
    "model": "tiny_clip",
    "model.image.image_size": "null",
    "model.text.name": "null",
    "model.embed_dim": 256,
    "data.workers": 1,
    "eval.suite": "[]",
}


@pytest.fixture
def resnet(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "resnet.json"
    path.write_text(json.dumps({"embed_dim": 256, "vision_cfg": RESNET, "text_cfg": TEXT}))
    return {**SCRATCH, "model.name": path}


def same(jobs: Jobs, keys: dict[str, Any], ways: list[tuple[int, object]]) -> None:
    """Losses agree to 1e-5 for all (processes, chunk_size) of `ways`."""
    runs = [
        jobs.run(world, {**keys, "chunk_size": chunk, "run.name": f"on-{world}-by-{chunk}"}) for world, chunk in ways
    ]
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), abs=1e-5), run.name


def test_the_recipe_from_scratch(jobs: Jobs) -> None:
    same(jobs, {**SCRATCH, "steps": 4, "global_batch_size": 48}, [(1, "null"), (2, 8), (4, "null")])


def test_batch_norms_in_one_chunk_and_no_more(jobs: Jobs, resnet: dict[str, Any]) -> None:
    keys = {**resnet, "steps": 4, "global_batch_size": 50}  # 13 or 12 pairs on each of four
    same(jobs, keys, [(1, "null"), (2, "null"), (4, 13)])
    job = jobs.start(2, {**keys, "run.name": "chunks", "chunk_size": 8})
    outcome = job.ends()
    assert outcome.codes == [2, 2] and outcome.out.count("error:") == 1 and not job.run.exists()
    for words in ("19 batch norms", "chunk_size", "model.batch_norm=per_chunk", "model.batch_norm=frozen"):
        assert words in outcome.out


@pytest.mark.soak
def test_the_recipe_from_scratch_over_20_steps(jobs: Jobs) -> None:
    keys = {**SCRATCH, "steps": 20, "global_batch_size": 256}
    same(jobs, keys, [(world, chunk) for world in (1, 2, 4) for chunk in ("null", 8, 32)])


@pytest.mark.soak
def test_batch_norms_over_20_steps(jobs: Jobs, resnet: dict[str, Any]) -> None:
    same(jobs, {**resnet, "steps": 20, "global_batch_size": 256}, [(1, "null"), (2, "null"), (4, "null")])
