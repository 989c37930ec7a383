"""The configuration of data: the keys data.* with their defaults and help. Imports no torch, so that --help is fast."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from dyad.data.base.errors import ConfigError, raise_broken

TYPED = "typed, \\n is a line break, \\t a tab, \\\\ a backslash; a SentenceTransformer brings its own"
AUTO = "auto"  # a value of data.workers
# The largest legal value of keys data.augment.*
LARGEST = {"rotate": 180, "aspect": 0.99, "shift": 1, "brightness": 1, "grey": 1, "flip": 1}
LARGEST |= {"jitter_prob": 1, "blur": 1, "solarise": 1}


Shuffle = StrEnum("Shuffle", ["window", "full"])
ItemKind = StrEnum("ItemKind", ["pictures", "texts", "ids", "frames"])
Mode = StrEnum("Mode", ["indexed", "stream"])
Batches = StrEnum("Batches", ["mixed", "by_source"])
Title = StrEnum("Title", ["join", "pair", "drop"])
DrawnPositives = StrEnum("DrawnPositives", ["one", "first", "all"])
AnswerMatch = StrEnum("AnswerMatch", ["string", "regex"])
NegativeList = StrEnum("NegativeList", ["hard_negatives", "negatives", "mined"])
BadSamples = StrEnum("BadSamples", ["substitute", "stop"])
CaptionPer = StrEnum("CaptionPer", ["paragraph", "line"])
ResizeMode = StrEnum("ResizeMode", ["shortest", "longest", "squash"])


def described(default: Any, meaning: str, **limits: float) -> Any:
    """Return a dataclass field for a configuration key, with its help line and limits as metadata.

    default: the key's default; a list or dict is copied for each object. meaning: the line that `--help` prints for the
    key. limits: any of least, most, above and below, the limits of the value; `check_limits` of data/base/limits.py
    checks them; `described` itself does not.
    """
    metadata = {"help": meaning, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """Base of configuration dataclasses. The constructor raises ConfigError if `broken_rules` yields messages."""

    def broken_rules(self) -> Iterator[str]:
        """Yield a message for each rule that the field values break. A subclass with rules overrides this method."""
        return iter(())

    def __post_init__(self) -> None:
        raise_broken(self.broken_rules())


@dataclass
class AugmentConfig(Checked):
    """Configuration of the random changes of training images: the keys data.augment.*. The defaults change nothing."""

    crop_scale: list[float] = described([1.0, 1.0], "random resized crop: smallest and largest share of the area")
    rotate: float = described(0.0, "largest rotation in degrees, either way")
    zoom: list[float] = described([1.0, 1.0], "range of the random zoom factor")
    aspect: float = described(0.0, "largest relative change of the aspect ratio")
    shift: float = described(0.0, "largest shift as a share of the side")
    gain: list[float] = described([1.0, 1.0], "range of the random gain of each colour channel")
    brightness: float = described(0.0, "largest relative change of brightness")
    grey: float = described(0.0, "probability of a grey image")
    flip: float = described(0.0, "probability of a horizontal flip")
    jitter: list[float] = described([0.0] * 4, "largest changes of brightness, contrast, saturation, hue; in any order")
    jitter_prob: float = described(1.0, "probability of the colour jitter")
    blur: float = described(0.0, "probability of a Gaussian blur, its kernel 10 % of the side")
    blur_sigma: list[float] = described([0.1, 2.0], "range of its standard deviation in pixels")
    solarise: float = described(0.0, "probability that values from 128 on are inverted")

    def broken_rules(self) -> Iterator[str]:
        for name in ("crop_scale", "zoom", "gain", "blur_sigma"):
            interval = getattr(self, name)
            if len(interval) != 2 or not 0 < interval[0] <= interval[1]:
                yield f"data.augment.{name}={interval} must be two numbers, 0 < smallest <= largest."
            elif name == "crop_scale" and interval[1] > 1:
                yield f"data.augment.crop_scale={interval} is a share of the area: at most 1."
        if len(self.jitter) != 4 or min(self.jitter) < 0 or self.jitter[3] > 0.5:
            yield f"data.augment.jitter={self.jitter} must be four numbers from 0, the last at most 0.5."
        for name, limit in LARGEST.items():
            if not 0 <= getattr(self, name) <= limit:
                yield f"data.augment.{name}={getattr(self, name)} must be in 0 … {limit}."


@dataclass
class QuestionConfig:
    """Configuration of the question side of the task question_passage: the keys data.question.*. The constructor raises
    ConfigError for a `split` that is no file name, as `check_split` does."""

    split: str = described("train", "of a BEIR folder: qrels/<split>.tsv has its questions and their right passages")
    prefix: str = described("", f"text before every question, e.g. 'query: '; {TYPED}")
    length: int = described(
        32, "longest question in tokens; a SentenceTransformer brings its own", least=2, most=1 << 20
    )

    def __post_init__(self) -> None:
        check_split(self.split, "data.question.split")


def check_split(split: str, key: str) -> None:
    """Raise ConfigError unless `split`, the name of a data split such as train or test, is a plain file name.

    It may have letters, digits, "_", "." and "-", and begins with none of the last two. Such a name cannot lead out of
    the data folder. key: the configuration key of `split`, for the message.
    """
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise ConfigError(f"{key}={split}: the name of a split, as train, dev or test: letters, digits, '_', '.', '-'")


def check_template(template: str | None, key: str) -> None:
    """Raise ConfigError for a caption template without {}, the place of the label. None passes. key: the configuration
    key of the template, for the message."""
    if template is not None and "{}" not in template:
        raise ConfigError(f"{key}={template}: must hold {{}}, the place of the label, like 'a photo of a {{}}'")


@dataclass
class PassageConfig:
    """Configuration of the passage side of the task question_passage: the keys data.passage.*."""

    corpus: str | None = described(None, "file of the passages that rows name by id: .jsonl or .tsv; null: in the rows")
    prefix: str = described("", f"text before every passage, e.g. 'passage: '; {TYPED}")
    length: int = described(
        128, "longest passage in tokens; a SentenceTransformer brings its own", least=1, most=1 << 20
    )
    title: Title = described(Title.join, "a passage's title: before its text, as the first of a pair, or left out")
    positives: DrawnPositives = described(DrawnPositives.one, "of several right passages: draw one, the first, or all")
    pos_pool: int = described(5, "rows with scored candidates: the best n are right passages", least=1)
    neg_pool: int = described(5, "rows with scored candidates: the worst n are hard negatives", least=1)


@dataclass
class MiningConfig(Checked):
    """Configuration of the mining of hard negatives: the keys data.negatives.mining.*.

    They say which of the passages (captions, images) that a search finds become hard negatives of a question (image,
    caption). The command `python -m eval.mine` has the same keys.
    """

    first_rank: int = described(10, "negatives are taken from this rank on, counted from 1 over all that is found")
    last_rank: int = described(60, "last rank that negatives are taken from")
    keep: int = described(25, "negatives kept for each question or image, the best ranked first", least=1)
    margin: float | None = described(None, "negatives score at least this much below the best right item")
    relative_margin: float | None = described(None, "negatives score at most (1 - this) × the best right item")
    max_score: float | None = described(None, "negatives score at most this")
    drop_answers: bool = described(True, "leave out passages that contain an answer of the question, where it has any")
    regex_answers: bool = described(False, "answers are regular expressions rather than words")
    index: str = described("Flat", "FAISS index of the search and its options, e.g. 'IVF256,Flat;nprobe=16'")

    def broken_rules(self) -> Iterator[str]:
        if not 1 <= self.first_rank <= self.last_rank:
            yield f"first_rank={self.first_rank}, last_rank={self.last_rank}: must be 1 <= first <= last"
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            yield f"relative_margin={self.relative_margin}: must be in 0 … 1"


@dataclass
class NegativesConfig(Checked):
    """Configuration of the hard negatives of questions, images and captions: the keys data.negatives.*."""

    per_row: int = described(
        0, "hard negatives drawn for a row each time, at most; a row with fewer gives all it has", least=0
    )
    lists: list[NegativeList] = described([NegativeList.hard_negatives], "drawn from the first of these that a row has")
    fields: list[str] = described(
        ["hard_negatives"], "task=image_text: json fields with texts that are wrong for the image, for hard_negatives"
    )
    file: str | None = described(None, "file of mined negatives that python -m eval.mine wrote, for the list 'mined'")
    pictures: int = described(
        0, "task=image_text: images drawn for a row each time, at most, that are wrong for its caption", least=0
    )
    picture_fields: list[str] = described(
        ["negative.jpg", "negative.png", "negative.webp"], "members of a sample that are such images"
    )
    picture_file: str | None = described(
        None, "file of mined images that python -m eval.mine mine=pictures wrote, for the list 'mined'"
    )
    refresh_every: int = described(
        0, "steps after which negatives are mined anew with the present weights; 0: never", least=0
    )
    mining: MiningConfig = field(default_factory=MiningConfig)

    def broken_rules(self) -> Iterator[str]:
        has_mined = NegativeList.mined in self.lists
        if not self.lists:
            yield "data.negatives.lists is empty. Choose of hard_negatives, negatives, mined"
        for name, count in (("file", "per_row"), ("picture_file", "pictures")):
            path = getattr(self, name)
            if path is not None and not (has_mined and getattr(self, count) > 0):
                yield (
                    f"data.negatives.{name}={path}: nothing draws from it. Add data.negatives.lists=[mined] "
                    f"data.negatives.{count}=1, or leave it out"
                )
        if self.refresh_every and not (has_mined and self.per_row > 0):
            yield (
                f"data.negatives.refresh_every={self.refresh_every}: nothing would use what is mined. Add "
                "data.negatives.lists=[mined] data.negatives.per_row=1, or leave refresh_every at 0"
            )


@dataclass
class SequenceConfig:
    """Configuration of task=sequence, next-item training on logs of events or on frames: the keys data.sequence.*."""

    user: str = described("user", "column of a log: whose event a row is; the events of one user are a sequence")
    item: str = described("item", "column of a log: the id of the item of an event")
    time: str | None = described("time", "column of a log: a number or an ISO 8601 time; null: rows are in order")
    items: Any = described(
        None, "data.items=texts: passages by id (.jsonl, .tsv, BEIR folder), null: an id is the text; pictures: shards"
    )
    earlier: Any = described(
        None, "logs of events between data.train and an evaluation, which count as history; null: data.val"
    )
    length: int = described(50, "most steps of a sample; longer sequences are cut into several", least=2, most=1 << 14)


@dataclass
class DataConfig(Checked):
    """Configuration of the data for training and validation: the keys data.*.

    The keys say where the data come from, how a training sample is made of them, and how they are loaded. The
    constructor raises ConfigError for broken rules.
    """

    train: Any = described(
        None,
        "training data: shards or tables, path, glob, 'd/{00..99}.tar', 'a@2::b@0.5' with weights, or a list of these "
        "and of {path: a, weight: 2, question_prefix: '…', passage_prefix: '…'}",
    )
    val: Any = described(None, "data for retrieval while training, written like data.train")
    items: ItemKind = described(
        ItemKind.pictures, "task=views, labelled: samples are pictures or texts; task=sequence: also ids or frames"
    )
    label: str = described(
        "cls", "task=labelled: what holds the class: cls or class (folders of classes), txt, a json field"
    )
    classes: Any = described(None, "task=labelled: names, or a TASK.json of zero_shot; null: all in data.train, sorted")
    rare: str | None = described(None, "task=labelled: this class on side x, all others on side y, for partial_auc")
    rare_per_batch: int = described(8, "samples of data.rare in a batch; global_batch_size counts them too", least=1)
    columns: list[str] = described([], "columns of a table to use: [picture,caption] or [question,positive,negative]")
    template: str | None = described(None, "captions made of labels or folder names, e.g. 'a photo of a {}'")
    mode: Mode = described(
        Mode.indexed, "indexed: by offset, each sample once an epoch, exact resume; stream: shards from start to end"
    )
    buffer: int = described(1000, "stream: samples that a loader process reads ahead at a time and mixes", least=1)
    id_key: str | None = described(None, "stream: json field with a sample's number 0, 1, …, for stateful objectives")
    workers: Any = described(
        AUTO,
        "loader processes per rank; they change the results of streams alone. auto: cores - 1, at most 16; on CPUs 2",
        least=0,
        most=1024,
    )
    timeout: float = described(
        60.0, "seconds a loader process may take for a sample before the run stops; 0: for ever", least=0, most=1e9
    )
    bad_samples: BadSamples = described(
        BadSamples.substitute, "a sample that cannot be used: another in its place, named in ledger.jsonl; or stop"
    )
    bad_in_a_row: int = described(100, "number of consecutive bad samples that stops the run")
    bad_share: float = described(0.01, "a larger share of bad samples among the last 10,000 stops the run")
    image_key: str = described("jpg;jpeg;png;webp", "suffixes of a sample's image, the first that it has counts")
    captions: list[str] = described(
        ["txt"], "where captions are: txt, json fields, as caption or meta.caption; evaluation: the first"
    )
    caption_per: CaptionPer = described(
        CaptionPer.paragraph, "what is one caption in a .txt: paragraph (all lines up to a blank one), or line"
    )
    caption_weights: list[float] | None = described(None, "chance of each entry of data.captions; null: all alike")
    text_key: str | None = described(None, "json field that says which texts mean the same item; null: the text itself")
    relevance: str | None = described(
        None,
        "weight in (0, 1] of each positive pair in the loss: a field of the json or the row, of each passage where "
        "it has fields, such as similarity, score, pos_scores; of qrels the grade / their largest; null: 1",
    )
    teacher: str | None = described(
        None,
        "task=question_passage: a score of each passage, a teacher's for objective=distill_kl or margin_mse, people's "
        "for cosent or cosine_mse: a field of passages, such as score; FlagEmbedding: scores, of pos_scores and "
        "neg_scores; else of the row: a number for a pair, a list of positives, then negatives, or for one of each "
        "their difference",
    )
    shuffle: Shuffle = described(Shuffle.window, "window: among 65,536 samples or more, reads stay local; full: all")
    batches: Batches = described(Batches.mixed, "mixed: each batch is of all sources; by_source: of one, drawn anew")
    resize: ResizeMode | None = described(None, "how images are resized if not cropped at random; null: as the tower")
    # PIL refuses more than 178,956,970 itself
    max_image_pixels: int = described(25_000_000, "larger images are refused, undecoded", least=1, most=178_956_970)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    augment_y: dict[str, Any] = described({}, "task=views: values that differ from data.augment in the second view")
    question: QuestionConfig = field(default_factory=QuestionConfig)
    passage: PassageConfig = field(default_factory=PassageConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)

    @property
    def bad_in_a_row_limit(self) -> int:
        """The number of consecutive bad (damaged or incomplete) samples at which the run stops; 0: at the first.

        It is 0 with data.bad_samples=stop. A share of bad samples above data.bad_share stops the run too.
        """
        return self.bad_in_a_row if self.bad_samples is BadSamples.substitute else 0

    @property
    def augments(self) -> tuple[AugmentConfig, AugmentConfig]:
        """The augmentation of the first and of the second view of an image (task=views), in this order.

        They are data.augment, and data.augment with the changes of data.augment_y.
        """
        return self.augment, replace(self.augment, **self.augment_y)

    def __post_init__(self) -> None:
        if isinstance(self.train, Mapping):  # one value, as a list is, wherever keys are compared
            self.train = [self.train]
        super().__post_init__()

    def broken_rules(self) -> Iterator[str]:
        if self.workers != AUTO and not (type(self.workers) is int and self.workers >= 0):
            yield f"data.workers={self.workers}: must be auto, or a whole number from 0"
        if self.bad_in_a_row < 1:
            yield f"data.bad_in_a_row={self.bad_in_a_row}: must be 1 or more; data.bad_samples=stop: none"
        if not 0 <= self.bad_share <= 1:
            yield f"data.bad_share={self.bad_share}: must be in 0 … 1; 1 lets any share pass"
        if self.teacher is not None and NegativeList.mined in self.negatives.lists:
            yield (
                f"data.teacher={self.teacher}: mined passages have no score of a teacher. Set "
                "data.negatives.lists=[hard_negatives], which are in the rows"
            )
        try:
            check_template(self.template, "data.template")
            _ = self.augments
        except ConfigError as error:
            yield str(error)
        except TypeError:
            yield f"data.augment_y={self.augment_y}: keys and values are as of data.augment"
        weights, names = self.caption_weights, self.captions
        if not names:
            yield "data.captions is empty. Write [txt], or fields of the json member like [caption]."
        elif weights is not None and (len(weights) != len(names) or min(weights) < 0 or not sum(weights)):
            yield f"data.caption_weights={weights} must be one chance for each of data.captions={names}."
