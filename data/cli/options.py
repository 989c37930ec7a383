"""The key=value options of `python -m data VERB`, with defaults and meanings. Imports nothing slow, so that `--help`
is fast."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from dyad.data.base.command_line import config_option
from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import (
    AnswerMatch,
    CaptionPer,
    DataConfig,
    DrawnPositives,
    PassageConfig,
    QuestionConfig,
    SequenceConfig,
    check_split,
    check_template,
    described,
)
from dyad.data.tables.image_table import TableOptions

OnError = StrEnum("OnError", ["stop", "skip"])
ImageTask = StrEnum("ImageTask", ["image_text", "views", "labelled"])  # tasks that train on images: the key `task`
Side = StrEnum("Side", ["x", "y"])
LogSplit = StrEnum("LogSplit", ["last", "time", "user"])
PassagesOfRows = StrEnum("PassagesOfRows", ["inside", "ids"])
# Formats to which questions can be converted
Target = StrEnum("Target", ["shards", "dpr", "tevatron", "tevatron_ids", "flag", "beir"])


BY = "rows that share it stay together: picture, caption, question, passage, a field, or content: any of the first four"


@dataclass
class TableKeys:
    """The key=value options of `python -m data` about tables, which most verbs have.

    The constructor raises ConfigError for a template without {}.
    """

    columns: list[str] = config_option(DataConfig, "columns")
    template: str | None = config_option(DataConfig, "template")
    max_image_pixels: int = config_option(DataConfig, "max_image_pixels")
    caption_per: CaptionPer = config_option(DataConfig, "caption_per")
    relevance: str | None = config_option(DataConfig, "relevance")
    teacher: str | None = config_option(DataConfig, "teacher")
    task: ImageTask = described(
        ImageTask.image_text,
        "what images are for: image_text (with captions), views (alone), labelled (a class); leave it out for texts",
    )

    def __post_init__(self) -> None:
        check_template(self.template, "template")


def table_keys(options: TableKeys) -> TableOptions:
    """Convert the options of a verb that are about tables to TableOptions, the form that the readers of tables take."""
    captions = {"caption_per": options.caption_per, "captioned": options.task is ImageTask.image_text}
    chosen = TableOptions(options.columns, options.template, options.max_image_pixels, **captions)
    return replace(chosen, relevance=options.relevance, teacher=options.teacher)


@dataclass
class IndexOptions(TableKeys):
    """The key=value options of `python -m data index`."""

    out: str | None = described(None, "also write the manifest of all shards to this JSON file")
    workers: int | None = described(None, "processes that scan; null: one per core", least=1, most=1024)


@dataclass
class QuestionKeys(TableKeys):
    """The key=value options of verbs that read questions: those about tables, about the corpus and about the split.

    The constructor raises ConfigError for an invalid template or split.
    """

    corpus: str | None = config_option(PassageConfig, "corpus")
    split: str = described(QuestionConfig.split, "questions: of a BEIR folder, qrels/<split>.tsv; names new files")
    pos_pool: int = config_option(PassageConfig, "pos_pool")
    neg_pool: int = config_option(PassageConfig, "neg_pool")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split(self.split, "split")


def question_config(options: QuestionKeys) -> DataConfig:
    """Convert the options of a verb to a DataConfig with which the same questions are read.

    It has the columns, relevance, teacher, corpus, split and the two pools of `options`, and otherwise defaults.
    """
    passage = PassageConfig(corpus=options.corpus, pos_pool=options.pos_pool, neg_pool=options.neg_pool)
    config = DataConfig(columns=options.columns, question=QuestionConfig(split=options.split), passage=passage)
    return replace(config, relevance=options.relevance, teacher=options.teacher)


@dataclass
class CaptionKeys(QuestionKeys):
    """The key=value options of verbs that read captions, and those of verbs that read questions."""

    captions: str = described(
        "txt,caption,captions,title,text,cls", "images: where captions are, first match: txt, json fields, cls"
    )


@dataclass
class ReadOptions(CaptionKeys):
    """The key=value options of verbs that read the content of data, such as captions."""

    image_key: str = config_option(DataConfig, "image_key")
    label: str = config_option(DataConfig, "label")


@dataclass
class WriteOptions(CaptionKeys):
    """The key=value options of verbs that write data: the new folder, the size of shards, rows that stay together."""

    out: str | None = described(None, "folder to write; must not exist yet (required)")
    by: str = described("content", BY)
    maxcount: int = described(10_000, "samples per shard, at most", least=1)
    maxsize: float = described(1e9, "bytes of samples after which a shard is closed", above=0)


@dataclass
class CheckOptions(ReadOptions):
    """The key=value options of `python -m data check`."""

    val: str | None = described(None, "data for evaluation, as data.val: count how much of it is in SOURCE too")
    workers: int | None = described(None, "images: processes that decode; null: one per core", least=1, most=1024)


@dataclass
class SplitOptions(WriteOptions, ReadOptions):
    """The key=value options of `python -m data split`."""

    val: float = described(0.1, "share of the rows for validation", above=0, below=1)


@dataclass
class PackOptions(WriteOptions):
    """The key=value options of `python -m data pack`. The constructor raises ConfigError for an invalid template or
    split.

    It also does so for a split whose file of questions would be taken for the file of passages (corpus, corpus.X), and
    for both relevance and teacher with to=flag, which has one field for them.
    """

    to: Target = described(Target.shards, "what questions become; images become shards")
    val: float | None = described(None, "split into train/ and val/: the share for validation", above=0, below=1)
    on_error: OnError = described(OnError.stop, "a bad row: stop, or skip it and count")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to not in (Target.shards, Target.beir) and self.split.split(".")[0] == "corpus":
            raise ConfigError(f"split={self.split}: corpus names the file of passages. Choose another, as train")
        if self.to is Target.flag and self.relevance is not None and self.teacher is not None:
            raise ConfigError("to=flag: its field pos_scores holds relevance= or teacher=. Leave one of them out")


@dataclass
class NegativesOptions(QuestionKeys):
    """The key=value options of `python -m data negatives`."""

    out: str | None = described(None, "new .jsonl or .json file of DPR's rows (required)")
    depth: int = described(100, "passages that BM25 finds for a question", least=1)
    negatives: int = described(30, "hard negatives of a question, the best ranked first, at most", least=0)
    all_positives: bool = described(False, "all found passages with an answer are positives; else the best ranked")
    answers: str = described("answers", "field of a row with the answers of its question")
    match: AnswerMatch = described(AnswerMatch.string, "an answer is words of the text, or a regex that matches")
    passages: PassagesOfRows = described(PassagesOfRows.inside, "rows hold whole passages, or only ids in corpus=")
    index: str | None = described(None, "folder that keeps the BM25 index for the next build; null: it is not kept")
    workers: int | None = described(None, "processes that search; null: one per core", least=1, most=1024)


@dataclass
class ContinuationsOptions:
    """The key=value options of `python -m data continuations`.

    The constructor raises ConfigError for shares that leave no training data, and if group_of is no regular expression
    with one group.
    """

    out: str | None = described(None, "folder to write; must not exist yet (required)")
    group_of: str = described("(.*)", "regular expression of ids: texts whose ids have an equal group stay in one part")
    wrong: int = described(7, "wrong answers of each prompt", least=1, most=1000)
    examples: int = described(
        0, "also write examples.jsonl: each row of train so many times, after another row", least=0
    )
    seed: int = described(0, "seed of the draws of wrong answers and examples", least=0)
    val: float = described(0.1, "share for validation", above=0, below=1)
    test: float = described(0.1, "share for the test", above=0, below=1)

    def __post_init__(self) -> None:
        check_shares(self.val, self.test)
        check_group("group_of", self.group_of)


@dataclass
class SequencesOptions:
    """The key=value options of `python -m data sequences`.

    The constructor raises ConfigError for shares that leave no training data, and if user_of is no regular expression
    with one group.
    """

    out: str | None = described(None, "folder to write; must not exist yet (required)")
    user: str = config_option(SequenceConfig, "user")
    item: str = config_option(SequenceConfig, "item")
    time: str | None = config_option(SequenceConfig, "time")
    columns: list[str] = described(
        [], "names of all columns of a file whose first line is an event, e.g. [user,item,rating,time]"
    )
    user_of: str | None = described(
        None, "INPUT is a corpus, or a BEIR folder: regular expression of its ids, whose group is the user"
    )
    split: LogSplit = described(LogSplit.last, "last: the last event of a user is for the test; time; or whole users")
    val: float = described(0.1, "split=time and user: share for validation", above=0, below=1)
    test: float = described(0.1, "split=time and user: share for the test", above=0, below=1)
    least: int = described(3, "users with fewer events are left out; of split=last at least 3", least=2)
    on_error: OnError = described(OnError.stop, "a bad row: stop, or skip it and count")

    def __post_init__(self) -> None:
        check_shares(self.val, self.test)
        if self.split is LogSplit.last and self.least < 3:
            raise ConfigError(f"split=last least={self.least}: a user needs an event in each part. Set least=3 or more")
        if self.user_of is not None:
            check_group("user_of", self.user_of)


def check_shares(val: float, test: float) -> None:
    """Raise ConfigError if the shares of validation and test data, `val` and `test`, leave nothing to train on."""
    if val + test >= 1:
        raise ConfigError(f"val={val:g} test={test:g}: nothing is left to train on. Make them smaller")


def check_group(key: str, pattern: str) -> None:
    """Raise ConfigError unless `pattern` is a regular expression with one group. key: its option, for the message."""
    try:
        if re.compile(pattern).groups != 1:
            raise ConfigError(f"{key}={pattern}: needs one group, as in '(.*)[.][0-9]+'")
    except re.error as error:
        raise ConfigError(f"{key}={pattern}: is no regular expression: {error}") from error


def group_of(name: str, pattern: str, key: str, source: str) -> str:
    """Match the whole id `name` with the regular expression `pattern`, and return the text of its group.

    Raises DataError if it does not match. key: name of the option `pattern`; source: path of the data; both for the
    message.
    """
    if not (found := re.fullmatch(pattern, name)) or found[1] is None:
        raise DataError(f"{source}: the id '{name:.80}' does not match {key}={pattern}")
    return found[1]


@dataclass
class WeightsOptions(QuestionKeys):
    """The key=value options of `python -m data weights`."""

    out: str | None = described(None, "new .safetensors file (required)")
    side: Side = described(Side.y, "items to count: y: passages or captions; x: questions or images")
    power: float = described(1.0, "q is proportional to the count to this power; word2vec: 0.75", least=0)
    add: float = described(0.0, "added to each count; above 0, negatives and passages of corpus= have a q too", least=0)
    temperature: float | None = described(None, "write ζ = -τ log q of this τ, for importance=zeta", above=0)
    positives: DrawnPositives = config_option(PassageConfig, "positives")
    captions: list[str] = config_option(DataConfig, "captions")
    caption_weights: list[float] | None = config_option(DataConfig, "caption_weights")
    text_key: str | None = config_option(DataConfig, "text_key")
    image_key: str = config_option(DataConfig, "image_key")
