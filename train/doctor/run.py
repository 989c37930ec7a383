"""What a configuration needs on this machine: its data, model, trackers and run folder. Nothing is written."""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.config import DataConfig, Mode
from data.errors import BadRow, ConfigError, DataError, ExitCode, nearest
from data.index import SCANS, has_index, stored_index
from data.questions import named_files
from data.records import query_of, record_of
from data.rows import Rows
from data.sample import ShardSample
from data.scan import Scan
from data.shards import Shards
from data.sources import ShardSource, parse_sources
from data.storage import open_ranges, open_stream, scheme_of, stat
from data.stream import first_of
from train.config import ImageTower, ModelConfig, Task, TextTower, TrainConfig
from train.doctor.machine import size
from train.findings import Finding, fail, ok, warn
from train.runs.folder import is_finished, run_folder
from train.towers.published import package_folder, read_json
from train.towers.sentence_folder import compared
from train.tracking.trackers import wandb_mode

SCANNED = 256 << 20  # bytes of an unindexed shard that are read whole
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
QUERIES = "queries.jsonl"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def run(words: Sequence[str], config: TrainConfig) -> Iterator[Finding]:
    """What `python -m train` checks before it loads anything, and where the run stands."""
    from train.__main__ import check_sweep

    check_sweep(words, [config])
    folder = run_folder(config)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    begins = f"goes on from {checkpoints[-1].name}" if checkpoints else "is new"
    stands = "is finished: the same command does nothing" if is_finished(config) else begins
    length = f"{config.steps} steps" if config.steps else f"{config.epochs:g} epochs"
    yield ok("run", f"{folder} {stands}; {length} of {config.global_batch_size} pairs")


# Data -----------------------------------------------------------------------------------------------------------------


def data(config: TrainConfig) -> Iterator[Finding]:
    """The first and last sample of the first and last shard, and whether the indexes are of these files."""
    if config.data.train is None:
        return
    if config.task is Task.question_passage:
        shards = [_beir_queries(file) for file in named_files(config.data.train, config.data)]
    else:
        shards = [shard for source in parse_sources(config.data.train) for shard in source.shards]
    total = f"{len(shards)} file{'s' * (len(shards) > 1)}"
    for shard in dict.fromkeys([shards[0], shards[-1]]):
        yield from _shard(shard, total, config)


def _beir_queries(file: str) -> str:
    """Of a BEIR folder, whose judgements are what it is named by, the file of its questions."""
    place = Path(file)
    return str(place.parent.parent / QUERIES) if place.parent.name == "qrels" else file


def _shard(path: str, total: str, config: TrainConfig) -> Iterator[Finding]:
    if config.data.mode is Mode.stream:
        _picture_and_captions(first_of(path), config.data)
        yield ok("data", f"{path}: first sample read ({total} in all, streamed)")
        return
    where = stat(path)
    index = stored_index(path)
    if index is None and has_index(path):
        fix = f"nothing to do: it is indexed anew at the start, or now by: python -m data index {shlex.quote(path)}"
        yield warn("data", f"{path} has changed since it was indexed", fix)
    if index is not None:
        if index.problems:
            raise DataError(f"{path}: {index.problems[0]}. All of it: python -m data check {shlex.quote(path)}")
        samples = Shards([ShardSource((path,))], [index])
        for position in {0, index.samples - 1} if index.samples else ():
            _look(samples, position, config)
        yield ok("data", f"{path}: {index.samples} samples, indexed, first and last read ({total} in all)")
    elif where.size > SCANNED or scheme_of(path):
        yield ok("data", f"{path}: {size(where.size)}, indexed at the start ({total} in all)")
    else:
        count = _scanned(path, config)
        yield ok("data", f"{path}: {count} samples, read whole, indexed at the start ({total} in all)")


def _look(samples: Shards, position: int, config: TrainConfig) -> None:
    """Raises DataError, naming shard and sample, for one that training could not use."""
    if config.task is Task.image_text:
        _picture_and_captions(ShardSample.read(samples, position), config.data)
    else:
        rows = Rows(samples)
        _question(rows.fields(position), rows.where(position), config.data)


def _picture_and_captions(sample: ShardSample, config: DataConfig) -> None:
    sample.decoded(config.image_key, config.max_image_pixels)
    for place in config.captions:
        sample.captions(place)


