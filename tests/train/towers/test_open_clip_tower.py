"""Which open_clip model a name means, and that a mistake is told once."""

import json
import logging
from pathlib import Path

import pytest
import torch

from dyad.data.base.errors import ConfigError
from dyad.train.config import ModelConfig
from dyad.train.towers.build import build_image_text

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
    with pytest.raises(ConfigError, match="with weights 'laion2b_s34b_b79k' cannot be created"):
        build_image_text(ModelConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k"))
    assert not caplog.records
    logging.getLogger("open_clip").warning("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


@pytest.mark.parametrize("content", ["{,}", "[" * 100_000, None])
def test_a_config_file_that_cannot_be_read_is_named_with_its_key(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.name=.*own\.json cannot be read: .*") as caught:
        build_image_text(ModelConfig(name=str(path)))
    assert "Fetch" not in str(caught.value) and "\n" not in str(caught.value)
