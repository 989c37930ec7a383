"""Models of which speed is measured: ViT-B-32 and MiniLM with random weights; tiny ones of the same kinds on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dyad.data.batch import Batch
from dyad.train.config import ModelConfig, OptimConfig, Precision, Task, TextTower, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import Tower, TwoTower
from gpu.needs import packages

TOKENS = {"cpu": 8, "cuda": 64}  # of a text of MiniLM
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
TINY_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def vit(device: str, folder: Path, **options: Any) -> Any:
    from helpers.towers import config_file

    from dyad.train.towers.build import build_image_text

    torch.manual_seed(0)
    name = "ViT-B-32" if device == "cuda" else config_file(folder)
    return build_image_text(ModelConfig(name=name, **options), load_pretrained=False).towers


class ClipText(nn.Module):
    """The text tower of CLIP as transformers has it: tokens (b, L) → (b, width)."""

    def __init__(self, layers: int, width: int) -> None:
        from transformers import CLIPTextConfig, CLIPTextModel

        super().__init__()
        config = CLIPTextConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
        self.model = CLIPTextModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).pooler_output


def vit_of_timm(device: str, folder: Path) -> TwoTower:
    """ViT-B-32 where open_clip is missing: the same layers, of timm and transformers."""
    import timm

    from dyad.data.image_text.transforms import ImageSpec
    from dyad.train.towers.image.pixels import NormalizePixels

    torch.manual_seed(0)
    size, depth, width = (224, 12, 512) if device == "cuda" else (32, 1, 32)
    name = "vit_base_patch32_224" if device == "cuda" else "vit_tiny_patch16_224"
    trunk = timm.create_model(name, img_size=size, depth=depth, num_classes=0)
    prepare = NormalizePixels(ImageSpec(size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    x_tower = Tower(trunk, nn.LazyLinear(width, bias=False), prepare=prepare)
    x_tower(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    return TwoTower(x_tower, Tower(ClipText(depth, width), nn.Linear(width, width, bias=False)))


def minilm(device: str, folder: Path) -> Any:
    """One encoder for questions and passages, as all-MiniLM-L6-v2 has it."""
    from helpers.tiny_bert import LETTERS
    from transformers import BertConfig, BertModel, BertTokenizer

    from dyad.train.towers.build import build_model

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    BertModel(BertConfig(**(MINILM if device == "cuda" else TINY_BERT))).save_pretrained(folder)
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    config = ModelConfig(name=None, embed_dim=None)
    config.text.kind, config.text.name = TextTower.transformers, str(folder)
    return build_model(TrainConfig(task=Task.question_passage, model=config), load_pretrained=False).towers


def image_pairs(count: int, device: str) -> Batch:
    size, tokens = (224, 77) if device == "cuda" else (32, 12)
    x = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    y = torch.randint(1, 49000, (count, tokens))
    y[:, -1] = 49407  # the end of a text: what follows it is not computed
    return pairs(x, y, device)


def text_pairs(count: int, device: str) -> Batch:
    """All of the same length, without padding."""
    x, y = torch.randint(5, 30000, (2, count, TOKENS[device]))
    return pairs(x, y, device)


def pairs(x: torch.Tensor, y: torch.Tensor, device: str) -> Batch:
    ids = torch.arange(len(x))
    rows = Batch(x, y, ids, ids, ids)
    return rows.pin_memory() if device == "cuda" else rows


MODELS = {
    "ViT-B-32": (vit, image_pairs),
    "ViT-B-32 of timm": (vit_of_timm, image_pairs),
    "MiniLM": (minilm, text_pairs),
}
NEEDED = {
    "ViT-B-32": packages("open_clip", "transformers", "timm"),
    "ViT-B-32 of timm": packages("timm", "transformers"),
    "MiniLM": packages("transformers"),
}
MEASURED = [pytest.param(name, marks=NEEDED[name]) for name in MODELS]


def step_of(model: Any, count: int, device: str = "cuda", **options: Any) -> TrainStep:
    world = World(device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    config = TrainConfig(global_batch_size=count, precision=Precision.bf16, optim=OptimConfig(), **options)
    objective = build_objective("clip").to(world.device)
    return TrainStep([LossTerm(model.to(world.device), objective, config, 10**6, world)])