def _question(fields: dict[str, Any], where: str, config: DataConfig) -> None:
    try:
        if QUERIES in where:
            query_of(fields)
        else:
            record_of(fields, config.passage)
    except BadRow as bad:
        raise DataError(f"{where}: {bad}") from bad


def _scanned(path: str, config: TrainConfig) -> int:
    """Samples of a shard without an index, which is not written either. Raises DataError for the first problem."""
    with io.BufferedReader(open_stream(path), 1 << 20) as stream:  # type: ignore[arg-type]
        scan = SCANS.get(os.path.splitext(path)[1], SCANS[".tar"])(stream)
    if scan.problems.first:
        raise DataError(f"{path}: {scan.problems.first[0]}. All of it: python -m data check {shlex.quote(path)}")
    read = open_ranges(path)
    if not isinstance(scan, Scan):
        for row in (0, -1) if len(scan.key) and scan.suffix == "json" else ():
            content = read(scan.offset[row], scan.offset[row] + scan.size[row])
            _question(json.loads(content), f"{path}: {scan.key[row]}", config.data)
        return len(scan.key)
    for sample in scan.samples[:1] + scan.samples[-1:]:
        members = {suffix: read(offset, offset + length) for suffix, offset, length in sample.members}
        if config.task is Task.image_text:
            _picture_and_captions(ShardSample(f"{path}: sample '{sample.key}'", members), config.data)
    return len(scan.samples)


# Model ----------------------------------------------------------------------------------------------------------------


def model(config: TrainConfig) -> Iterator[Finding]:
    """Architecture, weights and tokenizer of each tower: on this machine, or to be fetched."""
    towers = config.model
    if config.task is Task.image_text and towers.image.kind is ImageTower.timm:
        yield from _timm(towers)
    if config.task is Task.image_text and towers.image.kind is ImageTower.open_clip:
        yield from _open_clip(towers.image.name or towers.name, towers.image.pretrained or towers.pretrained)
    if towers.text.kind is TextTower.transformers:
        yield from _transformers(towers)
        yield from (ok("model", line) for line in compared(config))
    elif config.task is Task.image_text:
        named = towers.text.name or towers.name, towers.text.pretrained or towers.pretrained
        if towers.image.kind is not ImageTower.open_clip or named[0] != (towers.image.name or towers.name):
            yield from _open_clip(*named)
        yield from _open_clip_tokenizer(named[0])
    else:
        raise ConfigError("model.text.kind=open_clip: questions and passages take model.text.kind=transformers")


def batch_norm(config: TrainConfig) -> Iterator[Finding]:
    """What the picture tower's batch norms do here. A text encoder's are told when the run starts."""
    if config.task is not Task.image_text:
        return
    import torch

    from train.parts import batch_norms
    from train.towers.batch_norm import set_batch_norms
    from train.towers.image import build_image_tower
    from train.towers.open_clip_pair import OpenClipPair

    try:
        with torch.device("meta"):  # no memory, no weights
            tower, _ = build_image_tower(config.model, OpenClipPair(config.model, load_pretrained=False), False)
    except ConfigError:
        return
    set_batch_norms(tower.train(), config.model.batch_norm)
    said = batch_norms(config, tower, int(os.environ.get("WORLD_SIZE", "1")))
    yield ok("batch norm", said or "none that trains in the picture tower")


def _transformers(config: ModelConfig) -> Iterator[Finding]:
    name = config.text.name or config.name
    if name is None:
        raise ConfigError("model.text.name is missing: a transformers folder or name, or pkg:PACKAGE/FOLDER")
    folder = Path(package_folder(name) if name.startswith("pkg:") else os.path.expanduser(name))
    wanted = {"its configuration": ("config.json",), "a tokenizer": TOKENIZERS, "weights": WEIGHTS}
    if config.text.from_scratch:
        del wanted["weights"]
    if name.startswith(("pkg:", "/", ".", "~")) or folder.is_dir():
        if not folder.is_dir():
            raise ConfigError(f"model.text.name={name}: there is no folder {folder}")
        here = {what: [folder / file for file in files if (folder / file).is_file()] for what, files in wanted.items()}
        yield from _complete(name, here, wanted, folder)
    else:
        yield from _published("model.text.name", name, wanted)


