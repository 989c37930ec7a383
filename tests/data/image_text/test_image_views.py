"""Two views of each image: what they depend on, what equal images have in common, and bad images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.shards import image, opened, write_tar

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.batch import Batch
from dyad.data.config import AugmentConfig, BadSamples, DataConfig
from dyad.data.image_text.image_views import ImageViews, view_pairs
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order

EMOJI = Path(__file__).parents[3] / "data" / "samples" / "emoji" / "noto-unseen.tar"
SPEC = ImageSpec(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
STRONG = AugmentConfig(crop_scale=[0.2, 1], flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], grey=0.2, blur=0.5, solarise=0.1)


def views(path: Path = EMOJI, seed: int = 0, **config: Any) -> ImageViews:
    return ImageViews(opened(path), SPEC, DataConfig(**{"augment": STRONG, **config}), seed)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("x", "y", "sample_ids", "x_keys", "y_keys"))


def test_views_depend_on_seed_epoch_sample_and_view_alone() -> None:
    positions = [(2, i) for i in range(12)]
    batch = views().__getitems__(positions).with_noise()
    assert batch.x.shape == batch.y.shape == (12, 3, 32, 32) and batch.x.dtype == torch.uint8
    one_by_one = [views().__getitems__([p]).with_noise() for p in reversed(positions)][::-1]
    assert torch.equal(batch.x, torch.cat([b.x for b in one_by_one]))
    assert torch.equal(batch.y, torch.cat([b.y for b in one_by_one]))
    others = [
        batch.y,
        views(seed=1).__getitems__(positions).with_noise().x,
        views().__getitems__([(3, i) for i in range(12)]).with_noise().x,
    ]
    assert not any((batch.x == other).flatten(1).all(1).any() for other in others)
    assert torch.equal(batch.x_keys, batch.y_keys) and batch.sample_ids.tolist() == list(range(12))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_get_the_parts_of_one_global_batch(world_size: int, workers: int) -> None:
    data, order = views(), Order([100], [1.0], seed=3, global_batch_size=10)
    whole = [data.__getitems__([(0, i) for i in order.local(step, 0, 1)[1].tolist()]).with_noise() for step in range(3)]
    steps: dict[str, Any] = {"first_step": 0, "last_step": 3, "workers": workers}
    parts = [list(build_loader(data, order, rank=r, world_size=world_size, **steps)) for r in range(world_size)]
    for want, *found in zip(whole, *parts, strict=True):
        columns = (torch.cat([getattr(p, k) for p in found]) for k in ("x", "y", "sample_ids", "x_keys", "y_keys"))
        x, y, ids, x_keys, y_keys = columns
        assert same(want, Batch(x, y, ids, x_keys, y_keys))


@pytest.mark.parametrize("workers", [0, 2])
def test_noise_that_is_added_later_has_the_bits_of_a_loader_process(workers: int) -> None:
    steps: dict[str, Any] = {"first_step": 1, "last_step": 3, "workers": workers, "rank": 1, "world_size": 2}
    order = Order([100], [1.0], seed=3, global_batch_size=25)
    at_once, later = (list(build_loader(views(), order, **steps, noise_later=later)) for later in (False, True))
    for whole, pending in zip(at_once, later, strict=True):
        assert whole.x_noise is None and pending.x_noise is not None and not torch.equal(whole.x, pending.x)
        added = pending.to(torch.device("cpu")).with_noise()
        assert same(whole, added) and same(whole, added.with_noise())


def test_the_second_view_has_options_of_its_own() -> None:
    plain, other = DataConfig(), DataConfig(augment_y={"solarise": 1.0})
    x, y = (
        (b.x, b.y)
        for b in (
            views(augment=plain.augment).__getitems__([(0, 0)]).with_noise(),
            views(augment=plain.augment, augment_y={"solarise": 1.0}).__getitems__([(0, 0)]).with_noise(),
        )
    )
    assert torch.equal(x[0], x[1]) and torch.equal(x[0], y[0]) and not torch.equal(y[0], y[1])
    assert other.augments == (AugmentConfig(), AugmentConfig(solarise=1.0))
    for wrong in ({"flipp": 1}, {"flip": "a"}):
        with raises(ConfigError, "data.augment_y"):
            DataConfig(augment_y=wrong)
    with raises(ConfigError, "flip=2"):
        DataConfig(augment_y={"flip": 2})
    with raises(ConfigError, "jitter=[0.1, 0.1, 0.1, 0.6]"):
        AugmentConfig(jitter=[0.1, 0.1, 0.1, 0.6])


def test_equal_images_have_equal_keys_and_views_of_their_own(tmp_path: Path) -> None:
    drawn = [image(n, (40, 40)) for n in (1, 1, 2)]
    write_tar(tmp_path / "a.tar", [(f"{i}.png", data) for i, data in enumerate(drawn)])
    batch = views(tmp_path / "a.tar").__getitems__([(0, i) for i in range(3)]).with_noise()
    assert batch.x_keys[0] == batch.x_keys[1] != batch.x_keys[2]
    assert not torch.equal(batch.x[0], batch.x[1])


def test_bad_images_are_replaced_or_stop_the_run(tmp_path: Path) -> None:
    good = [(f"{i}.png", image(i, (40, 40))) for i in range(5)]
    write_tar(tmp_path / "a.tar", [*good, ("5.png", b"no image"), ("6.png", b"")])
    batch = views(tmp_path / "a.tar").__getitems__([(0, i) for i in range(7)]).with_noise()
    assert len(batch) == 7 and {b.id for b in batch.bad} >= {5, 6}
    assert Counter(batch.sample_ids.tolist())[0] >= 1 and not {5, 6} & {*batch.sample_ids.tolist()}
    with raises(SampleError, "'5'"):
        views(tmp_path / "a.tar", bad_samples=BadSamples.stop).__getitems__([(0, 5)]).with_noise()
    write_tar(tmp_path / "b.tar", [("5.png", b"no image")])
    with raises(DataError, "'5'"):
        views(tmp_path / "b.tar")


def test_evaluation_has_the_views_of_epoch_0_and_shows_them() -> None:
    found = view_pairs(opened(EMOJI), SPEC, DataConfig(augment=STRONG), seed=4)
    batch, size = views(seed=4).__getitems__([(0, i) for i in range(6, 9)]).with_noise(), len(found.images)
    assert torch.equal(found.images.block(6, 9), batch.x) and torch.equal(found.texts.block(6, 9), batch.y)
    assert torch.equal(found.images.decoded(7), batch.x[1]) and torch.equal(found.images.decoded(size + 7), batch.y[1])
    assert len(found.images.block(size - 1, size + 5)) == 1 and found.owner.tolist() == list(range(size))
    assert found.image_keys[6:9].tolist() == batch.x_keys.tolist()
