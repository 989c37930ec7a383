"""Images per second and core beside webdataset + PIL + open_clip's transform: python -m tests.benchmarks.loader

Synthetic photos (360 x 300 JPEG of about 24 kB) to 224 x 224 with open_clip's training crop (scale 0.9 to 1). One
process, one thread, methods taking turns, CPU time, median of the rounds. Theirs ends with float32 batches as open_clip
makes them, ours with the uint8 batches that the device normalises; neither tokenises. Then a batch of emoji, and the
views of SimCLR, with their noise and without it, which a GPU adds.
"""

from __future__ import annotations

import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dyad.data.config import AugmentConfig, DataConfig
from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.image_views import ImageViews
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources

SAMPLES, BATCH, ROUNDS = 512, 64, 7
EMOJI = Path(__file__).parents[2] / "data" / "samples" / "emoji"
EMOJI_NOISE = AugmentConfig(
    rotate=10, zoom=[0.85, 1.25], aspect=0.1, shift=0.06, gain=[0.75, 1.2], brightness=0.1, grey=0.1
)
SIMCLR = AugmentConfig(crop_scale=[0.08, 1], flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8, grey=0.2, blur=0.5)
HALF = (0.5, 0.5, 0.5)


def photo(seed: int) -> bytes:
    """A JPEG with smooth areas, edges and grain."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).resize(
        (360, 300), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse).astype(np.float32) + rng.normal(0, 13, (300, 360, 3))
    for _ in range(6):
        top, left = rng.integers(0, 240), rng.integers(0, 300)
        pixels[top : top + 60, left : left + 60] += rng.normal(0, 40, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=75)
    return file.getvalue()


def write_shard(path: Path) -> float:
    """SAMPLES photos with captions; returns their mean size in bytes."""
    sizes = []
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            for suffix, data in (("jpg", photo(number)), ("txt", b"a photo of noise")):
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                sizes += [len(data)] if suffix == "jpg" else []
    return statistics.mean(sizes)


def no_tokens(texts: list[str]) -> Tensor:
    return torch.zeros(len(texts), 1, dtype=torch.int64)


def ours(shard: Path) -> Callable[[], Iterator[Tensor]]:
    shards = open_shards(parse_sources(str(shard)), workers=0)
    config = DataConfig(augment=AugmentConfig(crop_scale=[0.9, 1.0]))
    dataset = ImageText(shards, PairMaker(ImageSpec(224, HALF, HALF), no_tokens, config, seed=0))
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=BATCH)
    steps = order.steps_per_epoch
    return lambda: (
        batch.x
        for batch in build_loader(dataset, order, rank=0, world_size=1, first_step=0, last_step=steps, workers=0)
    )


def theirs(shard: Path) -> Callable[[], Iterator[Tensor]]:
    from open_clip import AugmentationCfg
    from open_clip.transform import image_transform
    from webdataset.compat import WebDataset

    transform: Any = image_transform(224, True, HALF, HALF, aug_cfg=AugmentationCfg(scale=(0.9, 1.0)))
    pipeline: Any = (
        WebDataset(str(shard), shardshuffle=False)
        .shuffle(SAMPLES)
        .map(lambda sample: (transform(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), sample["txt"]))
        .batched(BATCH, partial=False)
    )
    return lambda: (batch[0] for batch in pipeline)


def emoji() -> Callable[[], Iterator[Tensor]]:
    shards = open_shards(
        parse_sources(str(EMOJI / "{noto,fluent-flat,noto-v1,emojione,fxemoji}-trained.tar")), workers=0
    )
    config = DataConfig(captions=["caption"], text_key="concept", augment=EMOJI_NOISE)
    dataset = ImageText(shards, PairMaker(ImageSpec(64, HALF, HALF), no_tokens, config, seed=0))
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=256)
    return lambda: (
        batch.x for batch in build_loader(dataset, order, rank=0, world_size=1, first_step=0, last_step=4, workers=0)
    )


def views(shard: Path, noise_later: bool) -> Callable[[], Iterator[Tensor]]:
    shards = open_shards(parse_sources(str(shard)), workers=0)
    dataset = ImageViews(shards, ImageSpec(224, HALF, HALF), DataConfig(augment=SIMCLR), seed=0)
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=BATCH)
    how: Any = {"rank": 0, "world_size": 1, "first_step": 0, "last_step": 2, "workers": 0}
    return lambda: (
        side for batch in build_loader(dataset, order, **how, noise_later=noise_later) for side in (batch.x, batch.y)
    )


def cpu_ms(batches: Callable[[], Iterator[Tensor]]) -> float:
    """CPU milliseconds per image."""
    start, count = time.process_time(), 0
    for batch in batches():
        count += len(batch)
    return (time.process_time() - start) / count * 1e3


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "photos.tar"
        print(f"{SAMPLES} JPEGs of 360 x 300, {write_shard(shard) / 1e3:.1f} kB on average, to 224 x 224")
        methods = {"webdataset + PIL + open_clip": theirs(shard), "ours": ours(shard), "emoji": emoji()}
        methods |= {"views": views(shard, False), "views, noise later": views(shard, True)}
        times: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(ROUNDS + 1):
            for name, batches in methods.items():
                spent = cpu_ms(batches)
                times[name] += [spent] if number else []  # the first round warms up
    median = {name: statistics.median(values) for name, values in times.items()}
    for name in ("webdataset + PIL + open_clip", "ours"):
        print(f"{name:30} {median[name]:.2f} CPU-ms per image, {1e3 / median[name]:.0f} per second and core")
    print(f"ratio {median['webdataset + PIL + open_clip'] / median['ours']:.2f} (goal: at least 3)")
    print(f"emoji batch of 256, decoded and with the recipe's noise: {256 * median['emoji']:.0f} CPU-ms")
    for name in ("views", "views, noise later"):
        print(f"SimCLR's {name:20} {median[name]:.2f} CPU-ms per view, {1e3 / median[name]:.0f} per second and core")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
