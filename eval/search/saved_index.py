"""Save and load a search index as a folder with embeddings.npy and items.json, without pickle.

A folder that is loaded may come from a stranger: sizes in headers are compared with the sizes of the files before
memory is allocated, and values are checked before they are used.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil

from dyad.data.base.arrays import header_errors
from dyad.data.base.errors import ConfigError
from dyad.data.base.files import open_foreign, whole_folder, write_errors, write_json
from dyad.data.base.json_text import LARGEST, MOST, read_json
from dyad.eval.search.index_spec import Spec

VECTORS, ITEMS = "embeddings.npy", "items.json"
PER_ITEM = 16  # the most commas and opening brackets of an item in items.json, such as a passage
PART = 1 << 16  # rows that are checked at a time


def save_index(folder: Path, items: Sequence[Any], embeddings: np.ndarray, model: str, spec: str) -> None:
    """Write an index into the new folder `folder`.

    items: the n items: texts, whole numbers, pairs (title, text), or passages as JSON objects. embeddings: the
    embeddings of the items (n, D), saved as float32. model: the digest of the model that computed them. spec: the
    specification of the FAISS index, see index_spec.py. Raises ConfigError if `folder` exists and is not an empty
    folder, HardwareError if it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists. Give the index a new folder, or remove it first")
    vectors = np.ascontiguousarray(embeddings, "<f4")
    facts = {"model": model, "spec": spec, "sha256": hashlib.sha256(vectors.data).hexdigest()}
    with write_errors(folder), whole_folder(folder) as temporary:
        np.save(temporary / VECTORS, vectors, allow_pickle=False)
        write_json(temporary / ITEMS, {**facts, "items": list(items)})


def load_index(folder: Path) -> tuple[list[Any], np.ndarray, str, str]:
    """Return (items, embeddings, digest of the model, specification), as `save_index` wrote them into `folder`.

    A pair (title, text) is a tuple again. The embeddings are in RAM; their values are not checked (`check_embeddings`).
    Raises OSError for files that are missing, are links out of the folder or are no regular files; ConfigError for an
    invalid specification; ValueError for files that are damaged in another way, or too large for the memory of the
    machine.
    """
    memory = psutil.virtual_memory().total
    with open_foreign(folder / VECTORS, memory, folder) as file:
        rows, width = _shape(file)
        largest = max(LARGEST, memory // 16)
        saved = read_json(folder / ITEMS, largest, MOST + PER_ITEM * rows, folder)
        if not isinstance(saved, dict) or not {"items", "model", "spec"} <= saved.keys():
            raise ValueError(f"{ITEMS} has no items, model and spec")
        items, model, spec = saved["items"], saved["model"], saved["spec"]
        if not isinstance(items, list) or not {*map(type, items)} <= {str, int, list, dict}:
            raise ValueError(f"items of {ITEMS} must be a list of texts, whole numbers, or passages")
        if not isinstance(model, str) or not isinstance(spec, str):
            raise ValueError(f"model and spec of {ITEMS} must be texts")
        Spec.parsed(spec)
        if len(items) != rows:
            raise ValueError(f"{rows} embeddings for {len(items)} items")
        embeddings = np.fromfile(file, np.dtype("<f4"), rows * width).reshape(rows, width)
    digest = hashlib.sha256(embeddings.data).hexdigest()
    if saved.get("sha256", digest) != digest:  # older versions saved none
        raise ValueError(f"{VECTORS} is not the one that was saved with {ITEMS} (SHA-256 differs)")
    return [tuple(item) if isinstance(item, list) else item for item in items], embeddings, model, spec


def check_embeddings(embeddings: np.ndarray, items: int) -> None:
    """Raise ValueError unless `embeddings` is a non-empty NumPy matrix of finite floats with `items` rows."""
    if not isinstance(embeddings, np.ndarray):
        raise ValueError(f"embeddings must be an array (n, D), not {type(embeddings).__name__}")
    if embeddings.ndim != 2 or embeddings.dtype.kind != "f" or 0 in embeddings.shape:
        raise ValueError(f"embeddings must be floats (n, D), not {embeddings.dtype} {embeddings.shape}")
    if len(embeddings) != items:
        raise ValueError(f"{len(embeddings)} embeddings for {items} items")
    if not all(np.isfinite(embeddings[row : row + PART]).all() for row in range(0, len(embeddings), PART)):
        raise ValueError("embeddings hold values that are not finite")


def _shape(file: BinaryIO) -> tuple[int, int]:
    """Read the header of a .npy file; return (rows, width) of its float32 matrix. The file is then at its first value.

    Raises ValueError for any other array, an empty one, one in Fortran order, or a size of the file that does not match
    the header.
    """
    with header_errors():
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if len(shape) != 2 or fortran or dtype != np.float32 or not dtype.isnative:
        raise ValueError(f"{VECTORS} is {dtype} {shape}, no float32 (n, D)")
    rows, width = shape
    if min(rows, width) < 1 or 4 * rows * width != left:
        raise ValueError(f"{VECTORS} has {left:,} bytes for {rows} × {width} numbers")
    return rows, width
