"""The index of the Python interface: embeddings of items that `Model.search` searches, kept in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dyad import inputs
from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import ConfigError, DataError, first_line
from dyad.eval.search import index as search
from dyad.eval.search.index import SAMPLED
from dyad.eval.search.index_spec import Spec
from dyad.eval.search.saved_index import check_embeddings, load_index, save_index


class Hit(NamedTuple):
    """One result of a search or a recommendation.

    score: inner product of the embeddings of query and item, which is the cosine if the model compares by cosine. item:
    what was found, as the Index stores it: the path of an image, or its position (int) in the list that was indexed if
    it has no path; the key of a sample of shards (str); a passage as it was given; a passage of a corpus as a mapping
    with id, title and text; of `Model.recommend` the id of an item.
    """

    score: float
    item: Any


@dataclass(frozen=True, eq=False)
class Index:
    """Embeddings of n items, prepared for search: made by `Model.index`, searched by `Model.search`.

    items: n values that identify the items, see Hit.item: texts, whole numbers, pairs (title, text) or mappings; kept
    as a tuple. embeddings: float32 (n, D). model: digest of the model that computed the embeddings, see Model.identity.
    spec: the kind of FAISS index, "Flat" for exact search. It is equal to itself alone, and does not change: `a + b`
    and `where` return new ones. Raises ConfigError for an invalid spec, and unless `embeddings` is a matrix of n rows
    of finite floats, and not empty.
    """

    items: Sequence[Any]
    embeddings: np.ndarray
    model: str
    spec: str = "Flat"

    def __post_init__(self) -> None:
        Spec.parsed(self.spec)
        object.__setattr__(self, "items", tuple(self.items))  # a list could lose the order of the embeddings
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

    def __add__(self, other: Index) -> Index:
        """Return an index of the items of both, with the spec of the first. An item of both is in it twice.

        Raises ConfigError if another model, or one with another `width`, made `other`.
        """
        if not isinstance(other, Index):
            return NotImplemented
        if (self.model, self.embeddings.shape[1]) != (other.model, other.embeddings.shape[1]):
            raise ConfigError(f"{self!r} and {other!r} are not of one model and width: make one of them anew")
        embeddings = np.concatenate([self.embeddings, other.embeddings])
        return replace(self, items=(*self.items, *other.items), embeddings=embeddings)

    def where(self, keep: Callable[[Any], bool]) -> Index:
        """Return an index of the items for which `keep` is true. Raises ConfigError if there is none."""
        rows = [row for row, item in enumerate(self.items) if keep(item)]
        if not rows:
            raise ConfigError("where: keep is true for no item of the index")
        return replace(self, items=[self.items[row] for row in rows], embeddings=self.embeddings[rows])

    def search(self, queries: np.ndarray, k: int = 5) -> list[list[Hit]]:
        """Return for each of n embeddings the k best items, best first; `Model.search` takes texts and images.

        queries: embeddings (n, D) of the index's model, such as those of `Model.encode_text`; one (D,) counts as
        (1, D). Fewer items are returned if the search finds fewer. The scores of an approximate index are exact, too;
        only which items it finds is not. Raises ConfigError for embeddings of another width or that are not finite, and
        for k below 1.
        """
        vectors, k = self._vectors(queries), inputs.count_of(k)
        found = self.faiss.search(vectors, k)
        return [self._hits(vector, found.found(n)) for n, vector in enumerate(vectors)]

    def recall(self, queries: np.ndarray, k: int = 10) -> float:
        """Return the share of the k exactly best items that `search` finds: 1 if spec is "Flat".

        It is the mean over at most SAMPLED (200) of the queries, evenly spread; no others are searched. queries:
        embeddings (n, D), such as those of typical texts or images. Raises ConfigError as `search`.
        """
        vectors, k = self._vectors(queries), inputs.count_of(k)
        vectors = vectors[evenly_spaced(len(vectors), SAMPLED)]
        return self.faiss.recall_against_exact(self.faiss.search(vectors, k), vectors)

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

    def _vectors(self, queries: np.ndarray) -> np.ndarray:
        vectors = inputs.embeddings_of(queries, "queries").astype(np.float32, copy=False)
        if vectors.shape[1] != (width := self.embeddings.shape[1]):
            raise ConfigError(f"the index has width {width}, the queries {vectors.shape[1]}")
        if not len(vectors) or not np.isfinite(vectors).all():
            raise ConfigError("queries must be one or more embeddings of finite numbers")
        return vectors

    def _hits(self, query_D: np.ndarray, found: list[tuple[int, float]]) -> list[Hit]:
        if not self.faiss.exact:  # the scores are of shortened embeddings (PQ, SQ, PCA)
            rows = [row for row, _ in found]
            scores = self.embeddings[rows] @ query_D
            found = [(rows[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")]
        return [Hit(score, self.items[row]) for row, score in found]
