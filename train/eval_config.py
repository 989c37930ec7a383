"""The keys eval.*: what a run evaluates, when and how. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.base.errors import ConfigError
from dyad.data.base.limits import check_limits
from dyad.data.config import AnswerMatch, described

DEEPEST = 1000  # the largest eval.depth, as in run files of TREC

Truth = StrEnum("Truth", ["keys", "pairs"])
EmbeddingType = StrEnum("EmbeddingType", ["float32", "float16"])
Seen = StrEnum("Seen", ["keep", "drop"])
ProbeFeatures = StrEnum("ProbeFeatures", ["features", "embeddings"])


@dataclass
class EvalConfig:
    """Options of evaluations during training and by `python -m eval`. Raises ConfigError for a value out of range."""

    every: int = described(0, "steps between evaluations; 0: at the end only", least=0)
    suite: list[str] = described(
        [],
        "what to evaluate besides data.val, each as KIND:PATH, e.g. retrieval:SHARDS or beir:FOLDER; "
        "python -m eval --help lists the kinds",
    )
    block: int = described(256, "items encoded at a time; results do not depend on the number of ranks", least=1)
    seen: Seen = described(
        Seen.keep,
        "task=sequence: whether the items of a history can be answers; drop: they cannot, but the right one can, "
        "also where it repeats an item of the history, as in RecBole",
    )
    truth: Truth = described(Truth.keys, "image_text, right answers: equal content keys, or only the own pair")
    recall_k: list[int] = described([1, 5, 10], "the K of R@K of images and texts, and of HR@K and nDCG@K of sequences")
    index: str = described(
        "Flat",
        "of retrieval, zero-shot and passages: Flat, exact; or a FAISS index and its options, approximate, and results "
        "say so: 'IVF256,Flat;nprobe=16', 'HNSW32', 'PQ32'; sets too small for it to learn from are searched exactly",
    )
    depth: int = described(100, "passages found for a question; 1000 adds Recall@1000")
    answers: AnswerMatch = described(
        AnswerMatch.string, "a passage has an answer when its words are in the text, or when a regex matches"
    )
    embeddings: str | None = described(
        None, "folder that keeps the embeddings of passages, where a stopped evaluation goes on; null: in memory"
    )
    embedding_type: EmbeddingType = described(
        EmbeddingType.float32, "how embeddings of passages are kept; float16 halves their memory and their files"
    )

    probe_features: ProbeFeatures = described(ProbeFeatures.features, "probes: before projection or head, or after it")
    probe_k: int = described(20, "probes: neighbours that vote in k-NN", least=1)
    width: int | None = described(
        None, "only so many of the first numbers of each embedding, for one of objective.matryoshka; null: all", least=1
    )
    examples: int = described(
        4, "queries of each kind (best, worst, random) and direction that the last evaluation shows; 0: none", least=0
    )

    def __post_init__(self) -> None:
        check_limits(self, "eval.")  # also for the options of dyad.load
        check_search("eval.", self.recall_k, self.depth, self.index)


def check_search(section: str, recall_k: list[int] | None, depth: int | None, index: str | None) -> None:
    """Raise ConfigError if one of these options, which a run and the command `python -m eval` share, is out of range.

    An option that is None is not checked. section: text before the name of the option in the error message, such as
    "eval.".
    """
    if recall_k is not None and (not recall_k or min(recall_k) < 1):
        raise ConfigError(f"{section}recall_k={recall_k}: needs at least one K, each 1 or more, e.g. [1,5,10]")
    if depth is not None and not 100 <= depth <= DEEPEST:
        raise ConfigError(f"{section}depth={depth}: must be 100 … {DEEPEST}; Recall@100 is always reported")
    if index is not None and not index.strip():
        raise ConfigError(f"{section}index is empty: name a FAISS index, e.g. Flat, 'IVF256,Flat;nprobe=16', HNSW32")
