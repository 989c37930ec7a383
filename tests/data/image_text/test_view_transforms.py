"""The changes of SimCLR's and BYOL's views are those of torchvision; a view's bits depend on its own draws alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional as F

from dyad.data.config import AugmentConfig
from dyad.data.image_text.noise import BLOCK_PIXELS, ORDERS, add_noise
from dyad.data.image_text.transforms import (
    CROP_DRAWS,
    DRAWS,
    ImageSpec,
    crop_and_resize,
    crop_box,
)
from dyad.data.loading.sample_rng import Floats, uniforms

HALF = (0.5, 0.5, 0.5)
BYOL = AugmentConfig(
    crop_scale=[0.08, 1], flip=0.5, jitter=[0.4, 0.4, 0.2, 0.1], jitter_prob=0.8, grey=0.2, blur=0.5, solarise=0.2
)
EVERYTHING = AugmentConfig(
    rotate=10, zoom=[0.85, 1.25], aspect=0.1, shift=0.06, gain=[0.75, 1.2], brightness=0.1, flip=0.5, grey=0.3,
    jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.7, blur=0.5, solarise=0.3
)  # fmt: skip
ALONE = {
    "brightness": {"jitter": [0.8, 0, 0, 0]},
    "contrast": {"jitter": [0, 0.8, 0, 0]},
    "saturation": {"jitter": [0, 0, 0.8, 0]},
    "hue": {"jitter": [0, 0, 0, 0.2]},
    "jitter": {"jitter": [0.8, 0.8, 0.8, 0.2]},
    "grey": {"grey": 1},
    "blur": {"blur": 1},
    "solarise": {"solarise": 1},
    "flip": {"flip": 0.5},
    "byol": vars(BYOL),
}


def photo(width: int = 90, height: int = 60, seed: int = 0) -> np.ndarray:
    """uint8 (H, W, 3): smooth colours with some grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    wave = 120 + 70 * np.sin(x / 9 + seed)[..., None] + 50 * np.cos(y[..., None] / (7, 11, 15))
    return (wave + rng.normal(0, 10, (height, width, 3))).clip(0, 255).astype(np.uint8)


def draws(ids: list[int], epoch: int = 3, seed: int = 7) -> np.ndarray:
    return np.stack([uniforms(seed, epoch, i, DRAWS) for i in ids])


def trained(spec: ImageSpec, augment: AugmentConfig, images: Sequence[Tensor], draws: Floats) -> Tensor:
    """Images as a training batch holds them."""
    sized = [crop_and_resize(image, spec, augment, row) for image, row in zip(images, draws, strict=True)]
    return add_noise(augment, torch.stack(sized), draws[:, CROP_DRAWS:])


