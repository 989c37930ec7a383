"""The keys of `python -m data VERB`, with their defaults and meanings. Imports nothing heavy: --help reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from data.config import DataConfig, PassageConfig, QuestionConfig, check_split, described


class OnError(Enum):
    stop = "stop"
    skip = "skip"


class Target(Enum):
    shards = "shards"
    dpr = "dpr"
    tevatron = "tevatron"
    tevatron_ids = "tevatron_ids"
    flag = "flag"
    beir = "beir"


@dataclass
class IndexOptions:
    out: str | None = described(None, "also write the manifest of all shards to this JSON file")
    workers: int | None = described(None, "processes that scan; null: one per core")


@dataclass
class CheckOptions:
    workers: int | None = described(None, "pictures: processes that decode; null: one per core")
    captions: str = described(
        "txt,caption,captions,title,text,cls", "pictures: where captions are, first match: txt, json fields, cls"
    )
    image_key: str = described(DataConfig.image_key, "pictures: their member names, first match")
    max_image_pixels: int = described(DataConfig.max_image_pixels, "larger pictures are bad samples")
    corpus: str | None = described(
        PassageConfig.corpus, "questions that name passages by id: the .jsonl or .tsv of these"
    )
    split: str = described(QuestionConfig.split, "questions in a BEIR folder: those of qrels/<split>.tsv")
    pos_pool: int = described(PassageConfig.pos_pool, "questions with scored candidates: the best n are right")
    neg_pool: int = described(
        PassageConfig.neg_pool, "questions with scored candidates: the worst n are hard negatives"
    )

    def __post_init__(self) -> None:
        check_split(self.split, "split")


@dataclass
class PackOptions:
    out: str | None = described(None, "folder to write; must not exist yet (required)")
    to: Target = described(Target.shards, "what questions become; pictures become shards")
    maxcount: int = described(10_000, "samples per shard, at most")
    maxsize: float = described(1e9, "bytes of samples after which a shard is closed")
    on_error: OnError = described(OnError.stop, "a bad row: stop, or skip it and count")
    corpus: str | None = described(
        PassageConfig.corpus, "questions that name passages by id: the .jsonl or .tsv of these"
    )
    split: str = described(QuestionConfig.split, "questions: of a BEIR folder, qrels/<split>.tsv; names the new files")
    pos_pool: int = described(PassageConfig.pos_pool, "questions with scored candidates: the best n are right")
    neg_pool: int = described(
        PassageConfig.neg_pool, "questions with scored candidates: the worst n are hard negatives"
    )
    csv_separator: str = described("\\t", "CSV: between columns; \\t is a tab")
    csv_image_key: str = described("filepath", "CSV: column of the picture's path")
    csv_caption_key: str = described("title", "CSV: column of the caption")
    image_key: str | None = described(None, "Parquet, JSONL: field of the picture's path; null: image, filepath, …")
    caption_key: str | None = described(None, "Parquet, JSONL: field of the caption(s); null: caption, title, text, …")
    max_image_pixels: int = described(DataConfig.max_image_pixels, "larger pictures are bad rows")

    def __post_init__(self) -> None:
        check_split(self.split, "split")
