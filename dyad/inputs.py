"""Check the arguments of the Python API (dyad/model.py) and convert them to lists and arrays, before other code uses
them."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError, first_line
from dyad.data.base.files import file_inside
from dyad.data.question_passage.passages import Passage
from dyad.data.sequence.frames import Frames
from dyad.train.distributed.devices import cuda_usable
from dyad.train.towers import models

# text; (title, text); {"text": …, "title": …}
PassageLike: TypeAlias = str | tuple[str | None, str] | Mapping[str, Any]
OnError: TypeAlias = Literal["stop", "skip"]  # what an image that cannot be read does
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
USES: Mapping[type[models.TwoTowerModel], tuple[str, str]] = {  # what a model takes, and the methods that take it
    models.ImageModel: ("images", "encode_image"),
    models.ImageTextModel: ("images and texts", "encode_image, encode_text"),
    models.TextPairModel: ("questions and passages", "encode_question, encode_passage"),
    models.SequenceModel: ("items of sequences", "recommend, encode_item, encode_history; encode_sequence of frames"),
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
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"{what} must be str, or a list of str: item {i} is {_type(text)}")
        _refuse_half(text, what, i)
    return texts


def passages_of(given: Any) -> list[Passage]:
    """Return passages as a list of Passage; a single passage becomes a list of one.

    See PassageLike for the forms of a passage. Raises ConfigError for an empty list, for a tuple of two texts that is
    in no list, for an element of another form, and for a text with half of a UTF-16 surrogate pair.
    """
    return [_passage(each, i) for i, each in enumerate(_passages(given))]


def stored_passages(given: Any) -> list[Any]:
    """Return passages as a list for an Index; a single passage becomes a list of one.

    The passages stay as they are given, except that a mapping becomes a dict; their form is checked by `passages_of`.
    Raises ConfigError for an empty list, for a tuple of two texts that is in no list, and for a passage that a JSON
    file cannot hold.
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

    An image is a path, the bytes of an image file, an open file, a PIL image, or an array or tensor. Any other value
    is converted by `listed`, with its errors. The elements of a list are checked when they are decoded. Raises
    ConfigError for the path of a folder.
    """
    if isinstance(given, str | PathLike) and os.path.isdir(os.path.expanduser(given)):
        raise ConfigError(
            f"'{given}' is a folder, not an image: give a list of files, or embed it by model.index(FOLDER)"
        )
    return [given] if is_single(given) else listed(given, "images")


def is_single(given: Any) -> bool:
    """Return whether `given` is a single text or image, and no list of them: see `Model` for the forms of an image."""
    pixels = isinstance(given, np.ndarray | Tensor) and given.ndim in (2, 3)  # of 2, it is refused as grey
    return pixels or isinstance(given, str | PathLike | bytes | Image) or hasattr(given, "read")


def listed(given: Any, what: str) -> list[Any]:
    """Return the elements of a sequence, an iterator or a column of pandas or pyarrow, or the rows of an array.

    what: the name of the elements in error messages. The elements are not checked. Raises ConfigError for a str or
    bytes, for another type such as a set, a mapping or a DataFrame, and if there are no elements.
    """
    as_list = getattr(given, "to_pylist", None) or getattr(given, "tolist", None)  # of pyarrow; of pandas
    if as_list and not isinstance(given, np.ndarray | Tensor):
        given = as_list()
    elif isinstance(given, Iterator | ValuesView):
        given = list(given)
    if not isinstance(given, Sequence | np.ndarray | Tensor) or isinstance(given, str | bytes | bytearray):
        raise ConfigError(f"{what} must be one or a list of them, not {_type(given)}. Give a list")
    if not getattr(given, "ndim", 1) or not len(given):
        raise ConfigError(f"nothing to embed: the list of {what} is empty")
    return list(given)


def queries_of(given: Any) -> tuple[list[Any], bool]:
    """Return (the queries of a search as a list, whether they are texts).

    A single query becomes a list of one. A str is a text, any other query an image; it is not checked further here.
    Raises ConfigError for an empty list, for a list with texts and images, for embeddings, and for what `listed`
    refuses.
    """
    if getattr(given, "ndim", 0) in (1, 2) and "float" in str(getattr(given, "dtype", "")):
        raise ConfigError("queries must be texts or images. With embeddings, search by index.search(EMBEDDINGS, k)")
    queries = [given] if is_single(given) else listed(given, "queries")
    texts = [isinstance(query, str) for query in queries]
    if any(texts) != all(texts):
        raise ConfigError("queries must be texts (str), or images (a path as a Path), not both in one list")
    return queries, all(texts)


def prefix_of(given: Any) -> str | None:
    """Return the prefix of texts as it is given; None stands for that of the model.

    Raises ConfigError for another type, and for a text with half of a UTF-16 surrogate pair.
    """
    if not isinstance(given, str | None):
        raise ConfigError(f"prefix={given!r:.50} must be a str, or None: the prefix of the model")
    _refuse_half(given or "", "prefix", 0)
    return given


def histories_of(given: Any) -> tuple[list[list[str]], bool]:
    """Return (histories as lists of ids, whether `given` is a single history).

    Raises ConfigError unless `given` is a list of ids (str), or a list of such lists, and not empty.
    """
    if isinstance(given, str):
        raise ConfigError(f"history={given!r:.80} must be a list of ids, oldest first: [{given!r:.80}]")
    many = listed(given, "ids of a history")
    single = np.ndim(many[0]) == 0
    return [texts_of(each, "ids of a history") for each in ([many] if single else many)], single


def frames_of(given: Any, width: int | None, length: int) -> list[np.ndarray]:
    """Return the last `length` frames of each sequence as float32 (T, width); a single sequence becomes a list of one.

    A sequence is an array (T, features) of floats, or the path of such a .npy file. Raises ConfigError for any other
    value and for an empty list; DataError for a file that cannot be read, for another width, and for a value in these
    frames that float32 does not hold as a finite number.
    """
    single = isinstance(given, str | PathLike) or (isinstance(given, np.ndarray) and given.ndim == 2)
    sequences = []
    for i, each in enumerate([given] if single else listed(given, "sequences")):
        if isinstance(each, str | PathLike):
            frames = Frames([os.path.expanduser(each)])
            each = frames.read(np.arange(len(frames))[-length:])
        elif not isinstance(each, np.ndarray) or each.ndim != 2 or each.dtype.kind != "f" or not each.size:
            raise ConfigError(f"sequences: item {i} must be a path, or an array of floats (steps, features)")
        with np.errstate(over="ignore"):
            last = each[-length:].astype(np.float32)
        if each.shape[1] != width or not np.isfinite(last).all():
            raise DataError(f"sequences: item {i} must have frames of {width} finite features, as in training")
        sequences.append(last)
    return sequences


def entries_of(given: Any, name: str) -> list[Any]:
    """Return a str or path as a list of one, and a list or tuple as a list. The elements are not checked.

    name: the name of the argument in error messages. Raises ConfigError for another type.
    """
    if not isinstance(given, str | PathLike | list | tuple):
        raise ConfigError(f"{name}={given!r:.80} must be a str or a list of str")
    return [os.fspath(given)] if isinstance(given, str | PathLike) else list(given)


def device_of(given: Any) -> torch.device:
    """Return a device that torch can use. given: as torch.device takes it; None: the GPU if there is one, else the CPU.

    Raises ConfigError for a device that torch does not know or cannot use.
    """
    try:
        device = torch.device(("cuda" if cuda_usable() else "cpu") if given is None else given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        choices = "Take 'cpu', 'cuda', 'cuda:1', or None: the GPU if there is one"
        raise ConfigError(f"device={given!r:.50}: {first_line(error)}. {choices}") from error
    return device


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

    Of the path of one image file, it is the list of this path; of another path that is no folder, []. Hidden files and
    folders are left out, as in training. Symbolic links that lead out of the folder are left out, because the folder
    may be untrusted; so is everything that is no regular file.
    """
    if folder.suffix.lower() in SUFFIXES and folder.is_file():
        return [folder]
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    shown = (path for path in found if not any(part.startswith(".") for part in path.parts))
    return sorted(folder / path for path in shown if file_inside(folder, path))


def _passages(given: Any) -> list[Any]:
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(text, str) for text in given):
        forms = "[(title, text)] for one passage with a title, [text, text] for two"
        raise ConfigError(f"passages: a tuple of two texts may be one passage or two. Write {forms}")
    return [given] if isinstance(given, str | Mapping) else listed(given, "passages")


def _passage(given: Any, i: int) -> Passage:
    title, text = given if isinstance(given, tuple) and len(given) == 2 else (None, given)
    if isinstance(given, Mapping):
        title, text = given.get("title"), given.get("text")
    title = "" if title is None else title
    if not isinstance(title, str) or not isinstance(text, str):
        forms = 'str, (title, text), or {"text": str, "title": str}'
        raise ConfigError(f"passages must be {forms}: item {i} is {_type(given)}")
    _refuse_half(title + text, "passages", i)
    return Passage(text, title)


def _refuse_half(text: str, what: str, i: int) -> None:
    """Raise ConfigError for text number i if it has half of a UTF-16 surrogate pair, which no tokenizer accepts."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{what}: character {half.start()} of item {i} is {half[0]!r}, which is no Unicode character")


def _type(given: Any) -> str:
    return "None" if given is None else type(given).__name__