def by_torchvision(image: Tensor, spec: ImageSpec, augment: AugmentConfig, row: Floats) -> Tensor:
    """uint8 (3, H, W) → float (3, S, S) in 0..255, each change by torchvision, with the same draws."""
    crop, noise = row[:CROP_DRAWS], row[CROP_DRAWS:]
    top, left, height, width = crop_box(image.shape[1], image.shape[2], augment.crop_scale, crop)
    x = F.resized_crop(image, top, left, height, width, [spec.size] * 2, InterpolationMode.BICUBIC) / 255
    x = F.horizontal_flip(x) if noise[5] < augment.flip else x
    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    if noise[11] < augment.jitter_prob:
        for change in ORDERS[int(24 * noise[12])]:
            strength, centre = augment.jitter[change], float(change != 3)
            low, high = max(centre - strength, 0.0 if centre else -1.0), centre + strength
            x = changes[change](x, float(low + (high - low) * noise[13 + change]))
    x = F.rgb_to_grayscale(x, 3) if noise[10] < augment.grey else x
    if noise[17] < augment.blur:
        low, high = augment.blur_sigma
        x = F.gaussian_blur(x, [spec.size // 10 // 2 * 2 + 1] * 2, [low + (high - low) * noise[18]])
    whole = (x * 255).round().to(torch.uint8)
    return (F.solarize(whole, 128) if noise[19] < augment.solarise else whole).float()


@pytest.mark.parametrize("name", ALONE)
def test_changes_of_simclr_and_byol_are_those_of_torchvision_with_the_same_draws(name: str) -> None:
    augment, spec = AugmentConfig(**ALONE[name]), ImageSpec(64, HALF, HALF)
    images = [torch.from_numpy(photo(90, 90, seed)).permute(2, 0, 1) for seed in range(24)]
    rows = draws(list(range(24)))
    ours = trained(spec, augment, images, rows).float()
    theirs = torch.stack([by_torchvision(p, spec, augment, row) for p, row in zip(images, rows, strict=True)])
    distance = (ours - theirs).abs()
    assert distance.mean() < 0.3 and distance.max() <= 3, (distance.mean(), distance.max())  # of 255
    assert (ours - trained(spec, AugmentConfig(crop_scale=augment.crop_scale), images, rows)).abs().mean() > 0.5


@pytest.mark.parametrize("augment", [BYOL, EVERYTHING], ids=["byol", "everything"])
@pytest.mark.parametrize(("size", "count"), [(24, 100), (50, 60), (96, 30), (224, 10)])
def test_a_whole_batch_has_the_bits_of_its_images_one_by_one(
    augment: AugmentConfig, size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes it, and as a loader process does at 224 pixels."""
    generator = torch.Generator().manual_seed(size)
    images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    rows = draws(list(range(count)))[:, CROP_DRAWS:]
    found = []
    for pixels in (1, 1 << 30):
        monkeypatch.setitem(BLOCK_PIXELS, "cpu", pixels)
        found.append(add_noise(augment, images, rows))
    assert torch.equal(*found) and (found[0] != images).flatten(1).any(1).float().mean() > 0.9


@pytest.mark.parametrize("name", ["brightness", "saturation", "hue", "grey", "blur", "flip"])
@pytest.mark.parametrize(("size", "count"), [(32, 100), (61, 50), (224, 8)])
def test_a_change_of_random_images_is_that_of_torchvision_within_1_of_255(name: str, size: int, count: int) -> None:
    """What it rounds between two changes may differ by more."""
    augment, spec = AugmentConfig(**ALONE[name]), ImageSpec(size, HALF, HALF)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    images[0], images[1, 1:] = 90, images[1, :1]  # one colour; grey
    rows = draws(list(range(count)))
    ours = add_noise(augment, images, rows[:, CROP_DRAWS:]).float()
    theirs = torch.stack([by_torchvision(p, spec, augment, row) for p, row in zip(images, rows, strict=True)])
    distance = (ours - theirs).abs()
    assert distance.max() <= 1 and distance.mean() < 0.02, (distance.max(), distance.mean())


def test_a_view_has_the_same_bits_alone_and_in_a_batch_and_with_any_number_of_threads() -> None:
    spec, rows = ImageSpec(64, HALF, HALF), draws(list(range(40)))
    images = [torch.from_numpy(photo(70, 90, seed)).permute(2, 0, 1) for seed in range(40)]
    whole, threads = trained(spec, BYOL, images, rows), torch.get_num_threads()
    alone = [trained(spec, BYOL, [p], row[None]) for p, row in zip(images, rows, strict=True)]
    assert torch.equal(whole, torch.cat(alone))
    try:
        torch.set_num_threads(4)
        assert torch.equal(whole, trained(spec, BYOL, images, rows))
    finally:
        torch.set_num_threads(threads)


def test_orders_of_a_colour_jitter_are_drawn_alike_often() -> None:
    found = Counter(ORDERS[int(24 * uniforms(0, 0, i, DRAWS)[CROP_DRAWS + 12])] for i in range(4800))
    assert len(found) == 24 and min(found.values()) > 140
