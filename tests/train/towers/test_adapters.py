"""Adapters of towers of images and open_clip's texts: what trains, that nothing drifts, what is merged or refused."""

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from helpers.towers import ARCHITECTURES, VIT, cnn, config_file, random_images, refused, timm_tower, trained, with_image
from safetensors.torch import save_file
from torch import nn

from dyad.export.open_clip import open_clip_state_dict
from dyad.train.config import ImageTowerConfig, ModelConfig
from dyad.train.towers.adapters import merged
from dyad.train.towers.build import build_image_text
from dyad.train.towers.image.pixels import PatchDropout
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.tower import Tower
from dyad.train.towers.trial import on_meta

TIMM_VIT = {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear"}


def adapted(config: ModelConfig, **options: Any) -> ImageTextModel:
    """Built from one seed, with adapters that do something."""
    config.image.lora_rank = 4
    for name, value in options.items():
        setattr(config.image, name, value)
    torch.manual_seed(0)
    model = build_image_text(config)
    for name, parameter in model.towers.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def kinds(folder: Path) -> dict[str, ModelConfig]:
    wrapped = {**ARCHITECTURES["timm"], "vision_cfg": TIMM_VIT}
    (folder / "wrapped.json").write_text(json.dumps(wrapped))
    return {
        "open_clip": ModelConfig(name=config_file(folder)),
        "open_clip, a trunk of timm": ModelConfig(name=str(folder / "wrapped.json")),
        "timm": with_image(folder, timm_tower(name="test_vit")),
    }


@pytest.mark.parametrize("kind", ["open_clip", "open_clip, a trunk of timm", "timm"])
def test_adapters_alone_train_and_are_merged(kind: str, tmp_path: Path) -> None:
    plain = build_image_text(kinds(tmp_path)[kind])
    model = adapted(kinds(tmp_path)[kind])
    tower = model.towers.x_tower
    assert isinstance(tower, Tower) and isinstance(plain.towers.x_tower, Tower)
    assert all("lora_" in name or name.startswith("projection.") for name in trained(tower))
    assert len([name for name in trained(tower) if "lora_B" in name]) >= 2
    x = random_images(2, model.image.size)
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    tower(x).square().sum().backward()
    assert all(p.grad is not None for p in tower.parameters() if p.requires_grad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower.state_dict().items())  # nothing drifts
    with torch.no_grad():
        want = tower.trunk(tower.prepare(x))
        whole = merged(tower.trunk)
        torch.testing.assert_close(whole(tower.prepare(x)), want)
        torch.testing.assert_close(tower.trunk(tower.prepare(x)), want)  # the model itself stays as it is
        assert not torch.allclose(plain.towers.x_tower.to(x.device).trunk(tower.prepare(x)), want, atol=1e-3)
    assert set(whole.state_dict()) == set(plain.towers.x_tower.trunk.state_dict())
    assert on_meta(tower)(x.to("meta")).shape == (2, 16)
    again = adapted(kinds(tmp_path)[kind]).towers
    again.load_state_dict(model.towers.state_dict())  # as a checkpoint does
    torch.testing.assert_close(again.x_tower(x), tower(x))


def test_adapters_of_texts_alone_train_and_are_merged(tmp_path: Path) -> None:
    """A text tower runs at the length of its batch, with adapters too."""
    config = ModelConfig(name=config_file(tmp_path))
    torch.manual_seed(0)
    plain = build_image_text(config).towers.y_tower
    config.text.lora_rank = 4
    torch.manual_seed(0)
    model = build_image_text(config)
    tower = model.towers.y_tower
    assert isinstance(tower, Tower)
    assert all("lora_" in name or name.startswith("projection.") for name in trained(tower))
    assert len([name for name in trained(tower) if "lora_B" in name]) >= 2
    for name, parameter in tower.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    tokens = model.tokenize(["a cat", "two dogs and a rather long text"])
    tower(tokens).square().sum().backward()
    assert all(p.grad is not None for p in tower.parameters() if p.requires_grad)
    with torch.no_grad():
        want, whole = tower.trunk(tokens), merged(tower.trunk)
        torch.testing.assert_close(whole(tokens), want)
        assert not any("lora_" in name for name in whole.state_dict())
        assert isinstance(plain, Tower) and set(whole.state_dict()) == set(plain.trunk.state_dict())
        assert not torch.allclose(plain.trunk(tokens), want, atol=1e-3)


def test_open_clip_loads_what_adapters_were_merged_into(tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path))
    config.text.lora_rank = 4
    model = adapted(config, lora_targets=["attn", "c_fc"])
    assert sum("c_fc" in name for name in trained(model.towers.x_tower)) == 6
    weights = {**open_clip_state_dict(model), "logit_scale": torch.tensor(1.0)}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "w.safetensors")
    library: Any = open_clip
    theirs = library.create_model(Path(config_file(tmp_path)).stem, str(tmp_path / "w.safetensors")).eval()
    x = random_images(2, 32)
    tower = model.towers.eval().x_tower
    with torch.no_grad():
        torch.testing.assert_close(theirs.encode_image(tower.prepare(x)), tower(x))  # type: ignore[operator]
        tokens = model.tokenize(["a cat", "two dogs"])
        torch.testing.assert_close(theirs.encode_text(tokens), model.towers.y_tower(tokens))


