"""The kinds of files that may come from a stranger: a sound one of each, what reads it, and a command that does."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers.rows import write_lines
from helpers.shards import write_pairs
from helpers.tables import TEXTS, hub_images, write_csv
from helpers.tiny_bert import write as write_bert
from helpers.tiny_runs import QUIET, tiny_arguments

import dyad
from dyad.data.base.errors import UserError
from dyad.data.base.files import read_lines
from dyad.data.cli import main as data
from dyad.data.question_passage.judgements import judgements
from dyad.data.tables.readers import open_table
from dyad.eval.report.main import write_report
from dyad.eval.report.run_folder import read_run
from dyad.eval.tasks.prompts import read_probe, read_task
from dyad.evaluation.find_model import find_model
from dyad.evaluation.load_run import find_run, load_run, read_config
from dyad.train.cli.compose import compose_config
from dyad.train.config_rules import check_values
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.folder import recorded_state
from dyad.train.run_folder.locate import locate
from dyad.train.run_folder.run_state import shorter_run
from dyad.train.run_folder.saving import write_checkpoint


@dataclass(frozen=True)
class Kind:
    """A kind of foreign file. make: writes a sound one into an empty folder. read: what reads it. command: arguments of
    a command that reads it; None: no command does. files: a pattern of those that are damaged."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    command: Callable[[Path], Sequence[str]] | None
    files: str = "*"


def _data(*words: str) -> None:
    sys.argv = ["data", *words]
    data.main()


def _table(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        with suppress(UserError):
            for _ in open_table(str(folder / name)).rows():
                pass
        with suppress(UserError):
            _data("pack", str(folder / name), f"out={folder / 'packed'}", "on_error=skip")
        _data("check", str(folder / name))

    return read


def _parquet(folder: Path) -> None:
    pq.write_table(hub_images().slice(0, 6), folder / "t.parquet", row_group_size=3)
    pq.write_table(pa.Table.from_pylist(TEXTS[:8]), folder / "s.parquet")


def _read_tar(folder: Path) -> None:
    path = str(folder / "s.tar")
    with suppress(UserError):
        _data("pack", path, f"out={folder / 'packed'}", "on_error=skip")
    _data("check", path)


def _tower(folder: Path) -> None:
    write_bert(folder)
    modules = [
        ("Transformer", "", ""),
        ("Pooling", "1_Pooling", "1_Pooling"),
        ("Normalize", "2_Normalize", "2_Normalize"),
    ]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path, _) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    prompts = {"prompts": {"query": "query: ", "passage": ""}, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "2_Normalize").mkdir()


def _index(folder: Path) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(12, 8), dim=1).numpy()
    items = [*(f"text {i}" for i in range(10)), {"id": "a", "title": "", "text": "b"}, 7]
    shutil.rmtree(folder)
    dyad.Index(items, vectors, "digest", "IVF2,Flat;nprobe=2").save(folder)


def _search(folder: Path) -> None:
    index = dyad.Index.load(folder)
    repr(index)
    index.faiss.search(index.embeddings[:2], 3)


SAMPLES: dict[str, Path] = {}  # what takes a run to make, by name


def _run(folder: Path) -> None:
    shutil.copytree(SAMPLES["trained"], folder, dirs_exist_ok=True)


def _read_run(folder: Path) -> None:
    recorded_state(folder)
    list(read_lines(folder / "metrics.jsonl"))
    with suppress(UserError):
        config = read_config(folder)
        shorter_run(replace(config, run=replace(config.run, dir=str(folder.parent), name=None)))
    read_run(folder)


def in_parts(run: Path) -> None:
    """Write the last checkpoint of a run again, as two ranks with sharded towers do."""
    state = Checkpoint(locate(run, print)).read()
    for rank in (1, 0):
        rows = {}
        halves: dict[str, dict[str, Any]] = {}
        for part in ("model", "optimizer"):
            halves[part] = {}
            for name, tensor in getattr(state, part).items():
                middle = len(tensor) // 2 if tensor.dim() else 0
                if middle:
                    rows[name] = slice(0, middle) if rank == 0 else slice(middle, len(tensor))
                halves[part][name] = tensor[rows[name]] if middle else tensor
        write_checkpoint(run, replace(state, **halves, part=(rank, 2, "once"), rows=rows), keep=1)


def _checkpoint(folder: Path) -> None:
    shutil.copytree(SAMPLES["parts"], folder, dirs_exist_ok=True)


