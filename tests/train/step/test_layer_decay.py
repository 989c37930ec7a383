"""Learning rates by layer: timm's own for its models; open_clip's towers, transformers and the small CNN by hand."""

import json
from pathlib import Path

import open_clip
import pytest
import timm
import torch
from helpers.runs import TINY
from timm.optim import param_groups_layer_decay  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from transformers import BertConfig, BertModel

from dyad.train.cli.compose import compose_config
from dyad.train.config import OptimConfig, Pooling
from dyad.train.step.optim import build_optimizer, layer_depths, learning_rate_scales
from dyad.train.towers.build import build_image_text
from dyad.train.towers.text.pooled import Pooled


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a tower"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_of_a_timm_model_the_rates_are_timms(name: str, inside: bool) -> None:
    model = timm.create_model(name, num_classes=0)
    depths = layer_depths(nn.ModuleDict({"trunk": model}) if inside else model)
    top = max(depths.values())
    theirs = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.75)
        for parameter in group["params"]
    }
    for parameter_name, parameter in model.named_parameters():
        own = depths[f"trunk.{parameter_name}" if inside else parameter_name]
        assert 0.75 ** (top - own) == pytest.approx(theirs[id(parameter)])


def test_of_open_clips_towers_and_transformers() -> None:
    clip = open_clip.create_model("ViT-B-32-256", force_custom_text=True, device=torch.device("meta"))
    depths = layer_depths(clip.visual)  # pyright: ignore[reportArgumentType]
    assert {depths[name] for name in ("class_embedding", "positional_embedding", "conv1.weight", "ln_pre.bias")} == {0}
    assert depths["transformer.resblocks.0.ln_1.weight"] == 1
    assert depths["transformer.resblocks.11.mlp.c_fc.weight"] == 12 and depths["ln_post.weight"] == 13
    depths = layer_depths(clip.text)  # pyright: ignore[reportArgumentType]
    assert depths["token_embedding.weight"] == 0 and depths["transformer.resblocks.11.attn.in_proj_weight"] == 12
    assert depths["ln_final.weight"] == 13

    resnet = open_clip.create_model("RN50", force_custom_text=True, device=torch.device("meta"))
    depths = layer_depths(resnet.visual)  # pyright: ignore[reportArgumentType]
    assert depths["conv3.weight"] == 0 and depths["layer1.0.conv1.weight"] == 1 and depths["layer4.2.bn3.bias"] == 16

    shape = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8)
    depths = layer_depths(Pooled(BertModel(shape), Pooling.cls, 0))
    found = {name: depths[f"encoder.{name}"] for name, _ in BertModel(shape).named_parameters()}
    assert found["embeddings.word_embeddings.weight"] == 0 and found["pooler.dense.weight"] == 4
    assert found["encoder.layer.2.output.dense.weight"] == 3


def test_the_scales_reach_the_groups_of_the_optimiser(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    config = compose_config(["data=emoji", "steps=1", f"model.name={tmp_path / 'tiny.json'}", "optim.layer_decay=0.5"])
    towers = build_image_text(config.model).towers
    scales = learning_rate_scales(towers, 0.5)
    optimizer = build_optimizer(towers.named_parameters("towers"), config.optim, scales)
    found = {
        id(p): (group["lr_scale"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in towers.named_parameters("towers"):
        if not parameter.requires_grad:
            continue
        scale, decay = found[id(parameter)]
        if "x_tower.trunk.conv1" in name:
            assert (scale, decay) == (0.125, config.optim.weight_decay)  # two blocks and the last norm above it
        if "x_tower.trunk.transformer.resblocks.1.ln_1" in name:
            assert (scale, decay) == (0.5, 0.0)
        if "y_tower.trunk.token_embedding" in name:
            assert scale == 0.25
        if "projection" in name:
            assert scale == 1.0
    assert len(optimizer.param_groups) == 2 * 4  # each scale with and without decay
    plain = build_optimizer(towers.named_parameters("towers"), OptimConfig())
    assert [group["lr_scale"] for group in plain.param_groups] == [1.0, 1.0]
