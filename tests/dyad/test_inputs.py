"""Odd inputs of the Python API are refused in one line, by the error that the docstrings name. With a model:
test_model.py."""

from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from helpers.messages import raises
from PIL import Image

import dyad
from dyad import inputs
from dyad.data.image_text.in_memory import GivenImages, pixels
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.question_passage.passages import Passage


class Column:
    """As a column of pandas: no Sequence, and no array of NumPy."""

    def tolist(self) -> list[str]:
        return ["a", "b"]


TEXTS: dict[str, Any] = {"None": None, "7": 7, "bytes": b"x", "set": {"a"}, "mapping": {"a": 1}, "empty": []}
TEXTS |= {"a number in it": ["a", 7], "bytes in it": [b"x"], "None in it": ["x", None], "array": np.zeros(3)}
TEXTS |= {
    "empty array": np.array([], str),
    "no axis": np.array("a"),
    "a list in it": [["a"]],
    "half a character": "a\ud800",
}


@pytest.mark.parametrize("given", TEXTS.values(), ids=TEXTS)
def test_what_is_no_text(given: Any) -> None:
    with raises(dyad.ConfigError, "questions"):
        inputs.texts_of(given, "questions")


def test_what_is_a_text() -> None:
    assert inputs.texts_of("a frog") == ["a frog"]
    usual = [("a", "b"), ["a", "b"], np.array(["a", "b"]), {1: "a", 2: "b"}.values(), map(str, "ab"), Column()]
    for given in [*usual, (text for text in "ab"), pyarrow.array(["a", "b"]), pyarrow.chunked_array([["a"], ["b"]])]:
        assert inputs.texts_of(given) == ["a", "b"]


def test_a_bad_item_is_named_by_its_position() -> None:
    for mistake in (
        lambda: inputs.texts_of(["a", "b", None]),
        lambda: inputs.texts_of(["a", "b", "a\ud800"]),
        lambda: inputs.passages_of(["a", "b", None]),
        lambda: inputs.passages_of(["a", "b", {"text": "a\ud800"}]),
        lambda: inputs.histories_of(["a", "b", 7]),
    ):
        with raises(dyad.ConfigError, "item 2"):
            mistake()
    images = [np.zeros((8, 8, 3), np.uint8), None, "nowhere.png"]
    given = GivenImages(images, ImageSpec(8, (0.5,) * 3, (0.5,) * 3), 1000)  # type: ignore[arg-type]
    with raises(dyad.DataError, "image 1"):
        given.decoded(1)
    with raises(dyad.DataError, "nowhere.png"):
        given.decoded(2)


@pytest.mark.parametrize("given", [[1, 2], "id", [], [["a"], [7]], 7, [iter(["a"])]])
def test_what_is_no_history(given: Any) -> None:
    with raises(dyad.ConfigError, "history"):
        inputs.histories_of(given)


def test_what_is_a_history() -> None:
    assert inputs.histories_of(["a", "b"]) == inputs.histories_of(np.array(["a", "b"])) == ([["a", "b"]], True)
    assert inputs.histories_of([["a"], ("b", "c")]) == ([["a"], ["b", "c"]], False)


@pytest.mark.parametrize(
    "given", [None, [None], [("a", "b", "c")], [("a", 7)], [{"title": "a"}], [{"text": 7}], [], "a\ud800", ("t", "a")]
)
def test_what_is_no_passage(given: Any) -> None:
    with raises(dyad.ConfigError, "passages"):
        inputs.passages_of(given)


def test_what_is_a_passage() -> None:
    assert inputs.passages_of("a") == inputs.passages_of({"text": "a"}) == [Passage("a")]
    assert inputs.passages_of([("t", "a")]) == [Passage("a", "t")]
    assert inputs.passages_of({"text": "a", "title": None}) == inputs.passages_of([(None, "a")]) == [Passage("a")]
    assert inputs.passages_of(("a", "b", "c")) == [Passage("a"), Passage("b"), Passage("c")]
    assert inputs.passages_of([("t", "a"), "a", {"text": "b", "id": 7}]) == [
        Passage("a", "t"),
        Passage("a"),
        Passage("b"),
    ]


