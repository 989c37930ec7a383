"""Kinds of data sets of sequences: next_item, which predicts the next item, and context_probe, which classifies
contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.progress import print_on_rank_0
from dyad.data.config import ItemKind
from dyad.data.sequence.files import events_left_out, sequence_files
from dyad.eval.tasks.prompts import read_probe
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task
from dyad.train.eval_config import Seen

if TYPE_CHECKING:
    from dyad.eval.encode.encoder import Evaluator
    from dyad.train.towers.models import SequenceModel

NO_HISTORY = (
    "The model is an export, which has no data.train: val='FOLDER/{train,val}.jsonl' gives earlier events, and is "
    "evaluated too"
)


def _next_item(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry next_item:LOG: predict each event of the log from the earlier events of its user.

    Earlier events are also those of data.train and of data.sequence.earlier, or of data.val if that is unset. Prints a
    warning as `events_left_out` does, and how many events have no earlier one with a known item or, with
    eval.seen=drop, have an item that is in the history too. Raises DataError if no event has an earlier one.
    """
    from dyad.data.sequence.histories import next_items
    from dyad.data.sequence.log import read_log
    from dyad.data.sequence.open import items_of
    from dyad.eval.tasks.sequence.next_item import NextItem

    config = inputs.config
    data, options, model = config.data, config.eval, cast("SequenceModel", inputs.model)
    # the configuration of an export has no data.train
    train = [] if data.train is None else sequence_files(data.train, data)
    between = data.val if data.sequence.earlier is None else data.sequence.earlier
    earlier = [] if between is None else sequence_files(between, data, "data.sequence.earlier")
    own = sequence_files(entry.target, data, entry.key)
    history = [*train, *(file for file in earlier if file not in own)]
    files = [*history, *own]
    for line in events_left_out(own, files):
        print_on_rank_0(line)
    log = read_log(files, data.sequence, model.names)
    known = log.items if data.items is not ItemKind.ids else log.items[: config.run.inputs]
    items = items_of(known, data, model)
    try:
        events = next_items(log, items, data.sequence.length, len(history), len(train))
    except DataError as error:
        if train or earlier:
            raise
        raise DataError(f"{error} {NO_HISTORY}") from error
    if left_out := events.without_history:
        print_on_rank_0(
            f"{entry.spec}: {left_out:,} of {left_out + len(events):,} events have no earlier event with an item that "
            "the model knows, and are left out"
        )
    if options.seen is Seen.drop and (repeats := events.repeated_n.sum()):
        print_on_rank_0(
            f"{entry.spec}: {repeats:,} of {len(events):,} right items are in the history too. eval.seen=drop leaves "
            "out the other items of a history, not these, so they are easier to find"
        )
    how = (tuple(options.recall_k), options.seen, options.index, options.depth, inputs.baselines, history)
    return NextItem(entry.name, entry.spec, events, *how)


def _check_log(entry: SuiteEntry) -> None:
    """Raise ConfigError for data.items=frames, and for an entry next_item:LOG without a log or its columns."""
    if entry.data.items is ItemKind.frames:
        raise ConfigError(f"{entry.key}={entry.target}: frames have no next item to find among others. Leave it out")
    sequence_files(entry.target, entry.data, entry.key)


def _context_probe(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry context_probe:TASK.json, which fits a linear probe to the contexts of sequences.

    The contexts are those of the x tower; the classes are the labels of the training part, sorted. If items are ids,
    items that the model has no embedding for are left out.
    """
    from dyad.data.loading.class_batches import distinct
    from dyad.data.sequence.labelled import labelled_sequences
    from dyad.data.sequence.open import known_ids
    from dyad.eval.tasks.probe import Probe

    config, model = inputs.config, cast("SequenceModel", inputs.model)
    options, (files, label) = config.eval, _parts(entry)
    known = known_ids(config.data, model.names, config.run.inputs) if config.data.items is ItemKind.ids else ()
    train, test = (labelled_sequences(part, config.data, model, label, known) for part in files)
    names = distinct(train.labels)
    return Probe(entry.name, entry.spec, test, names, train, "x", options.probe_features, options.probe_k)


def _parts(entry: SuiteEntry) -> tuple[list[list[str]], str]:
    """Return the files of the training and of the test part of a context_probe, and the field that holds the class.
    Raises ConfigError if the task file or a file is missing or invalid, or a file lacks that field; DataError for a
    file that cannot be read."""
    from dyad.data.sequence.labelled import check_label

    named, label = read_probe(entry.path, "context_probe")
    found = {part: sequence_files(value, entry.data, f"{entry.target}: {part}") for part, value in named.items()}
    for part, files in found.items():
        check_label(files, entry.data, label, f"{entry.target}: {part}")
    return [*found.values()], label


NEXT_ITEM = SuiteKind(Task.sequence, "LOG", _check_log, _next_item)
CONTEXT_PROBE = SuiteKind(Task.sequence, "TASK.json", _parts, _context_probe)