def _complete(
    name: str, here: dict[str, list[Path]], wanted: dict[str, Sequence[str]], folder: Path
) -> Iterator[Finding]:
    for what, files in here.items():
        if not files:
            fix = f"put {' or '.join(wanted[what][:2])} into {folder}, or name another folder"
            yield fail("model", f"model.text.name={name} lacks {what}", fix, ExitCode.CONFIG)
        for file in files:
            if file.suffix == ".json":
                read_json(file)
    if all(here.values()):
        yield ok("model", f"{name}: {', '.join(wanted)} found")


def _published(key: str, name: str, wanted: dict[str, Sequence[str]]) -> Iterator[Finding]:
    """A model of the hub: in the cache, or fetched at the start where that is allowed."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = {
            what: any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
            for what, files in wanted.items()
        }
    except HFValidationError as error:
        raise ConfigError(f"{key}={name}: neither a folder nor a name of the hub: {error}") from error
    absent = [what for what, found in cached.items() if not found]
    if not absent:
        yield ok("model", f"{name}: {', '.join(wanted)} cached in {constants.HF_HUB_CACHE}")
        return
    text = f"{key}={name}: {', '.join(absent)} not on this machine"
    if constants.HF_HUB_OFFLINE:
        fix = f"give the path of a folder that has it, or fetch it once: HF_HUB_OFFLINE=0 hf download {name}"
        yield fail("model", f"{text}, and HF_HUB_OFFLINE=1 forbids to fetch it", fix, ExitCode.CONFIG)
    else:
        yield warn("model", f"{text}: fetched at the start, which needs a network", f"before: hf download {name}")


def _open_clip(name: str | None, pretrained: str | None) -> Iterator[Finding]:
    from open_clip.pretrained import get_pretrained_cfg

    from train.towers.open_clip_pair import check_weights, model_name

    known = model_name(name)
    if pretrained is None:
        brings = ":" in known
        yield ok("model", f"{name}: an open_clip model with {'its own' if brings else 'random'} weights")
        return
    check_weights(known, pretrained)
    published = get_pretrained_cfg(known, pretrained)
    if Path(pretrained).expanduser().is_file():
        yield ok("model", f"{name}: weights in {pretrained}")
    elif repository := str(published.get("hf_hub", "")).strip("/"):
        files = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "open_clip_pytorch_model.safetensors")
        yield from _published("model.pretrained", repository, {"weights": files})
    else:
        file = Path("~/.cache/clip", os.path.basename(str(published.get("url", "")))).expanduser()
        if file.is_file():
            yield ok("model", f"{name}: weights in {file}")
        else:
            fix = "give the path of a file: model.pretrained=FILE"
            yield warn("model", f"model.pretrained={pretrained}: fetched at the start, which needs a network", fix)


def _open_clip_tokenizer(name: str | None) -> Iterator[Finding]:
    import open_clip

    from train.towers.open_clip_pair import model_name

    text = (open_clip.get_model_config(model_name(name)) or {}).get("text_cfg", {})
    hub = text.get("hf_tokenizer_name") or text.get("hf_model_name")
    if hub is None:
        yield ok("model", f"{name}: the tokenizer comes with open_clip")
    elif Path(hub).is_dir():
        yield ok("model", f"{name}: the tokenizer is in {hub}")
    else:
        yield from _published("model.name", hub, {"a tokenizer": TOKENIZERS})


def _timm(config: ModelConfig) -> Iterator[Finding]:
    import timm

    name, weights = config.image.name or "", config.image.pretrained
    if not timm.is_model(name):
        hint = nearest(name, timm.list_models())
        raise ConfigError(f"model.image.name={name or None}: timm has no such model.{hint}")
    if weights and Path(weights).suffix and not Path(weights).expanduser().is_file():
        raise ConfigError(f"model.image.pretrained={weights}: no such file")
    if weights and not Path(weights).suffix:
        files = ("model.safetensors", "pytorch_model.bin")
        yield from _published("model.image.pretrained", f"timm/{name.partition('.')[0]}.{weights}", {"weights": files})
    else:
        yield ok("model", f"{name}: a timm model with {f'weights in {weights}' if weights else 'random weights'}")


# Tracking -------------------------------------------------------------------------------------------------------------


def tracking(config: TrainConfig) -> Iterator[Finding]:
    """What tracking.wandb comes to here; the server is not asked."""
    mode = wandb_mode(config.tracking)
    why = {
        "online": "an API key is here",
        "offline": "no API key, or asked for; `wandb sync` sends it later",
        "disabled": "metrics.jsonl has every number",
    }[mode.value]
    yield ok("wandb", f"{mode.value}: {why}")
