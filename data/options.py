"""The keys of `python -m data VERB`, with their defaults and meanings. Imports nothing heavy: --help reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from data.config import DataConfig, described


class OnError(Enum):
    stop = "stop"
    skip = "skip"


@dataclass
class IndexOptions:
    out: str | None = described(None, "also write the manifest of all shards to this JSON file")
    workers: int | None = described(None, "processes that scan; null: one per core")


@dataclass
class CheckOptions:
    workers: int | None = described(None, "processes that decode; null: one per core")
    captions: str = described("txt,caption,captions,title,text", "where captions are, first match: txt or json fields")
    image_key: str = described(DataConfig.image_key, "member names of the picture, first match")
    max_image_pixels: int = described(DataConfig.max_image_pixels, "larger pictures are bad samples")


@dataclass
class PackOptions:
    out: str | None = described(None, "folder of the new shards; must not exist yet (required)")
    maxcount: int = described(10_000, "samples per shard, at most")
    maxsize: float = described(1e9, "bytes of samples after which a shard is closed")
    on_error: OnError = described(OnError.stop, "a bad row: stop, or skip it and count")
    csv_separator: str = described("\\t", "CSV: between columns; \\t is a tab")
    csv_image_key: str = described("filepath", "CSV: column of the picture's path")
    csv_caption_key: str = described("title", "CSV: column of the caption")
    image_key: str | None = described(None, "Parquet, JSONL: field of the picture's path; null: image, filepath, …")
    caption_key: str | None = described(None, "Parquet, JSONL: field of the caption(s); null: caption, title, text, …")
    max_image_pixels: int = described(DataConfig.max_image_pixels, "larger pictures are bad rows")


@dataclass
class BuildOptions:
    out: str | None = described(None, "folder to write; null: data/samples/NAME")
    check: bool = described(False, "write nothing, only compare a fresh build with the folder")
