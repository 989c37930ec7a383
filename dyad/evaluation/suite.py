"""The evaluation suite: builds the evaluators of data.val and of the entries KIND:TARGET of eval.suite.

The kinds, by the task of the model:

image_text
  retrieval:SHARDS      images and captions, named as in data.val
  zero_shot:TASK.json   labelled images and prompts (format: prompts.py, and --help)
  imagenet:FOLDER       ImageNet's validation images or ImageNet-V2: one folder for each of the 1,000 classes, named by
                        its WordNet id (n01440764 …) or its index; class names and templates of open_clip, as there
  wds:FOLDER            a CLIP_benchmark data set (format: wds.py): labelled images, or images and captions; as
                        in CLIP_benchmark, only the captions of an image itself are right for the image
labelled
  classes:SHARDS        samples with a class, named as in data.val, of the classes of training
views
  views:SHARDS          images, named as in data.val: one view of each image is the query, the other is to be found;
                        views are drawn as in epoch 0 of training
question_passage, and views of texts (formats: question_sets.py)
  beir:FOLDER[@SPLIT]   one split of a BEIR folder, by default test; FOLDER and FOLDER@test name the same set
  dpr:PATH              questions with their answers or their passages
  sts:ROWS              pairs of texts with a score, rows named as in data.train: correlation with the model's scores
  in_context:TASK.json  questions with right and wrong answers; a language model chooses an answer after an example
                        (format: prompts.py, and --help)
language_model
  answers:ROWS          prompts with right and wrong answers, rows named as in data.train
sequence
  next_item:LOG         events to predict, each from the earlier events of its user
  context_probe:TASK.json   sequences with a class: a training and a test part (format: prompts.py, and --help)
any task that embeds images or texts
  probe:TASK.json       labelled images or texts: a training and a test part (format: prompts.py, and --help)

Entries are checked without importing torch, except classes: of texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.plugins import plugins_needed
from dyad.eval.config import Baseline
from dyad.eval.search.index_spec import EXACT, check_spec
from dyad.eval.tasks.question_passage.question_sets import names_beir
from dyad.evaluation.kinds.answers import ANSWERS, IN_CONTEXT
from dyad.evaluation.kinds.imagenet import IMAGENET
from dyad.evaluation.kinds.images import RETRIEVAL, VIEWS, WDS, ZERO_SHOT
from dyad.evaluation.kinds.labelled import CLASSES, PROBE
from dyad.evaluation.kinds.passages import BEIR, DPR, STS
from dyad.evaluation.kinds.sequences import CONTEXT_PROBE, NEXT_ITEM
from dyad.evaluation.suite_entry import Inputs, SuiteEntry
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.eval.encode.encoder import Encoder, Evaluator
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import TwoTowerModel


def build_evaluators(
    config: TrainConfig,
    model: TwoTowerModel,
    baselines: Sequence[Baseline] = (),
    untrained: Callable[[], Encoder] | None = None,
) -> list[Evaluator]:
    """Build an evaluator named "val" for data.val, and one named "eval/NAME" for each entry of eval.suite.

    NAME is the last part of the entry's path, made unique. The data are opened; new shards are indexed, and tables
    converted, so rank 0 should call it before the other ranks (`rank_0_first`). baselines: further systems to score
    beside the model; evaluators of images support "untrained" only. untrained: returns an Encoder with the model's
    weights before training; called only for the baseline "untrained", by the reports of evaluators. Raises ConfigError
    for an entry that cannot be read, DataError for damaged data.
    """
    inputs, before = Inputs(config, model, baselines), untrained if Baseline.untrained in baselines else None
    return [replace(entry.kind.build(entry, inputs), untrained=before) for entry in _entries(config)]


def check_suite(config: TrainConfig) -> None:
    """Raise ConfigError for missing data and an invalid data.val, entry of eval.suite or eval.index.

    Raises DataError for a table or log that cannot be read. eval.index is not checked where FAISS is not needed:
    without a data set, and for the exact search of images. Makes no index, converts no table, and reads no samples
    other than the first rows of tables, so damaged data may pass. Imports no torch, except for classes of texts.
    """
    entries = list(_entries(config))
    for entry in entries:
        entry.kind.check(entry)
    # images are searched exactly by torch if FAISS is not installed
    if entries and (config.eval.index != EXACT or not config.has_images):
        check_spec(config.eval.index)


def _entries(config: TrainConfig) -> Iterator[SuiteEntry]:
    """Yield the data sets to evaluate on: data.val, if given, then the parsed entries of eval.suite.

    Of the entries only the form is checked. Raises ConfigError for an entry of an unknown kind, without a target, or of
    a kind that belongs to another task.
    """
    of_text_views = config.task is Task.views and not config.has_images
    task = Task.question_passage if of_text_views else config.task
    val = config.data.val
    if val is not None:
        scored = config.objective.inputs == "scored pairs"
        kind = VAL.get(task) or ("beir" if names_beir(val) else "sts" if scored else "dpr")
        yield SuiteEntry(KINDS[kind], "val", "data.val", str(val), val, config.data, config.has_texts)
    embeds = (config.has_images or config.has_texts) and task is not Task.language_model
    legal = {name: kind for name, kind in KINDS.items() if kind.task is task or (kind.task is None and embeds)}
    names = ["val"]  # taken even without data.val: the results of a suite must not replace those of a run's data.val
    for spec in config.eval.suite:
        kind, _, target = str(spec).partition(":")  # from Python anything may come, such as rows in memory
        if kind not in legal or not target:
            forms = ", ".join(f"{name}:…" for name in legal)
            other = KINDS[kind].task if kind in KINDS and target else None
            hint = f" '{kind}' is of task={other.name}." if other else nearest(kind, legal)
            hint += plugins_needed(config.plugins)
            raise ConfigError(f"eval.suite: '{spec!s:.200}' must be one of {forms} (task={config.task.name}).{hint}")
        names.append(_name(target, names, legal[kind].prefix))
        key, kind = f"eval.suite: {kind}", legal[kind]
        yield SuiteEntry(kind, f"eval/{names[-1]}", key, spec, target, config.data, config.has_texts)


def _name(target: str, taken: Sequence[str], prefix: str = "") -> str:
    """Return a name for a suite entry with this target that `taken` lacks, such as "flickr30k" or "imagenet-val-2".

    It is the last part of the path, without @test, a weight, or a suffix of data such as .tar, with "_" in place of
    characters that do not suit a file name. If it does not begin with `prefix`, "PREFIX-" is put before it. If `taken`
    has it, the first number from 2 on that makes it new is put behind it.
    """
    last = re.sub(r"@(test|[\d.]+)$", "", Path(target).name)
    last = re.sub(r"\.(tar|jsonl?|[ct]sv|parquet|arrow)(?=@|$)", "", last)
    stem = re.sub(r"[^\w.-]+", "_", last).strip("_") or "set"
    stem = stem if stem.lower().startswith(prefix) else f"{prefix}-{stem}"
    return next(name for name in chain([stem], (f"{stem}-{n}" for n in count(2))) if name not in taken)


# Task → the kind of its data.val
VAL = {
    Task.image_text: "retrieval",
    Task.views: "views",
    Task.labelled: "classes",
    Task.sequence: "next_item",
    Task.language_model: "answers",
}
KINDS = {
    "retrieval": RETRIEVAL,
    "views": VIEWS,
    "zero_shot": ZERO_SHOT,
    "imagenet": IMAGENET,
    "wds": WDS,
    "classes": CLASSES,
    "beir": BEIR,
    "dpr": DPR,
    "sts": STS,
    "next_item": NEXT_ITEM,
    "answers": ANSWERS,
    "in_context": IN_CONTEXT,
    "context_probe": CONTEXT_PROBE,
    "probe": PROBE,
}


def forms_help() -> str:
    """Return help text on how the entries KIND:TARGET of eval.suite are written, with a line for each task.

    Kinds of imported plugins are included.
    """
    names = {task: task.name for task in Task} | {None: "any task that embeds images or texts"}
    rows = {of: [f"{name}:{kind.form}" for name, kind in KINDS.items() if kind.task is of] for of in names}
    return "suite entries " + "".join(f"of {names[of]}: {'  '.join(forms)}\n" for of, forms in rows.items())
