"""Options of evaluations, and the options of the commands of dyad.eval. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from dyad.data.base.command_line import run_option
from dyad.data.base.errors import ConfigError
from dyad.data.base.limits import check_limits
from dyad.data.config import AnswerMatch, CaptionPer, DataConfig, MiningConfig, PassageConfig, described

DEEPEST = 1000  # passages found for a question; TREC's runs end there too

Truth = StrEnum("Truth", ["keys", "pairs"])
EmbeddingType = StrEnum("EmbeddingType", ["float32", "float16"])
ProbeFeatures = StrEnum("ProbeFeatures", ["features", "embeddings"])
MinedItems = StrEnum("MinedItems", ["captions", "pictures"])
Baseline = StrEnum("Baseline", ["bm25", "untrained", "fusion"])


@dataclass
class EvalConfig:
    """Options of evaluations, both during training and by `python -m eval`."""

    every: int = described(0, "steps between evaluations; 0: at the end only", least=0)
    suite: list[str] = described(
        [],
        "what to evaluate besides data.val, each as KIND:PATH, e.g. retrieval:SHARDS or beir:FOLDER; "
        "python -m eval --help lists the kinds",
    )
    block: int = described(256, "items encoded at a time; results do not depend on the number of ranks", least=1)
    truth: Truth = described(Truth.keys, "image_text, right answers: equal content keys, or only the own pair")
    recall_k: list[int] = described([1, 5, 10], "image_text: the K of recall@K")
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
    examples: int = described(
        4, "queries of each kind (best, worst, random) and direction that the last evaluation shows; 0: none", least=0
    )

    def __post_init__(self) -> None:
        check_limits(self, "eval.")  # of dyad.load, too
        check(self, "eval.")


@dataclass
class EvalCommand:
    """Options of the command `python -m eval`: which model to evaluate, on which data, and how."""

    run: str | None = described(None, "a run folder (its newest checkpoint), RUN@best or one checkpoint folder; or:")
    checkpoint: str | None = described(None, "the same by another name; or:")
    model: str | None = described(None, "a model as it is, of another library or an export, e.g. st:FOLDER; see below")
    suite: list[str] | None = described(None, "what to evaluate; without suite and val: the run's own")
    val: str | None = described(None, "shards or questions, as data.val of a run")
    block: int | None = run_option(EvalConfig, "block")
    workers: int | None = run_option(DataConfig, "workers")
    examples: int | None = run_option(EvalConfig, "examples")
    out: str | None = described(None, "folder for the results; null: eval/ of the run, runs/eval-MODEL of a model")
    columns: list[str] | None = run_option(DataConfig, "columns")
    template: str | None = run_option(DataConfig, "template")
    image_key: str | None = run_option(DataConfig, "image_key")
    max_image_pixels: int | None = run_option(DataConfig, "max_image_pixels")
    corpus: str | None = run_option(PassageConfig, "corpus")
    captions: list[str] | None = run_option(DataConfig, "captions")
    caption_per: CaptionPer | None = run_option(DataConfig, "caption_per")
    text_key: str | None = run_option(DataConfig, "text_key")
    truth: Truth | None = run_option(EvalConfig, "truth")
    recall_k: list[int] | None = run_option(EvalConfig, "recall_k")
    baselines: list[Baseline] | None = described(
        None,
        "rows beside the model: untrained (before training); of questions also bm25 and fusion (with bm25); null: all "
        "of questions, none of pictures, where untrained doubles the time",
    )
    index: str | None = run_option(EvalConfig, "index")
    depth: int | None = run_option(EvalConfig, "depth")
    answers: AnswerMatch | None = run_option(EvalConfig, "answers")
    embeddings: str | None = described(None, "folder that keeps the embeddings of passages; null: the run's")
    embedding_type: EmbeddingType | None = run_option(EvalConfig, "embedding_type")
    probe_features: ProbeFeatures | None = run_option(EvalConfig, "probe_features")
    probe_k: int | None = run_option(EvalConfig, "probe_k")

    def __post_init__(self) -> None:
        check(self, "")


@dataclass
class MineCommand:
    """Options of the command `python -m eval.mine`, which finds hard negatives with the model of a run."""

    run: str = described(MISSING, "a run folder (its newest checkpoint), RUN@best or one checkpoint folder")
    corpus: str | None = described(
        None, "questions: passages by id, .jsonl, .tsv, BEIR folder; null: the run's, or those in the rows of queries"
    )
    columns: list[str] | None = run_option(DataConfig, "columns")
    queries: str | None = described(
        None, "questions with what is right for them, or pictures with captions, as data.train; null: the run's"
    )
    mine: MinedItems | None = described(
        None, "of pictures: captions that are wrong for a picture (null), or pictures that are for a caption"
    )
    captions: list[str] | None = run_option(DataConfig, "captions")
    caption_per: CaptionPer | None = run_option(DataConfig, "caption_per")
    image_key: str | None = run_option(DataConfig, "image_key")
    text_key: str | None = run_option(DataConfig, "text_key")
    out: str | None = described(
        None, "folder for mined.jsonl, its summary and the embeddings; null: mined/ or mined_pictures/ of the run"
    )
    first_rank: int | None = run_option(MiningConfig, "first_rank")
    last_rank: int | None = run_option(MiningConfig, "last_rank")
    keep: int | None = run_option(MiningConfig, "keep")
    margin: float | None = run_option(MiningConfig, "margin")
    relative_margin: float | None = run_option(MiningConfig, "relative_margin")
    max_score: float | None = run_option(MiningConfig, "max_score")
    drop_answers: bool | None = run_option(MiningConfig, "drop_answers")
    regex_answers: bool | None = run_option(MiningConfig, "regex_answers")
    index: str | None = run_option(MiningConfig, "index")
    scores: str | None = described(
        None,
        "questions: a cross-encoder's scores, JSONL or TSV of query_id, docid, score; margins and max_score go by it",
    )
    workers: int | None = run_option(DataConfig, "workers")


@dataclass
class ReportCommand:
    """Options of the command `python -m eval.report`: the run to report on, and the file to write."""

    run: str = described(MISSING, "a run folder")
    out: str | None = described(None, "file of the page; null: report.html of the run")


def check(options: EvalConfig | EvalCommand, section: str) -> None:
    """Raise ConfigError if the option recall_k, depth or index of `options` has a value outside its allowed range.

    An option that is None is not checked. section: text before the name of the option in the error message, such as
    "eval.".
    """
    recall_k, depth = options.recall_k, options.depth
    if recall_k is not None and (not recall_k or min(recall_k) < 1):
        raise ConfigError(f"{section}recall_k={recall_k}: needs at least one K, each 1 or more, e.g. [1,5,10]")
    if depth is not None and not 100 <= depth <= DEEPEST:
        raise ConfigError(f"{section}depth={depth}: must be 100 … {DEEPEST}; Recall@100 is always reported")
    if options.index is not None and not options.index.strip():
        raise ConfigError(f"{section}index is empty: name a FAISS index, e.g. Flat, 'IVF256,Flat;nprobe=16', HNSW32")
