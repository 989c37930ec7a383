"""The evaluation suite: builds the evaluators of data.val and of the entries KIND:TARGET of eval.suite.

image_text
  retrieval:SHARDS      images and captions, named as in data.val
  zero_shot:TASK.json   labelled images and prompts (format: prompts.py, and --help)
  wds:FOLDER            a CLIP_benchmark data set (format: wds.py): labelled images, or images and captions; as
                        in CLIP_benchmark, only an image's own captions are right for it
labelled
  classes:SHARDS        samples with a class, named as in data.val, of the classes of training
views
  views:SHARDS          images, named as in data.val: of one view of each, the other is searched; random numbers as
                        in epoch 0 of training
question_passage, and views of texts (formats: question_sets.py)
  beir:FOLDER[@SPLIT]   one split of a BEIR folder, by default test: FOLDER and FOLDER@test have one name
  dpr:PATH              questions with their answers or their passages
any task
  probe:TASK.json       labelled images or texts, to fit and to score (format: prompts.py, and --help)

Entries are checked without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.plugins import plugins_needed
from dyad.data.config import CaptionPer, ItemKind
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.shards.sources import ShardSource, Tables, parse_sources
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.eval.config import Baseline
from dyad.eval.search.index_spec import EXACT, check_spec
from dyad.eval.tasks.prompts import read_probe, read_task
from dyad.eval.tasks.question_sets import check_beir, check_dpr, names_beir, open_beir, open_dpr
from dyad.eval.tasks.wds import IMAGES, read_wds
from dyad.train.config import Task
from dyad.train.eval_config import Truth

if TYPE_CHECKING:
    from dyad.data.config import DataConfig
    from dyad.data.shards.shards import Shards
    from dyad.eval.encode.encoder import Encoder, Evaluator
    from dyad.eval.tasks.passage_retrieval import PassageSide
    from dyad.eval.tasks.question_sets import QuestionSet
    from dyad.eval.tasks.zero_shot import ZeroShot
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import ImageModel, ImageTextModel, SequenceModel, TwoTowerModel


@dataclass(frozen=True)
class Inputs:
    """Everything that evaluators are built from, except the suite entry: the run's configuration, its model, and more.

    baselines: systems that are scored beside the model. sides: search corpora that are open already, by fingerprint, so
    that several entries share one.
    """

    config: TrainConfig
    model: TwoTowerModel
    baselines: Sequence[Baseline]
    sides: dict[str, PassageSide] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteKind:
    """A kind of data set that can be evaluated, for example beir.

    task: the task of the models that it can evaluate; None: every task. form: how a target (the part of an entry after
    KIND:) is written, for help texts. check: raises ConfigError for a missing target. build: makes the evaluator of an
    entry.
    """

    task: Task | None
    form: str
    check: Callable[[SuiteEntry], Any]
    build: Callable[[SuiteEntry, Inputs], Evaluator]


@dataclass(frozen=True)
class SuiteEntry:
    """One data set to evaluate on: data.val or an entry KIND:TARGET of eval.suite.

    name: the name of its evaluator. key: how messages about its target name the entry. spec: the entry as the user
    wrote it. target: the part after KIND:, or the value of data.val. data: the data options of the run.
    """

    kind: SuiteKind
    name: str
    key: str
    spec: str
    target: Any
    data: DataConfig


def build_evaluators(
    config: TrainConfig,
    model: TwoTowerModel,
    baselines: Sequence[Baseline] = (),
    untrained: Callable[[], Encoder] | None = None,
) -> list[Evaluator]:
    """Build the evaluator "val" for data.val, and an evaluator "eval/<name>" for each entry of eval.suite, named after
    its path.

    baselines: further systems to score beside the model; those of images know "untrained" only. untrained: function
    that makes the encoder with its weights before training, for the baseline "untrained". Raises ConfigError for an
    entry that cannot be read, DataError for damaged data.
    """
    inputs, before = Inputs(config, model, baselines), untrained if Baseline.untrained in baselines else None
    return [replace(entry.kind.build(entry, inputs), untrained=before) for entry in _entries(config)]


def check_suite(config: TrainConfig) -> None:
    """Raise ConfigError for wrong entries of eval.suite, missing data, or a wrong eval.index. Does not import torch."""
    entries = list(_entries(config))
    for entry in entries:
        entry.kind.check(entry)
    # torch makes an exact search of images where FAISS is not installed
    if entries and (config.eval.index != EXACT or not config.has_images):
        check_spec(config.eval.index)


def _entries(config: TrainConfig) -> Iterator[SuiteEntry]:
    """Yield the data sets to evaluate on: data.val, if given, then the parsed entries of eval.suite.

    Raises ConfigError for an entry of an unknown kind, or of a kind that belongs to another task.
    """
    own = config.has_images or config.task in (Task.labelled, Task.sequence)
    task = config.task if own else Task.question_passage  # any other model of texts can do the same
    val = config.data.val
    if config.task is Task.language_model and (val is not None or config.eval.suite):
        raise ConfigError(
            "task=language_model: has no evaluation yet. Set data.val=null and eval.suite=[]; dyad.load(…).score gives "
            "scores"
        )
    if val is not None:
        kind = VAL.get(task) or ("beir" if names_beir(val) else "dpr")
        yield SuiteEntry(KINDS[kind], "val", "data.val", str(val), val, config.data)
    legal = {name: kind for name, kind in KINDS.items() if kind.task in (task, None)}
    names = ["val"]
    for spec in config.eval.suite:
        kind, _, target = spec.partition(":")
        if kind not in legal or not target:
            forms = ", ".join(f"{name}:…" for name in legal)
            other = KINDS[kind].task if kind in KINDS and target else None
            hint = f" '{kind}' is of task={other.name}." if other else nearest(kind, legal)
            hint += plugins_needed(config.plugins)
            raise ConfigError(f"eval.suite: '{spec}' must be one of {forms} (task={config.task.name}).{hint}")
        names.append(_name(target, names))
        yield SuiteEntry(legal[kind], f"eval/{names[-1]}", f"eval.suite: {kind}", spec, target, config.data)


def _name(target: str, taken: Sequence[str]) -> str:
    """Return a name for a suite entry: the last part of its path, without suffix. If `taken` has that name, add a
    number.
    """
    last = re.sub(r"\.(tar|jsonl?|[ct]sv|parquet|arrow)(@.*)?$|@test$", "", Path(target).name)
    stem = re.sub(r"[^\w.-]+", "_", last).strip("_") or "set"
    same = sum(re.fullmatch(re.escape(stem) + r"(-\d+)?", t) is not None for t in taken)
    return f"{stem}-{same + 1}" if same else stem


# ---- images and texts ----------------------------------------------------------------------------------------------


def images(
    build: Callable[[SuiteEntry, Shards, Inputs], Evaluator],
    form: str = "SHARDS",
    named: Callable[[SuiteEntry], tuple[Any, str]] = lambda entry: (entry.target, entry.key),
) -> SuiteKind:
    """Make the SuiteKind (how entries KIND:TARGET of one KIND are read) of a kind of the task image_text, whose targets
    name shards of images.

    build: function that makes the evaluator of an entry from its opened shards. form: how a target is written, for help
    texts. named: function that returns what an entry names, in the syntax of data.train, and its key for messages.
    """

    def open_and_build(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
        from dyad.data.shards.shards import open_shards

        prepared = prepared_tables(table_options(entry.data))
        return build(entry, open_shards(parse_sources(*named(entry), tables=prepared)), inputs)

    def check(entry: SuiteEntry) -> None:
        parse_sources(*named(entry), tables=checked_tables(table_options(entry.data)))

    return SuiteKind(Task.image_text, form, check, open_and_build)


def _retrieval(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    from dyad.data.image_text.dataset import retrieval_set
    from dyad.eval.tasks.image_text_retrieval import Retrieval

    model = cast("ImageTextModel", inputs.model)
    data, options = retrieval_set(shards, model.image, model.tokenize, inputs.config.data), inputs.config.eval
    return Retrieval(entry.name, entry.spec, data, options.truth, tuple(options.recall_k), options.index)


def _views(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    from dyad.data.image_text.image_views import view_pairs
    from dyad.eval.tasks.image_text_retrieval import ViewRetrieval

    config, model = inputs.config, cast("ImageModel", inputs.model)
    data, options = view_pairs(shards, model.image, config.data, config.seed), config.eval
    return ViewRetrieval(entry.name, entry.spec, data, recall_k=tuple(options.recall_k), index=options.index)


def _zero_shot(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    from dyad.eval.tasks.zero_shot import of_classes

    task = read_task(_path(entry))
    found = _classification(entry, shards, inputs, task.label, task.classes)
    return replace(found, data=of_classes(found.data, task, entry.spec))


def _wds(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    folder, config = read_wds(_path(entry)), inputs.config
    keys = {"image_key": IMAGES, "captions": ["txt"], "caption_weights": None, "text_key": None}
    keys["caption_per"] = CaptionPer.line
    own = replace(config, data=replace(config.data, **keys), eval=replace(config.eval, truth=Truth.pairs))
    inputs = replace(inputs, config=own)
    if not folder.classes:
        return _retrieval(entry, shards, inputs)
    found = _classification(entry, shards, inputs, "cls", folder.classes)
    return replace(found, data=replace(found.data, labels=folder.class_names(found.data.labels)))


def _classification(
    entry: SuiteEntry, shards: Shards, inputs: Inputs, label: str, classes: Mapping[str, Sequence[str]]
) -> ZeroShot:
    """Make the evaluator of labelled images. label: the field with the class. classes: class name → its prompts."""
    from dyad.data.image_text.dataset import labelled_set
    from dyad.eval.tasks.zero_shot import ZeroShot

    model, config = cast("ImageTextModel", inputs.model), inputs.config
    data = labelled_set(shards, model.image, config.data, label)
    return ZeroShot(entry.name, entry.spec, data, classes, model.tokenize, index=config.eval.index)


# ---- samples with a class --------------------------------------------------------------------------------------------


def _labelled(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    from dyad.data.image_text.dataset import labelled_set
    from dyad.data.question_passage.text_views import labelled_texts, text_tokens, titled_text
    from dyad.eval.tasks.labelled import RareClass, TrainedClasses
    from dyad.run.class_names import class_inputs, open_labelled

    config, model, rare = inputs.config, cast("ImageTextModel", inputs.model), inputs.config.data.rare
    found = open_labelled(entry.target, config)
    if found.rows:
        tokenize = partial(text_tokens, Passage, model.tokenize, config.data.passage)
        data = labelled_texts(found.shards, config.data.label, tokenize, titled_text)
    else:
        data = labelled_set(found.shards, model.image, config.data, config.data.label)
    if rare is not None:
        return RareClass(entry.name, entry.spec, data, rare, getattr(config.objective, "alpha", 1.0))
    texts, tokenize = class_inputs(config, model)
    prompts = {name: [text] for name, text in zip(config.run.classes or [], texts, strict=True)}
    return TrainedClasses(entry.name, entry.spec, data, prompts, tokenize, index=config.eval.index)


def _check_labelled(entry: SuiteEntry) -> None:
    if entry.data.items is ItemKind.pictures:
        parse_sources(entry.target, entry.key, tables=checked_tables(table_options(entry.data)))
    else:
        from dyad.data.question_passage.text_views import text_sources

        text_sources(entry.target, entry.data, checked_tables)


# ---- questions and passages ------------------------------------------------------------------------------------------


def _passages(open_set: Callable[[str, DataConfig], QuestionSet], entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    from dyad.eval.tasks.passage_retrieval import PassageRetrieval, PassageSide

    data, options, tokenize = inputs.config.data, inputs.config.eval, inputs.model.tokenize
    questions = open_set(entry.target, data)
    side = PassageSide(questions.corpus, tokenize, data.passage, options)
    side = inputs.sides.setdefault(questions.corpus.fingerprint, side)
    by = (tokenize, data.question, options, inputs.baselines)
    return PassageRetrieval(entry.name, entry.spec, questions, side, *by)


# ---- sequences -------------------------------------------------------------------------------------------------------


def _next_item(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    from dyad.data.sequence.files import sequence_files
    from dyad.data.sequence.histories import next_items
    from dyad.data.sequence.log import read_log
    from dyad.data.sequence.open import items_of
    from dyad.eval.tasks.next_item import NextItem

    config = inputs.config
    data, options, model = config.data, config.eval, cast("SequenceModel", inputs.model)
    train = [] if data.train is None else sequence_files(data.train, data)  # an export does not say
    between = data.val if data.sequence.earlier is None else data.sequence.earlier
    earlier = [] if between is None else sequence_files(between, data, "data.sequence.earlier")
    own = sequence_files(entry.target, data, entry.key)
    files = [*train, *(file for file in earlier if file not in own), *own]
    log = read_log(files, data.sequence, model.names)
    known = log.items if data.items is not ItemKind.ids else log.items[: config.run.inputs]
    events = next_items(log, items_of(known, data, model), data.sequence.length, len(files) - len(own), len(train))
    how = (tuple(options.recall_k), options.seen, options.index, options.depth, inputs.baselines)
    return NextItem(entry.name, entry.spec, events, *how)


def _check_log(entry: SuiteEntry) -> None:
    from dyad.data.sequence.files import sequence_files

    if entry.data.items is ItemKind.frames:
        raise ConfigError(f"{entry.key}={entry.target}: frames have no next item to find among others. Leave it out")
    sequence_files(entry.target, entry.data, entry.key)


# ---- labelled images or texts of any model -------------------------------------------------------------------------


def _parts(tables: Callable[[Any], Tables], entry: SuiteEntry) -> tuple[list[list[ShardSource]], str]:
    """Return the sources of the training and of the test part of a probe, and its label. Raises ConfigError for wrong
    ones. tables: gives the shards of tables of images.
    """
    named, label = read_probe(_path(entry))
    found = tables(table_options(entry.data))
    return [parse_sources(shards, f"{entry.target}: {part}", tables=found) for part, shards in named.items()], label


def _probe(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    from dyad.data.image_text.dataset import labelled_set
    from dyad.data.question_passage.text_views import labelled_texts, text_tokens
    from dyad.data.shards.shards import open_shards
    from dyad.eval.tasks.probe import Probe

    parts, label = _parts(prepared_tables, entry)
    model, data, options = inputs.model, inputs.config.data, inputs.config.eval
    spec = cast("Any", getattr(model, "image", None))  # of a model that takes some
    has_texts = not spec or all(shard.endswith(".jsonl") for source in parts[0] for shard in source.shards)
    if has_texts:
        questions = inputs.config.task is Task.question_passage  # other tasks take texts as passages
        kind, lengths = (partial(Question, ""), data.question) if questions else (Passage, data.passage)
        tokenize = model.tokenize if spec else partial(text_tokens, kind, model.tokenize, lengths)
        train, test = (labelled_texts(open_shards(sources), label, tokenize) for sources in parts)
    else:
        train, test = (labelled_set(open_shards(sources), spec, data, label) for sources in parts)
    side, names = "y" if has_texts and spec else "x", sorted(set(train.labels))
    return Probe(entry.name, entry.spec, test, names, train, side, options.probe_features, options.probe_k)


def _path(entry: SuiteEntry) -> Path:
    return Path(entry.target).expanduser()


# Task of pictures → the kind of data.val
VAL = {Task.image_text: "retrieval", Task.views: "views", Task.labelled: "classes", Task.sequence: "next_item"}
KINDS = {
    "retrieval": images(_retrieval),
    "views": replace(images(_views), task=Task.views),
    "zero_shot": images(
        _zero_shot, "TASK.json", lambda entry: (read_task(_path(entry)).source, f"{entry.target}: source")
    ),
    "wds": images(
        _wds,
        "FOLDER (a CLIP_benchmark data set)",
        lambda entry: (read_wds(_path(entry)).shards, f"wds:{entry.target}: shard"),
    ),
    "classes": SuiteKind(Task.labelled, "SHARDS", _check_labelled, _labelled),
    "beir": SuiteKind(
        Task.question_passage, "FOLDER[@SPLIT]", lambda entry: check_beir(entry.target), partial(_passages, open_beir)
    ),
    "dpr": SuiteKind(
        Task.question_passage,
        "PATH (questions with answers, in a folder with psgs_w100.tsv, or DPR JSON)",
        lambda entry: check_dpr(entry.target, entry.data, entry.key),
        partial(_passages, open_dpr),
    ),
    "next_item": SuiteKind(Task.sequence, "LOG", _check_log, _next_item),
    "probe": SuiteKind(None, "TASK.json", partial(_parts, checked_tables), _probe),
}


def forms_help() -> str:
    """Return help text on how the entries of eval.suite are written (KIND:TARGET), with a line for each task."""
    rows = {task: [f"{name}:{kind.form}" for name, kind in KINDS.items() if kind.task in (task, None)] for task in Task}
    return "suite entries " + "".join(f"of {task.name}: {'  '.join(forms)}\n" for task, forms in rows.items())
