"""The specification of a search index: an argument for FAISS's index_factory, and options of the search.

    Flat                      exact search
    IVF256,Flat;nprobe=16     256 lists of vectors; each query searches 16 lists
    IVF256,PQ32;nprobe=16     the same with 32 bytes per vector
    HNSW32;efSearch=128       a graph with 32 neighbours per vector; a query follows 128 candidates

An option is a name of FAISS's ParameterSpace. Scores are inner products.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dyad.data.base.errors import ConfigError

EXACT = "Flat"
EXAMPLES = '"Flat", "IVF256,Flat;nprobe=16", "IVF256,PQ32;nprobe=16", "HNSW32;efSearch=128"'


def check_spec(spec: str, width: int = 2688) -> None:
    """Raise ConfigError if FAISS cannot build the index `spec`, such as "IVF256,Flat", for vectors of this width.

    Faults that only appear with real vectors, such as too few vectors, are not found. Any usual number of bytes of a
    product quantiser divides the default width, 2⁷ · 3 · 7.
    """
    Spec.parsed(spec).built(load_faiss(), width)


@dataclass(frozen=True)
class Spec:
    """A parsed index specification. text: as the user wrote it. factory: the argument for FAISS's index_factory.
    options: search options, name → value.
    """

    text: str
    factory: str
    options: dict[str, float]

    @staticmethod
    def parsed(text: str) -> "Spec":
        factory, *options = (part.strip() for part in text.split(";"))
        try:
            pairs = [option.split("=") for option in options if option]
            return Spec(text, factory, {name.strip(): float(value) for name, value in pairs})
        except ValueError:
            raise ConfigError(f"index '{text}': options are name=number. Examples: {EXAMPLES}") from None

    def built(self, faiss: ModuleType, width: int) -> Any:
        """Build the untrained FAISS index that this specification describes, for vectors of the given width, with its
        search options. Raises ConfigError if FAISS refuses it.
        """
        with self.errors(f" (for vectors of width {width})"):
            index = faiss.index_factory(width, self.factory, faiss.METRIC_INNER_PRODUCT)
            lists = faiss.try_extract_index_ivf(index)
            if lists is not None and lists.nlist < 1:
                raise RuntimeError("an index of 0 lists")
            _allow_few_rows(faiss, index)
        self.set_options(faiss.ParameterSpace(), index)
        return index

    def set_options(self, space: Any, index: Any) -> None:
        for name, value in self.options.items():
            with self.errors(f" (option {name})"):
                space.set_index_parameter(index, name, value)

    @property
    def exact(self) -> bool:
        return self.factory == EXACT and not self.options

    @contextmanager
    def errors(self, where: str = "") -> Iterator[None]:
        """Context manager: convert FAISS's RuntimeError about a bad specification to a ConfigError of one line.

        where: text appended to FAISS's own message, or "".
        """
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^Error in .* at \S+:\d+: ", "", str(error).strip(), flags=re.DOTALL)
            raise ConfigError(f"index '{self.text}': FAISS says: {reason}{where}. Examples: {EXAMPLES}") from error


def _allow_few_rows(faiss: ModuleType, index: Any) -> None:
    """Switch off FAISS's warning that an index is trained on few rows. index: the FAISS index."""
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
    """Whether FAISS can use a GPU. Its CPU build has no StandardGpuResources; its GPU build may run without a GPU."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
