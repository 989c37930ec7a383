"""What callers of the Python API may hand over: checked once, at the boundary, before anything else sees it."""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL.Image import Image
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import file_inside
from dyad.data.question_passage.passages import Passage

PassageLike: TypeAlias = str | tuple[str, str] | Mapping[str, str]  # text; (title, text); {"text": …, "title": …}
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def texts_of(given: Any, what: str = "texts") -> list[str]:
    """Return the list of texts; one str becomes a list of it. what: their name in messages. Raises ConfigError for
    anything else and for an empty list."""
    texts = [given] if isinstance(given, str) else listed(given, what)
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"{what} must be str, or a list of str: one is {_type(text)}")
        _refuse_half(text, what)
    return texts


def passages_of(given: Any) -> list[Passage]:
    """Return the list of passages; one str or mapping becomes a list of it. Raises ConfigError as `texts_of` does."""
    return [_passage(each) for each in ([given] if isinstance(given, str | Mapping) else listed(given, "passages"))]


def images_of(given: Any) -> list[Any]:
    """Return the list of images; one image becomes a list of it. Raises ConfigError for an empty list and for what
    is neither. What a list holds is checked when it is read."""
    pixels = isinstance(given, np.ndarray | Tensor) and given.ndim == 3
    return [given] if pixels or isinstance(given, str | PathLike | bytes | Image) else listed(given, "images")


def listed(given: Any, what: str) -> list[Any]:
    """Return the values of a sequence or an array. Raises ConfigError for anything else and for an empty one."""
    if not isinstance(given, Sequence | np.ndarray | Tensor) or isinstance(given, str | bytes):
        raise ConfigError(f"{what} must be one or a list of them, not {_type(given)}")
    if not getattr(given, "ndim", 1) or not len(given):
        raise ConfigError(f"nothing to embed: the list of {what} is empty")
    return list(given)


def queries_of(given: Any) -> tuple[list[Any], bool]:
    """Return the queries of a search, and whether they are texts. One query becomes a list of it.

    Raises ConfigError for an empty list and for one of texts and images.
    """
    queries = listed(given, "queries") if isinstance(given, list) else [given]
    texts = [isinstance(query, str) for query in queries]
    if any(texts) != all(texts):
        raise ConfigError("queries must be texts (str), or images (a path as a Path), not both in one list")
    return queries, all(texts)


def count_of(k: Any) -> int:
    """Return `k`, the number of results of a search. Raises ConfigError unless it is a whole number of at least 1."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k={k!r:.50} must be a whole number of at least 1")
    return int(k)


def embeddings_of(given: Any, name: str) -> np.ndarray:
    """Return embeddings as a matrix (n, D); one (D,) becomes a matrix of one row. name: for messages. Raises
    ConfigError for anything else."""
    rows = given.numpy(force=True) if isinstance(given, Tensor) else given
    if not isinstance(rows, np.ndarray) or rows.ndim not in (1, 2) or rows.dtype.kind not in "fiu":
        raise ConfigError(f"{name} must be embeddings, an array (n, D) of numbers, not {_type(given)}")
    return np.atleast_2d(rows)


def image_files(folder: Path) -> list[Path]:
    """Return the files of images in a folder, sorted. Links that lead out of the folder, and what is no regular file,
    are left out: the folder may be a stranger's."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in found if file_inside(folder, path.relative_to(folder)))


def _passage(given: Any) -> Passage:
    title, text = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
    if isinstance(given, Mapping):
        title, text = given.get("title", ""), given.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise ConfigError('passages must be str, (title, text), or {"text": str, "title": str}: one is ' + _type(given))
    _refuse_half(title + text, "passages")
    return Passage(text, title)


def _refuse_half(text: str, what: str) -> None:
    """Raise ConfigError for a text with half of a pair of UTF-16, which no tokenizer takes."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{what}: character {half.start()} of a text is {half[0]!r}, which is no Unicode character")


def _type(given: Any) -> str:
    return "None" if given is None else type(given).__name__