def test_where_adapters_cannot_be_is_refused(tmp_path: Path) -> None:
    def without(named: str, config: ModelConfig, **options: Any) -> None:
        config.image.lora_rank = 4
        for name, value in options.items():
            setattr(config.image, name, value)
        refused(config, named)

    vit = kinds(tmp_path)["open_clip"]
    without("attn, c_fc, c_proj", vit, lora_targets=["out_proj"])  # a layer that is not called
    without("lora_rank", with_image(tmp_path, cnn()))
    without("names no layer", with_image(tmp_path, timm_tower(name="test_vit")), lora_targets=[])
    without("lora_targets=['x']", with_image(tmp_path, timm_tower(name="test_vit")), lora_targets=["x"])
    config = ModelConfig(name=config_file(tmp_path))
    config.text.lora_rank, config.text.lora_targets = 4, ["out_proj"]
    refused(config, "model.text.lora_targets", "attn, c_fc, c_proj")


# Patch dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["open_clip", "open_clip, a trunk of timm", "timm"])
def test_patches_are_left_out_in_training_only(kind: str, tmp_path: Path) -> None:
    config = kinds(tmp_path)[kind]
    torch.manual_seed(0)
    whole = build_image_text(config).towers.eval().x_tower
    config.image.patch_dropout = 0.5
    torch.manual_seed(0)
    model = build_image_text(config)
    tower = model.towers.x_tower
    (dropout,) = (module for module in tower.modules() if isinstance(module, PatchDropout))
    seen: list[int] = []
    dropout.register_forward_hook(lambda _, given, left: seen.append(given[0].shape[1] - left.shape[1]))
    x = random_images(2, model.image.size)
    torch.manual_seed(2)
    first = tower(x)
    assert not torch.allclose(first, tower(x), atol=1e-5)
    torch.testing.assert_close(tower.eval()(x), whole(x))
    assert tower.train().training and dropout.training
    patches = (model.image.size // (16 if kind != "open_clip" else VIT["patch_size"])) ** 2
    assert seen == [patches // 2, patches // 2, 0]


def test_patch_dropout_of_the_configuration_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "dropping.json"
    path.write_text(json.dumps({**ARCHITECTURES["vit"], "vision_cfg": {**VIT, "patch_dropout": 0.5}}))
    found = []
    for share in (None, 0.0, 0.25):
        config = ModelConfig(name=str(path), image=ImageTowerConfig(patch_dropout=share))
        towers = build_image_text(config).towers
        found += [module.prob for module in towers.modules() if isinstance(module, PatchDropout)]
    assert found == [0.5, 0.0, 0.25]


def test_towers_without_patches_refuse_patch_dropout(tmp_path: Path) -> None:
    resnet = ModelConfig(name=config_file(tmp_path, "resnet"), image=ImageTowerConfig(patch_dropout=0.5))
    for config in (resnet, with_image(tmp_path, cnn(patch_dropout=0.5))):
        refused(config, "model.image.patch_dropout=0.5")
