"""What a user writes for a search index: FAISS's words for it, and options of the search.

    Flat                      exact
    IVF256,Flat;nprobe=16     256 lists, of which each query looks into 16
    IVF256,PQ32;nprobe=16     the same with 32 bytes a vector
    HNSW32;efSearch=128       a graph of 32 neighbours a vector, and how many candidates a query follows

The part before ";" is for FAISS's index_factory, an option is a name of its ParameterSpace. Scores are inner products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from data.errors import ConfigError

EXACT = "Flat"
EXAMPLES = '"Flat", "IVF256,Flat;nprobe=16", "IVF256,PQ32;nprobe=16", "HNSW32;efSearch=128"'


def check_spec(spec: str, width: int = 64) -> None:
    """Raise ConfigError for an index that cannot be, as far as that shows without vectors."""
    Spec.parsed(spec).built(load_faiss(), width)


@dataclass(frozen=True)
class Spec:
    """text: as the user wrote it; factory: for FAISS's index_factory; options: of the search."""

    text: str
    factory: str
    options: dict[str, float]

    @staticmethod
    def parsed(text: str) -> Spec:
        factory, *options = (part.strip() for part in text.split(";"))
        try:
            pairs = [option.split("=") for option in options if option]
            return Spec(text, factory, {name.strip(): float(value) for name, value in pairs})
        except ValueError:
            raise ConfigError(f"index '{text}': options are name=number. Examples: {EXAMPLES}") from None

    def built(self, faiss: ModuleType, width: int) -> Any:
        """The index, untrained, with its options."""
        with self.errors(f" (for vectors of width {width})"):
            index = faiss.index_factory(width, self.factory, faiss.METRIC_INNER_PRODUCT)
            lists = faiss.try_extract_index_ivf(index)
            if lists is not None and lists.nlist < 1:
                raise RuntimeError("an index of 0 lists")
            _learn_from_few(faiss, index)
        self.set_options(faiss.ParameterSpace(), index)
        return index

    def set_options(self, space: Any, index: Any) -> None:
        for name, value in self.options.items():
            with self.errors(f" (option {name})"):
                space.set_index_parameter(index, name, value)

    @contextmanager
    def errors(self, where: str = "") -> Iterator[None]:
        """What FAISS says of a bad spec, in one line."""
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^Error in .* at \S+:\d+: ", "", str(error).strip(), flags=re.DOTALL)
            raise ConfigError(f"index '{self.text}': FAISS says: {reason}{where}. Examples: {EXAMPLES}") from error


def _learn_from_few(faiss: ModuleType, index: Any) -> None:
    """FAISS would print a warning at every small corpus; ours is the recall that we report."""
    lists = faiss.try_extract_index_ivf(index)
    parts = [index] if lists is None else [index, faiss.downcast_index(lists)]
    for learner in [*parts, *(part.pq for part in parts if hasattr(part, "pq"))]:
        if hasattr(learner, "cp"):
            learner.cp.min_points_per_centroid = 1


def load_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "search needs FAISS, which is not installed. Take one: pip install -e '.[cpu]', or '.[gpu]' for CUDA 13"
        ) from error
    return faiss


def has_gpu(faiss: Any) -> bool:
    """The CPU build of FAISS lacks StandardGpuResources; the GPU build may stand on a machine without a GPU."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
