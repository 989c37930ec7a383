"""A CLIP or SigLIP in a folder of transformers: its image processor prepares images as the run does."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from helpers.export import near
from helpers.foreign import of_two_towers, unit
from helpers.messages import raises
from PIL import Image

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.image_text.transforms import evaluation_batch
from dyad.export.library import ExportSource, probe_images
from dyad.export.main import export
from dyad.export.transformers import LIBRARY
from dyad.train.cli.compose import compose_config
from dyad.train.towers.build import build_model
from dyad.train.towers.models import ImageTextModel

# Kind of model, resize mode of the run, the side to which images are resized before the crop
CASES = [("clip", "squash", 40), ("siglip", "shortest", None)]


def source(folder: Path, kind: str, resize: str, resized: int | None = None) -> ExportSource:
    config = compose_config(["data.train=x.tar", "steps=1", *of_two_towers(folder, kind).words])
    model = cast(ImageTextModel, build_model(config))
    model = replace(model, image=replace(model.image, resize=resize, resized=resized))
    return ExportSource("mine", config, model, model.calibration)


@pytest.mark.parametrize(("kind", "resize", "resized"), CASES)
def test_images_are_resized_as_in_the_run(
    kind: str, resize: str, resized: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near(monkeypatch)
    of, out = source(tmp_path / "of", kind, resize, resized), tmp_path / "out"
    model = cast(ImageTextModel, of.model)
    assert export(LIBRARY, of, out) < 1e-5
    pixels = probe_images(90, 180)[0]  # transformers rounds an odd margin of the crop otherwise, by a pixel
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    ours = unit(model.towers.eval().x_tower(evaluation_batch([pixels], model.image)).detach())
    processor: Any = transformers.AutoProcessor.from_pretrained(out)
    theirs: Any = transformers.AutoModel.from_pretrained(out).eval()
    found = theirs.get_image_features(**processor(images=[image], return_tensors="pt"))
    torch.testing.assert_close(unit(found.pooler_output), ours, atol=1e-5, rtol=0)
    loaded = dyad.load(f"hf:{out}", "cpu")
    assert loaded.loaded.model.image == model.image  # type: ignore[attr-defined]
    np.testing.assert_allclose(loaded.encode_image(image), ours.numpy(), atol=1e-5)


def test_padding_is_refused_with_the_format_that_can(tmp_path: Path) -> None:
    with raises(ConfigError, "data.resize=longest", "format=onnx"):
        export(LIBRARY, source(tmp_path / "of", "clip", "longest"), tmp_path / "out")
