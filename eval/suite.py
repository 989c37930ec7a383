"""From names of data sets to evaluators. Torch-free until it builds them.

retrieval:SHARDS      pictures and captions, written like data.val
zero_shot:TASK.json   labelled pictures and prompts (format: prompts.py)
wds:FOLDER            a CLIP_benchmark data set (format: wds.py), with its truth: only the own pair is right
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import ConfigError, nearest
from data.sources import Source, parse_sources
from eval.config import EvalConfig, Truth
from eval.prompts import read_task
from eval.wds import PICTURES, read_wds

if TYPE_CHECKING:
    from torch import Tensor

    from data.config import DataConfig
    from data.shards import Shards
    from data.transforms import ImageSpec
    from eval.encode import Encoder, Evaluator


def build_evaluators(
    specs: Sequence[str],
    val: str | Sequence[str] | None,
    *,
    image_spec: ImageSpec,
    tokenize: Callable[[list[str]], Tensor],
    data_config: DataConfig,
    eval_config: EvalConfig,
) -> list[Evaluator]:
    """One evaluator "val" for `val`, and one "eval/<name>" per suite entry, named after its file or folder.

    Raises ConfigError for an entry that cannot be read, DataError for damaged shards.
    """
    from data.shards import open_shards

    inputs = Inputs(image_spec, tokenize, data_config, eval_config)
    evaluators = []
    if val is not None:
        shards = open_shards(parse_sources(val, "data.val"))
        evaluators.append(_retrieval(Entry("val", str(val), str(val)), shards, inputs))
    names = ["val"]
    for spec in specs:
        kind, place = _split(spec)
        names.append(_name(place, names))
        entry = Entry(f"eval/{names[-1]}", spec, place)
        evaluators.append(KINDS[kind].build(entry, open_shards(KINDS[kind].sources(place)), inputs))
    return evaluators


def check_specs(specs: Sequence[str]) -> None:
    """Raise ConfigError for an entry of an unknown kind, or one that names what is not there. Loads nothing heavy."""
    for spec in specs:
        kind, place = _split(spec)
        KINDS[kind].sources(place)


def run_all(evaluators: Sequence[Evaluator], encode: Encoder) -> dict[str, float]:
    """Every scalar of every evaluator as "<evaluator>/<metric>". Call on every rank."""
    return {f"{e.name}/{metric}": value for e in evaluators for metric, value in e.run(encode).items()}


@dataclass(frozen=True)
class Inputs:
    """How the model at hand wants its inputs, and how it is scored."""

    image: ImageSpec
    tokenize: Callable[[list[str]], Tensor]
    data: DataConfig
    evaluation: EvalConfig


@dataclass(frozen=True)
class Entry:
    """name: of the evaluator; spec: as the user wrote it; place: its path."""

    name: str
    spec: str
    place: str


@dataclass(frozen=True)
class Kind:
    """sources: which shards a place means, or ConfigError; build: their evaluator."""

    sources: Callable[[str], list[Source]]
    build: Callable[[Entry, Shards, Inputs], Evaluator]


def _retrieval(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import Captions, retrieval_set
    from eval.retrieval import Retrieval

    data = retrieval_set(shards, inputs.image, inputs.tokenize, inputs.data)
    assert isinstance(data.texts, Captions)
    truth, recall_k = inputs.evaluation.truth, tuple(inputs.evaluation.recall_k)
    return Retrieval(entry.name, entry.spec, data, shards.key, data.texts.texts, truth, recall_k)


def _zero_shot(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import labelled_set
    from eval.zero_shot import ZeroShot

    task = read_task(_path(entry.place))
    data = labelled_set(shards, inputs.image, inputs.data, task.label)
    return ZeroShot(entry.name, entry.spec, data, task.classes, inputs.tokenize)


def _wds(entry: Entry, shards: Shards, inputs: Inputs) -> Evaluator:
    from data.image_text import labelled_set
    from eval.zero_shot import ZeroShot

    folder = read_wds(_path(entry.place))
    plain = dataclasses.replace(inputs.data, image_key=PICTURES, captions=["txt"], caption_weights=None, text_key=None)
    if not folder.classes:
        own_pairs = dataclasses.replace(inputs.evaluation, truth=Truth.pairs)
        return _retrieval(entry, shards, dataclasses.replace(inputs, data=plain, evaluation=own_pairs))
    labelled = labelled_set(shards, inputs.image, plain, "cls")
    named = dataclasses.replace(labelled, labels=[folder.class_name(label) for label in labelled.labels])
    return ZeroShot(entry.name, entry.spec, named, folder.classes, inputs.tokenize)


KINDS = {
    "retrieval": Kind(lambda place: parse_sources(place, "eval.suite: retrieval"), _retrieval),
    "zero_shot": Kind(lambda place: parse_sources(read_task(_path(place)).source, f"{place}: source"), _zero_shot),
    "wds": Kind(lambda place: parse_sources(read_wds(_path(place)).shards, f"wds:{place}: shard"), _wds),
}


def _split(spec: str) -> tuple[str, str]:
    kind, _, place = spec.partition(":")
    if kind not in KINDS or not place:
        legal = ", ".join(f"{k}:…" for k in KINDS)
        raise ConfigError(f"eval.suite: '{spec}' must be one of {legal}.{nearest(kind, KINDS)}")
    return kind, place


def _path(place: str) -> Path:
    return Path(place).expanduser()


def _name(place: str, taken: Sequence[str]) -> str:
    """The stem of the last part of the path, made unique."""
    last = re.sub(r"\.(tar|jsonl?)(@.*)?$", "", Path(place).name)
    stem = re.sub(r"[^\w.-]+", "_", last).strip("_") or "set"
    same = sum(re.fullmatch(re.escape(stem) + r"(-\d+)?", t) is not None for t in taken)
    return f"{stem}-{same + 1}" if same else stem
