"""Captions mined for images: which samples count, what is right, and all rules against a plain reading of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.mining import mined, read_lines, untokenized
from helpers.shards import Member, image, opened, write_tar
from torch import Tensor, nn

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, MiningConfig
from dyad.data.image_text.items import Images
from dyad.data.image_text.transforms import ImageSpec
from dyad.eval.encode.encoder import Encoder
from dyad.eval.mine import images
from dyad.eval.mine.images import BLACK, CaptionsAndImages, ImageInputs, ImagesAndCaptions, write_captions
from dyad.eval.mine.mining import MiningInput, embed_all
from dyad.train.distributed.world import World

SPEC = ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
Fields = Mapping[str, Any]


def id_of(payload: bytes) -> str:
    """The name of a content key, from its definition."""
    return hashlib.blake2b(payload, digest_size=8).digest()[::-1].hex()


def data_of(
    folder: Path,
    samples: Sequence[tuple[bytes, Fields]],
    kind: type = ImagesAndCaptions,
    tokenize: Any = untokenized,
    **options: Any,
) -> ImagesAndCaptions:
    """samples: the image and the json member of each."""
    folder.mkdir(exist_ok=True)
    members: list[Member] = []
    for number, (encoded, fields) in enumerate(samples):
        members += [(f"{number:06d}.png", encoded), (f"{number:06d}.json", json.dumps(fields).encode())]
    shards = opened(write_tar(folder / "shard.tar", members))
    config = DataConfig(captions=["caption", "more"], **options)
    write_captions(shards, config, folder)
    return kind(Images(shards, SPEC, config), tokenize, folder)


def plainly(
    samples: Sequence[tuple[bytes, Fields]], texts: list[str], scores: np.ndarray, config: MiningConfig, meaning: str
) -> dict[str, list[str]]:
    """The rules, read aloud. scores: of each caption for each distinct image. meaning: as data.text_key; "": texts"""
    meant: dict[str, set[str]] = {}
    right: dict[str, set[str]] = {}
    for encoded, fields in samples:
        for text in [fields["caption"], *fields["more"]]:
            meant.setdefault(text, set()).add(fields[meaning] if meaning else text)
            right.setdefault(id_of(encoded), set()).add(fields[meaning] if meaning else text)
    result = {}
    for row, (name, means) in enumerate(right.items()):
        own = [bool(meant[text] & means) for text in texts]
        score = scores[:, row].tolist()
        best = max(s for s, is_own in zip(score, own, strict=True) if is_own)
        limit = np.inf if config.margin is None else best - config.margin
        if config.relative_margin is not None:
            limit = min(limit, best - config.relative_margin * abs(best))
        ranked = sorted(range(len(texts)), key=lambda i: -score[i])[config.first_rank - 1 : config.last_rank]
        top = np.inf if config.max_score is None else config.max_score
        result[name] = [texts[i] for i in ranked if not own[i] and score[i] <= min(limit, top)][: config.keep]
    return result


def random_samples(seed: int) -> list[tuple[bytes, Fields]]:
    """Images that come several times, captions that many have, and meanings that many captions have."""
    chance = np.random.default_rng(seed)

    def some() -> str:
        return f"{chance.integers(20)}\n{chance.integers(3)} É"  # a line break is a part of a caption

    return [
        (
            image(int(chance.integers(40))),
            {"caption": some(), "more": [some() for _ in range(chance.integers(1, 4))], "concept": str(number % 9)},
        )
        for number in range(70)
    ]


@pytest.mark.parametrize("meaning", ["", "concept"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"first_rank": 3, "last_rank": 20, "keep": 4, "margin": 0.5}, {"relative_margin": 0.3}, {"max_score": 0.2}],
    ids=str,
)
def test_as_a_plain_reading_of_the_rules(tmp_path: Path, settings: dict[str, Any], meaning: str) -> None:
    samples = random_samples(0)
    data = data_of(tmp_path, samples, text_key=meaning or None)
    texts = list(dict.fromkeys(text for _, fields in samples for text in [fields["caption"], *fields["more"]]))
    assert [line["text"] for line in read_lines(tmp_path / "captions.jsonl")] == texts
    images = list(dict.fromkeys(encoded for encoded, _ in samples))
    assert data.sides()[0].ids(0, len(images)) == [id_of(encoded) for encoded in images]
    scores = np.random.default_rng(1).normal(size=(len(texts), len(images))).astype(np.float32)
    found = MiningInput(data, np.eye(len(images), dtype=np.float32), scores)
    negatives, summary = mined(found, tmp_path / "out", **settings)
    config = MiningConfig(**{"first_rank": 1, **settings})
    assert negatives == plainly(samples, texts, scores, config, meaning)
    assert summary["pictures"] == len(images) and summary["negatives"] == sum(map(len, negatives.values()))
    assert sum(summary["left_out"].values()) + summary["negatives"] == summary["found"]


@pytest.mark.parametrize("meaning", ["", "concept"])
def test_images_for_captions_as_a_plain_reading_of_the_rules(tmp_path: Path, meaning: str) -> None:
    """An image is right for a caption that means what a caption of the image means."""
    samples = random_samples(2)
    data = data_of(tmp_path, samples, CaptionsAndImages, text_key=meaning or None)
    meant: dict[str, set[str]] = {}
    of_image: dict[str, set[str]] = {}
    for encoded, fields in samples:
        for text in [fields["caption"], *fields["more"]]:
            meant.setdefault(text, set()).add(fields[meaning] if meaning else text)
            of_image.setdefault(id_of(encoded), set()).add(fields[meaning] if meaning else text)
    names, texts = [*of_image], [*meant]
    scores = np.random.default_rng(3).normal(size=(len(names), len(texts))).astype(np.float32)
    found = MiningInput(data, np.eye(len(texts), dtype=np.float32), scores)
    negatives, summary = mined(found, tmp_path / "out", first_rank=2, last_rank=30, keep=5, margin=0.2)
    assert [*negatives] == [id_of(text.encode()) for text in texts] and summary["captions"] == len(texts)
    for (of_caption, chosen), text, of_text in zip(negatives.items(), texts, scores.T.tolist(), strict=True):
        right = [bool(meant[text] & of_image[name]) for name in names]
        limit = max(score for score, is_right in zip(of_text, right, strict=True) if is_right) - 0.2
        ranked = sorted(range(len(names)), key=lambda i: -of_text[i])[1:30]
        assert chosen == [names[i] for i in ranked if not right[i] and of_text[i] <= limit][:5], of_caption


def test_what_training_never_draws_is_right_but_not_searched(tmp_path: Path) -> None:
    """`more` of the first is the caption of the third."""
    captions = [("a", ["c"]), ("b", ["x"]), ("c", ["y"])]
    samples = [(image(n), {"caption": text, "more": more}) for n, (text, more) in enumerate(captions)]
    data = data_of(tmp_path, samples, caption_weights=[1.0, 0.0])
    found = MiningInput(data, np.eye(3, dtype=np.float32), np.ones((3, 3), np.float32))
    assert list(mined(found, tmp_path / "out")[0].values()) == [["b"], ["a", "c"], ["a", "b"]]


class Flat(nn.Module):
    """A tower whose embedding is all of its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1).float() + 1


