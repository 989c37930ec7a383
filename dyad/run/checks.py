"""Checks of the command line of a training run, made before the model is built and the samples are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.data.base.errors import ConfigError, nearest, raise_broken

if TYPE_CHECKING:
    from dyad.data.config import DataConfig
    from dyad.train.config import TrainConfig


def check_arguments(arguments: list[str]) -> Path | None:
    """Check the command line arguments of python -m train and return the path of the run folder.

    launch/job.sh calls this before it starts many processes. Returns None for a command line of several runs (-m), and
    for --cfg job and --cfg runs, which print the configuration or the runs and train nothing. Raises the errors of
    `compose_config` and `check_sweep`, with --cfg those of `preview`.
    """
    from dyad.train.cli.command_line import parse_command_line
    from dyad.train.cli.compose import compose_config, preview
    from dyad.train.run_folder.folder import run_folder

    line = parse_command_line(arguments)
    if line.show:
        for own in line.runs():
            preview(own)
        return None
    configs = [compose_config(own) for own in line.runs()]
    check_sweep(line.words, configs)
    return None if line.sweep else run_folder(configs[0])


def check_sweep(arguments: Sequence[str], configs: Sequence[TrainConfig]) -> None:
    """Check all runs of a python -m train command line before the first run begins.

    arguments: the texts of the command line, such as "steps=10"; configs: one configuration per run. Raises ConfigError
    or DataError as `check_config` does, and as `_check_batch` for each run and auxiliary loss; ConfigError also if no
    loss of a run reads a key of the command line (`refuse_unread`), or if two runs have the same run folder. Of a plan
    (keys plan.*), batch and folder are not checked.
    """
    from dyad.train.cli.also import auxiliary_configs, errors_of
    from dyad.train.cli.unread_keys import refuse_unread
    from dyad.train.run_folder.folder import run_folder

    for config in configs:
        check_config(config)
    auxiliary = [loss for config in configs for loss in auxiliary_configs(config).items()]
    refuse_unread(arguments, configs, [own for _, own in auxiliary])
    for config in configs:
        _check_batch(config)
    for name, own in auxiliary:
        with errors_of(name):
            _check_batch(own)
    folders = [run_folder(config) for config in configs if not config.planned]
    if shared := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError(f"-m: {folders.count(shared)} runs would share {shared}. Leave run.name out, or vary it too")


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for mistakes in one configuration that can be found before model and data are loaded.

    These are wrong values and combinations, data of data.train, data.val and eval.suite that are missing, data.train
    and data.val of a wrong kind (their first samples are read), trackers that cannot work, and a run folder that has
    another run (see `check_run` in train/run_folder/folder.py). Whether no run reads a key, and whether an epoch fills
    a batch, is checked by `check_sweep` alone. Raises DataError for a table or log that cannot be read. Of a plan (keys
    plan.*) without plan.dry_run, only the values are checked, and task=sequence is refused.
    """
    from dyad.train.cli.also import auxiliary_configs, errors_of, refuse_keys_of_shared_towers
    from dyad.train.config import Task
    from dyad.train.config_rules import check_values
    from dyad.train.run_folder.folder import check_run
    from dyad.train.tracking.trackers import check_tracking

    if config.planned and config.plan.dry_run is None:  # without data, for other devices
        if config.task is Task.sequence:
            raise ConfigError(
                "plan.*: is of pairs, and the steps of a sequence are no pairs by themselves. Train some steps of "
                "task=sequence: metrics.jsonl has their memory and rate"
            )
        check_values(config, config.plan.gpus or 1)
        return
    _check_loss(config)
    for name, auxiliary in auxiliary_configs(config).items():
        with errors_of(name):
            _check_loss(auxiliary)
            refuse_keys_of_shared_towers(config, auxiliary)
    check_tracking(config.tracking)
    raise_broken(_path_rules(config))
    check_run(config)


def _check_loss(config: TrainConfig) -> None:
    """Raise ConfigError for invalid values, training data or evaluations of a run, or of an auxiliary loss.

    Raises DataError for a table or log that cannot be read. The number of ranks is that of plan.dry_run, or of the
    environment variable WORLD_SIZE, or 1.
    """
    from dyad.evaluation.suite import check_suite
    from dyad.train.config_rules import validate

    raise_broken(_task_rules(config))
    validate(config, config.plan.dry_run or int(os.environ.get("WORLD_SIZE", "1")))
    training_files(config)
    check_suite(config)


def training_files(config: TrainConfig) -> list[str]:
    """Return the paths or URLs of the files that data.train names, in their order.

    A table is named by its own path, not by the shard that it will be converted to. A BEIR or MS MARCO folder is named
    by its file of judgements, or of passages if texts are trained on alone. Raises ConfigError for a value that names
    no usable files, DataError for a table or log that cannot be read.
    """
    from dyad.data.question_passage.questions import named_files
    from dyad.data.sequence.files import sequence_files
    from dyad.data.shards.sources import parse_sources
    from dyad.data.tables.prepare import checked_tables, table_options
    from dyad.train.config import LISTED, Task

    if config.task is Task.sequence:
        return sequence_files(config.data.train, config.data)
    if config.task in LISTED:
        return named_files(config.data.train, row_settings(config))
    if config.has_images:
        options = table_options(config.data, captioned=config.task is Task.image_text)
        sources = parse_sources(config.data.train, tables=checked_tables(options))
    else:
        from dyad.data.question_passage.text_views import text_sources  # loads torch

        sources = text_sources(config.data.train, config.data, checked_tables)
    return [file for source in sources for file in source.shards]


