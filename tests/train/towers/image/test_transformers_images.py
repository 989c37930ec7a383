"""Vision towers of transformers: tiny models of each family, made and saved by its own classes, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as library
from helpers.towers import random_images, refused, trained, with_image
from PIL import Image
from torch import Tensor

from dyad.data.image_text.decode import decode
from dyad.data.image_text.transforms import evaluation_transform
from dyad.train.config import ImageTower, ImageTowerConfig, ModelConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.tower import Tower
from dyad.train.towers.trial import features_on_meta, on_meta

transformers: Any = library  # its annotations are too wide for the type checker
IMAGE = Path(__file__).parents[4] / "docs/images/report.webp"  # not a square
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SHAPE, "image_size": 32, "patch_size": 8}
TEXT = {**SHAPE, "vocab_size": 100}
CROPPED = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
SQUASHED = {"size": {"height": 32, "width": 32}}
# family → configuration, class, processor, its options, and the library's embedding of images
FAMILIES: dict[str, tuple[Any, Any, Any, dict[str, Any], Callable[[Any, Tensor], Tensor]]] = {
    "siglip": (
        transformers.SiglipVisionConfig(**VISION),
        transformers.SiglipVisionModel,
        transformers.SiglipImageProcessor,
        SQUASHED,
        lambda model, x: model(x).pooler_output,
    ),
    "siglip, both towers": (
        transformers.SiglipConfig(vision_config=VISION, text_config=TEXT),
        transformers.SiglipModel,
        transformers.SiglipImageProcessor,
        SQUASHED,
        lambda model, x: model.get_image_features(x).pooler_output,
    ),
    "clip": (
        transformers.CLIPVisionConfig(**VISION),
        transformers.CLIPVisionModel,
        transformers.CLIPImageProcessor,
        {**CROPPED, "size": {"shortest_edge": 32}},
        lambda model, x: model(x).pooler_output,
    ),
    "clip, both towers": (
        transformers.CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=16),
        transformers.CLIPModel,
        transformers.CLIPImageProcessor,
        CROPPED,
        lambda model, x: model.get_image_features(x).pooler_output,
    ),
    "dinov2": (
        transformers.Dinov2Config(**VISION, mlp_ratio=2),
        transformers.Dinov2Model,
        transformers.BitImageProcessor,
        CROPPED,
        lambda model, x: model(x).last_hidden_state[:, 0],
    ),
    "vit": (
        transformers.ViTConfig(**VISION),
        transformers.ViTModel,
        transformers.ViTImageProcessor,
        SQUASHED,
        lambda model, x: model(x).last_hidden_state[:, 0],
    ),
    "resnet": (
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        transformers.ResNetModel,
        transformers.ViTImageProcessor,
        SQUASHED,
        lambda model, x: model(x).pooler_output.flatten(1),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for family, (settings, model, processor, options, _) in FAMILIES.items():
        torch.manual_seed(0)
        made[family] = str(tmp_path_factory.mktemp("model"))
        model(settings).save_pretrained(made[family])
        processor(**options).save_pretrained(made[family])
    return made


def tower_of(tmp_path: Path, folder: str, embed_dim: int | None = 16, **options: Any) -> ModelConfig:
    of_both = {name: options.pop(name) for name in ("grad_checkpointing", "frozen_cache_mb") if name in options}
    config = with_image(tmp_path, ImageTowerConfig(kind=ImageTower.transformers, name=folder, **options), **of_both)
    config.embed_dim = embed_dim
    return config


def built(tmp_path: Path, folder: str, **options: Any) -> ImageTextModel:
    torch.manual_seed(0)
    return build_image_text(tower_of(tmp_path, folder, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_embedded_as_its_library_does(family: str, folders: dict[str, str], tmp_path: Path) -> None:
    """And otherwise when its weights are left out."""
    _, kind, _, _, embed = FAMILIES[family]
    theirs = kind.from_pretrained(folders[family]).eval()
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folders[family])
    whole = "clip, both" in family  # its projection is taken too
    ours = built(tmp_path, folders[family], embed_dim=None if whole else 16)
    tower = ours.towers.x_tower.eval()
    assert isinstance(tower, Tower)
    pixels = evaluation_transform(decode(IMAGE.read_bytes(), 10**8), ours.image)[None]
    with torch.no_grad():
        found = tower(pixels) if whole else tower.features(pixels)
        given = processor(Image.open(IMAGE).convert("RGB"), return_tensors="pt").pixel_values
        torch.testing.assert_close(tower.prepare(pixels), given, rtol=0, atol=1e-5)
        torch.testing.assert_close(found, embed(theirs, given), rtol=0, atol=1e-5)
    assert tower(pixels).shape == (1, 16)
    meta = on_meta(tower)
    assert features_on_meta(meta, pixels.to("meta")).shape == tower.features(pixels).shape
    scratch = build_image_text(tower_of(tmp_path, folders[family], from_scratch=True)).towers.x_tower.eval()
    assert isinstance(scratch, Tower) and not torch.allclose(scratch.features(pixels), tower.features(pixels))


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2", "vit"])
def test_images_of_another_size(family: str, folders: dict[str, str], tmp_path: Path) -> None:
    model = built(tmp_path, folders[family], image_size=48)
    assert model.image.size == 48 and model.image.resized == (60 if family == "dinov2" else None)
    assert model.towers.x_tower(random_images(2, 48)).shape == (2, 16)


@pytest.mark.parametrize("family", ["siglip, both towers", "dinov2", "vit"])
def test_frozen_and_partly_frozen_towers(family: str, folders: dict[str, str], tmp_path: Path) -> None:
    frozen = built(tmp_path, folders[family], frozen=True, frozen_cache_mb=8).towers.x_tower
    assert trained(frozen) == {"projection.weight"}
    assert torch.equal(frozen(random_images(3, 32)), frozen(random_images(3, 32)))  # from the cache
    partly = trained(built(tmp_path, folders[family], frozen=True, unlocked_groups=1).towers.x_tower)
    assert any(".2." in name for name in partly) and not any(".1." in name or "embeddings" in name for name in partly)


def test_gradient_checkpointing_and_compiling_change_no_value(folders: dict[str, str], tmp_path: Path) -> None:
    for family in ("siglip, both towers", "clip", "dinov2"):
        found = []
        for options in ({}, {"grad_checkpointing": True}):
            tower = built(tmp_path, folders[family], **options).towers.x_tower
            tower(random_images(2, 32)).square().sum().backward()
            found.append({name: p.grad for name, p in tower.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        torch.testing.assert_close(found[0], found[1])
        want = tower(random_images(2, 32))
        tower.compile(backend="eager")
        torch.testing.assert_close(tower(random_images(2, 32)), want)


def test_what_cannot_be_a_tower_is_one_line(folders: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**VISION)).save_pretrained(folder)
    refused(tower_of(tmp_path, str(folder)), folder, "AutoImageProcessor")
    oblong = transformers.ViTImageProcessor(size={"height": 32, "width": 48})
    oblong.save_pretrained(folder)
    refused(tower_of(tmp_path, str(folder)), folder)
    transformers.ViTImageProcessor(**SQUASHED, do_rescale=False).save_pretrained(folder)  # pixels of 0 to 255
    refused(tower_of(tmp_path, str(folder)), folder)
    transformers.ViTImageProcessor(**SQUASHED).save_pretrained(folder)
    refused(tower_of(tmp_path, str(folder)), "32 x 32")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 10**9}))
    refused(tower_of(tmp_path, str(folder)), "num_hidden_layers")
    refused(tower_of(tmp_path, str(tmp_path / "none")), tmp_path / "none")
    refused(tower_of(tmp_path, "pkg:nope/x"), "model.image.name=pkg:nope/x", "nope")
    refused(with_image(tmp_path, ImageTowerConfig(kind=ImageTower.transformers)), "model.image.name")
    refused(tower_of(tmp_path, folders["vit"], patch_dropout=0.5), "patch_dropout=0.5")
