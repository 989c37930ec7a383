"""Towers from every source: what they compute, what of them trains, and what is said when something is wrong."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from helpers.towers import (
    ARCHITECTURES,
    TEXT,
    VIT,
    cnn,
    config_file,
    mpnet_folder,
    random_images,
    refused,
    timm_tower,
    trained,
    transformers_folder,
    transformers_tower,
    with_image,
    with_text,
)
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from dyad.export.open_clip import open_clip_state_dict
from dyad.train.config import ImageTower, ImageTowerConfig, ModelConfig, Pooling
from dyad.train.towers.build import build_image_text
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.tower import Tower

# open_clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_open_clip_models_are_open_clips_own(architecture: str, tmp_path: Path) -> None:
    """Equal weights for an equal seed, equal embeddings to the bit, names that open_clip loads strictly."""
    path = config_file(tmp_path, architecture)
    torch.manual_seed(0)
    model = build_image_text(ModelConfig(name=path))
    model.towers.eval()
    torch.manual_seed(0)
    library: Any = open_clip
    reference, _, preprocess = library.create_model_and_transforms(Path(path).stem)
    reference.eval()
    ours = random_images(3, model.image.size)
    theirs = torch.stack([preprocess(Image.fromarray(p.permute(1, 2, 0).numpy())) for p in ours])
    texts = ["a cat", "", "of the house, a dog " * 9]
    tokens = model.tokenize(texts)
    assert torch.equal(tokens, open_clip.get_tokenizer(Path(path).stem)(texts)) and tokens.dtype == torch.int64
    with torch.no_grad():
        assert torch.equal(model.towers.x_tower(ours), reference.encode_image(theirs))
        assert torch.equal(model.towers.y_tower(tokens), reference.encode_text(tokens))
    named = open_clip_state_dict(model)
    left = set(reference.state_dict()) - set(named)
    assert left <= {"logit_scale", "logit_bias"}
    assert all(torch.equal(named[name], reference.state_dict()[name]) for name in named)
    assert model.open_clip_config is not None
    assert model.open_clip_config["vision_cfg"].items() >= ARCHITECTURES[architecture]["vision_cfg"].items()


def test_image_size_and_context_length_can_be_chosen(tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path))
    config.image.image_size, config.text.context_length = 48, 7
    model = build_image_text(config)
    assert model.image.size == 48 and model.tokenize(["a"]).shape == (1, 7)
    assert model.open_clip_config is not None
    assert model.open_clip_config["vision_cfg"]["image_size"] == 48
    assert model.open_clip_config["text_cfg"]["context_length"] == 7
    assert model.towers.x_tower(random_images(2, 48)).shape == (2, 16)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_from_a_file(suffix: str, tmp_path: Path) -> None:
    path = config_file(tmp_path)
    source = build_image_text(ModelConfig(name=path))
    weights = {**open_clip_state_dict(source), "logit_scale": torch.tensor(1.0)}
    file = tmp_path / f"weights.{suffix}"
    save_file(weights, file) if suffix == "safetensors" else torch.save({"state_dict": weights}, file)
    loaded = build_image_text(ModelConfig(name=path, pretrained=str(file)))
    assert all(torch.equal(value, open_clip_state_dict(source)[n]) for n, value in open_clip_state_dict(loaded).items())
    bare = build_image_text(ModelConfig(name=path, pretrained=str(file)), load_pretrained=False)
    assert not torch.equal(open_clip_state_dict(bare)["visual.proj"], weights["visual.proj"])


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    source = build_image_text(ModelConfig(name=config_file(tmp_path)))
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {**open_clip_state_dict(source), "logit_scale": torch.tensor(1.0)}, folder / "open_clip_model.safetensors"
    )
    preprocess = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear", "resize_mode": "squash"}
    whole = {"model_cfg": ARCHITECTURES["vit"], "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(whole))
    for name in (str(folder), str(folder / "open_clip_config.json"), f"local-dir:{folder}"):
        model = build_image_text(ModelConfig(name=name))
        assert torch.equal(open_clip_state_dict(model)["visual.proj"], open_clip_state_dict(source)["visual.proj"])
        assert (model.image.mean, model.image.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert (model.image.resize, model.image.interpolation) == ("squash", "bilinear")
    refused(ModelConfig(name=str(folder), pretrained="openai"), folder)


def test_two_names_are_two_models(tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path))
    config.text.name = config_file(tmp_path, "resnet")
    model = build_image_text(config)
    assert model.open_clip_config is None
    assert model.towers.x_tower(random_images(2, 32)).shape == model.towers.y_tower(model.tokenize(["a", "b"])).shape


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo evil",)


def test_open_clip_mistakes_are_explained(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    refused(ModelConfig(name="ViT-B-23"), "'ViT-B-32'")
    refused(ModelConfig(name=None), "model.name")
    refused(ModelConfig(name=str(tmp_path / "none.json")), "none.json")
    (tmp_path / "half.json").write_text('{"embed_dim": 3}')
    refused(ModelConfig(name=str(tmp_path / "half.json")), "half.json", "vision_cfg, text_cfg")
    (tmp_path / "wrong.json").write_text(json.dumps({**ARCHITECTURES["vit"], "vision_cfg": {"layer": 1}}))
    refused(ModelConfig(name=str(tmp_path / "wrong.json")), "wrong.json")
    oblong = {**ARCHITECTURES["vit"], "vision_cfg": {**VIT, "image_size": [32, 48]}}
    (tmp_path / "oblong.json").write_text(json.dumps(oblong))
    refused(ModelConfig(name=str(tmp_path / "oblong.json")), "32 x 48")
    refused(ModelConfig(name="ViT-B-32", pretrained="openia"), "'openai'")
    refused(ModelConfig(name=path, pretrained=str(tmp_path / "none.pt")), tmp_path / "none.pt")
    torch.save({"state_dict": {"visual.proj": Evil()}}, tmp_path / "evil.pt")
    refused(ModelConfig(name=path, pretrained=str(tmp_path / "evil.pt")), tmp_path / "evil.pt")
    captioner = {**ARCHITECTURES["vit"], "custom_text": True, "multimodal_cfg": {**TEXT, "mlp_ratio": 1}}
    (tmp_path / "coca.json").write_text(json.dumps(captioner))
    refused(ModelConfig(name=str(tmp_path / "coca.json")), "coca.json")


def test_without_a_network_a_file_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    refused(ModelConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k"), "'laion2b_s34b_b79k'")
    refused(with_text(transformers_tower("no-such-org/no-such-model")), "no-such-org/no-such-model")
    timm = ModelConfig(name=None, image=timm_tower(name="test_resnet", pretrained="r160_in1k"))
    refused(timm, "model.image.pretrained=r160_in1k")
    assert "Retry" not in "".join(capfd.readouterr())  # the libraries would ask for a minute


# Frozen and partly frozen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["vit", "resnet", "timm"])
def test_frozen_open_clip_towers_train_their_projection_only(architecture: str, tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path, architecture))
    config.image.frozen = config.text.frozen = True
    towers = build_image_text(config).towers
    assert towers.training
    for tower in (towers.x_tower, towers.y_tower):
        assert isinstance(tower, Tower)
        assert trained(tower) == {f"projection.{name}" for name, _ in tower.projection.named_parameters()} != set()
        assert not any(module.training for module in tower.trunk.modules()) and tower.projection.training
    before = {name: buffer.clone() for name, buffer in towers.named_buffers()}
    towers.x_tower(random_images(4, 160 if architecture == "timm" else 32))
    assert all(torch.equal(buffer, before[name]) for name, buffer in towers.named_buffers())


def test_the_last_groups_of_a_frozen_tower_train(tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path))
    config.image.frozen = config.text.frozen = True
    config.image.unlocked_groups = config.text.unlocked_layers = 2  # open_clip counts the projection
    towers = build_image_text(config).towers
    assert {name.split(".")[2] for name in trained(towers.x_tower) if "resblocks" in name} == {"resblocks"}
    last = "trunk.transformer.resblocks.2."
    assert all(n.startswith((last, "trunk.ln_post", "projection")) for n in trained(towers.x_tower))
    assert all(n.startswith((last, "trunk.ln_final", "projection")) for n in trained(towers.y_tower))
    assert f"{last}attn.in_proj_weight" in trained(towers.x_tower) & trained(towers.y_tower)
    blocks = towers.x_tower.get_submodule("trunk.transformer.resblocks")
    assert [block.training for block in blocks.children()] == [False, False, True]


def test_what_cannot_be_frozen_in_part_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(name=config_file(tmp_path, "resnet"))
    config.image.frozen, config.image.unlocked_groups = True, 2
    refused(config, "model.image.unlocked_groups=2")


# The small convolutional tower ----------------------------------------------------------------------------------------


def test_the_small_tower_embeds_every_image_for_itself(tmp_path: Path) -> None:
    model = build_image_text(with_image(tmp_path, cnn()))
    tower, inputs = model.towers.x_tower, random_images(6, 16)
    together = tower(inputs)
    assert together.shape == (6, 16) and model.open_clip_config is None
    torch.testing.assert_close(torch.cat([tower(row[None]) for row in inputs]), together)
    brighter = tower(inputs // 2 + 100)
    assert not torch.allclose(brighter, together, atol=1e-3)
    assert "prepare.mean" not in tower.state_dict()


def test_the_small_tower_learns_where_something_is(tmp_path: Path) -> None:
    tower = build_image_text(with_image(tmp_path, cnn())).towers.x_tower
    left = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    left[..., :4] = 255
    assert not torch.allclose(tower(left), tower(left.flip(-1)), atol=1e-3)


@pytest.mark.parametrize(("groups", "layers"), [(0, set()), (1, {"1"}), (2, {"0", "1"}), (9, {"0", "1"})])
def test_the_small_tower_freezes_by_layers(groups: int, layers: set[str], tmp_path: Path) -> None:
    tower = build_image_text(with_image(tmp_path, cnn(frozen=True, unlocked_groups=groups))).towers.x_tower
    assert {name.split(".")[1] for name in trained(tower) if name.startswith("trunk")} == layers
    assert {"projection.weight", "projection.bias"} <= trained(tower)


@pytest.mark.parametrize("widths", [[], [12], [0]])
def test_impossible_widths_are_refused(widths: list[int], tmp_path: Path) -> None:
    image = ImageTowerConfig(kind=ImageTower.cnn, widths=widths)
    refused(with_image(tmp_path, image), "model.image.widths")


# timm -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "mobilenetv3_small_050"])
def test_timm_models_as_towers(name: str, tmp_path: Path) -> None:
    model = build_image_text(with_image(tmp_path, timm_tower(name=name, image_size=64)))
    tower = model.towers.x_tower.eval()
    assert isinstance(tower, Tower) and model.image.size == 64
    normalised = (random_images(2, 64) / 255 - torch.tensor(model.image.mean).view(3, 1, 1)) / torch.tensor(
        model.image.std
    ).view(3, 1, 1)
    torch.testing.assert_close(tower(random_images(2, 64)), tower.projection(tower.trunk(normalised)))
    assert tower(random_images(2, 64)).shape == (2, 16)


def test_timm_weights_from_a_file(tmp_path: Path) -> None:
    source = timm.create_model("test_vit", num_classes=5)
    save_file(source.state_dict(), tmp_path / "vit.safetensors")
    image = timm_tower(name="test_vit", pretrained=str(tmp_path / "vit.safetensors"), image_size=96)
    tower = build_image_text(with_image(tmp_path, image)).towers.x_tower
    assert torch.equal(
        tower.get_parameter("trunk.blocks.0.attn.qkv.weight"), source.get_parameter("blocks.0.attn.qkv.weight")
    )
    assert tower(random_images(1, 96)).shape == (1, 16)
    fresh = build_image_text(with_image(tmp_path, image), load_pretrained=False).towers.x_tower
    assert not torch.equal(fresh.get_parameter("trunk.cls_token"), source.get_parameter("cls_token"))
    image.name = "test_resnet"
    refused(with_image(tmp_path, image), tmp_path / "vit.safetensors")
    image.pretrained = str(tmp_path / "none.safetensors")
    refused(with_image(tmp_path, image), tmp_path / "none.safetensors")


def test_timm_weights_of_another_size_than_that_of_the_name(tmp_path: Path) -> None:
    """As trained at 64 pixels; timm knows the name at 160."""
    given = timm.create_model("test_vit", img_size=64, num_classes=0).eval()
    save_file(given.state_dict(), tmp_path / "vit.safetensors")
    image = timm_tower(name="test_vit", pretrained=str(tmp_path / "vit.safetensors"), image_size=64)
    trunk: Any = build_image_text(with_image(tmp_path, image)).towers.x_tower.trunk
    torch.testing.assert_close(trunk.pos_embed, given.pos_embed, rtol=0, atol=0)
    image.image_size = None
    refused(with_image(tmp_path, image), "vit.safetensors")


def test_timm_freezes_by_its_own_groups(tmp_path: Path) -> None:
    frozen = timm_tower(name="test_vit", frozen=True)
    assert trained(build_image_text(with_image(tmp_path, frozen)).towers.x_tower) == {"projection.weight"}
    frozen.unlocked_groups = 2
    partly = trained(build_image_text(with_image(tmp_path, frozen)).towers.x_tower)
    assert any("norm" in name for name in partly) and not any("patch_embed" in name for name in partly)


def test_timm_mistakes_are_explained(tmp_path: Path) -> None:
    refused(with_image(tmp_path, timm_tower(name="resnet_50")), "'resnet50'")
    refused(with_image(tmp_path, timm_tower()), "model.image.name")
    refused(with_image(tmp_path, timm_tower(name="test_vit", image_size=8)), "test_vit")


# Both -----------------------------------------------------------------------------------------------------------------


def gradients(model: ImageTextModel, images: Tensor, texts: Sequence[str]) -> dict[str, Tensor]:
    (
        model.towers.x_tower(images).square().mean() + model.towers.y_tower(model.tokenize([*texts])).square().mean()
    ).backward()
    return {name: p.grad for name, p in model.towers.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["open_clip", "foreign"])
def test_gradient_checkpointing_changes_no_gradient(kind: str, tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        config = ModelConfig(name=config_file(tmp_path), grad_checkpointing=checkpointing, embed_dim=16)
        if kind == "foreign":
            config.image = timm_tower(name="test_vit")
            config.text = transformers_tower(transformers_folder(tmp_path, "bert"), pooling=Pooling.cls)
        torch.manual_seed(0)
        model = build_image_text(config)
        torch.manual_seed(1)  # of dropout
        found.append(gradients(model, random_images(2, model.image.size), ["a cat", "dogs"]))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_gradient_checkpointing_that_a_library_does_not_support_is_refused(tmp_path: Path) -> None:
    options = {"grad_checkpointing": True}
    text = transformers_tower(mpnet_folder(tmp_path))
    refused(with_text(text, **options), "model.grad_checkpointing=true", "MPNetModel", "model.grad_checkpointing=false")
    convit = with_image(tmp_path, timm_tower(name="convit_tiny"), **options)
    refused(convit, "model.grad_checkpointing=true", "ConVit", "model.grad_checkpointing=false")


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(build_image_text(with_image(tmp_path, cnn())).towers.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["x_tower.projection.weight"], states[2]["x_tower.projection.weight"])


def test_widths_must_agree(tmp_path: Path) -> None:
    refused(ModelConfig(name=config_file(tmp_path), embed_dim=99, image=cnn()), "99", "16", "model.embed_dim")


def test_tokens_that_the_tower_does_not_know_are_refused(tmp_path: Path) -> None:
    few = {**ARCHITECTURES["vit"], "text_cfg": {**TEXT, "vocab_size": 64}}
    (tmp_path / "few_words.json").write_text(json.dumps(few))
    refused(ModelConfig(name=str(tmp_path / "few_words.json")), "model.text")


def test_compiling_a_tower_leaves_its_names_and_values(tmp_path: Path) -> None:
    towers = build_image_text(ModelConfig(name=config_file(tmp_path))).towers.eval()
    names, want = list(towers.state_dict()), towers.x_tower(random_images(2, 32))
    towers.x_tower.compile(backend="eager")
    torch.testing.assert_close(towers.x_tower(random_images(2, 32)), want)
    assert list(towers.state_dict()) == names
