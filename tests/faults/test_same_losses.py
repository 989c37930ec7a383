"""The losses of a run on any number of processes and with any chunks, also of towers with batch norms."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Jobs
from helpers.tiny_runs import losses, records
from safetensors.torch import load_file
from ways import run_in_ways

RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 32}  # torch's batch norms
EFFICIENTNET = {"image_size": 64, "timm_model_name": "test_efficientnet", "timm_pool": "abs_attn", "timm_proj": ""}
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2}
SCRATCH = {
    "experiment": "emoji_scratch",
    "model": "tiny_clip_gn",
    "model.image.image_size": "null",
    "model.image.widths": [32, 64, 128, 192],  # the default: the model has no use for it
    "model.text.name": "null",
    "model.embed_dim": 256,
    "data.workers": 1,
    "eval.suite": "[]",
}


def normed(vision: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Keys for a tower with batch norms."""
    path = folder / "normed.json"
    path.write_text(json.dumps({"embed_dim": 256, "vision_cfg": vision, "text_cfg": TEXT}))
    return {**SCRATCH, "model.name": path}


def test_the_recipe_from_scratch(jobs: Jobs) -> None:
    """Its texts are cut to what a chunk holds, by sharded towers too."""
    keys = {**SCRATCH, "steps": 3, "global_batch_size": 24}
    run_in_ways(jobs, keys, [(1, "null", "fsdp2"), (3, 4, "fsdp2")])


def test_batch_norms_in_one_chunk_also_after_a_resume(jobs: Jobs, tmp_path: Path) -> None:
    """timm's, with their activations."""
    keys = {**normed(EFFICIENTNET, tmp_path), "steps": 4, "global_batch_size": 50, "checkpoint.every": 2}
    one, two = run_in_ways(jobs, keys, [(1, "null", "ddp"), (2, 25, "ddp")])
    three = jobs.run(3, {**keys, "resume": two / "checkpoints/step_00000002", "run.name": "resumed"})
    assert [r["train/loss"] for r in records(three)] == pytest.approx(losses(one)[2:], abs=1e-5)
    ends = [load_file(run / "checkpoints/step_00000004/model.safetensors") for run in (one, two, three)]
    statistics = [name for name in ends[0] if name.endswith(("running_mean", "running_var"))]
    assert statistics
    for end in ends[1:]:
        assert all(torch.allclose(end[name], ends[0][name], rtol=1e-4, atol=1e-6) for name in statistics)


def test_batch_norms_in_several_chunks_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(2, {**normed(RESNET, tmp_path), "chunk_size": 8})
    outcome = job.ends()
    assert outcome.codes == [2, 2] and outcome.out.count("error:") == 1 and not job.run.exists()
    for words in ("19 batch norms", "chunk_size", "model.batch_norm=per_chunk", "model.batch_norm=frozen"):
        assert words in outcome.out


@pytest.mark.soak
def test_the_recipe_from_scratch_over_20_steps(jobs: Jobs) -> None:
    keys = {**SCRATCH, "steps": 20, "global_batch_size": 256}
    run_in_ways(jobs, keys, [(world, chunk, "ddp") for world in (1, 2, 4) for chunk in ("null", 8, 32)])


@pytest.mark.soak
def test_batch_norms_of_a_resnet(jobs: Jobs, tmp_path: Path) -> None:
    """Later steps amplify rounding: after 20, torch's own float32 is 4e-4 from its float64 in one process."""
    keys = {**normed(RESNET, tmp_path), "steps": 6, "global_batch_size": 256}
    run_in_ways(jobs, keys, [(world, "null", "ddp") for world in (1, 2, 4)])
