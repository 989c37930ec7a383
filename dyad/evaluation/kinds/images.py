"""Kinds of data sets of images: retrieval between images and captions or between two views, zero-shot
classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from dyad.data.config import CaptionPer
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.eval.tasks.prompts import read_task
from dyad.eval.tasks.wds import IMAGES, read_wds
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task
from dyad.train.eval_config import Truth

if TYPE_CHECKING:
    from dyad.data.shards.shards import Shards
    from dyad.eval.encode.encoder import Evaluator
    from dyad.eval.tasks.zero_shot import ZeroShot
    from dyad.train.towers.models import ImageModel, ImageTextModel


def images(
    build: Callable[[SuiteEntry, Shards, Inputs], Evaluator],
    form: str = "SHARDS",
    named: Callable[[SuiteEntry], tuple[Any, str]] = lambda entry: (entry.target, entry.key),
    **own: Any,
) -> SuiteKind:
    """Return a SuiteKind for image_text models, whose targets name shards or tables of images.

    A SuiteKind says how entries KIND:TARGET of one KIND are checked, and how their evaluators are built. Tables are
    converted to shards when the evaluator is built. build: makes the evaluator of an entry from its opened shards.
    form: how a target is written, for help texts. named: returns, for an entry, (the shards that it names, in the
    syntax of data.train; the name of the entry in error messages), and may raise ConfigError. own: options data.* that
    replace those of the run, for reading the targets and in the `inputs` that `build` gets.
    """

    def open_and_build(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
        """Open the shards of an entry, tables as shards, and call `build` with them."""
        from dyad.data.shards.shards import open_shards

        prepared = prepared_tables(table_options(replace(entry.data, **own)))
        inputs = replace(inputs, config=replace(inputs.config, data=replace(inputs.config.data, **own)))
        return build(entry, open_shards(parse_sources(*named(entry), tables=prepared)), inputs)

    def check(entry: SuiteEntry) -> None:
        """Raise ConfigError for shards and tables that are missing or invalid; of a table only the head is read.

        Raises DataError for a table that cannot be read.
        """
        parse_sources(*named(entry), tables=checked_tables(table_options(replace(entry.data, **own))))

    return SuiteKind(Task.image_text, form, check, open_and_build)


def _retrieval(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    """Build the evaluator of retrieval between the images and the captions of an entry, in both directions.

    With eval.truth=pairs, only the captions of an image are right for it, whatever data.text_key says.
    """
    from dyad.data.image_text.items import retrieval_set
    from dyad.eval.tasks.image_text_retrieval import Retrieval

    model = cast("ImageTextModel", inputs.model)
    config, options = inputs.config.data, inputs.config.eval
    if options.truth is Truth.pairs:  # the meaning of a text does not matter
        config = replace(config, text_key=None)
    data = retrieval_set(shards, model.image, model.tokenize, config)
    return Retrieval(entry.name, entry.spec, data, options.truth, tuple(options.recall_k), options.index)


def _views(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    """Build the evaluator that finds the second view of each image by its first.

    The views are drawn as in epoch 0 of training.
    """
    from dyad.data.image_text.image_views import view_pairs
    from dyad.eval.tasks.image_text_retrieval import ViewRetrieval

    config, model = inputs.config, cast("ImageModel", inputs.model)
    data, options = view_pairs(shards, model.image, config.data, config.seed), config.eval
    return ViewRetrieval(entry.name, entry.spec, data, recall_k=tuple(options.recall_k), index=options.index)


def _zero_shot(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    """Build the zero-shot evaluator of an entry zero_shot:TASK.json.

    Images of classes that the task file lacks raise DataError, or are left out, see `keep_known_classes`.
    """
    from dyad.eval.tasks.zero_shot import keep_known_classes

    task = read_task(entry.path)
    found = classification(entry, shards, inputs, task.label, task.classes)
    return replace(found, data=keep_known_classes(found.data, task, entry.spec))


def _wds(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry wds:FOLDER: zero-shot classification, or retrieval if the folder has no classes.

    Retrieval uses eval.truth=pairs, as CLIP_benchmark does. Raises DataError for a label that is no class index.
    """
    folder, config = read_wds(entry.path), inputs.config
    if not folder.classes:
        pairs = replace(config, eval=replace(config.eval, truth=Truth.pairs))
        return _retrieval(entry, shards, replace(inputs, config=pairs))
    found = classification(entry, shards, inputs, "cls", folder.classes)
    return replace(found, data=replace(found.data, labels=folder.class_names(found.data.labels)))


def classification(
    entry: SuiteEntry, shards: Shards, inputs: Inputs, label: str, classes: Mapping[str, Sequence[str]]
) -> ZeroShot:
    """Return the zero-shot evaluator of a data set of labelled images.

    label: the field of a sample that holds its class. classes: class name → its prompts. The labels are used as they
    are stored: if they are not class names, the caller replaces them in the attribute `data` of the result. Raises
    SampleError for a sample without a label or an image.
    """
    from dyad.data.image_text.items import labelled_set
    from dyad.eval.tasks.zero_shot import ZeroShot

    model, config = cast("ImageTextModel", inputs.model), inputs.config
    data = labelled_set(shards, model.image, config.data, label)
    return ZeroShot(entry.name, entry.spec, data, classes, model.tokenize, index=config.eval.index)


RETRIEVAL, VIEWS = images(_retrieval), replace(images(_views), task=Task.views)
ZERO_SHOT = images(_zero_shot, "TASK.json", lambda entry: (read_task(entry.path).source, f"{entry.target}: source"))
WDS = images(
    _wds,
    "FOLDER (a CLIP_benchmark data set)",
    lambda entry: (read_wds(entry.path).shards, f"wds:{entry.target}: shard"),
    image_key=IMAGES,
    captions=["txt"],
    caption_weights=None,
    caption_per=CaptionPer.line,
)
