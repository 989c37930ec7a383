"""Images are decoded as PIL does, brought to size as open_clip does; noise depends on (seed, epoch, id) alone."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from helpers.messages import raises
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional as F

from dyad.data.base.errors import DataError
from dyad.data.config import AugmentConfig
from dyad.data.image_text.decode import decode
from dyad.data.image_text.noise import add_noise
from dyad.data.image_text.transforms import (
    CROP_DRAWS,
    DRAWS,
    NOISE_DRAWS,
    ImageSpec,
    crop_and_resize,
    crop_box,
    evaluation_transform,
)
from dyad.data.loading.sample_rng import Floats, uniforms

LIMIT = 25_000_000
HALF = (0.5, 0.5, 0.5)
NOISY = AugmentConfig(
    rotate=10, zoom=[0.85, 1.25], aspect=0.1, shift=0.06, gain=[0.75, 1.2], brightness=0.1, grey=0.3, flip=0.5
)


def photo(width: int = 90, height: int = 60, seed: int = 0) -> np.ndarray:
    """uint8 (H, W, 3): smooth colours with some grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    wave = 120 + 70 * np.sin(x / 9 + seed)[..., None] + 50 * np.cos(y[..., None] / (7, 11, 15))
    return (wave + rng.normal(0, 10, (height, width, 3))).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def hwc(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def draws(ids: list[int], epoch: int = 3, seed: int = 7) -> np.ndarray:
    return np.stack([uniforms(seed, epoch, i, DRAWS) for i in ids])


def trained(spec: ImageSpec, augment: AugmentConfig, images: Sequence[Tensor], draws: Floats) -> Tensor:
    """Images as a training batch holds them."""
    sized = [crop_and_resize(image, spec, augment, row) for image, row in zip(images, draws, strict=True)]
    return add_noise(augment, torch.stack(sized), draws[:, CROP_DRAWS:])


# Decoding


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_colour_images_are_what_pil_decodes(kind: str) -> None:
    data = encoded(Image.fromarray(photo()), kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    found = decode(data, LIMIT)
    assert found.dtype == torch.uint8 and found.shape == (3, 60, 90)
    np.testing.assert_array_equal(hwc(found), expected)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("L", "WEBP")],
)
def test_other_modes_are_what_pil_converts(mode: str, kind: str) -> None:
    data = encoded(Image.fromarray(photo()).convert(mode), kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(hwc(decode(data, LIMIT)), expected)


def transparent(mode: str) -> Image.Image:
    image = Image.new("RGBA", (4, 3), (200, 0, 0, 255))
    image.putpixel((1, 1), (0, 0, 0, 0))
    image.putpixel((2, 1), (0, 0, 0, 51))
    return image.convert(mode)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_becomes_white(kind: str) -> None:
    found = hwc(decode(encoded(transparent("RGBA"), kind, **({"lossless": True} if kind == "WEBP" else {})), LIMIT))
    assert found[0, 0].tolist() == [200, 0, 0]
    assert found[1, 1].tolist() == [255, 255, 255]
    assert found[1, 2].tolist() == [204, 204, 204]


def test_transparency_of_grey_and_palette_images_becomes_white() -> None:
    grey = hwc(decode(encoded(transparent("LA"), "PNG"), LIMIT))
    assert grey[1, 1].tolist() == [255, 255, 255] and grey[1, 2].tolist() == [204, 204, 204]
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.putpixel((1, 1), 0)
    found = hwc(decode(encoded(palette, "PNG", transparency=0), LIMIT))
    assert found[1, 1].tolist() == [255, 255, 255] and found[0, 0].tolist() == [200, 0, 0]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    levels = np.array([[0, 256, 32768, 65535]], np.uint16)
    found = hwc(decode(encoded(Image.fromarray(levels), "PNG"), LIMIT))
    assert found[0, :, 0].tolist() == [0, 1, 128, 255] and (found[..., :1] == found).all()


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert hwc(decode(data, LIMIT))[0, 0].tolist() == [255, 0, 0]


def test_a_jpeg_that_libjpeg_warns_of_is_decoded_by_pil() -> None:
    data = encoded(Image.fromarray(photo()), "JPEG")
    stuffed = data[:2] + b"\xff\x00" + data[2:]  # extraneous bytes before a marker
    with raises(ValueError):
        simplejpeg.decode_jpeg(stuffed)
    assert decode(stuffed, LIMIT).shape == (3, 60, 90)


def header_only_png(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    first = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return first + struct.pack(">I", 1000) + b"IDAT"


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.new("RGB", (400, 300)), "JPEG"),
        encoded(Image.new("RGB", (400, 300)), "WEBP"),
        header_only_png(10_000, 10_000),
    ],
    ids=["jpeg", "webp", "png"],
)
def test_too_many_pixels_are_refused_by_the_header(data: bytes) -> None:
    with raises(DataError, "data.max_image_pixels=100000"):
        decode(data, 100_000)


