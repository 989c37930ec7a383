"""Hard negatives of images: texts of json fields or of a mined file, images of members or of one; by the seed."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.shards import image, write_tar
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.batch import ExtraX
from dyad.data.config import AugmentConfig, DataConfig, NegativeList, NegativesConfig
from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.negatives import MinedTexts
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.image_text.wrong_images import MinedImages
from dyad.data.shards.content_keys import content_key, key_name
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources

SPEC = ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
WRONG = [["cat", "dog"], [], ["bird"], ["own 3", "fish", "fish", "cow"]]  # of sample 3: its caption, and a repetition


def tokenize(texts: list[str]) -> Tensor:
    return torch.tensor([[ord(c) for c in text.ljust(12)[:12]] for text in texts], dtype=torch.int64).reshape(-1, 12)


def read_back(tokens: Tensor) -> list[str]:
    return ["".join(map(chr, row)).rstrip() for row in tokens.tolist()]


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    return written(tmp_path, [{"caption": f"own {n}", "wrong": texts} for n, texts in enumerate(WRONG)])


def written(folder: Path, samples: list[dict[str, Any]], wrong: dict[int, list[bytes]] | None = None) -> Shards:
    """wrong: number of a sample → the images of its members neg0.png, neg1.png, …"""
    members = []
    for n, of_json in enumerate(samples):
        members += [(f"{n:03d}.png", image(n)), (f"{n:03d}.json", json.dumps(of_json).encode())]
        members += [(f"{n:03d}.neg{k}.png", encoded) for k, encoded in enumerate((wrong or {}).get(n, []))]
    return open_shards(parse_sources(str(write_tar(folder / "a.tar", members))), workers=0)


def dataset(shards: Shards, seed: int = 0, mined: MinedTexts | None = None, **negatives: Any) -> ImageText:
    own = NegativesConfig(**{"per_row": 2, "fields": ["wrong"], **negatives})
    return ImageText(shards, PairMaker(SPEC, tokenize, DataConfig(captions=["caption"], negatives=own), seed, mined))


def mined_file(folder: Path, lines: dict[int, list[str]]) -> Path:
    rows = [{"query_id": key_name(content_key(image(n))), "negatives": texts} for n, texts in lines.items()]
    (folder / "mined.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "mined.jsonl"


def mined_dataset(shards: Shards, path: Path, lists: list[NegativeList]) -> ImageText:
    return dataset(shards, mined=MinedTexts(str(path)), file=str(path), lists=lists)


def test_a_batch_has_the_negatives_of_its_rows(shards: Shards) -> None:
    """At most per_row each; none twice, never the own caption. Draws depend on seed, epoch and sample alone."""
    data = dataset(shards)
    batch = data.__getitems__([(0, 3), (0, 1), (0, 0), (5, 2)])
    assert batch.extra is not None and read_back(batch.y) == ["own 3", "own 1", "own 0", "own 2"]
    texts, rows = read_back(batch.extra.y), batch.extra.row.tolist()
    assert rows == [0, 0, 2, 2, 3] and not batch.extra.positive.any()
    assert {*texts[:2]} <= {"fish", "cow"} and {*texts[2:4]} == {"cat", "dog"} and texts[4:] == ["bird"]
    assert batch.extra.keys.tolist() == [content_key(text.encode()) for text in texts]
    alone = pickle.loads(pickle.dumps(data)).__getitems__([(0, 3)])
    assert alone.extra is not None and read_back(alone.extra.y) == texts[:2]
    drawn = Counter(read_back(dataset(shards, per_row=1).__getitems__([(e, 0) for e in range(400)]).extra.y))  # type: ignore[union-attr]
    assert abs(drawn["cat"] - 200) < 50 and sum(drawn.values()) == 400


def test_negatives_leave_the_other_draws_alone(shards: Shards) -> None:
    """The caption and the noise of an image are those of a run without negatives, which has no further items."""
    plain, more = (dataset(shards, per_row=n).__getitems__([(0, 0), (1, 3)]) for n in (0, 2))
    assert plain.extra is None and torch.equal(plain.x, more.x) and torch.equal(plain.y, more.y)
    assert (plain.x_noise is None) == (more.x_noise is None)


def test_mined_texts_are_found_by_the_content_of_the_image(shards: Shards, tmp_path: Path) -> None:
    path = mined_file(tmp_path, {2: ["tree", "own 2"], 0: ["sun"]})
    first_mined = mined_dataset(shards, path, [NegativeList.mined, NegativeList.hard_negatives])
    extra = first_mined.__getitems__([(0, 0), (0, 2), (0, 3)]).extra
    assert extra is not None and read_back(extra.y)[:2] == ["sun", "tree"] and extra.row.tolist() == [0, 1, 2, 2]
    own_first = mined_dataset(shards, path, [NegativeList.hard_negatives, NegativeList.mined])
    extra = own_first.__getitems__([(0, 2)]).extra
    assert extra is not None and read_back(extra.y) == ["bird"]


OTHER_LINES = r"""
{"query_id": "00000000000000aa", "negatives": ["half \ud800"]}
{"query_id": "00000000000000aa", "negatives": "a"}
{"query_id": "q1", "negatives": ["a"]}
{}
"""


@pytest.mark.parametrize("line", OTHER_LINES.strip().splitlines())
def test_a_file_of_other_lines_is_refused(line: str, tmp_path: Path) -> None:
    path = mined_file(tmp_path, {1: ["x"]})
    path.write_text(path.read_text() + line + "\n")
    with raises(DataError, f"{path}: line 2"):
        MinedTexts(str(path))


def test_a_repeated_image_is_refused(tmp_path: Path) -> None:
    path = mined_file(tmp_path, {1: ["x"]})
    path.write_text(path.read_text() * 2)
    with raises(DataError, f"{path}: line 2", f"{path}: line 1"):
        MinedTexts(str(path))


def test_a_file_mined_of_other_images_is_refused(shards: Shards, tmp_path: Path) -> None:
    """An image without a negative may be in it, so a strict mining is no other data."""
    mined = [NegativeList.mined]
    mined_dataset(shards, mined_file(tmp_path, {1: []}), mined)
    with raises(ConfigError, "data.negatives.per_row", "data.negatives.fields"):
        mined_dataset(shards, mined_file(tmp_path, {7: ["x"]}), mined)


def test_data_without_any_negatives_are_refused(tmp_path: Path) -> None:
    """One of 100 rows, evenly spaced over all sources, is enough."""
    shards = written(tmp_path, [{"caption": "a"}] * 30 + [{"caption": "a", "wrong": ["a"]}] * 30)
    with raises(ConfigError, "data.negatives.per_row", "data.negatives.fields"):
        dataset(shards)
    (tmp_path / "b").mkdir()
    dataset(written(tmp_path / "b", [{"caption": "a"}] * 500 + [{"caption": "a", "wrong": ["b"]}] * 20))


def test_a_field_that_is_no_list_of_texts_is_a_bad_sample(tmp_path: Path) -> None:
    shards = written(tmp_path, [{"caption": f"own {n}", "wrong": [5] if n == 1 else ["x"]} for n in range(4)])
    batch = dataset(shards).__getitems__([(0, 0), (0, 1)])
    assert {one.key for one in batch.bad} == {"001"} and "'wrong'" in batch.bad[0].reason


@pytest.mark.parametrize(("file", "count"), [("file", "per_row"), ("picture_file", "pictures")])
def test_a_file_that_nothing_draws_from_is_refused(file: str, count: str) -> None:
    mined: dict[str, Any] = {file: "a", "lists": [NegativeList.mined], count: 1}
    for left_out in ({"lists", count}, {"lists"}, {count}):
        with raises(ConfigError, f"data.negatives.{file}=a", "data.negatives.lists=[mined]", f"{count}=1"):
            NegativesConfig(**{key: value for key, value in mined.items() if key not in left_out})
    assert getattr(NegativesConfig(**mined), file) == "a"


# Images -------------------------------------------------------------------------------------------------------------

WRONG_IMAGES = {0: [image(7), image(8)], 2: [image(9)], 3: [image(3), image(8), image(8)]}
NAMES = ["neg0.png", "neg1.png", "neg2.png"]


@pytest.fixture
def with_images(tmp_path: Path) -> Shards:
    return written(tmp_path, [{"caption": f"own {n}", "more": f"more {n}"} for n in range(4)], WRONG_IMAGES)


def image_dataset(shards: Shards, mined: MinedImages | None = None, **negatives: Any) -> ImageText:
    own = NegativesConfig(**{"pictures": 2, "picture_fields": NAMES, **negatives})
    augment = AugmentConfig(crop_scale=[0.3, 1.0], gain=[0.5, 1.0])
    config = DataConfig(captions=["caption"], negatives=own, augment=augment)
    return ImageText(shards, PairMaker(SPEC, tokenize, config, 0, None, mined))


def drawn(data: ImageText, *positions: tuple[int, int]) -> ExtraX:
    extra_x = data.__getitems__(positions).extra_x
    assert extra_x is not None
    return extra_x


def test_a_batch_has_the_wrong_images_of_its_rows(with_images: Shards) -> None:
    """At most so many each; none twice, never the own image. All that is random depends on seed, epoch and sample."""
    data = image_dataset(with_images)
    extra = drawn(data, (0, 3), (0, 1), (0, 0), (5, 2))
    own, keys = [content_key(image(n)) for n in range(10)], extra.keys.tolist()
    assert extra.row.tolist() == [0, 2, 2, 3]
    assert keys[0] == own[8] and {*keys[1:3]} == {own[7], own[8]} and keys[3] == own[9]
    noisy = extra.with_noise()
    assert noisy.noise is None and noisy.x.shape == (4, 3, 8, 8) and not torch.equal(noisy.x, extra.x)
    for position, rows in (((0, 3), [0]), ((0, 0), [1, 2]), ((5, 2), [3])):
        alone = drawn(pickle.loads(pickle.dumps(data)), position).with_noise()
        assert torch.equal(alone.x, noisy.x[rows]) and alone.keys.tolist() == extra.keys[rows].tolist()
    assert not torch.equal(drawn(data, (1, 2)).with_noise().x, noisy.x[3:])  # another gain in another epoch
    of_row = [drawn(data, (epoch, 0)).keys.tolist() for epoch in range(40)]
    assert {tuple(each) for each in of_row} == {(own[7], own[8]), (own[8], own[7])}


def test_wrong_images_leave_the_other_draws_alone(with_images: Shards) -> None:
    plain, more = (image_dataset(with_images, pictures=n).__getitems__([(0, 0), (1, 3)]) for n in (0, 2))
    assert plain.extra_x is None and plain.extra is more.extra is None
    assert torch.equal(plain.with_noise().x, more.with_noise().x) and torch.equal(plain.y, more.y)


def test_a_batch_without_any_wrong_image_has_none(with_images: Shards) -> None:
    extra = drawn(image_dataset(with_images), (0, 1), (1, 1)).with_noise()
    assert extra.x.shape == (0, 3, 8, 8) and extra.row.shape == extra.keys.shape == (0,)


def test_mined_pictures_are_found_by_the_content_of_the_caption(with_images: Shards, tmp_path: Path) -> None:
    own = [content_key(image(n)) for n in range(4)]
    path = mined_images(tmp_path, {"own 0": [own[2], own[0], own[3]], "own 1": []})
    mined = MinedImages(str(path), with_images, DataConfig())
    lists = [NegativeList.mined, NegativeList.hard_negatives]
    extra = drawn(image_dataset(with_images, mined, picture_file=str(path), lists=lists), (0, 0), (0, 1), (0, 2))
    assert extra.row.tolist() == [0, 0, 2] and {*extra.keys[:2].tolist()} == {own[2], own[3]}
    assert extra.keys[2] == content_key(image(9))  # it was not mined
    only = image_dataset(with_images, mined, picture_file=str(path), lists=lists[:1])
    assert drawn(pickle.loads(pickle.dumps(only)), (0, 0), (0, 2)).row.tolist() == [0, 0]


def mined_images(folder: Path, lines: dict[str, list[int]]) -> Path:
    rows = [
        {"query_id": key_name(content_key(text.encode())), "negatives": [key_name(key) for key in keys]}
        for text, keys in lines.items()
    ]
    (folder / "mined.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "mined.jsonl"


def test_a_file_mined_of_images_that_are_not_there_is_refused(with_images: Shards, tmp_path: Path) -> None:
    path = mined_images(tmp_path, {"own 0": [content_key(image(9))]})  # a member, no image of a sample
    mined = MinedImages(str(path), with_images, DataConfig())
    with raises(DataError, f"data.negatives.picture_file={path}", key_name(content_key(image(9))), "mine=pictures"):
        image_dataset(with_images, mined, picture_file=str(path), lists=[NegativeList.mined])
    texts = mined_file(tmp_path, {1: ["a text"]})
    with raises(DataError, f"{texts}: line 1"):
        MinedImages(str(texts), with_images, DataConfig())


def test_data_without_any_wrong_image_are_refused(with_images: Shards) -> None:
    with raises(ConfigError, "data.negatives.pictures", "data.negatives.picture_fields", "mine=pictures"):
        image_dataset(with_images, picture_fields=["negative.png"])
    with raises(ConfigError, "data.negatives.lists", "data.negatives.picture_file"):
        image_dataset(with_images, lists=[NegativeList.mined])


def test_a_wrong_image_that_is_none_makes_a_bad_sample(tmp_path: Path) -> None:
    samples = [{"caption": f"own {n}"} for n in range(4)]
    shards = written(tmp_path, samples, {0: [image(7)], 1: [b"no image"]})
    batch = image_dataset(shards).__getitems__([(0, 0), (0, 1)])
    assert {one.key for one in batch.bad} == {"001"} and "no sound" in batch.bad[0].reason
