"""The key=value options of `python -m data VERB`, with defaults and meanings. Imports nothing slow: `--help` reads
it."""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.base.command_line import config_option
from dyad.data.config import (
    CaptionPer,
    DataConfig,
    PassageConfig,
    QuestionConfig,
    check_split,
    check_template,
    described,
)
from dyad.data.tables.pictures import TableOptions

OnError = StrEnum("OnError", ["stop", "skip"])
PictureTask = StrEnum("PictureTask", ["image_text", "views", "labelled"])  # that pictures are for, as the key task
# Formats that questions are converted to.
Target = StrEnum("Target", ["shards", "dpr", "tevatron", "tevatron_ids", "flag", "beir"])


BY = "rows that share it stay together: picture, caption, question, passage, a field, or content: any of the first four"


@dataclass
class TableKeys:
    """The key=value options of each verb of `python -m data` about tables."""

    columns: list[str] = config_option(DataConfig, "columns")
    template: str | None = config_option(DataConfig, "template")
    max_image_pixels: int = config_option(DataConfig, "max_image_pixels")
    caption_per: CaptionPer = config_option(DataConfig, "caption_per")
    relevance: str | None = config_option(DataConfig, "relevance")
    task: PictureTask = described(
        PictureTask.image_text, "what pictures are for: image_text (with captions), views (alone), labelled (a class)"
    )

    def __post_init__(self) -> None:
        check_template(self.template, "template")


def table_keys(options: TableKeys) -> TableOptions:
    captioned = options.task is PictureTask.image_text
    chosen = {"caption_per": options.caption_per, "captioned": captioned, "relevance": options.relevance}
    return TableOptions(options.columns, options.template, options.max_image_pixels, **chosen)


@dataclass
class IndexOptions(TableKeys):
    """The key=value options of `python -m data index`."""

    out: str | None = described(None, "also write the manifest of all shards to this JSON file")
    workers: int | None = described(None, "processes that scan; null: one per core", least=1, most=1024)


@dataclass
class QuestionKeys(TableKeys):
    """The key=value options of commands that read questions, too."""

    corpus: str | None = config_option(PassageConfig, "corpus")
    split: str = described(QuestionConfig.split, "questions: of a BEIR folder, qrels/<split>.tsv; names new files")
    pos_pool: int = config_option(PassageConfig, "pos_pool")
    neg_pool: int = config_option(PassageConfig, "neg_pool")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split(self.split, "split")


@dataclass
class ReadOptions(QuestionKeys):
    """The key=value options of commands that read data to look into it."""

    captions: str = described(
        "txt,caption,captions,title,text,cls", "pictures: where captions are, first match: txt, json fields, cls"
    )
    image_key: str = config_option(DataConfig, "image_key")
    label: str = config_option(DataConfig, "label")


@dataclass
class WriteOptions(QuestionKeys):
    """The key=value options of commands that write data."""

    out: str | None = described(None, "folder to write; must not exist yet (required)")
    by: str = described("content", BY)
    maxcount: int = described(10_000, "samples per shard, at most")
    maxsize: float = described(1e9, "bytes of samples after which a shard is closed")


@dataclass
class CheckOptions(ReadOptions):
    """The key=value options of `python -m data check`."""

    val: str | None = described(None, "data for evaluation, as data.val: count what of it stands in SOURCE too")
    workers: int | None = described(None, "pictures: processes that decode; null: one per core", least=1, most=1024)


@dataclass
class SplitOptions(WriteOptions, ReadOptions):
    """The key=value options of `python -m data split`."""

    val: float = described(0.1, "share of the rows for validation, above 0 and below 1")


@dataclass
class PackOptions(WriteOptions):
    """The key=value options of `python -m data pack`."""

    to: Target = described(Target.shards, "what questions become; pictures become shards")
    val: float | None = described(None, "split into train/ and val/: the share of the rows for validation, e.g. 0.05")
    on_error: OnError = described(OnError.stop, "a bad row: stop, or skip it and count")