def test_a_decompression_bomb_is_refused() -> None:
    with raises(DataError, "data.max_image_pixels=25000000"):
        decode(header_only_png(30_000, 30_000), LIMIT)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(photo()), "JPEG")[:900],
        encoded(Image.fromarray(photo()), "PNG")[:900],
        encoded(Image.fromarray(photo()), "WEBP")[:300],
        encoded(Image.fromarray(photo()), "GIF"),
        b"\xff\xd8\xff and then nothing of the kind",
        b"<html>404</html>",
        b"",
    ],
    ids=["cut jpeg", "cut png", "cut webp", "gif", "no jpeg", "html", "empty"],
)
def test_what_is_no_sound_image_is_a_data_error_with_a_reason(data: bytes) -> None:
    with raises(DataError):
        decode(data, LIMIT)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(choose: st.DataObject) -> None:
    kind = choose.draw(st.sampled_from(["JPEG", "PNG", "WEBP"]))
    data = bytearray(encoded(Image.fromarray(photo(24, 16)), kind))
    for _ in range(choose.draw(st.integers(1, 4))):
        data[choose.draw(st.integers(0, len(data) - 1))] = choose.draw(st.integers(0, 255))
    with suppress(DataError):
        assert decode(bytes(data), 100_000).shape[0] == 3


# Bringing to size


@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(90, 60), (61, 127), (200, 31), (40, 40), (33, 47), (33, 1000), (1100, 21)])
def test_evaluation_agrees_with_open_clip(resize: str, interpolation: str, size: tuple[int, int]) -> None:
    from open_clip.transform import image_transform

    spec = ImageSpec(48, HALF, HALF, resize, interpolation)
    reference: Any = image_transform(48, False, (0.0,) * 3, (1.0,) * 3, resize_mode=resize, interpolation=interpolation)
    pixels = photo(*size)
    expected = (reference(Image.fromarray(pixels)) * 255).round()
    found = evaluation_transform(torch.from_numpy(pixels).permute(2, 0, 1), spec)
    assert found.dtype == torch.uint8 and found.shape == (3, 48, 48)
    assert (found.float() - expected).abs().max() <= 2


def test_an_image_of_the_right_size_is_left_alone() -> None:
    pixels = torch.from_numpy(photo(48, 48)).permute(2, 0, 1)
    for resize in ("shortest", "longest", "squash"):
        assert evaluation_transform(pixels, ImageSpec(48, HALF, HALF, resize)) is pixels
    found = trained(ImageSpec(48, HALF, HALF), AugmentConfig(), [pixels], draws([0]))
    assert torch.equal(found[0], pixels)


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (700, 1)])
def test_extreme_shapes_still_fill_the_square(size: tuple[int, int]) -> None:
    image = torch.zeros(3, *size, dtype=torch.uint8)
    for resize in ("shortest", "longest", "squash"):
        assert evaluation_transform(image, ImageSpec(16, HALF, HALF, resize)).shape == (3, 16, 16)


# Random resized crop


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 500),
    st.integers(1, 500),
    st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)).map(sorted),
    st.integers(0, 10**6),
)
def test_a_crop_lies_inside_the_image(height: int, width: int, scale: list[float], sample: int) -> None:
    top, left, h, w = crop_box(height, width, scale, uniforms(0, 0, sample, CROP_DRAWS))
    assert top >= 0 and left >= 0 and h > 0 and w > 0 and top + h <= height and left + w <= width


def test_crops_are_distributed_as_torchvisions() -> None:
    from torchvision.transforms import RandomResizedCrop

    height, width, scale, count = 300, 200, [0.3, 0.9], 3000
    ours = np.array([crop_box(height, width, scale, uniforms(1, 0, i, CROP_DRAWS)) for i in range(count)])
    image = torch.empty(3, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = np.array([RandomResizedCrop.get_params(image, scale, [3 / 4, 4 / 3]) for _ in range(count)])
    for column in range(4):
        spread = theirs[:, column].std() / count**0.5
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) < 5 * 2**0.5 * spread
    area = ours[:, 2] * ours[:, 3] / (height * width)
    assert 0.29 < area.min() < 0.32 and 0.8 < area.max() < 0.91


def test_an_image_too_long_for_any_crop_gives_its_centre() -> None:
    top, left, height, width = crop_box(1000, 10, [0.9, 1.0], uniforms(0, 0, 0, CROP_DRAWS))
    assert (height, width, left) == (13, 10, 0) and top == (1000 - 13) // 2


