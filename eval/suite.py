"""From names of data sets to evaluators. Torch-free until it builds them.

image_text
  retrieval:SHARDS      pictures and captions, written like data.val
  zero_shot:TASK.json   labelled pictures and prompts (format: prompts.py)
  wds:FOLDER            a CLIP_benchmark data set (format: wds.py), with its truth: only the own pair is right
question_passage (formats: question_sets.py)
  beir:FOLDER[@SPLIT]   a BEIR folder with one of its splits, test unless said
  dpr:PATH              questions with their answers or their passages
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import ConfigError, nearest
from data.sources import ShardSource, parse_sources
from eval.config import Baseline, EvalConfig, Truth
from eval.index_spec import EXACT, check_spec
from eval.prompts import read_task
from eval.question_sets import QuestionSet, check_beir, check_dpr, is_beir, open_beir, open_dpr
from eval.wds import PICTURES, read_wds
from train.config import Task

if TYPE_CHECKING:
    from data.config import DataConfig
    from data.shards import Shards
    from eval.encode import Encoder, Evaluator
    from eval.passages import PassageSide
    from train.towers.build import ImageTextModel, TwoTowerModel


@dataclass(frozen=True)
class Inputs:
    """The model at hand, and how it is scored.

    baselines, untrained: see PassageRetrieval; sides: of the corpora that are open already.
    """

    model: TwoTowerModel
    data: DataConfig
    evaluation: EvalConfig
    baselines: Sequence[Baseline]
    untrained: Callable[[], Encoder] | None
    sides: dict[str, PassageSide] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """name: of the evaluator; spec: as the user wrote it; place: its path, or what data.val says."""

    name: str
    spec: str
    place: Any


@dataclass(frozen=True)
class Kind:
    """check: ConfigError for a place that is not there; build: its evaluator."""

    task: Task
    check: Callable[[Any], Any]
    build: Callable[[Entry, Inputs], Evaluator]


def build_evaluators(
    specs: Sequence[str],
    val: Any,
    *,
    task: Task,
    model: TwoTowerModel,
    data_config: DataConfig,
    eval_config: EvalConfig,
    baselines: Sequence[Baseline] = (),
    untrained: Callable[[], Encoder] | None = None,
) -> list[Evaluator]:
    """One evaluator "val" for `val`, and one "eval/<name>" per suite entry, named after its file or folder.

    baselines: what question_passage scores beside the model; untrained: makes its encoder as it was before training.
    Raises ConfigError for an entry that cannot be read, DataError for damaged data.
    """
    check_index(eval_config.index, task)
    inputs = Inputs(model, data_config, eval_config, baselines, untrained)
    evaluators = [] if val is None else [VAL[task].build(Entry("val", str(val), val), inputs)]
    names = ["val"]
    for spec in specs:
        kind, place = _split(spec, task)
        names.append(_name(place, names))
        evaluators.append(kind.build(Entry(f"eval/{names[-1]}", spec, place), inputs))
    return evaluators


def check_specs(specs: Sequence[str], val: Any, task: Task) -> None:
    """Raise ConfigError for an entry that the task has no kind for, or that names what is not there.

    Loads nothing heavy.
    """
    if val is not None:
        VAL[task].check(val)
    for spec in specs:
        kind, place = _split(spec, task)
        kind.check(place)


def check_index(index: str, task: Task) -> None:
    """Raise ConfigError for an index that cannot be. Pictures are ranked without one where it is exact."""
    if task is Task.question_passage or index != EXACT:
        check_spec(index)


# Pictures and texts ---------------------------------------------------------------------------------------------------


def _images(sources: Callable[[Any], list[ShardSource]], build: Callable[[Entry, Shards, Inputs], Evaluator]) -> Kind:
    """A kind whose places mean shards."""

    def open_and_build(entry: Entry, inputs: Inputs) -> Evaluator:
        from data.shards import open_shards

        return build(entry, open_shards(sources(entry.place)), inputs)

    return Kind(Task.image_text, sources, open_and_build)


def _retrieval(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import retrieval_set
    from eval.retrieval import Retrieval

    model = _pictures_and_texts(inputs)
    data, options = retrieval_set(shards, model.image, model.tokenize, inputs.data), inputs.evaluation
    return Retrieval(entry.name, entry.spec, data, options.truth, tuple(options.recall_k), options.index)


def _zero_shot(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import labelled_set
    from eval.zero_shot import ZeroShot

    task = read_task(_path(entry.place))
    data = labelled_set(shards, _pictures_and_texts(inputs).image, inputs.data, task.label)
    return ZeroShot(entry.name, entry.spec, data, task.classes, inputs.model.tokenize, inputs.evaluation.index)


def _wds(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import labelled_set
    from eval.zero_shot import ZeroShot

    folder = read_wds(_path(entry.place))
    plain = dataclasses.replace(inputs.data, image_key=PICTURES, captions=["txt"], caption_weights=None, text_key=None)
    if not folder.classes:
        own_pairs = dataclasses.replace(inputs.evaluation, truth=Truth.pairs)
        return _retrieval(entry, shards, dataclasses.replace(inputs, data=plain, evaluation=own_pairs))
    labelled = labelled_set(shards, _pictures_and_texts(inputs).image, plain, "cls")
    named = dataclasses.replace(labelled, labels=[folder.class_name(label) for label in labelled.labels])
    return ZeroShot(entry.name, entry.spec, named, folder.classes, inputs.model.tokenize, inputs.evaluation.index)


def _pictures_and_texts(inputs: Inputs) -> ImageTextModel:
    from train.towers.build import ImageTextModel

    assert isinstance(inputs.model, ImageTextModel)
    return inputs.model


# Questions and passages -----------------------------------------------------------------------------------------------


def _beir(entry: Entry, inputs: Inputs) -> Evaluator:
    return _passages(entry, open_beir(entry.place, inputs.data), inputs)


def _dpr(entry: Entry, inputs: Inputs) -> Evaluator:
    return _passages(entry, open_dpr(entry.place, inputs.data), inputs)


def _passages(entry: Entry, questions: QuestionSet, inputs: Inputs) -> Evaluator:
    from eval.passages import PassageRetrieval, PassageSide

    corpus, tokenize, options = questions.corpus, inputs.model.tokenize, inputs.evaluation
    side = PassageSide(corpus, tokenize, inputs.data.passage, options)
    return PassageRetrieval(
        entry.name,
        entry.spec,
        questions,
        inputs.sides.setdefault(corpus.fingerprint, side),
        tokenize,
        inputs.data.question,
        options,
        inputs.baselines,
        inputs.untrained,
    )


KINDS = {
    "retrieval": _images(lambda place: parse_sources(place, "eval.suite: retrieval"), _retrieval),
    "zero_shot": _images(lambda place: parse_sources(read_task(_path(place)).source, f"{place}: source"), _zero_shot),
    "wds": _images(lambda place: parse_sources(read_wds(_path(place)).shards, f"wds:{place}: shard"), _wds),
    "beir": Kind(Task.question_passage, check_beir, _beir),
    "dpr": Kind(Task.question_passage, check_dpr, _dpr),
}
VAL = {
    Task.image_text: _images(lambda place: parse_sources(place, "data.val"), _retrieval),
    Task.question_passage: Kind(
        Task.question_passage,
        lambda place: check_beir(place) if is_beir(place) else check_dpr(place),
        lambda entry, inputs: _beir(entry, inputs) if is_beir(entry.place) else _dpr(entry, inputs),
    ),
}


def _split(spec: str, task: Task) -> tuple[Kind, str]:
    name, _, place = spec.partition(":")
    legal = {k: kind for k, kind in KINDS.items() if kind.task is task}
    if name not in legal or not place:
        forms = ", ".join(f"{k}:…" for k in legal)
        hint = f" '{name}' is of task={KINDS[name].task.value}." if name in KINDS and place else nearest(name, legal)
        raise ConfigError(f"eval.suite: '{spec}' must be one of {forms} (task={task.value}).{hint}")
    return legal[name], place


def _path(place: str) -> Path:
    return Path(place).expanduser()


def _name(place: str, taken: Sequence[str]) -> str:
    """The stem of the last part of the path, made unique."""
    last = re.sub(r"\.(tar|jsonl?|[ct]sv)(@.*)?$", "", Path(place).name)
    stem = re.sub(r"[^\w.-]+", "_", last).strip("_") or "set"
    same = sum(re.fullmatch(re.escape(stem) + r"(-\d+)?", t) is not None for t in taken)
    return f"{stem}-{same + 1}" if same else stem
