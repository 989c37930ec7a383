"""Noise of images on a GPU: that of a CPU within 1 of 255, and how fast it is added."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from dyad.data.config import AugmentConfig
from dyad.data.image_text.noise import add_noise
from dyad.data.image_text.transforms import NOISE_DRAWS
from dyad.data.loading.sample_rng import uniforms
from gpu.bare import bytes_per_second, seconds
from gpu.needs import DEVICES, KERNELS, packages

SIMCLR = AugmentConfig(flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8, grey=0.2, blur=0.5)
WARPED = AugmentConfig(rotate=10, zoom=[0.85, 1.25], aspect=0.1, shift=0.06, gain=[0.75, 1.2], brightness=0.1)


def images(count: int, size: int) -> tuple[torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return pixels, np.stack([uniforms(0, 0, i, NOISE_DRAWS) for i in range(count)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augment", [SIMCLR, WARPED], ids=["simclr", "warped"])
def test_it_is_the_noise_of_a_cpu_and_has_the_same_bits_in_any_batch(augment: AugmentConfig, device: str) -> None:
    pixels, draws = images(64, 64)
    on_cpu, found = add_noise(augment, pixels, draws), add_noise(augment, pixels.to(device), draws)
    distance = (found.cpu().int() - on_cpu.int()).abs()
    assert distance.max() <= 1 and distance.float().mean() < 1e-3
    assert torch.equal(found[5:9], add_noise(augment, pixels[5:9].to(device), draws[5:9]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_views_of_simclr_take_little_time_and_memory(device: str, record_property: Any) -> None:
    pixels, draws = images(*((512, 224) if device == "cuda" else (8, 32)))
    pixels = pixels.to(device)
    took = seconds(lambda: add_noise(SIMCLR, pixels, draws), device)
    least = 2 * pixels.nbytes / bytes_per_second(device)
    of_memory = (took / len(pixels) * 1e6, least / took, "reading and writing the images once")
    record_property("SimCLR noise, 224 pixels, µs an image", of_memory)
    start = perf_counter()
    add_noise(SIMCLR, pixels, draws)
    record_property("SimCLR noise of 512 images, ms until it is queued", (perf_counter() - start) * 1e3)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        add_noise(SIMCLR, pixels, draws)
        peak = torch.cuda.max_memory_allocated() - before
        record_property("SimCLR noise, peak memory, GB", peak / 1e9)
        assert peak < 1.5e9


@KERNELS
@packages("timm")
@pytest.mark.parametrize("device", DEVICES)
def test_noise_takes_little_of_a_step(device: str, record_property: Any) -> None:
    """Two views of each image, beside the step of ResNet-50 on both."""
    import timm

    count, size, name = (256, 224, "resnet50") if device == "cuda" else (4, 32, "test_resnet")
    pixels, draws = images(count, size)
    pixels, tower = pixels.to(device), timm.create_model(name, num_classes=128).to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = tower(pixels.float()).square().mean()
        loss.backward()

    noise, bare = (seconds(run, device) for run in (lambda: add_noise(SIMCLR, pixels, draws), step))
    record_property("SimCLR noise, share of a step of ResNet-50", noise / bare)