def test_passages_of_an_index_are_json_values() -> None:
    assert inputs.stored_passages(MappingProxyType({"text": "a"})) == [{"text": "a"}]
    with raises(dyad.ConfigError, "[(title, text)]"):
        inputs.stored_passages(("t", "a"))
    with raises(dyad.ConfigError, "number 1"):
        inputs.stored_passages(["a", {"text": "b", "id": b"7"}])


def test_one_image_and_several() -> None:
    one = [np.zeros((8, 8, 3), np.uint8), torch.zeros(3, 8, 8), Image.new("RGB", (2, 2)), "a.png", Path("a.png"), b"x"]
    assert all(inputs.images_of(each)[0] is each for each in one)
    assert len(inputs.images_of(np.zeros((4, 8, 8, 3), np.uint8))) == 4
    for given in (None, 7, [], {"a.png"}, bytearray(b"x")):
        with raises(dyad.ConfigError, "images"):
            inputs.images_of(given)


def cut_image() -> Image.Image:
    """An image file that PIL has opened, and of which the end is missing."""
    file = BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "PNG")
    return Image.open(BytesIO(file.getvalue()[:2000]))


NO_IMAGES: list[Any] = [None, 7, np.zeros((0, 0, 3), np.uint8), np.zeros((8, 8, 4), np.uint8), "/dev/zero"]
NO_IMAGES += [cut_image(), np.array(7)]


@pytest.mark.parametrize("given", NO_IMAGES)
def test_what_is_no_image(given: Any) -> None:
    with raises(dyad.DataError):
        pixels(given, 1000)


@pytest.mark.parametrize("k", [0, -1, 2.5, None, True, "3", float("nan")])
def test_what_is_no_number_of_results(k: Any) -> None:
    with raises(dyad.ConfigError, f"k={k!r}"):
        inputs.count_of(k)


@pytest.mark.parametrize("steps", [range(0, 10, 5), range(-2, 3), 7])
def test_what_are_no_steps(steps: Any) -> None:
    with raises(dyad.ConfigError, f"steps={steps!r}"):
        inputs.check_steps(steps)


def test_embeddings_of_few_bits_are_multiplied_as_float32() -> None:
    for dtype in (np.float16, np.int8, np.float32):
        assert inputs.embeddings_of(np.ones(3, dtype), "x").dtype == np.float32
    assert inputs.embeddings_of(torch.ones(3, dtype=torch.bfloat16), "x").dtype == np.float32


def test_queries_are_of_one_kind() -> None:
    assert inputs.queries_of("a") == inputs.queries_of(iter(["a"])) == (["a"], True)
    assert inputs.queries_of([Path("a")]) == ([Path("a")], False)
    assert inputs.count_of(np.int64(3)) == 3
    with raises(dyad.ConfigError):
        inputs.queries_of(["a", Path("b.png")])
    with raises(dyad.ConfigError, "queries"):
        inputs.queries_of([])


@pytest.mark.parametrize("given", [None, [[1.0]], np.zeros((2, 2, 2)), np.array(["a"]), np.float32(1)])
def test_what_are_no_embeddings(given: Any) -> None:
    with raises(dyad.ConfigError, "x"):
        inputs.embeddings_of(given, "x")


@pytest.mark.parametrize(
    "rows", [np.full((2, 3), np.nan), np.zeros((3, 3)), np.zeros((2, 0)), np.zeros(2), np.zeros((2, 3), int), [[1.0]]]
)
def test_an_index_has_finite_numbers_for_each_item(rows: Any) -> None:
    with raises(dyad.ConfigError, "index"):
        dyad.Index(["a", "b"], rows, "digest")


def test_of_a_folder_no_link_leads_out_and_no_device_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "c.png").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("a.png", "._a.png", ".hidden/b.png"):
        (folder / name).touch()
    (tmp_path / "secret.png").touch()
    for name, target in {"out": "../secret.png", "zero": "/dev/zero", "in": "a.png", "circle": "circle.png"}.items():
        (folder / f"{name}.png").symlink_to(target)
    assert inputs.image_files(folder) == [folder / "a.png", folder / "in.png"]
