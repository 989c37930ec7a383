"""Options of the commands python -m eval and eval.score, mine, report and compare. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from dyad.data.base.command_line import RunOptions, run_option
from dyad.data.config import AnswerMatch, CaptionPer, DataConfig, MiningConfig, PassageConfig, described
from dyad.train.eval_config import EmbeddingType, EvalConfig, ProbeFeatures, Seen, Truth, check_search

MinedItems = StrEnum("MinedItems", ["captions", "pictures"])
Baseline = StrEnum("Baseline", ["bm25", "untrained", "fusion", "popularity", "successors", "item_knn"])


@dataclass
class EvalCommand(RunOptions):
    """Options of the command `python -m eval`: which model to evaluate, on which data, and how.

    An option that is None keeps the value of the run, unless its description says what None means. But if one of suite
    and val is given, the run's value of the other one is dropped too. The constructor raises ConfigError for a value of
    recall_k, depth or index that is out of range; `parse_options` checks the other limits.
    """

    run: str | None = described(None, "a run folder (its newest checkpoint), RUN@best or one checkpoint folder; or:")
    checkpoint: str | None = described(None, "the same by another name; or:")
    model: str | None = described(None, "a model as it is, of another library or an export, e.g. st:FOLDER; see below")
    suite: list[str] | None = described(None, "what to evaluate; without suite and val: the run's own")
    val: str | None = described(None, "shards or questions, as data.val of a run")
    block: int | None = run_option(EvalConfig, "block")
    width: int | None = run_option(EvalConfig, "width")
    workers: int | None = run_option(DataConfig, "workers")
    examples: int | None = run_option(EvalConfig, "examples")
    out: str | None = described(None, "folder for the results; null: eval/ of the run, runs/eval-MODEL of a model")
    columns: list[str] | None = run_option(DataConfig, "columns")
    template: str | None = run_option(DataConfig, "template")
    relevance: str | None = run_option(DataConfig, "relevance")
    image_key: str | None = run_option(DataConfig, "image_key")
    max_image_pixels: int | None = run_option(DataConfig, "max_image_pixels")
    corpus: str | None = run_option(PassageConfig, "corpus")
    captions: list[str] | None = run_option(DataConfig, "captions")
    caption_per: CaptionPer | None = run_option(DataConfig, "caption_per")
    text_key: str | None = run_option(DataConfig, "text_key")
    truth: Truth | None = run_option(EvalConfig, "truth")
    seen: Seen | None = run_option(EvalConfig, "seen")
    recall_k: list[int] | None = run_option(EvalConfig, "recall_k")
    baselines: list[Baseline] | None = described(
        None,
        "rows beside the model: untrained (before training); of questions also bm25 and fusion (with bm25); of "
        "sequences popularity, successors (of the last item), item_knn, of texts bm25 (by the last item); null: all of "
        "questions and sequences, none of images, where untrained doubles the time",
    )
    index: str | None = run_option(EvalConfig, "index")
    depth: int | None = run_option(EvalConfig, "depth")
    answers: AnswerMatch | None = run_option(EvalConfig, "answers")
    embeddings: str | None = run_option(EvalConfig, "embeddings")
    embedding_type: EmbeddingType | None = run_option(EvalConfig, "embedding_type")
    probe_features: ProbeFeatures | None = run_option(EvalConfig, "probe_features")
    probe_k: int | None = run_option(EvalConfig, "probe_k")

    def __post_init__(self) -> None:
        check_search("", self.recall_k, self.depth, self.index)


@dataclass
class ScoreCommand:
    """Options of the command `python -m eval.score`, which scores prompts by a language model."""

    model: str = described(MISSING, "a language model: lm:NAME, or a run of task=language_model")
    rows: str = described(MISSING, "rows of questions and answers, as data.train; each is a prompt for the others")
    out: str = described(MISSING, "file of scored rows; the same command goes on where it was stopped")
    by: str = described("bm25", "what finds the candidates: bm25, random, or a model of questions and passages")
    depth: int = described(50, "candidates of each row; random ones where fewer are found", least=2, most=10_000)
    sample: int | None = described(
        None, "rows that are scored, drawn by seed; null: all. Candidates are all rows", least=1
    )
    template: str = described("{question}{answer}\\n", "a row as a prompt, which stands before the question")
    length: int | None = described(None, "most tokens of prompt and question; null: as the model has it", least=2)
    batch: int = described(64, "prompts that are scored at a time", least=1)
    seed: int = described(0, "of by=random and of sample", least=0)


@dataclass
class MineCommand(RunOptions):
    """Options of the command `python -m eval.mine`, which finds hard negatives with the model of a run.

    An option that is None keeps the value of the run, unless its description says what None means. With scores=None,
    the margins and max_score go by the scores of the search.
    """

    run: str = described(MISSING, "a run folder (its newest checkpoint), RUN@best or one checkpoint folder")
    corpus: str | None = run_option(PassageConfig, "corpus")
    columns: list[str] | None = run_option(DataConfig, "columns")
    queries: str | None = described(
        None, "questions with what is right for them, or images with captions, as data.train; null: the run's"
    )
    mine: MinedItems | None = described(
        None, "of images: captions that are wrong for an image (null), or images that are for a caption"
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


@dataclass
class CompareCommand:
    """Options of the command `python -m eval.compare`. The run folders are no options, but arguments without a key."""

    out: str | None = described(None, "also write the table to this file as CSV")
    page: str | None = described(
        None, "also write an HTML page to this file: the table, and the curves of several runs in one chart"
    )