def test_an_image_that_cannot_be_decoded_is_no_negative(tmp_path: Path) -> None:
    """A darker image has a higher score. One that cannot be decoded is encoded as black, sets no margin for its caption
    c, and does not take a black image with it."""
    whole, other, cut, black = image(1), image(2), image(3)[:-40], image(0)
    samples = [(whole, "a"), (other, "b"), (cut, "c"), (whole, "c"), (black, "d")]
    fields = [(each, {"caption": text, "more": text}) for each, text in samples]
    data = data_of(tmp_path, fields, CaptionsAndImages, lambda texts: torch.full((len(texts), 3 * 8 * 8), -2))
    encode = Encoder({"x": Flat(), "y": Flat()}, World(), cosine=False)
    negatives, summary = mined(embed_all(encode, data, tmp_path / "embeddings"), tmp_path / "out", margin=0.0)
    assert [*negatives.values()] == [[id_of(other)], [], [id_of(other)], [id_of(whole), id_of(other)]]
    assert summary["left_out"] == {"margin": 4, "right": 5, "unreadable": 3}


class Collapsed(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ones(len(inputs), 4)


def test_of_a_collapsed_model_not_every_image_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[int]()
    monkeypatch.setattr(images, "WINDOW", 5)
    monkeypatch.setattr(images, "ENOUGH", 7)
    monkeypatch.setattr(ImageInputs, "_decoded", lambda _, row: tried.append(row) if row in (0, 12) else BLACK)
    inputs = ImageInputs(Images(opened(write_tar(tmp_path / "a.tar", [])), SPEC, DataConfig()), np.arange(100))
    encode = Encoder({"x": Collapsed()}, World(), cosine=False)
    assert inputs.undecodable(encode, np.ones((100, 4), np.float32)).tolist() == [0] and tried == [0]


def test_a_sample_lacks_captions_that_training_never_draws(tmp_path: Path) -> None:
    """Training takes it; it had no negatives, and its captions were none."""
    samples = [(image(1), {"caption": "a", "more": ["b"]}), (image(2), {"caption": "c"})]
    data = data_of(tmp_path, samples, caption_weights=[1.0, 0.0])
    assert [data.item(i)[0] for i in range(len(data.item_keys))] == ["a", "c"]
    assert data.sides()[0].ids(0, 2) == [id_of(encoded) for encoded, _ in samples]


def test_samples_that_training_replaces(tmp_path: Path) -> None:
    """One without captions has no part in it; an image that cannot be decoded is known only when it is encoded."""
    fields = {"caption": "a", "more": "b"}
    samples = [
        (image(1), {"caption": "z"}),
        (image(2), fields),
        (b"no image", fields),
        (image(3), {"caption": " "}),
    ]
    data = data_of(tmp_path, samples)
    assert data.item(0) == ("a", "a") and len(data.item_keys) == 2
    inputs = data.sides()[0].inputs
    assert isinstance(inputs, ImageInputs) and inputs.samples.tolist() == [1, 2]
    pixels = inputs.take([1, 0])
    assert pixels.shape == (2, 3, 8, 8) and not pixels[0].any() and pixels[1].any()
    with raises(DataError, "1 samples", "shard.tar", "'000000'", "'more'"):
        data_of(tmp_path / "none", samples[:1])
