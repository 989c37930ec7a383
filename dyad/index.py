"""The index of the Python interface: embeddings of items that `Model.search` searches, kept in a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, first_line
from dyad.eval.search import index as search
from dyad.eval.search.saved_index import check_embeddings, load_index, save_index


class Hit(NamedTuple):
    """One result of a search or a recommendation.

    score: inner product of the embeddings of query and item, which is the cosine if the model compares by cosine; only
    near to it if the index stores shortened embeddings (PQ, SQ). item: what was found, as the Index stores it: the path
    of an image, or its position (int) in the list that was indexed if it has no path; the key of a sample of shards
    (str); a passage as it was given; a passage of a corpus as a mapping with id, title and text; of `Model.recommend`
    the id of an item.
    """

    score: float
    item: Any


@dataclass(frozen=True, eq=False)
class Index:
    """Embeddings of n items, prepared for search: made by `Model.index`, searched by `Model.search`.

    items: n values that identify the items, see Hit.item: texts, whole numbers, pairs (title, text) or mappings.
    embeddings: float32 (n, D). model: digest of the model that computed the embeddings, see Model.identity. spec: the
    kind of FAISS index, "Flat" for exact search. It is equal to itself alone. Raises ConfigError unless `embeddings` is
    a matrix of n rows of finite floats, and not empty.
    """

    items: Sequence[Any]
    embeddings: np.ndarray
    model: str
    spec: str = "Flat"

    def __post_init__(self) -> None:
        try:
            check_embeddings(self.embeddings, len(self.items))
        except ValueError as error:
            raise ConfigError(f"index: {error}") from error

    def __repr__(self) -> str:
        count, width = self.embeddings.shape
        return f"Index({count:,} items, {width} numbers each, {self.spec})"

    def __len__(self) -> int:
        return len(self.items)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "faiss"}  # which is built at a search

    @cached_property
    def faiss(self) -> search.Index:
        """The search index over `embeddings` of the kind `spec`, built at its first use."""
        return search.Index(self.embeddings, self.spec)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the index into the new folder `folder`, as embeddings.npy and items.json, without pickle.

        Raises ConfigError if the folder exists and is not empty, HardwareError if it cannot be written.
        """
        save_index(Path(os.path.expanduser(folder)).absolute(), self.items, self.embeddings, self.model, self.spec)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Index:
        """Read an index from a folder that `save` wrote; the files may be untrusted.

        Whether the index is of a given model is checked by `Model.search`. Raises DataError if a file is missing or
        damaged.
        """
        path = Path(os.path.expanduser(folder))
        try:
            return cls(*load_index(path))
        except (OSError, ValueError, TypeError, ConfigError) as error:
            raise DataError(f"{path!s:.200} is no index of ours, or damaged: {first_line(error)}") from error