def row_settings(config: TrainConfig) -> DataConfig:
    """Return config.data as it is for rows of data.train: data.teacher is a PairScore if the objective learns pairs."""
    from dyad.data.question_passage.formats import PairScore

    if config.data.teacher is None or config.objective.inputs != "scored pairs":
        return config.data
    return replace(config.data, teacher=PairScore(config.data.teacher))


def _check_batch(config: TrainConfig) -> None:
    """Raise ConfigError if an epoch has fewer samples than a batch, or takes no sample of a source.

    Nothing is checked if the number of samples is not known quickly (`most_samples`, whose errors are raised), for
    plans, streams, data.rare and task=sequence, and in a process that torchrun started.
    """
    from dyad.data.cli.counts import most_samples
    from dyad.data.config import Mode
    from dyad.data.loading.order import Order
    from dyad.data.shards.sources import written_sources
    from dyad.train.config import Task

    # streams and rare classes have an order of samples of their own
    if config.planned or config.data.mode is Mode.stream or config.data.rare is not None:
        return
    if config.task is Task.sequence:  # its samples are windows, whose number is not known yet
        return
    # launch/ has checked it already; each rank would read the files again, as they have no index yet
    if "RANK" in os.environ:
        return
    written = written_sources(config.data.train or "", "data.train")
    of_source = (replace(config, data=replace(config.data, train=source.path)) for source in written)
    found = [most_samples(training_files(own), config.data.columns) for own in of_source]
    sizes = [count for count in found if count]
    if len(sizes) == len(found):  # a file without readable rows is reported when it is opened
        Order(sizes, [each.weight for each in written], seed=0, global_batch_size=config.global_batch_size)


def _task_rules(config: TrainConfig) -> Iterator[str]:
    """Yield a message if data.train or data.val holds data of another task: images in place of texts, or the reverse.

    Only the first source of each is looked at. Remote data, data with unknown fields and task=sequence are not checked.
    The message on data.train has the command to type.
    """
    from dyad.data.cli.inputs import InputKind, recognised
    from dyad.data.cli.outputs import command
    from dyad.data.shards.sources import written_sources
    from dyad.data.shards.storage import scheme_of
    from dyad.data.tables.prepare import table_options
    from dyad.train.config import ITEMS, Task

    if config.task is Task.sequence:  # logs are recognised by their columns, frames by their suffix
        return
    wants_images = config.has_images
    for key, value in (("data.train", config.data.train), ("data.val", config.data.val)):
        if value is None or scheme_of(path := written_sources(value, key)[0].path):
            continue
        found, why = recognised([path], table_options(config.data))
        if found is None or wants_images is (found is InputKind.images):
            continue
        other = "experiment=mnrl model.text.name=bert-base-uncased" if wants_images else "model.name=ViT-B-32 epochs=10"
        if config.task not in ITEMS:
            other = f"task={config.task.name} data.items={'texts' if wants_images else 'pictures'} epochs=10"
        train = f". Type: {command('python -m train', {'data.train': Path(path)}, *other.split())}"
        columns = ", or name its columns of images and captions: data.columns=[…]" * why.startswith("columns ")
        yield (
            f"{key}={path} holds {found.value} ({why}), task={config.task.name} takes "
            f"{'images' if wants_images else 'texts'}{columns * wants_images}{train * (key == 'data.train')}"
        )


def _path_rules(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each path in resume, init_from and the files of data.negatives that does not exist.

    Not checked are resume=auto and resume=never, which are no paths; the path of the checkpoint at which the run in the
    run folder began, if it has gone on since (`resume_mode`); and a file of data.negatives that is a URL.
    """
    from dyad.train.run_folder.folder import resume_mode, without_best

    mode = resume_mode(config)
    if mode not in ("auto", "never") and not without_best(Path(mode)).is_dir():
        hint = nearest(mode, ("auto", "never"))
        choices = "auto (go on where the run stopped), never (begin again), a checkpoint folder, RUN@best"
        yield f"resume={mode}: no such folder.{hint} Choices: {choices}"
    if config.init_from is not None and not without_best(Path(config.init_from)).is_dir():
        yield f"init_from={config.init_from}: no such folder. Give a run folder, RUN@best or a checkpoint of one"
    negatives = config.data.negatives
    for key, mined, side in (("file", negatives.file, ""), ("picture_file", negatives.picture_file, " mine=pictures")):
        if mined is not None and not Path(mined).expanduser().exists() and "://" not in mined:
            command = f"python -m eval.mine run=…{side}"
            yield f"data.negatives.{key}={mined}: no such file. It is what `{command}` writes"
