"""The specification of a search index: an argument for FAISS's index_factory, and options of the search.

    Flat                      exact search
    IVF256,Flat;nprobe=16     256 lists of vectors; each query searches 16 lists
    IVF256,PQ32;nprobe=16     the same with 32 bytes per vector
    HNSW32;efSearch=128       a graph with 32 neighbours per vector; a query follows 128 candidates (by default as many
                              as it asks for, at least 16)

An option is a name of FAISS's ParameterSpace. Scores are inner products.

A specification may come with a saved index of a stranger. FAISS crashes the interpreter for some texts, such as many
brackets or a number 0, and allocates memory as the numbers in a text say. So a text must match FACTORY, a part of
FAISS's grammar without nested brackets and zeros, and its numbers must not exceed LIMITS. FACTORY has only what FAISS
can copy and fill in parts: not NSG, L2norm and ITQ.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dyad.data.base.errors import ConfigError

EXACT = "Flat"
N = r"[1-9]\d*"
CODE = rf"Flat|PQ{N}(?:x{N})?(?:fs)?(?:np)?|SQ(?:4|6|8|fp16|bf16)"
FACTORY = re.compile(
    rf"""(?:(?:PCAR?|PCAWR?|RR){N},|OPQ{N}(?:_{N})?,){{0,2}}  # turns vectors or shortens them
    (?:IVF{N}(?:_HNSW{N})?,(?:{CODE})|HNSW{N}(?:,Flat|,SQ8|_SQ8)?|{CODE})
    (?:,RFlat|,Refine\((?:Flat|SQ8|SQfp16)\))?""",
    re.VERBOSE | re.ASCII,
)
# Name in a specification → the largest number after it; "x": bits of a code, 12 are 4,096 vectors in a codebook
LIMITS = {"IVF": 1 << 20, "HNSW": 512, "x": 12}
LARGEST = 1 << 12  # the largest of all other numbers, such as a width or the bytes of a vector
LONGEST = 200  # the most characters of a specification
OPTIONS = {  # search option → its largest value
    **{"nprobe": 1 << 20, "quantizer_nprobe": 1 << 20, "max_codes": 1 << 40, "ht": 1 << 16, "k_factor_rf": 1000},
    **{"efSearch": 1 << 16, "quantizer_efSearch": 1 << 16, "efConstruction": 1 << 12},
}
EXAMPLES = '"Flat", "IVF256,Flat;nprobe=16", "IVF256,PQ32;nprobe=16", "HNSW32;efSearch=128"'


def check_spec(spec: str, width: int = 2688) -> None:
    """Raise ConfigError if FAISS is not installed, if `Spec.parsed` refuses `spec`, or FAISS does for this width.

    Faults that only appear with real vectors, such as too few vectors, are not found. The default width, 2⁷ · 3 · 7, is
    a multiple of any usual number of bytes of a product quantiser.
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
        """Parse a specification.

        Raises ConfigError for a factory that FACTORY, LIMITS or LARGEST does not allow, for more than LONGEST
        characters, for an option that is not of the form name=number, and for one in OPTIONS that is below 1 or above
        its limit. Other options are left to FAISS, see `built`.
        """
        shown = f"index '{text:.{LONGEST}}'"
        factory, *options = (part.strip() for part in text[: LONGEST + 1].split(";"))
        if len(text) > LONGEST or not FACTORY.fullmatch(factory):
            raise ConfigError(f"{shown}: not among the FAISS indexes that are taken. Examples: {EXAMPLES}")
        for name, number in re.findall(r"([A-Za-z_]+)(\d+)", factory):
            if int(number) > (most := LIMITS.get(name.strip("_"), LARGEST)):
                raise ConfigError(f"{shown}: {name}{number} is more than {most}. Examples: {EXAMPLES}")
        try:
            pairs = [option.split("=") for option in options if option]
            values = {name.strip(): float(value) for name, value in pairs}
        except ValueError:
            raise ConfigError(f"{shown}: options are name=number. Examples: {EXAMPLES}") from None
        for name, value in values.items():
            if name in OPTIONS and not 1 <= value <= OPTIONS[name]:
                raise ConfigError(f"{shown}: {name} must be 1 to {OPTIONS[name]}. Examples: {EXAMPLES}")
        return Spec(text, factory, values)

    def built(self, faiss: ModuleType, width: int) -> Any:
        """Build the untrained FAISS index of this specification for vectors of `width` numbers, and set its options.

        Raises ConfigError if FAISS refuses it.
        """
        with self.errors(f" (for vectors of width {width})"):
            index = faiss.index_factory(width, self.factory, faiss.METRIC_INNER_PRODUCT)
            _set_training(faiss, index)
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:  # as of HNSW32_PQ16, whatever the factory is told
            raise ConfigError(
                f"index '{self.text}': FAISS searches it by distance, not by inner product. Examples: {EXAMPLES}"
            )
        self.set_options(faiss.ParameterSpace(), index)
        return index

    def set_options(self, space: Any, index: Any) -> None:
        """Set the search options in a FAISS index.

        space: an object of FAISS's ParameterSpace, or of GpuParameterSpace for an index on a GPU. Raises ConfigError
        for an option that FAISS refuses.
        """
        for name, value in self.options.items():
            with self.errors(f" (option {name})"):
                space.set_index_parameter(index, name, value)

    def search_parameters(self, faiss: ModuleType, index: Any, k: int) -> Any:
        """Return the parameters of a search for k rows: of an HNSW graph without efSearch, as many candidates as rows.

        FAISS's default of 16 candidates would miss many of 100 rows. index: the FAISS index, or one that another index
        contains. Returns None for an index that needs no parameters.
        """
        index = faiss.downcast_index(index)
        if hasattr(index, "chain"):  # PCA32,HNSW32
            return faiss.SearchParametersPreTransform(index_params=self.search_parameters(faiss, index.index, k))
        if hasattr(index, "base_index"):  # HNSW32_SQ8,RFlat;k_factor_rf=4
            base = self.search_parameters(faiss, index.base_index, int(k * index.k_factor))
            return faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=base)
        if hasattr(index, "hnsw") and "efSearch" not in self.options:
            return faiss.SearchParametersHNSW(efSearch=max(index.hnsw.efSearch, k))
        return None

    @property
    def exact(self) -> bool:
        """Whether it is exact search: "Flat" without options."""
        return self.factory == EXACT and not self.options

    @contextmanager
    def errors(self, where: str = "") -> Iterator[None]:
        """Context manager: convert a RuntimeError of FAISS to a ConfigError that names the specification.

        where: text appended to FAISS's own message, or "".
        """
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^Error in .* at \S+:\d+: ", "", str(error).strip(), flags=re.DOTALL)
            raise ConfigError(f"index '{self.text}': FAISS says: {reason}{where}. Examples: {EXAMPLES}") from error


def _set_training(faiss: ModuleType, index: Any) -> None:
    """Switch off FAISS's warning that an index is trained on few rows, and a product quantizer's polysemous training.

    That training serves a Hamming search that we never ask for. It only numbers the centroids anew, so every score
    stays the same. index: the FAISS index.
    """
    parts = [index]
    for name in ("base_index", "index"):  # of PQ16,RFlat and of OPQ16,PQ16
        parts += [faiss.downcast_index(getattr(part, name)) for part in parts if hasattr(part, name)]
    for part in parts:
        if hasattr(part, "do_polysemous_training"):
            part.do_polysemous_training = False
    for learner in [*parts, *(part.pq for part in parts if hasattr(part, "pq"))]:
        if hasattr(learner, "cp"):
            learner.cp.min_points_per_centroid = 1


def load_faiss() -> ModuleType:
    """Import FAISS and return the module. Raises ConfigError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "search needs FAISS, which is not installed. Take one: pip install -e '.[cpu]', or '.[gpu]' for CUDA 13"
        ) from error
    return faiss
