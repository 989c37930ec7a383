"""format=transformers: write a CLIP or SigLIP as a folder that transformers' AutoModel and AutoProcessor load."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import CLIPImageProcessor

from dyad.data.base.errors import ConfigError
from dyad.data.config import ResizeMode
from dyad.data.image_text.transforms import ImageSpec, evaluation_batch
from dyad.export.library import PROBES, Call, ExportSource, Library, probe_images, render
from dyad.export.main import chosen_format
from dyad.train.towers.adapters import merged
from dyad.train.towers.image.image_tower import INTERPOLATIONS
from dyad.train.towers.libraries.published import shared_model_name
from dyad.train.towers.libraries.transformers_model import load_model
from dyad.train.towers.models import ImageTextModel


def write(folder: Path, source: ExportSource) -> None:
    """Write weights, configuration, tokenizer and image processor into `folder`.

    The classes of model and tokenizer are those of the CLIP or SigLIP from which the towers come; the image processor
    is of CLIP's class. Adapters are merged in. Raises ConfigError unless both towers are those of one CLIP or SigLIP of
    transformers, and for data.resize=longest, because image processors do not pad.
    """
    model, name = _checked(source)
    whole = load_model(f"model.name={name}", name, pretrained=False).model
    x, y = cast(Any, model.towers.x_tower), cast(Any, model.towers.y_tower)
    whole.vision_model, whole.text_model = merged(x.trunk).encoder, merged(y.trunk).encoder
    for projection, tower in (("visual_projection", x), ("text_projection", y)):
        if hasattr(whole, projection):
            setattr(whole, projection, tower.projection)
    if known := source.calibration:
        whole.logit_scale.data.fill_(known.logit_scale)
        if hasattr(whole, "logit_bias") and known.logit_bias is not None:
            whole.logit_bias.data.fill_(known.logit_bias)
    whole.save_pretrained(folder)
    tokenizer: Any = model.tokenize
    tokenizer.tokenizer.save_pretrained(folder)
    _processor(model.image).save_pretrained(folder)


def _processor(image: ImageSpec) -> CLIPImageProcessor:
    """Return the image processor of transformers that prepares images as `image` describes.

    CLIP's class is used for every model, because it can do both: resize the shorter side and crop, and resize both
    sides.
    """
    edge, numbers = image.resized or image.size, {name: number for number, name in INTERPOLATIONS.items()}
    shortest = image.resize == ResizeMode.shortest
    return CLIPImageProcessor(
        size={"shortest_edge": edge} if shortest else {"height": edge, "width": edge},
        resample=numbers[image.interpolation],
        do_center_crop=shortest or edge != image.size,
        crop_size={"height": image.size, "width": image.size},
        image_mean=list(image.mean),
        image_std=list(image.std),
    )


def calls(source: ExportSource) -> list[Call]:
    """Return two Calls for the check of the export, with our embeddings: wide noise images, then sample texts.

    The image processor of the export resizes the images. Raises ConfigError as `write`.
    """
    model, _ = _checked(source)
    towers, images = model.towers.eval(), probe_images(2 * model.image.size, 6 * model.image.size)
    tokens, options = model.tokenize(PROBES), cast(Any, towers.x_tower).trunk.options
    with torch.no_grad():
        pixels = towers.x_tower(evaluation_batch(images, model.image))
        texts = Call(towers.y_tower(tokens), texts=PROBES, hints={"length": tokens.shape[1]})
        return [Call(pixels, images=images, hints={"options": options}), texts]


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and compare images with texts."""
    model, _ = _checked(source)
    biased = source.calibration is not None and source.calibration.logit_bias is not None
    trunk = cast(Any, model.towers.x_tower).trunk
    values = {"length": model.tokenize([""]).shape[1], "biased": biased, "options": trunk.options}
    crops = model.image.resize == ResizeMode.shortest
    return render("transformers.md.j2", folder, source, crops=crops, **values)


def _checked(source: ExportSource) -> tuple[ImageTextModel, str]:
    """Return the model, and the name or folder of the CLIP or SigLIP that its towers come from.

    Raises ConfigError for other models, and for data.resize=longest, because image processors do not pad.
    """
    model, name = source.model, shared_model_name(source.config.model)
    if not isinstance(model, ImageTextModel) or name is None:
        takes = chosen_format(None, source.config, model).name
        raise ConfigError(
            "format=transformers: only both towers of one CLIP or SigLIP of transformers, with their own projections "
            f"(model=transformers), can be exported. Take format={takes}"
        )
    if model.image.resize == ResizeMode.longest:
        raise ConfigError(
            "format=transformers: its image processors do not pad, as data.resize=longest does. Take format=onnx"
        )
    return model, name


FRONT = {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification", "tags": ["clip"]}
LIBRARY = Library("transformers", FRONT, "CLIP model", write, calls, snippet)
