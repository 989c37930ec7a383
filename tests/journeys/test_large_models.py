"""The recipes of models that need several GPUs, llm_embedder and vit_h14, at toy width on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_decoder, tiny_llama
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, losses
from sentence_transformers import SentenceTransformer

import dyad
from dyad.plan.plan import RunPlan
from dyad.plan.towers import nbytes
from dyad.train.cli.command_line import parse_command_line
from dyad.train.cli.compose import compose_config

# Of Qwen3-Embedding-8B, with 2 of its 36 layers; 193 million weights each, and 1.2 million of adapters
WIDE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32}
WIDE |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_665}
PUBLISHED = [f"Qwen/Qwen3-Embedding-{size}" for size in ("0.6B", "4B", "8B")] + ["intfloat/e5-mistral-7b-instruct"]


@pytest.fixture
def toys(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Recipe → keys by which it runs here, in seconds."""
    tiny_decoder.write(tmp_path / "decoder", layers=2)
    text = {"model.text.name": tmp_path / "decoder", "data.train": "data/samples/topics", "data.negatives.per_row": 0}
    text |= {"data.question.length": 128, "data.passage.length": 64, "chunk_size": 4, "epochs": "null"}
    vision = {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}
    words = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 3}
    clip = tmp_path / "clip.json"
    clip.write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": words}))
    return {
        "llm_embedder": text,
        "vit_h14": {"model.name": clip, "data.train": SHARD, "data.captions": "[caption]", "chunk_size": 4},
    }


@pytest.mark.parametrize("name", ["llm_embedder", pytest.param("vit_h14", marks=pytest.mark.soak)])
def test_a_recipe_at_toy_width_trains_as_without_shards(
    name: str, toys: dict[str, dict[str, Any]], commands: Commands, tmp_path: Path
) -> None:
    keys = {"global_batch_size": 16, "steps": 3, "optim.warmup": 0, "tracking": "local", "tracking.every": 1}
    keys |= {**toys[name], "data.workers": 0, "checkpoint.every": 3, "precision": "fp32", "tracking.report": "false"}

    def run(ranks: int, dist: str, **more: Any) -> list[float]:
        words = [f"{key}={value}" for key, value in {**keys, "dist": dist, "run.name": dist, **more}.items()]
        ended = commands.world(ranks, "train", f"experiment={name}", f"run.dir={tmp_path}/runs", *words)
        assert [e.code for e in ended] == [0] * ranks, ended[0].out
        return losses(tmp_path / "runs" / dist)

    assert run(2, "fsdp2") == pytest.approx(run(1, "ddp", chunk_size=8), rel=1e-5)
    assert len(run(2, "hsdp", precision="bf16")) == 3


def test_texts_of_a_decoder_end_with_their_token_in_training_and_in_its_export(
    commands: Commands, tmp_path: Path
) -> None:
    folder, texts = tiny_llama.write(tmp_path / "llama"), ["a red cat", "the house of the rising sun", "x " * 99]
    keys = {"task": "question_passage", "model": "decoder", "model.text.name": folder, "objective": "dpr"}
    keys |= {"data": "question_passage", "data.train": "data/samples/topics", "data.workers": 0, "steps": 2}
    keys |= {"global_batch_size": 8, "optim.lr": 0.01, "tracking": "local", "tracking.report": "false"}
    words = [f"{key}={value}" for key, value in {**keys, "run.dir": tmp_path, "run.name": "run"}.items()]
    for command in (["train", *words], ["helpers.export", f"run={tmp_path}/run", f"out={tmp_path}/out"]):
        ended = commands.run(*command)
        assert ended.code == 0, ended.out
    model, theirs = dyad.load(str(tmp_path / "run"), "cpu"), SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert theirs.tokenizer(texts[0]).input_ids[-1] == tiny_llama.VOCAB[tiny_llama.END]
    np.testing.assert_allclose(model.encode_passage(texts), theirs.encode_document(texts), atol=1e-5)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_embedders_compose(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = parse_command_line(["experiment=llm_embedder", f"model.text.name={model}", "data.train=train.jsonl"]).words
    config = compose_config(words)
    assert (config.model.text.name, config.model.text.pooling.name, config.dist.name.name) == (model, "last", "fsdp2")
    assert config.data.question.prefix.endswith("\nQuery:") and config.data.question.length == 512


def test_layers_of_an_embedder_of_8_billion_weights_are_planned(tmp_path: Path) -> None:
    tiny_decoder.write(tmp_path / "8B", weights=False)
    settings = tmp_path / "8B" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **WIDE, "layer_types": None}))
    cluster = ["plan.gpus=8", "plan.gpu=h100", "steps=100", "epochs=null", "data.train=train.jsonl"]
    words = ["experiment=llm_embedder", f"model.text.name={tmp_path}/8B", *cluster]
    plan = RunPlan(compose_config(parse_command_line(words).words))
    assert plan.towers.weights / 4e6 == pytest.approx(2 * 193 + 621 + 2 * 1.2, rel=0.01)
    assert plan.towers.moments / nbytes(plan.towers.trained) == pytest.approx(2, rel=0.01)
    stays, _ = plan.memory(plan.pairs, plan.chunk)
    assert stays["weights"][0] == plan.towers.weights / 8
    assert plan.peak(plan.pairs, plan.chunk) < 0.9 * 80 * 2**30
