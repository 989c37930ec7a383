"""Batches and item sets out of real shards: captions, keys, order, and what is said of samples that cannot be used."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.shards import image, write_tar
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import AugmentConfig, BadSamples, CaptionPer, DataConfig, ResizeMode
from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.decode import decode
from dyad.data.image_text.items import labelled_set, retrieval_set
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources

EMOJI = Path(__file__).parents[3] / "data" / "samples" / "emoji"
SPEC = ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def tokenize(texts: list[str]) -> Tensor:
    """(n, 32) int64, one number per letter: the text can be read back."""
    return torch.tensor([[ord(c) for c in text.ljust(32)[:32]] for text in texts])


def read_back(tokens: Tensor) -> list[str]:
    return ["".join(map(chr, row)).rstrip() for row in tokens.tolist()]


def shards_of(path: Path, *samples: Mapping[str, bytes | str | dict[str, Any]]) -> Shards:
    """One shard; a sample is {suffix: bytes, text or json}."""
    members = [
        (f"{number:04d}.{suffix}", _bytes(value)) for number, s in enumerate(samples) for suffix, value in s.items()
    ]
    write_tar(path / "shard.tar", members)
    return open_shards(parse_sources(str(path / "shard.tar")), workers=0)


def _bytes(value: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def dataset(shards: Shards, seed: int = 0, **config: Any) -> ImageText:
    return ImageText(shards, PairMaker(SPEC, tokenize, DataConfig(**config), seed))


def texts_of(data: ImageText, sample: int, epochs: int = 400) -> Counter[str]:
    """How often each caption of a sample is drawn."""
    return Counter(read_back(data.__getitems__([(epoch, sample) for epoch in range(epochs)]).y))


def test_a_batch_holds_images_tokens_ids_and_keys(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, *({"png": image(n, (8, 8)), "txt": f"thing {n}"} for n in range(5)))
    batch = dataset(shards).__getitems__([(0, 3), (0, 0), (2, 4)])
    assert batch.x.dtype == torch.uint8 and batch.y.dtype == torch.int64
    for row, sample in enumerate((3, 0, 4)):
        assert torch.equal(batch.x[row], decode(image(sample, (8, 8)), 100))
    assert read_back(batch.y) == ["thing 3", "thing 0", "thing 4"]
    assert batch.sample_ids.tolist() == [3, 0, 4]
    assert batch.x_keys.tolist() == [content_key(image(n, (8, 8))) for n in (3, 0, 4)]
    assert batch.y_keys.tolist() == [content_key(f"thing {n}".encode()) for n in (3, 0, 4)]
    assert {t.dtype for t in (batch.sample_ids, batch.x_keys, batch.y_keys)} == {torch.int64}


def test_the_relevance_of_a_pair_is_a_field(tmp_path: Path) -> None:
    """A sample without one is as other samples that cannot be used."""
    values = [0.25, "1", 0.0, None, 1.5, 1]
    shards = shards_of(
        tmp_path, *({"png": image(n), "txt": "x", "json": {"similarity": v}} for n, v in enumerate(values))
    )
    data = dataset(shards, relevance="similarity")
    batch = data.__getitems__([(0, 1), (0, 0), (0, 5)])
    assert batch.relevance is not None and batch.relevance.tolist() == [1.0, 0.25, 1.0] and not batch.bad
    assert dataset(shards).__getitems__([(0, 2)]).relevance is None
    bad = data.__getitems__([(0, n) for n in (2, 3, 4)]).bad
    assert [one.key for one in bad][:1] == ["0002"] and all("similarity" in one.reason for one in bad)
    with raises(DataError, "shard.tar", "'0000'", "'similar'", "'similarity'"):
        dataset(shards, relevance="similar")


def test_content_keys_are_64_bit_blake2b() -> None:
    assert content_key(b"") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little", signed=True)
    assert -(2**63) <= content_key(b"x") < 2**63 and content_key(b"x") != content_key(b"y")


def test_the_first_image_member_in_the_order_of_the_key_is_taken(tmp_path: Path) -> None:
    red, blue = image(1, (8, 8)), image(2, (8, 8))
    shards = shards_of(tmp_path, {"webp": red, "png": blue, "txt": "t"})
    for key, expected in (("webp;png", red), ("png;webp", blue), ("jpg;png", blue)):
        assert dataset(shards, image_key=key).__getitems__([(0, 0)]).x_keys.tolist() == [content_key(expected)]


@pytest.mark.parametrize(
    "per, captions", {CaptionPer.paragraph: {"one\n two", "three"}, CaptionPer.line: {"one", "two", "three"}}.items()
)
def test_a_caption_in_txt_is_a_paragraph_or_a_line(per: CaptionPer, captions: set[str], tmp_path: Path) -> None:
    shards = shards_of(tmp_path, {"png": image(), "txt": "one\n two \r\n\n three"})
    counts = texts_of(dataset(shards, caption_per=per), 0)
    assert set(counts) == captions and min(counts.values()) > 90


def test_json_fields_may_be_texts_or_lists_and_are_drawn_by_weight(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, {"png": image(), "json": {"caption": "a", "more": ["b", "c"]}})
    counts = texts_of(dataset(shards, captions=["caption", "more"], caption_weights=[3.0, 1.0]), 0, 1000)
    assert abs(counts["a"] - 750) < 70 and abs(counts["b"] - 125) < 55 and abs(counts["c"] - 125) < 55
    even = texts_of(dataset(shards, captions=["caption", "more"]), 0, 1000)
    assert abs(even["a"] - 500) < 80
    for weights, expected in (([1.0, 0.0], {"a"}), ([0.0, 1.0], {"b", "c"})):
        assert set(texts_of(dataset(shards, captions=["caption", "more"], caption_weights=weights), 0)) == expected


def test_what_a_sample_becomes_depends_on_seed_epoch_and_id_alone(tmp_path: Path) -> None:
    augment = AugmentConfig(crop_scale=[0.5, 1.0], gain=[0.5, 1.5], flip=0.5)
    shards = shards_of(
        tmp_path,
        *({"png": image(n, (20, 10)), "json": {"caption": [f"{n} {k}" for k in range(9)]}} for n in range(6)),
    )
    data = dataset(shards, captions=["caption"], augment=augment)
    whole = data.__getitems__([(1, n) for n in range(6)]).with_noise()
    part = data.__getitems__([(1, 4), (1, 1)]).with_noise()
    assert torch.equal(part.x, whole.x[[4, 1]]) and torch.equal(part.y, whole.y[[4, 1]])
    other_epoch = data.__getitems__([(2, n) for n in range(6)]).with_noise()
    other_seed = (
        dataset(shards, 1, captions=["caption"], augment=augment).__getitems__([(1, n) for n in range(6)]).with_noise()
    )
    for other in (other_epoch, other_seed):
        assert not torch.equal(other.x, whole.x) and not torch.equal(other.y, whole.y)
    again = pickle.loads(pickle.dumps(data)).__getitems__([(1, n) for n in range(6)]).with_noise()
    assert torch.equal(again.x, whole.x) and torch.equal(again.y, whole.y)


def test_text_key_says_which_texts_mean_the_same(tmp_path: Path) -> None:
    shards = shards_of(
        tmp_path,
        {"png": image(0), "json": {"caption": "cat", "concept": 7}},
        {"png": image(1), "json": {"caption": "kitten", "concept": 7}},
        {"png": image(2), "json": {"caption": "cat", "concept": 8}},
    )
    by_concept = dataset(shards, captions=["caption"], text_key="concept").__getitems__([(0, n) for n in range(3)])
    by_text = dataset(shards, captions=["caption"]).__getitems__([(0, n) for n in range(3)])
    same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    assert torch.equal(by_concept.y_keys[:, None] == by_concept.y_keys, same)
    assert torch.equal(by_text.y_keys[:, None] == by_text.y_keys, same[[0, 2, 1]][:, [0, 2, 1]])


def test_the_configuration_decides_how_images_are_resized(tmp_path: Path) -> None:
    half = torch.zeros(8, 16, 3, dtype=torch.uint8)
    half[:, 8:] = 200
    from PIL import Image

    path = tmp_path / "half.png"
    Image.fromarray(half.numpy()).save(path)
    shards = shards_of(tmp_path, {"png": path.read_bytes(), "txt": "t"})
    found = {
        mode: dataset(shards, resize=mode).__getitems__([(0, 0)]).x[0, 0]
        for mode in (None, ResizeMode.longest, ResizeMode.squash)
    }
    assert found[None][:, 0].eq(0).all() and found[None][:, 7].eq(200).all()  # the tower's own: shortest
    assert found[ResizeMode.longest][:2].eq(0).all() and found[ResizeMode.longest][3:5, 7].ge(199).all()
    assert found[ResizeMode.squash][:, :3].le(4).all() and found[ResizeMode.squash][:, 5:].ge(196).all()


CANNOT_BE_USED = {
    "no image": ({"txt": "t"}, {}, "data.image_key=jpg;jpeg;png;webp"),
    "no text": ({"png": image(), "json": {"a": "t"}}, {}, "txt"),
    "no json": ({"png": image(), "txt": "t"}, {"captions": ["caption"]}, "'caption'"),
    "wrong field": ({"png": image(), "json": {"captoin": "t", "b": 1}}, {"captions": ["caption"]}, "'captoin'"),
    "blank text": ({"png": image(), "txt": " \n"}, {}, "'txt'"),
    "blank field": ({"png": image(), "json": {"a": ""}}, {"captions": ["a"]}, "'a'"),
    "empty list": ({"png": image(), "json": {"a": []}}, {"captions": ["a"]}, "'a'"),
    "a number": ({"png": image(), "json": {"a": 5}}, {"captions": ["a"]}, "'a' is 5"),
    "null": ({"png": image(), "json": {"a": None}}, {"captions": ["a"]}, "'a' is None"),
    "not UTF-8": ({"png": image(), "txt": b"\xff\xfe"}, {}, ""),
    "broken json": ({"png": image(), "json": "{"}, {"captions": ["a"]}, ""),
    "a json list": ({"png": image(), "json": "[1]"}, {"captions": ["a"]}, ""),
    "no text key": ({"png": image(), "txt": "t"}, {"text_key": "id"}, "data.text_key=null"),
}


@pytest.mark.parametrize("case", CANNOT_BE_USED)
def test_a_sample_that_cannot_be_used_is_named_with_what_it_has(case: str, tmp_path: Path) -> None:
    bad, config, named = CANNOT_BE_USED[case]
    shards = shards_of(tmp_path, bad)
    with raises(DataError, "shard.tar", "'0000'", named):
        dataset(shards, **config)


def test_a_later_sample_that_cannot_be_used_is_named_when_it_is_read(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, {"png": image(), "txt": "t"}, {"png": image(), "txt": ""})
    data = dataset(shards, bad_samples=BadSamples.stop)
    with raises(DataError, "shard.tar", "'0001'", "'txt'"):
        data.__getitems__([(0, 0), (0, 1)])


def test_an_undecodable_image_is_named(tmp_path: Path) -> None:
    images = image(), image()[:40], image(size=(40, 40))
    shards = shards_of(tmp_path, *({"png": data, "txt": "t"} for data in images))
    data = dataset(shards, max_image_pixels=1500, bad_samples=BadSamples.stop)
    with raises(DataError, "shard.tar", "'0001'"):
        data.__getitems__([(0, 0), (0, 1)])
    with raises(DataError, "'0002'", "40 x 40", "data.max_image_pixels=1500"):
        data.__getitems__([(0, 2)])


def test_a_wrong_caption_field_shows_before_training(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, {"png": image(), "json": {"caption": "t"}})
    with raises(DataError, "'captions'", "'caption'"):
        dataset(shards, captions=["caption", "captions"], caption_weights=[1.0, 1.0])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"captions": []}, "data.captions"),
        ({"caption_weights": [1.0, 2.0]}, "data.caption_weights=[1.0, 2.0]"),
        ({"caption_weights": [0.0]}, "data.caption_weights"),
    ],
)
def test_captions_and_weights_must_fit(wrong: dict[str, Any], named: str) -> None:
    with raises(ConfigError, named):
        DataConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"zoom": [2.0, 1.0]}, {"crop_scale": [0.5, 1.5]}, {"gain": [1.0]}, {"flip": 1.5}, {"rotate": -1.0}]
)
def test_noise_settings_must_be_possible(wrong: dict[str, Any]) -> None:
    with raises(ConfigError, f"data.augment.{next(iter(wrong))}="):
        AugmentConfig(**wrong)


# Evaluation


def test_a_retrieval_set_holds_all_captions_of_the_first_place(tmp_path: Path) -> None:
    shards = shards_of(
        tmp_path,
        {"png": image(0, (9, 12)), "json": {"captions": ["a", "b", "c"], "other": "z"}},
        {"png": image(1, (9, 12)), "json": {"captions": "d", "other": "z"}},
        {"png": image(0, (9, 12)), "json": {"captions": ["a", "e"], "other": "z"}},
    )
    config = DataConfig(captions=["captions", "other"])
    found = pickle.loads(pickle.dumps(retrieval_set(shards, SPEC, tokenize, config)))
    assert found.owner.tolist() == [0, 0, 0, 1, 2, 2] and found.owner.dtype == np.int64
    assert read_back(found.texts.block(0, 6)) == ["a", "b", "c", "d", "a", "e"] and len(found.texts) == 6
    assert read_back(found.texts.block(3, 5)) == ["d", "a"]
    assert found.image_keys[0] == found.image_keys[2] != found.image_keys[1]
    assert found.text_keys[0] == found.text_keys[4] and len(set(found.text_keys.tolist())) == 5
    assert len(found.images) == 3 and found.images.block(0, 3).shape == (3, 3, 8, 8)
    assert torch.equal(found.images.block(1, 3), found.images.block(0, 3)[1:])
    assert found.images.block(0, 3).is_contiguous() and found.images.block(0, 3).dtype == torch.uint8


def test_an_evaluation_set_refuses_a_sample_without_caption(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, {"png": image(), "txt": "t"}, {"png": image(), "txt": ""})
    with raises(DataError, "'0001'", "'txt'"):
        retrieval_set(shards, SPEC, tokenize, DataConfig())


def test_labels_come_from_a_field_or_the_cls_member(tmp_path: Path) -> None:
    shards = shards_of(
        tmp_path,
        {"png": image(0), "cls": "3\n", "json": {"group": "animals"}},
        {"png": image(1), "cls": "012", "json": {"group": 5}},
    )
    assert labelled_set(shards, SPEC, DataConfig(), "cls").labels == ["3", "12"]
    by_field = labelled_set(shards, SPEC, DataConfig(), "group")
    assert by_field.labels == ["animals", "5"] and by_field.items.block(0, 2).shape == (2, 3, 8, 8)
    with raises(DataError, "'grup'", "'group'"):
        labelled_set(shards, SPEC, DataConfig(), "grup")


@pytest.mark.parametrize("bad", ["dog", "-1", "", "7" * 5000])
def test_a_cls_member_must_be_a_class_number(bad: str, tmp_path: Path) -> None:
    with raises(DataError, "'0000'", "cls"):
        labelled_set(shards_of(tmp_path, {"png": image(), "cls": bad}), SPEC, DataConfig(), "cls")


def test_the_shipped_emoji_can_be_trained_on_and_evaluated() -> None:
    spec = ImageSpec(64, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    config = DataConfig(captions=["caption", "tagged"], caption_weights=[0.7, 0.3], text_key="concept")
    train = open_shards(parse_sources(str(EMOJI / "{noto,fxemoji}-trained.tar")), workers=0)
    batch = ImageText(train, PairMaker(spec, tokenize, config, 0)).__getitems__(
        [(0, n) for n in range(0, len(train), 97)]
    )
    assert batch.x.shape[1:] == (3, 64, 64) and len(batch) == -(-len(train) // 97)
    unseen = open_shards(parse_sources(str(EMOJI / "twemoji-unseen.tar")), workers=0)
    retrieval = retrieval_set(unseen, spec, tokenize, config)
    assert len(retrieval.images) == len(retrieval.texts) == 181 and retrieval.owner.tolist() == list(range(181))
    assert not set(retrieval.text_keys.tolist()) & set(batch.y_keys.tolist())
    groups = labelled_set(unseen, spec, config, "group").labels
    assert set(groups) <= set(json.loads((EMOJI / "groups.json").read_text())["classes"])
