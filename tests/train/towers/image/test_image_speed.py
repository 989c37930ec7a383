"""What makes image towers fast: pixels normalised in one pass, memory formats, patches dropped where they are."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.step import same_bits, snapshot, train_step
from helpers.towers import ARCHITECTURES, VIT, config_file, random_images, timm_tower, with_image
from open_clip.transformer import PatchDropout as TheirPatchDropout
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dyad.data.batch import Batch
from dyad.data.image_text.transforms import ImageSpec
from dyad.train.config import ImageTower, ImageTowerConfig, ModelConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.image.pixels import PART, NormalizePixels, PatchDropout

MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)


# Normalisation --------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers of a float32 tensor that an operation has made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = (t.numel() for t in tree_leaves(found) if isinstance(t, Tensor) and t.dtype == torch.float32)
        self.numbers = max(self.numbers, *made, 0)
        return found


def in_float64(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(numbers, dtype=torch.float64).view(3, 1, 1) for numbers in (MEAN, STD))
    return (pixels.double() / 255 - mean) / std


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pixels_become_half_precision_without_a_copy_in_float32(dtype: torch.dtype) -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3 * 32 * 1024 // 256 * 128).view(128, 3, 32, 1024)
    with torch.autocast("cpu", dtype), Largest() as largest:
        found = NormalizePixels(ImageSpec(32, MEAN, STD))(pixels)
    assert 0 < largest.numbers <= PART < pixels.numel() // 8
    assert found.dtype == dtype and torch.equal(found, in_float64(pixels).to(dtype))  # rounded once


@pytest.mark.parametrize("kernel", ["of a GPU", "compiled"])
def test_other_ways_to_normalise_round_once(kernel: str) -> None:
    """The one kernel of a GPU, computed here; and torch.compile's."""
    pixels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 4, 256)
    normalize = NormalizePixels(ImageSpec(32, MEAN, STD))
    if kernel == "compiled":
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.compile(normalize, backend="aot_eager", fullgraph=True)(pixels)
    else:
        found = torch.addcmul(
            normalize.shift, pixels, normalize.scale, out=torch.empty_like(pixels, dtype=torch.bfloat16)
        )
    steps = found.view(torch.int16).int() - in_float64(pixels).bfloat16().view(torch.int16).int()
    assert steps.abs().max() <= 1 and (steps == 0).float().mean() > 0.99  # of the last bit


def test_float32_has_the_bits_that_it_always_had() -> None:
    pixels = random_images(70, 128)
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
    found = NormalizePixels(ImageSpec(128, MEAN, STD))(pixels)
    assert torch.equal(found, ((pixels.float() / 255) - mean) / std)


# Memory format --------------------------------------------------------------------------------------------------------


def images(kind: str, tmp_path: Path) -> ModelConfig:
    if kind in ARCHITECTURES:
        return ModelConfig(name=config_file(tmp_path, kind))
    if kind == "cnn":
        return with_image(tmp_path, ImageTowerConfig(kind=ImageTower.cnn, widths=[8, 16], image_size=16))
    return with_image(tmp_path, timm_tower(name=kind))


def formats(tower: nn.Module) -> set[bool]:
    """Whether the convolutions' weights, as far as formats differ for them, are channels-last."""
    weights = [p for p in tower.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    return {p.is_contiguous(memory_format=torch.channels_last) for p in weights}


@pytest.mark.parametrize(
    ("kind", "convolves"),
    [("resnet", True), ("timm", True), ("test_convnext", True), ("cnn", True), ("vit", False), ("test_vit", False)],
)
def test_convolutions_are_channels_last_off_the_cpu(kind: str, convolves: bool, tmp_path: Path) -> None:
    towers = build_image_text(images(kind, tmp_path)).towers
    assert formats(towers.to("cpu").x_tower) == {kind == "cnn"}  # as it was built
    assert formats(copy.deepcopy(towers).to("meta").x_tower) == {convolves}
    assert all(p.is_contiguous() for p in towers.to("meta").y_tower.parameters())


@pytest.mark.parametrize(("kind", "last"), [("test_convnext", True), ("vit", False), ("timm", False)])
def test_pixels_of_a_cpu_are_channels_last_in_fp32(kind: str, last: bool, tmp_path: Path) -> None:
    """Where there are convolutions and no batch norms; embeddings and gradients stay what they were, to rounding."""
    tower = build_image_text(images(kind, tmp_path)).towers.x_tower.eval()
    prepare, pixels = tower.prepare, random_images(6, 32)
    assert isinstance(prepare, NormalizePixels)
    assert prepare(pixels).is_contiguous(memory_format=torch.channels_last) == last
    with torch.autocast("cpu", torch.bfloat16):
        assert prepare(pixels).is_contiguous()
    results = []
    for prepare.channels_last in (last, False):
        embeddings = tower(pixels)
        results.append([embeddings, *torch.autograd.grad(embeddings.sum(), [*tower.parameters()])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.detach().abs().max()))


# Patch dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("prob", [0.0, 0.5, 0.95])
def test_the_patches_that_stay_are_open_clips(prob: float, class_token: bool) -> None:
    theirs = TheirPatchDropout(prob, exclude_first_token=class_token)
    ours, tokens = PatchDropout(prob, int(class_token)), torch.randn(5, 17, 8)
    kept = []
    for module in (theirs, ours):
        rows = tokens.clone().requires_grad_()
        torch.manual_seed(3)
        result = module(rows)
        (gradient,) = torch.autograd.grad((result * result.detach().sin()).sum(), rows)
        kept.append((result, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert ours.eval()(tokens) is tokens


def test_dropped_patches_are_dropped_again_in_the_second_pass(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({**ARCHITECTURES["vit"], "vision_cfg": {**VIT, "patch_dropout": 0.5}}))
    found = []
    for keep_graphs, checkpointing in ((1, False), (4, False), (1, True)):
        torch.manual_seed(0)
        model = build_image_text(ModelConfig(name=str(file), grad_checkpointing=checkpointing))
        trunk: Any = model.towers.x_tower.trunk
        assert type(trunk.patch_dropout) is PatchDropout
        ids = torch.arange(16)
        batch = Batch(random_images(16, 32), model.tokenize(["a cat", "dogs"] * 8), ids, ids, ids)
        step = train_step(model.towers, 16, chunk_size=4, keep_graphs=keep_graphs)
        step(batch, 0)
        found.append(snapshot(step))
    assert all(same_bits(found[0], other) for other in found[1:])
