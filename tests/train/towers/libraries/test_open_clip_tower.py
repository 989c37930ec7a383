"""Which open_clip model a name means, and that a mistake is told once."""

import json
import logging
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from helpers.messages import raises
from safetensors.torch import save_file

from dyad.data.base.errors import ConfigError
from dyad.run.components import build_components
from dyad.train.cli.compose import compose_config
from dyad.train.config import ModelConfig
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_image_text

WEIGHTS = "open_clip_model.safetensors"
TEXT = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}


def config_file(folder: Path, width: int) -> str:
    folder.mkdir()
    path = folder / "model.json"
    path.write_text(json.dumps({"embed_dim": width, "vision_cfg": VISION, "text_cfg": TEXT}))
    return str(path)


def width(name: str) -> int:
    towers = build_image_text(ModelConfig(name=name)).towers
    return towers.x_tower(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape[1]


def test_files_of_one_name_in_two_folders_are_two_models(tmp_path: Path) -> None:
    """open_clip knows a file by its name alone."""
    first, second = config_file(tmp_path / "first", 16), config_file(tmp_path / "second", 24)
    assert [width(name) for name in (first, second, first)] == [16, 24, 16]
    Path(first).write_text(Path(second).read_text())
    assert width(first) == 24


def test_what_is_raised_is_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with raises(ConfigError, "laion2b_s34b_b79k"):
        build_image_text(ModelConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k"))
    assert not caplog.records
    logging.getLogger("open_clip").warning("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


@pytest.mark.parametrize("content", ["{,}", "[" * 100_000, None])
def test_a_config_file_that_cannot_be_read_is_named_with_its_key(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with raises(ConfigError, "model.name=", "own.json") as caught:
        build_image_text(ModelConfig(name=str(path)))
    assert "Fetch" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["image_size=5", "patch_dropout=0.5"])
def test_what_the_image_tower_cannot_do_is_said_before_data_are_opened(key: str, tmp_path: Path) -> None:
    words = {"image_size=5": [], "patch_dropout=0.5": ["model.image.kind=timm", "model.image.name=test_resnet"]}[key]
    words += [f"model.name={config_file(tmp_path / 'model', 16)}", f"model.image.{key}", "model.embed_dim=16"]
    with raises(ConfigError, "model.image"):
        build_components(compose_config([*words, "data.train=nowhere.tar", "steps=1"]), World())


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_tower_of_a_folder_beside_another_model(side: str, tmp_path: Path) -> None:
    own, other = tmp_path / "own", config_file(tmp_path / "other", 16)
    file = Path(config_file(own, 16))
    content = {"model_cfg": json.loads(file.read_text()), "preprocess_cfg": {"mean": [0.1] * 3}}
    (own / "open_clip_config.json").write_text(json.dumps(content))
    library: Any = open_clip
    open_clip.add_model_config(file)
    theirs = library.create_model(file.stem, force_custom_text=False)
    save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, own / WEIGHTS)
    config = ModelConfig(name=other)
    getattr(config, side).name = f"local-dir:{own}"
    model = build_image_text(config)
    assert (model.image.mean == (0.1,) * 3) == (side == "image") and model.open_clip_config is None
    weight = {"image": "x_tower.trunk.class_embedding", "text": "y_tower.trunk.token_embedding.weight"}
    named = {"image": "visual.class_embedding", "text": "token_embedding.weight"}
    parameters = dict(model.towers.named_parameters())
    assert [torch.equal(parameters[weight[s]], theirs.state_dict()[named[s]]) for s in ("image", "text")] == [
        side == "image",
        side == "text",
    ]