def test_cropped_images_are_resized_parts() -> None:
    pixels = torch.from_numpy(photo(90, 60)).permute(2, 0, 1)
    row = draws([5])
    top, left, h, w = crop_box(60, 90, [0.5, 0.8], row[0])
    expected = F.resize(pixels[:, top : top + h, left : left + w], [32, 32], InterpolationMode.BICUBIC, antialias=True)
    found = trained(ImageSpec(32, HALF, HALF), AugmentConfig(crop_scale=[0.5, 0.8]), [pixels], row)
    assert torch.equal(found[0], expected)


# Noise


def images(count: int = 12, size: int = 32) -> Tensor:
    return torch.stack([torch.from_numpy(photo(size, size, i)).permute(2, 0, 1) for i in range(count)])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_has_the_same_pixels_in_any_batch(threads: int) -> None:
    transform = partial(trained, ImageSpec(32, HALF, HALF), AugmentConfig(**{**vars(NOISY), "crop_scale": [0.5, 1.0]}))
    batch, ids, before = list(images(12, 40)), list(range(12)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = transform(batch, draws(ids))
        order = [7, 2, 11, 0, 5]
        part = transform([batch[i] for i in order], draws(order))
        alone = [transform([batch[i]], draws([i]))[0] for i in ids]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[order])
    assert torch.equal(torch.stack(alone), whole)


def mirrored(count: int) -> Tensor:
    """Which of the first images are mirrored where half of them are."""
    return torch.from_numpy(draws(list(range(count)))[:, CROP_DRAWS + 5] < 0.5)


def test_noise_leaves_the_global_generators_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    trained(ImageSpec(32, HALF, HALF), NOISY, list(images()), draws(list(range(12))))
    assert torch.equal(torch.get_rng_state(), torch_state) and pickle.dumps(np.random.get_state()) == numpy_state


@pytest.mark.parametrize(
    ("augment", "expected"),
    [
        (AugmentConfig(), lambda x: x),
        (AugmentConfig(flip=1.0), lambda x: x.flip(-1)),
        (AugmentConfig(flip=1.0, zoom=[1.0, 1.0 + 1e-9]), lambda x: x.flip(-1)),  # by sampling
        (AugmentConfig(flip=0.5), lambda x: torch.where(mirrored(6)[:, None, None, None], x.flip(-1), x)),
        (AugmentConfig(gain=[0.5, 0.5]), lambda x: (x.float() * 0.5 + 0.5).byte()),
        (AugmentConfig(gain=[3.0, 3.0]), lambda x: (x.float() * 3).clamp(max=255).byte()),
        (AugmentConfig(grey=1.0), lambda x: F.rgb_to_grayscale(x, 3)),
    ],
    ids=["none", "flip", "flip and zoom", "some flip", "darker", "brighter", "grey"],
)
def test_each_part_does_what_it_says(augment: AugmentConfig, expected: Callable[[Tensor], Tensor]) -> None:
    batch = images(6)
    found = add_noise(augment, batch, draws(list(range(6)))[:, CROP_DRAWS:])
    assert (found.int() - expected(batch).int()).abs().max() <= (1 if augment.grey else 0)


def test_motion_agrees_with_torchvisions_affine() -> None:
    batch, row = images(1, 64), draws([9])[:, CROP_DRAWS:]
    augment = AugmentConfig(rotate=25, zoom=[0.7, 1.4], shift=0.1)
    angle, zoom = 25 * (2 * row[0, 0] - 1), 0.7 + 0.7 * row[0, 1]
    shift = 64 * 0.1 * (2 * row[0, 3:5] - 1)  # of the place a pixel comes from
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    turn = np.array([[cos, -sin], [sin, cos]])
    moved = -zoom * turn @ shift
    expected = F.affine(
        batch.float(), float(angle), list(map(float, moved)), float(zoom), [0.0], InterpolationMode.BILINEAR, [255.0]
    )
    found = add_noise(augment, batch, row)
    assert (found.float() - expected)[..., 20:44, 20:44].abs().max() <= 0.51
    corners = add_noise(AugmentConfig(zoom=[0.5, 0.5]), torch.zeros_like(batch), row)
    assert (corners[..., :10, :] == 255).all() and (corners[..., 20:44, 20:44] == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_aspect_and_brightness_stay_within_their_limits(sample: int, epoch: int) -> None:
    row = uniforms(0, epoch, sample, NOISE_DRAWS)[None]
    grey = torch.full((1, 3, 16, 16), 100, dtype=torch.uint8)
    bright = add_noise(AugmentConfig(brightness=0.2), grey, row)
    assert bright.min() == bright.max() and 80 <= int(bright.min()) <= 120
    dark = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    covered = add_noise(AugmentConfig(zoom=[0.5, 0.5], aspect=0.3), dark, row)[0, 0] < 128
    width, height = int(covered.any(0).sum()), int(covered.any(1).sum())
    assert 0.66 <= width / height <= 1.34
