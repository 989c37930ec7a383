"""Check the arguments of the Python API (dyad/model.py) and convert them to lists and arrays, before other code uses
them."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import file_inside
from dyad.data.question_passage.passages import Passage
from dyad.train.towers import models

PassageLike: TypeAlias = str | tuple[str, str] | Mapping[str, str]  # text; (title, text); {"text": …, "title": …}
OnError: TypeAlias = Literal["stop", "skip"]  # what an image that cannot be read does
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
USES: Mapping[type[models.TwoTowerModel], tuple[str, str]] = {  # what a model takes, and the methods that take it
    models.ImageModel: ("images", "encode_image"),
    models.ImageTextModel: ("images and texts", "encode_image, encode_text"),
    models.TextPairModel: ("questions and passages", "encode_question, encode_passage"),
    models.SequenceModel: ("items of sequences", "recommend"),
    models.LanguageModel: ("answers to prompts", "score"),
}


def unsupported_input_error(model: models.TwoTowerModel, classes: Sequence[str]) -> ConfigError:
    """Return a ConfigError, to raise for inputs that `model` does not take; it says what the model takes.

    classes: the names of its classes; empty for a model without them.
    """
    what, methods = USES[type(model)]
    return ConfigError(f"this model takes {what} only: {methods}{'; classes by encode_class' * bool(classes)}")


def texts_of(given: Any, what: str = "texts") -> list[str]:
    """Return texts as a list; a single str becomes a list of one. what: the name of the texts in error messages.

    Raises ConfigError unless `given` is a str or a non-empty sequence of str, and for a text with half of a UTF-16
    surrogate pair.
    """
    texts = [given] if isinstance(given, str) else listed(given, what)
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"{what} must be str, or a list of str: one is {_type(text)}")
        _refuse_half(text, what)
    return texts


def passages_of(given: Any) -> list[Passage]:
    """Return passages as a list of Passage; a single passage becomes a list of one.

    A pair of texts (title, text) is a single passage. See PassageLike for the forms of a passage. Raises ConfigError
    for an empty list, for an element of another form, and for a text with half of a UTF-16 surrogate pair.
    """
    return [_passage(each) for each in _passages(given)]


def stored_passages(given: Any) -> list[Any]:
    """Return passages as a list for an Index; a single passage becomes a list of one.

    The passages stay as they are given, except that a mapping becomes a dict; their form is checked by `passages_of`.
    Raises ConfigError for an empty list, and for a passage that a JSON file cannot hold.
    """
    passages = [dict(each) if isinstance(each, Mapping) else each for each in _passages(given)]
    for i, passage in enumerate(passages):
        try:
            json.dumps(passage)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"passages: number {i} cannot be stored in an index as JSON: {error}") from error
    return passages


def images_of(given: Any) -> list[Any]:
    """Return images as a list; a single image becomes a list of one.

    An image is a path, the bytes of an image file, a PIL image, or an array or tensor of 3 dimensions. Any other value
    is converted by `listed`, with its errors. The elements of a list are checked when they are decoded. Raises
    ConfigError for the path of a folder.
    """
    if isinstance(given, str | PathLike) and os.path.isdir(os.path.expanduser(given)):
        raise ConfigError(
            f"'{given}' is a folder, not an image: give a list of files, or embed it by model.index(FOLDER)"
        )
    pixels = isinstance(given, np.ndarray | Tensor) and given.ndim == 3
    return [given] if pixels or isinstance(given, str | PathLike | bytes | Image) else listed(given, "images")


def listed(given: Any, what: str) -> list[Any]:
    """Return the elements of a sequence, or the rows of an array or tensor, as a list.

    what: the name of the elements in error messages. The elements are not checked. Raises ConfigError for a str or
    bytes, for another type such as a generator, and for an empty sequence.
    """
    if not isinstance(given, Sequence | np.ndarray | Tensor) or isinstance(given, str | bytes | bytearray):
        raise ConfigError(f"{what} must be one or a list of them, not {_type(given)}")
    if not getattr(given, "ndim", 1) or not len(given):
        raise ConfigError(f"nothing to embed: the list of {what} is empty")
    return list(given)


def queries_of(given: Any) -> tuple[list[Any], bool]:
    """Return (the queries of a search as a list, whether they are texts).

    Any value that is no list is a single query, and becomes a list of one. A str is a text, any other query an image;
    it is not checked further here. Raises ConfigError for an empty list, and for a list with texts and images.
    """
    queries = listed(given, "queries") if isinstance(given, list) else [given]
    texts = [isinstance(query, str) for query in queries]
    if any(texts) != all(texts):
        raise ConfigError("queries must be texts (str), or images (a path as a Path), not both in one list")
    return queries, all(texts)


def count_of(k: Any, name: str = "k") -> int:
    """Return `k`, a number of things, as an int.

    name: the name of the argument in error messages. Raises ConfigError unless it is a whole number of at least 1; a
    bool is none.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"{name}={k!r:.50} must be a whole number of at least 1")
    return int(k)


def check_steps(steps: Any) -> None:
    """Raise ConfigError unless `steps` is a range of consecutive steps whose first step is 0 or more."""
    if not isinstance(steps, range) or steps.step != 1 or steps.start < 0:
        raise ConfigError(f"steps={steps!r:.50} must be a range without gaps from 0 or more on, as range(100, 200)")


def embeddings_of(given: Any, name: str) -> np.ndarray:
    """Return embeddings as an array (n, D) of float32, or of float64 if `given` needs it.

    A single embedding (D,) becomes (1, D). name: the name of the argument in error messages. Raises ConfigError unless
    `given` is a numeric array or tensor of 1 or 2 dimensions.
    """
    if isinstance(given, Tensor):  # numpy has no bfloat16
        given = (given.float() if given.dtype == torch.bfloat16 else given).numpy(force=True)
    if not isinstance(given, np.ndarray) or given.ndim not in (1, 2) or given.dtype.kind not in "fiu":
        raise ConfigError(f"{name} must be embeddings, an array (n, D) of numbers, not {_type(given)}")
    # products of float16 overflow, those of int8 wrap around
    return np.atleast_2d(given).astype(np.promote_types(given.dtype, np.float32), copy=False)


def image_files(folder: Path) -> list[Path]:
    """Return the paths of the image files (suffixes SUFFIXES) in a folder and its subfolders, sorted.

    Returns [] for a path that is no folder. Hidden files and folders are left out, as in training. Symbolic links that
    lead out of the folder are left out, because the folder may be untrusted; so is everything that is no regular file.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    shown = (path for path in found if not any(part.startswith(".") for part in path.parts))
    return sorted(folder / path for path in shown if file_inside(folder, path))


def _passages(given: Any) -> list[Any]:
    is_pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(text, str) for text in given)
    return [given] if is_pair or isinstance(given, str | Mapping) else listed(given, "passages")


def _passage(given: Any) -> Passage:
    title, text = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
    if isinstance(given, Mapping):
        title, text = given.get("title", ""), given.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise ConfigError('passages must be str, (title, text), or {"text": str, "title": str}: one is ' + _type(given))
    _refuse_half(title + text, "passages")
    return Passage(text, title)


def _refuse_half(text: str, what: str) -> None:
    """Raise ConfigError for a text that contains half of a UTF-16 surrogate pair, which no tokenizer accepts."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{what}: character {half.start()} of a text is {half[0]!r}, which is no Unicode character")


def _type(given: Any) -> str:
    return "None" if given is None else type(given).__name__