def seal(folder: Path) -> None:
    """Mend the sizes and SHA-256 of a manifest, as a stranger would."""
    for manifest in folder.rglob("manifest.json"):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(manifest.read_text())
            for name, entry in content["files"].items():
                with suppress(OSError):
                    held = (manifest.parent / name).read_bytes()
                    entry |= {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
            manifest.write_text(json.dumps(content))


def _read_checkpoint(folder: Path) -> None:
    run, found = find_run(str(folder))
    with suppress(UserError):
        state = Checkpoint(found).read()
        for tensors in state.tensors.values():
            for name in tensors:
                tensors[name].sum()
    load_run(run, found)


def _task(folder: Path) -> None:
    write_pairs(folder / "s.tar", 6)
    classes = {"a": ["an a"], "b": []}
    task = {"source": "s.tar", "label": "caption", "templates": ["a photo of a {}"], "classes": classes}
    (folder / "task.json").write_text(json.dumps({**task, "others": "skip"}, indent=1))
    (folder / "probe.json").write_text(json.dumps({"train": "s.tar", "test": "s.tar", "label": "caption"}))
    lines = [f"q{i}\tp{i}\t{i % 3}" for i in range(9)]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")


def _read_task(folder: Path) -> None:
    for read in (read_task, read_probe):
        for name in ("task.json", "probe.json"):
            with suppress(UserError):
                read(folder / name)
    list(judgements(str(folder / "qrels.tsv")))


def _recipe(folder: Path) -> None:
    keys = "steps: 2\noptim:\n  lr: 0.001\n  beta1: 0.9\nobjective:\n  temperature: 0.05\nmodel:\n  embed_dim: 16\n"
    (folder / "r.yaml").write_text(f"defaults:\n  - override /model: tiny\n{keys}data:\n  captions: [caption]\n")
    (folder / "model").mkdir()
    (folder / "model" / "tiny.yaml").write_text("image:\n  image_size: 32\n  widths: [8, 16]\n")


def _read_recipe(folder: Path) -> None:
    check_values(compose_config([f"experiment={folder / 'r.yaml'}", "data.train=x"]))


def _trained(**keys: Any) -> Sequence[str]:
    small = {**QUIET, "steps": 1, "global_batch_size": 4, "eval.suite": "[]", "run.name": "new"}
    return tiny_arguments(SAMPLES["models"], SAMPLES["models"].parent / "out", small | keys)


def _eval_of(folder: Path) -> Sequence[str]:
    return ["eval", f"checkpoint={folder}", f"suite=[retrieval:{SAMPLES['tar'] / 's.tar'}]", "captions=[caption]"]


KINDS = {
    "tar": Kind(
        lambda d: write_pairs(d / "s.tar", 6), _read_tar, lambda d: _trained(**{"data.train": d / "s.tar"}), "*.tar"
    ),
    "jsonl": Kind(
        lambda d: write_lines(d / "t.jsonl", TEXTS[:8]),
        _table("t.jsonl"),
        lambda d: ["data", "check", str(d / "t.jsonl")],
    ),
    "csv": Kind(
        lambda d: write_csv(d / "t.csv", TEXTS[:8]), _table("t.csv"), lambda d: ["data", "check", str(d / "t.csv")]
    ),
    "parquet": Kind(
        _parquet,
        lambda d: (_table("s.parquet")(d), _table("t.parquet")(d)),
        lambda d: ["data", "check", str(d / "t.parquet")],
    ),
    "tower": Kind(
        _tower,
        lambda d: find_model(f"st:{d}").load(),
        lambda d: ["eval", f"model=st:{d}", f"suite=[beir:{SAMPLES['beir']}@train]", f"out={d / 'out'}"],
    ),
    "index": Kind(_index, _search, None),
    "run": Kind(_run, _read_run, _eval_of, "*.*"),
    "report": Kind(_run, write_report, lambda d: ["eval.report", f"run={d}"], "*.*"),
    "checkpoint": Kind(_checkpoint, _read_checkpoint, _eval_of, "step_*/*"),
    "task": Kind(
        _task,
        _read_task,
        lambda d: ["eval", f"checkpoint={SAMPLES['trained']}", f"suite=[zero_shot:{d / 'task.json'}]"],
        "*.[jt]s*",
    ),
    "recipe": Kind(_recipe, _read_recipe, lambda d: _trained(experiment=d / "r.yaml"), "*.yaml"),
}
