"""format=open_clip: a folder that open_clip loads, by its name or by a model name and a .pt file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import ConfigError
from data.transforms import ImageSpec
from train.exported import PROBES, Library, Source, largest_difference
from train.towers import ImageTextModel, open_clip_state_dict

WEIGHTS, CHECKPOINT, CONFIG = "open_clip_model.safetensors", "open_clip_pytorch_model.pt", "open_clip_config.json"
OWN_SCALE = math.log(1 / 0.07)  # where open_clip starts


def write(folder: Path, source: Source) -> None:
    model, scale = _checked(source), source.logit_scale
    tensors: dict[str, Tensor] = {k: v.detach().cpu().contiguous() for k, v in open_clip_state_dict(model).items()}
    tensors["logit_scale"] = torch.tensor(OWN_SCALE if scale is None else scale)
    save_file(tensors, folder / WEIGHTS)
    torch.save({"state_dict": tensors}, folder / CHECKPOINT)
    assert model.open_clip_config is not None
    config = model.open_clip_config["model_cfg"]
    whole = {"model_cfg": config, "preprocess_cfg": _preprocess(model.image)}
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n")
    (folder / f"{source.name}.json").write_text(json.dumps(config, indent=2) + "\n")
    if config["text_cfg"].get("hf_tokenizer_name"):  # open_clip then looks for its files in the folder
        model.tokenize.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]


def difference(folder: Path, source: Source) -> float:
    """Of a few pictures and texts."""
    model = _checked(source)
    exact = load_file(folder / WEIGHTS)
    pickled = torch.load(folder / CHECKPOINT, weights_only=True)["state_dict"]
    assert exact.keys() == pickled.keys() and all(torch.equal(exact[k], pickled[k]) for k in exact)
    library: Any = open_clip  # its own annotations are too wide to be checked
    loaded, _, preprocess = library.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = library.get_tokenizer(f"local-dir:{folder}")
    size = (len(PROBES), 3, model.image.size, model.image.size)
    pictures = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    prepared = torch.stack([preprocess(Image.fromarray(p.permute(1, 2, 0).numpy())) for p in pictures])
    ours, theirs = model.towers.eval(), loaded.eval()
    with torch.no_grad():
        pairs = [
            (ours.x_tower(pictures), theirs.encode_image(prepared)),
            (ours.y_tower(model.tokenize(PROBES)), theirs.encode_text(tokenize(PROBES))),
        ]
    return largest_difference("open_clip", pairs)


def snippet(folder: Path, source: Source) -> str:
    image = _checked(source).image
    return f"""\
    import open_clip
    model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer("local-dir:{folder}")

By a model name and the .pt file, which does not know how pictures are prepared:
    open_clip.add_model_config("{folder}")
    model, _, preprocess = open_clip.create_model_and_transforms(
        "{source.name}", pretrained="{folder / CHECKPOINT}",
        image_mean={list(image.mean)}, image_std={list(image.std)},
        image_interpolation="{image.interpolation}", image_resize_mode="{image.resize}",
    )"""


def _checked(source: Source) -> ImageTextModel:
    model = source.model
    if not isinstance(model, ImageTextModel) or model.open_clip_config is None:
        raise ConfigError(
            "format=open_clip: only a model whose two towers are one open_clip model can be exported: "
            "model.name=… with model.image.kind=open_clip and model.text.kind=open_clip"
        )
    return model


def _preprocess(image: ImageSpec) -> dict[str, Any]:
    return {
        "size": image.size,
        "mean": list(image.mean),
        "std": list(image.std),
        "interpolation": image.interpolation,
        "resize_mode": image.resize,
    }


FRONT = "library_name: open_clip\npipeline_tag: zero-shot-image-classification\ntags: [clip]"
LIBRARY = Library("open_clip", FRONT, "CLIP model", write, difference, snippet)
