"""format=open_clip: write a folder that open_clip loads, as local-dir:FOLDER or by a model name and a .pt file."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import write_json
from dyad.export.library import PROBES, Call, ExportSource, Library, probe_images, render
from dyad.export.main import chosen_format
from dyad.train.towers.adapters import merged
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.libraries.open_clip import PROJECTIONS, MatrixProjection
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.tower import Tower

WEIGHTS, CHECKPOINT, CONFIG = "open_clip_model.safetensors", "open_clip_pytorch_model.pt", "open_clip_config.json"
OWN_SCALE = math.log(1 / 0.07)  # open_clip's initial logit_scale


def write(folder: Path, source: ExportSource) -> None:
    """Write weights (safetensors and .pt), configuration and tokenizer files into `folder`.

    The configuration is written twice: as <run>.json, for a model name of open_clip, and as open_clip_config.json, for
    local-dir:. Tokenizer files are written only if the tokenizer is of transformers. Raises ConfigError unless both
    towers are one open_clip model.
    """
    model, config = _checked(source)
    image, known = model.image, source.calibration or Calibration("", OWN_SCALE)
    tensors: dict[str, Tensor] = {k: v.detach().cpu().contiguous() for k, v in open_clip_state_dict(model).items()}
    tensors["logit_scale"] = torch.tensor(known.logit_scale)
    config = {key: value for key, value in config.items() if key != "init_logit_bias"}
    if known.logit_bias is not None:
        tensors["logit_bias"] = torch.tensor(known.logit_bias)
        config["init_logit_bias"] = known.logit_bias
    save_file(tensors, folder / WEIGHTS)
    torch.save({"state_dict": tensors}, folder / CHECKPOINT)
    preprocess: dict[str, Any] = {"size": image.size, "mean": list(image.mean), "std": list(image.std)}
    preprocess |= {"interpolation": image.interpolation, "resize_mode": image.resize}
    write_json(folder / f"{source.name}.json", config)
    if words := config["text_cfg"].get("hf_tokenizer_name"):  # open_clip looks for its files in the folder
        model.tokenize.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
        config = {**config, "text_cfg": {**config["text_cfg"], "hf_tokenizer_name": Path(words).name}}
    write_json(folder / CONFIG, {"model_cfg": config, "preprocess_cfg": preprocess})


def calls(source: ExportSource) -> list[Call]:
    """Return two Calls for the check of the export, with our embeddings: noise images, then sample texts.

    Raises ConfigError as `write`.
    """
    model, _ = _checked(source)
    towers, images = model.towers.eval(), probe_images(model.image.size)
    with torch.no_grad():
        texts = Call(towers.y_tower(model.tokenize(PROBES)), texts=PROBES)
        return [Call(towers.x_tower(images), images=images), texts]


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder as local-dir:…, and its .pt file by a model name."""
    image = _checked(source)[0].image
    return render("open_clip.md.j2", folder, source, name=source.name, checkpoint=CHECKPOINT, image=image)


def _checked(source: ExportSource) -> tuple[ImageTextModel, dict[str, Any]]:
    """Return the model and its open_clip model_cfg. Raises ConfigError unless both towers are one open_clip model."""
    model = source.model
    if not isinstance(model, ImageTextModel) or model.open_clip_config is None:
        takes = chosen_format(None, source.config, model).name
        raise ConfigError(
            "format=open_clip: only a model whose two towers are one open_clip model can be exported: model.name=… "
            f"with model.image.kind=open_clip and model.text.kind=open_clip. Take format={takes}"
        )
    return model, model.open_clip_config


FRONT = {"library_name": "open_clip", "pipeline_tag": "zero-shot-image-classification", "tags": ["clip"]}
LIBRARY = Library("open_clip", FRONT, "CLIP model", write, calls, snippet)


def open_clip_state_dict(model: ImageTextModel) -> dict[str, Tensor]:
    """Return the weights of both towers under the parameter names of open_clip's model class, adapters merged in.

    Both towers of `model` must come from one open_clip model. Most configurations create the class CLIP, whose text
    weights have no "text." before their names; others create CustomTextCLIP, whose text weights have it.
    """
    assert model.open_clip_config is not None
    named: dict[str, Tensor] = {}
    for part, tower in (("visual", model.towers.x_tower), ("text", model.towers.y_tower)):
        assert isinstance(tower, Tower)
        attribute, _ = PROJECTIONS[type(tower.trunk).__name__]
        is_matrix = isinstance(tower.projection, MatrixProjection)
        for name, tensor in merged(tower.trunk).state_dict().items():
            named[f"{part}.{name}"] = tensor
        for name, tensor in tower.projection.state_dict().items():
            named[f"{part}.{attribute}" if is_matrix else f"{part}.{attribute}.{name}"] = tensor
    config = model.open_clip_config
    custom = config.get("custom_text", False) or "hf_model_name" in config["text_cfg"]
    return named if custom else {name.removeprefix("text."): tensor for name, tensor in named.items()}
