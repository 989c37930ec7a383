"""Check a configuration on this machine: its data, model, trackers and run folder. No file is written.

The public functions yield findings, the results of single checks: a line marked ok, warn or fail, with a fix. They
raise what training would raise; `findings_of` (doctor/main.py) turns that into a finding.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from open_clip.pretrained import get_pretrained_cfg
from torch import nn

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import BadRow, ConfigError, DataError, ExitCode
from dyad.data.base.findings import Finding, fail, ok, warn
from dyad.data.base.json_text import parse_json
from dyad.data.config import Mode, NegativeList
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.stream import first_sample
from dyad.data.loading.negatives import LOOKED_AT
from dyad.data.question_passage.formats import query_of, record_of
from dyad.data.question_passage.judgements import queries_of
from dyad.data.question_passage.negatives import no_negatives_message
from dyad.data.question_passage.text_views import text_of
from dyad.data.sequence.dataset import NEXT, OWN, Sequences
from dyad.data.sequence.open import input_size, open_sequences
from dyad.data.shards.index import has_index, scan_stream, stored_index
from dyad.data.shards.rows import Rows
from dyad.data.shards.scan_tar import Problem, Scan
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource, WrittenSource, written_sources
from dyad.data.shards.storage import open_buffered, open_ranges, scheme_of, stat
from dyad.data.tables.folders import tables_of
from dyad.doctor.machine import size_text
from dyad.doctor.texts import cut_texts
from dyad.run.checks import check_sweep, row_settings, training_files
from dyad.run.components import describe_batch_norms
from dyad.train.config import LISTED, ImageTower, Task, TextTower, TrainConfig, Wandb
from dyad.train.run_folder.folder import folder_of, resume_mode, run_folder, steps
from dyad.train.run_folder.run_state import is_finished
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.build import build_model
from dyad.train.towers.image.image_tower import build_image_tower
from dyad.train.towers.libraries.open_clip import BuildContext, published_weights, resolve_model_name
from dyad.train.towers.libraries.published import file_of, location_of, split_revision
from dyad.train.towers.libraries.sentence_transformers import describe_choices
from dyad.train.towers.text.text_tower import build_text_tower
from dyad.train.tracking.wandb_mode import wandb_mode
from dyad.training_data import check_horizons, check_texts

SCANNED = 256 << 20  # bytes: a shard without an index that is larger is not read
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
QUERIES = "queries."  # the names of files that hold only questions begin with it
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
OPEN_CLIP_WEIGHTS += ("open_clip_pytorch_model.bin",)
Wanted = Mapping[str, Sequence[str]]  # kind of file → names, of which one is enough


def run(arguments: Sequence[str], config: TrainConfig) -> Iterator[Finding]:
    """Check the configuration as `python -m train` does at its start, and yield one finding, a line marked ok.

    It says, by `resume` and what is in the run folder, whether the run is new, begins again, goes on from a checkpoint
    or is finished, and how long it is; or that it is a plan. arguments: the key=value arguments of the command line.
    Raises ConfigError or DataError as `check_sweep`.
    """
    check_sweep(arguments, [config])
    if config.planned:
        yield ok("run", "is a plan: nothing is trained")
        return
    folder, mode = run_folder(config), resume_mode(config)
    saved = steps(folder)
    state = "begins again, and the old run is put aside" if saved else "is new"
    if mode not in ("auto", "never"):
        state = f"goes on from {mode}"
    elif saved and mode == "auto":
        state = f"goes on from {folder_of(folder, saved[0]).name}"
    if is_finished(config):
        state = "is finished: the same command does nothing"
    length = f"{config.steps} steps" if config.steps else f"{config.epochs:g} epochs"
    yield ok("run", f"{folder} {state}; {length} of {config.global_batch_size} {config.unit}")


# Data -----------------------------------------------------------------------------------------------------------------


def data(config: TrainConfig) -> Iterator[Finding]:
    """Yield findings (lines marked ok or warn, with a fix) on the first and the last file or shard of data.train.

    Checked are the index and the first and last sample, or some rows, of each of the two; less of streams, tables, and
    remote or large files without an index. Of task=sequence all events are read. Sources with a weight or a prefix give
    a finding each. Yields nothing without data.train. Raises ConfigError or DataError for data that training could not
    use.
    """
    if config.data.train is None:
        return
    if config.task is Task.sequence:
        yield from _sequences(config)
        return
    shards = training_files(config)
    if config.task in LISTED:
        shards = [queries_of(file) if "qrels" in file and file.endswith(".tsv") else file for file in shards]
    for source in written_sources(config.data.train, "data.train"):
        if source != WrittenSource(source.path):
            yield ok("data", ", ".join(f"{name}={value!r}" for name, value in vars(source).items()))
    total = f"{len(shards)} file{'s' * (len(shards) > 1)}"
    for shard in dict.fromkeys([shards[0], shards[-1]]):
        yield from _shard(shard, total, config)


def _sequences(config: TrainConfig) -> Iterator[Finding]:
    """Read the sequences of data.train, and yield a finding (a line marked ok) with the numbers of events and samples.

    Events are items or frames. A sample is a window of consecutive events of one sequence. Raises ConfigError if files
    or columns are missing, and as `check_horizons`; DataError if an event lacks a valid value, if an item that an event
    names is missing, or if there are fewer samples than global_batch_size.
    """
    log, items = open_sequences(config.data, SimpleNamespace(tokenize=None, image=None))
    ahead = OWN if "lengths" in config.objective.takes else NEXT
    sequences = Sequences(log, items, config.data.sequence.length, ahead)
    (found,) = sequences.notes()
    if len(sequences.windows) < config.global_batch_size:
        needed = f"global_batch_size={config.global_batch_size}"
        raise DataError(f"{log.files[0].name}: fewer samples than {needed}: {found}")
    check_horizons(config, sequences.windows)
    yield ok("data", f"{', '.join(file.name for file in log.files[:3])}: {found}")


def _shard(path: str, total: str, config: TrainConfig) -> Iterator[Finding]:
    """Yield findings (lines marked ok or warn) on one shard or file: its index, and its first and last sample.

    Of a file of texts, up to 100 evenly spaced rows are checked instead; of a streamed shard only the first sample is
    read. Tables, whose columns were checked before, are not read, nor are shards without an index that are remote or
    above 256 MiB; rows of a .tsv file without an index are only counted. path: the shard. total: text like "3 files",
    for the messages. Raises DataError, which names shard and sample, for data that training could not use.
    """
    if config.data.mode is Mode.stream:
        _check_image(first_sample(path), config)
        yield ok("data", f"{path}: first sample read ({total} in all, streamed)")
        return
    if not scheme_of(path) and tables_of(path, config.data.columns):
        yield ok("data", f"{path}: a table with known columns, converted once at the start ({total} in all)")
        return
    length, index = stat(path).size, stored_index(path)
    if index is None and has_index(path):
        fix = f"nothing to do: it is indexed anew at the start, or now by: python -m data index {shlex.quote(path)}"
        yield warn("data", f"{path} has changed since it was indexed", fix)
    if index is not None:
        _refuse(path, index.problems)
        samples = Shards([ShardSource((path,))], [index])
        rows = Rows(samples)
        if config.has_images:
            for i in {0, index.samples - 1} if index.samples else ():
                _check_image(ShardSample.read(samples, i), config)
        else:
            found = ((rows.fields(i), rows.where(i)) for i in evenly_spaced(index.samples, LOOKED_AT).tolist())
            yield from _check_rows(found, path, config)
        yield ok("data", f"{path}: {index.samples} samples, indexed, first and last read ({total} in all)")
    elif length > SCANNED or scheme_of(path):
        yield ok("data", f"{path}: {size_text(length)}, indexed at the start ({total} in all)")
    else:
        count, findings = _scan(path, config)
        yield from findings
        yield ok("data", f"{path}: {count} samples, read whole, indexed at the start ({total} in all)")


def _refuse(path: str, problems: Sequence[Problem]) -> None:
    """Raise DataError with the first of `problems`, which a scan found in the shard `path`, if there are any."""
    if problems:
        raise DataError(f"{path}: {problems[0]}. All of it: python -m data check {shlex.quote(path)}")


def _check_image(sample: ShardSample, config: TrainConfig) -> None:
    """Raise SampleError if the image of a sample is missing, damaged or has too many pixels (data.max_image_pixels).

    For task=image_text, also if a caption of data.captions or the field data.relevance is missing or invalid.
    """
    sample.decoded(config.data.image_key, config.data.max_image_pixels)
    if config.task is Task.image_text:
        sample.relevance(config.data.relevance)
        for name in config.data.captions:
            sample.captions(name, config.data.caption_per)


def _check_rows(rows: Iterable[tuple[dict[str, Any], str]], path: str, config: TrainConfig) -> Iterator[Finding]:
    """Check rows of a file of texts; yield a warning if hard negatives are drawn from rows alone, and no row has any.

    rows: the fields of each row, and its file and line. path: the file, for the warning. Raises DataError for an
    invalid row, as `_check_row` does.
    """
    found, negatives = [_check_row(*row, config) for row in rows], config.data.negatives
    is_drawn = config.task in LISTED and negatives.per_row and NegativeList.mined not in negatives.lists
    if is_drawn and found and not any(found):
        fix = "or leave them out: data.negatives.per_row=0"
        key = f"data.negatives.per_row={negatives.per_row}"
        yield warn("data", f"{path}: {key}: {no_negatives_message(len(found))}", fix)


def _check_row(fields: dict[str, Any], where: str, config: TrainConfig) -> bool:
    """Check a row of a file of texts, and return whether it has hard negatives that training draws.

    Raises DataError for an invalid row. For task=question_passage and language_model, a row in the queries of a folder
    of BEIR or MS MARCO (`where` has "queries.") must be a query, and any other row a question with its passages, in one
    of the formats of question files. For other tasks, a row must have a text. fields: the row. where: its file and
    line, which begin the error message.
    """
    try:
        if config.task not in LISTED:
            text_of(fields)
        elif QUERIES in where:
            query_of(fields)
        else:
            record = record_of(fields, config.data.passage, config.data.relevance, row_settings(config).teacher)
            return any(getattr(record, name, ()) for name in config.data.negatives.lists)
    except BadRow as bad:
        raise DataError(f"{where}: {bad}") from bad
    return False


def _scan(path: str, config: TrainConfig) -> tuple[int, Sequence[Finding]]:
    """Read a whole shard that has no index, and check its first and last sample, or some rows of a .jsonl file.

    Rows of other files of texts, such as .tsv, are counted and not checked. Returns (number of samples in the shard,
    findings on the checked ones). No index is written. Raises DataError for the first problem of the shard or of a
    checked sample.
    """
    with open_buffered(path) as stream:
        scan = scan_stream(stream, path)
    _refuse(path, scan.problems.first)
    read = open_ranges(path)
    if isinstance(scan, Scan):
        for sample in scan.samples[:1] + scan.samples[-1:] if config.has_images else ():
            members = {suffix: read(offset, offset + length) for suffix, offset, length in sample.members}
            _check_image(ShardSample(path, sample.key, members), config)
        return len(scan.samples), ()

    def row(i: int) -> tuple[dict[str, Any], str]:
        """Return the fields of row i and its file and line; raise DataError if it is no JSON."""
        where = f"{path}: {scan.key[i]}"
        try:
            return parse_json(read(scan.offset[i], scan.offset[i] + scan.size[i])), where
        except ValueError as error:
            raise DataError(f"{where}: unreadable row: {error}") from error

    some = evenly_spaced(len(scan.key), LOOKED_AT).tolist() if scan.suffix == "json" else ()
    return len(scan.key), [*_check_rows(map(row, some), path, config)]


# Model ----------------------------------------------------------------------------------------------------------------


def model(config: TrainConfig) -> Iterator[Finding]:
    """Yield findings (lines marked ok, warn or fail, with a fix) on the models that the towers are loaded from.

    For each one the finding says, without a download, whether its files are on this machine. If all are, the towers are
    built without loading weights (a Dense module is downloaded), and further findings give the number of weights,
    settings taken from a SentenceTransformer, texts that are too long for the tower (see `cut_texts`), and the
    statistics that batch norms use. Raises ConfigError for a model that cannot be built.
    """
    complete = True
    for key, name, wanted in _sources(config):
        if absent := [what for what, files in wanted.items() if not any(file_of(name, file, False) for file in files)]:
            complete = False
            yield _absent(key, name, absent, wanted)
        else:
            yield ok("model", f"{name}: {', '.join(wanted)} found")
    if not complete:
        return
    with torch.device("meta"):  # no memory, no weights
        if config.task is Task.image_text:
            context = BuildContext(config.model, load_pretrained=False)
            text, tokenize = build_text_tower(context)
            towers: list[nn.Module] = [build_image_tower(context)[0], text]
            set_batch_norms(nn.ModuleList(towers).train(), config.model.batch_norm)  # build_model does it for others
        else:
            some = [config.data.rare] if config.data.rare else ["", ""]  # the data are not read for all classes
            inputs = input_size(config.data) if config.task is Task.sequence else None
            own = replace(config.run, classes=some if config.task is Task.labelled else None, inputs=inputs)
            built = build_model(replace(config, run=own), load_pretrained=False)
            check_texts(config, built)
            towers = [built.towers]
            tokenize = built.tokenize
    modules = nn.ModuleList(towers).train()
    yield ok("model", f"builds with {sum(p.numel() for p in modules.parameters()) / 1e6:.1f} M weights")
    yield from (ok("model", line) for line in describe_choices(config))
    yield from cut_texts(config, tokenize)
    if line := describe_batch_norms(config, modules, int(os.environ.get("WORLD_SIZE", "1"))):
        yield ok("batch norm", line)


def _sources(config: TrainConfig) -> Iterator[tuple[str, str, Wanted]]:
    """Yield (key, name, files) for each folder, package or published model that the towers are loaded from.

    key: the configuration key that names it. name: the folder, package or published name. files: kind of file → file
    names, of which one is enough. Weights of open_clip in a file of this disk are checked here, and not yielded. Raises
    ConfigError for an unknown open_clip model, for weights that are neither a file nor published, and for a
    model.text.kind that does not suit the task.
    """
    image, text, both = config.model.image, config.model.text, config.model
    if config.has_texts and text.kind is TextTower.transformers and (name := text.name or both.name):
        weights = {} if text.from_scratch else {"weights": WEIGHTS}
        yield "model.text.name", name, {"its configuration": ("config.json",), "a tokenizer": TOKENIZERS, **weights}
    if not config.has_images:
        if config.has_texts and text.kind is not TextTower.transformers:
            raise ConfigError("model.text.kind=open_clip: questions and passages take model.text.kind=transformers")
        return
    if image.kind is ImageTower.transformers and image.name:
        weights = {} if image.from_scratch else {"weights": WEIGHTS}
        processor = {"an image processor": ("preprocessor_config.json", "processor_config.json")}
        yield "model.image.name", image.name, {"its configuration": ("config.json",), **processor, **weights}
    if image.kind is ImageTower.timm and image.pretrained:
        if not Path(image.pretrained).suffix:
            published = f"timm/{(image.name or '').partition('.')[0]}.{image.pretrained}"
            yield "model.image.pretrained", published, {"weights": ("model.safetensors", "pytorch_model.bin")}
        elif not Path(image.pretrained).expanduser().is_file():
            raise ConfigError(f"model.image.pretrained={image.pretrained}: no such file")
    context = BuildContext(both, load_pretrained=False)
    models = [(context.image_model, image.kind), *[(context.text_model, text.kind)] * config.has_texts]
    for name, pretrained in dict.fromkeys(model for model, kind in models if kind == "open_clip"):
        known = resolve_model_name(name)
        published_weights(known, pretrained)
        if pretrained and not Path(pretrained).expanduser().is_file():
            published = str(get_pretrained_cfg(known, pretrained)["hf_hub"]).strip("/")
            yield "model.pretrained", published, {"weights": OPEN_CLIP_WEIGHTS}
    if config.has_texts and text.kind is TextTower.open_clip:
        settings = (open_clip.get_model_config(resolve_model_name(text.name or both.name)) or {}).get("text_cfg", {})
        if encoder := settings.get("hf_model_name"):
            yield "model.name", encoder, {"its configuration": ("config.json",)}
        if tokenizer := settings.get("hf_tokenizer_name") or encoder:
            yield "model.name", tokenizer, {"a tokenizer": TOKENIZERS}


def _absent(key: str, name: str, absent: Sequence[str], wanted: Wanted) -> Finding:
    """Return the finding for a model whose files are not all on this machine.

    The finding is a failure for a local folder, and for a published model with HF_HUB_OFFLINE=1; else a warning, as the
    run would download the files. key: the configuration key that names the model. name: the model's folder, package or
    published name. absent: the kinds of files that are missing. wanted: kind of file → file names, of which one is
    enough. Raises ConfigError if the folder or package does not exist, or the name cannot be one on the Hugging Face
    hub.
    """
    folder = location_of(name, f"{key}={name}")
    if os.path.isdir(folder):
        fix = f"put {' or '.join(wanted[absent[0]][:2])} into {folder}, or name another folder"
        return fail("model", f"{key}={name} lacks {' and '.join(absent)}", fix, ExitCode.CONFIG)
    if name.startswith("pkg:") or folder.startswith(("/", ".")):
        raise ConfigError(f"{key}={name}: there is no folder {folder}")
    try:
        validate_repo_id(split_revision(name)[0])
    except HFValidationError as error:
        raise ConfigError(f"{key}={name}: neither a folder nor a name of the hub: {error}") from error
    text = f"{key}={name}: {', '.join(absent)} not on this machine"
    if constants.HF_HUB_OFFLINE:
        fix = f"give the path of a folder that has it, or fetch it once: HF_HUB_OFFLINE=0 hf download {name}"
        return fail("model", f"{text}, and HF_HUB_OFFLINE=1 forbids to fetch it", fix, ExitCode.CONFIG)
    return warn("model", f"{text}: fetched at the start, which needs a network", f"before: hf download {name}")


# Tracking -------------------------------------------------------------------------------------------------------------


def tracking(config: TrainConfig) -> Iterator[Finding]:
    """Yield a finding (a line marked ok): the W&B mode (online, offline, disabled) that a run would choose.

    A run takes another mode if the W&B server does not answer or the package wandb cannot be imported; neither is tried
    here. TensorBoard and plugins are not checked here. Raises ConfigError as `wandb_mode` does.
    """
    mode = wandb_mode(config.tracking)
    more = {Wandb.offline: "; `wandb sync` sends it later", Wandb.disabled: "; with an API key (`wandb login`) online"}
    yield ok("wandb", f"{mode.name}{more.get(mode, '')}")
