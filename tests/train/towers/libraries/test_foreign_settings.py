"""No settings file of a model leads to another model, or out of the model's folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises
from helpers.tiny_bert import write as write_bert
from helpers.towers import ARCHITECTURES

from dyad.data.base.errors import ConfigError
from dyad.train.config import ModelConfig, TrainConfig
from dyad.train.towers.build import build_model
from dyad.train.towers.libraries.published import check_files, check_settings
from dyad.train.towers.libraries.sentence_transformers import sentence_folder
from dyad.train.towers.libraries.transformers_model import load_companion, load_model

KEY = "model.text.name=x"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_bert(folder := tmp_path_factory.mktemp("models") / "bert")
    return folder


@pytest.fixture
def theirs(bert: Path, tmp_path: Path) -> Path:
    """A copy by links would lead out of its folder."""
    (folder := tmp_path / "theirs").mkdir()
    for file in bert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))


def test_where_a_model_was_before_is_not_followed(theirs: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "other")
    change(theirs / "config.json", _name_or_path=gone, auto_map={"AutoModel": "someone/else--evil.Evil"})
    change(theirs / "tokenizer_config.json", name_or_path=gone, tokenizer_file=f"{gone}/tokenizer.json")
    load_model(KEY, str(theirs), pretrained=True)
    load_companion(KEY, str(theirs), "AutoTokenizer")


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "hf-hub:someone/else"},
        {"backbone": "resnet50", "use_pretrained_backbone": True},
        {"vision_config": {"architecture": "local-dir:/private"}},
    ],
    ids=str,
)
def test_settings_with_the_weights_of_another_model(theirs: Path, settings: dict[str, Any]) -> None:
    change(theirs / "config.json", **settings)
    with raises(ConfigError, theirs / "config.json"):
        check_settings(KEY, theirs / "config.json")


def test_adapters_name_no_base(theirs: Path) -> None:
    change(theirs / "adapter_config.json", base_model_name_or_path="someone/else")
    with raises(ConfigError, KEY):
        load_model(KEY, str(theirs), pretrained=True)


@pytest.mark.parametrize("part", ["../bert/model.safetensors", "/private/model.safetensors", "in/model.safetensors", 7])
def test_parts_of_weights_elsewhere(theirs: Path, part: object) -> None:
    change(theirs / "model.safetensors.index.json", metadata={}, weight_map={"a": part})
    with raises(ConfigError, KEY, repr(part)):
        load_model(KEY, str(theirs), pretrained=True)


@pytest.mark.parametrize("setting", ["vocab_file", "tokenizer_file", "merges_file"])
def test_words_elsewhere(theirs: Path, tmp_path: Path, setting: str) -> None:
    (tmp_path / "private.txt").write_text("secret\nwords\n")
    change(theirs / "tokenizer_config.json", **{setting: str(tmp_path / "private.txt")})
    with raises(ConfigError, KEY, setting):
        load_companion(KEY, str(theirs), "AutoTokenizer")


@pytest.mark.parametrize("name", ["vocab.txt", "special_tokens_map.json", "model-00002-of-00002.safetensors"])
def test_links_and_pipes_in_the_folder(theirs: Path, bert: Path, name: str) -> None:
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to(bert / "config.json")
    with raises(ConfigError, theirs / name):
        check_files(KEY, str(theirs))
    (theirs / name).unlink()
    os.mkfifo(theirs / name)
    with raises(ConfigError, theirs / name):
        check_files(KEY, str(theirs))


@pytest.mark.parametrize("folder", ["../bert/1_Pooling", "/private"])
def test_modules_elsewhere(theirs: Path, folder: str) -> None:
    kinds = [("Transformer", ""), ("Pooling", folder)]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds]
    (theirs / "modules.json").write_text(json.dumps(modules))
    with raises(ConfigError, theirs / "modules.json"):
        sentence_folder(str(theirs))


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("text_cfg", {"hf_model_name": "PRIVATE"}),
        ("text_cfg", {"hf_tokenizer_name": "PRIVATE"}),
        ("vision_cfg", {"timm_model_name": "hf-hub:someone/else"}),
        ("vision_cfg", {"timm_model_name": "local-dir:PRIVATE"}),
    ],
    ids=str,
)
def test_open_clip_settings_lead_to_no_other_model(tmp_path: Path, bert: Path, part: str, settings: dict) -> None:
    config = json.loads(json.dumps(ARCHITECTURES["vit"]))
    config[part] |= {key: value.replace("PRIVATE", str(bert)) for key, value in settings.items()}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with raises(ConfigError, tmp_path):
        build_model(TrainConfig(model=ModelConfig(name=str(tmp_path))))
