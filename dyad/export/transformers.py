"""format=transformers: write a CLIP or SigLIP as a folder that transformers' AutoModel and AutoProcessor load."""

from pathlib import Path
from typing import Any, cast

import torch

from dyad.data.base.errors import ConfigError
from dyad.export.library import PROBES, Call, ExportSource, Library, probe_images, render
from dyad.train.towers.adapters import merged
from dyad.train.towers.libraries.published import of_one_model
from dyad.train.towers.libraries.transformers_model import load_companion, load_model
from dyad.train.towers.models import ImageTextModel


def write(folder: Path, source: ExportSource) -> None:
    """Write weights, configuration, tokenizer and image processor into `folder`.

    Raises ConfigError unless both towers are those of one CLIP or SigLIP of transformers.
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
    processor = load_companion(f"model.name={name}", name, "AutoImageProcessor")
    side = {"height": model.image.size, "width": model.image.size}
    if getattr(processor, "do_center_crop", False):
        processor.crop_size, processor.size = side, {"shortest_edge": model.image.resized or model.image.size}
    else:
        processor.size = side
    processor.save_pretrained(folder)


def calls(source: ExportSource) -> list[Call]:
    """Return the inputs for the check of the export, with our embeddings of them: noise images, then sample texts."""
    model, _ = _checked(source)
    towers, images = model.towers.eval(), probe_images(model.image.size)
    tokens, options = model.tokenize(PROBES), cast(Any, towers.x_tower).trunk.options
    with torch.no_grad():
        texts = Call(towers.y_tower(tokens), texts=PROBES, hints={"length": tokens.shape[1]})
        return [Call(towers.x_tower(images), images=images, hints={"options": options}), texts]


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and compare images with texts."""
    model, _ = _checked(source)
    biased = source.calibration is not None and source.calibration.logit_bias is not None
    trunk = cast(Any, model.towers.x_tower).trunk
    values = {"length": model.tokenize([""]).shape[1], "biased": biased, "options": trunk.options}
    return render("transformers.md.j2", folder, source, **values)


def _checked(source: ExportSource) -> tuple[ImageTextModel, str]:
    """Return the model and the name of the CLIP or SigLIP that its towers come from. Raises ConfigError for others."""
    model, name = source.model, of_one_model(source.config.model)
    if not isinstance(model, ImageTextModel) or name is None:
        raise ConfigError(
            "format=transformers: only both towers of one CLIP or SigLIP of transformers, with their own projections "
            "(model=transformers), can be exported. Take format=onnx"
        )
    return model, name


FRONT = {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification", "tags": ["clip"]}
LIBRARY = Library("transformers", FRONT, "CLIP model", write, calls, snippet)
