"""README.md of an export: what a hub reads of a model, and what a stranger has to know before using it."""

from __future__ import annotations

import html
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from data.notices import Notice, notices
from data.secrets import public_path
from data.sources import parts
from train.config import Task, TextTower, TrainConfig
from train.export.library import ExportSource, Library
from train.runs.folder import what_matters
from train.towers.published import package_folder
from train.tracking.headlines import scores

ROOT = Path(__file__).parents[2]
PACKAGES = ("dyad", "torch", "transformers", "open_clip_torch", "sentence-transformers", "onnx", "onnxruntime")
HUB_TASKS = {
    "zeroshot_retrieval": "image-text-retrieval",
    "zeroshot_classification": "zero-shot-image-classification",
    "passage_retrieval": "information-retrieval",
}
UNUSED = {
    Task.image_text: ("data.question.", "data.passage.", "data.negatives.", "model.shared"),
    Task.question_passage: ("data.augment.", "data.image_key", "data.caption", "data.max_image_pixels", "model.image."),
}
TEMPLATE = Path(__file__).with_name("templates") / "card.md.j2"


def card(library: Library, source: ExportSource, difference: float) -> str:
    """The model card. difference: the result of `library.difference`, as a share of the length of an embedding."""
    config = source.config
    measured = [(result, metric, score) for result in source.results for metric, score in scores(result).items()]
    evaluations = [
        EvalResult(
            task_type=HUB_TASKS[result["task"]],
            dataset_type=re.sub(r"[^\w.-]+", "_", result["dataset"]),
            dataset_name=_one_line(result["dataset"]),
            metric_type=metric,
            metric_value=score.value,
        )
        for result, metric, score in measured
    ]
    index = {"model_name": _one_line(source.name), "eval_results": evaluations} if evaluations else {}
    written = ModelCard.from_template(
        ModelCardData(license="unknown", **library.front, **index),
        template_path=str(TEMPLATE),
        title=escaped(source.name),
        kind=library.kind,
        data=", ".join(code(public_path(path)) for path, _ in parts(config.data.train, "data.train")),
        steps="" if source.step is None else f"{source.step:,} steps of ",
        pairs=f"{config.global_batch_size:,}",
        objective=code(config.objective.name),
        snippet=library.snippet(Path("THIS_FOLDER"), source),
        library=library.name,
        difference=difference,
        scores=[(escaped(result["dataset"]), metric, score) for result, metric, score in measured],
        settings=list(_settings(source)),
        notices=[_quoted(notice) for notice in notices(list(_origins(config)))],
        task=config.task.value,
    )
    return f"{written}\n"


def _settings(source: ExportSource) -> Iterator[tuple[str, str]]:
    """What changes the weights, by the part of the configuration it stands in; what is off is left out."""
    config, told = source.config, cast(dict[str, list[str]], {})
    idle = {"model.text.lora_": not config.model.text.lora_rank, "data.negatives.": not config.data.negatives.per_row}
    unused = (*UNUSED[config.task], *(key for key, is_idle in idle.items() if is_idle))
    for key, value in what_matters(config).items():
        if value and not key.startswith(unused):
            part = key.partition(".")[0] if "." in key else "training"
            told.setdefault(part, []).append(f"{key.removeprefix(f'{part}.')}={_shown(value)}")
    for part, values in told.items():
        yield "optim (AdamW)" if part == "optim" else part, code(", ".join(values))
    if source.logit_scale is not None:
        yield "temperature at the end", f"{math.exp(-source.logit_scale):.4g}"
    if source.step is not None:
        yield "seen", f"{source.step:,} steps, {source.step * config.global_batch_size:,} pairs"
    yield "exported by", f"commit {commit()}; {_versions()}"


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return "::".join(map(public_path, value.split("::"))) if isinstance(value, str) else value


def _origins(config: TrainConfig) -> Iterator[str]:
    """Where it comes from, data and weights, as `notices` takes it."""
    yield from (path for path, _ in parts(config.data.train, "data.train"))
    if config.data.passage.corpus:
        yield config.data.passage.corpus
    model, text = config.model, config.model.text
    encoder = text.name if text.kind is TextTower.transformers and not text.from_scratch else None
    if encoder and encoder.startswith("pkg:"):
        encoder = package_folder(encoder)
    for weights in (encoder, model.pretrained, model.image.pretrained, text.pretrained):
        if weights and Path(weights).expanduser().exists():  # else a published name
            yield weights


def _quoted(notice: Notice) -> dict[str, str]:
    """A notice for the template. The fence keeps its text from being read as Markdown of the card."""
    name = html.escape(_one_line(public_path(notice.file)))
    return {"name": name, "fence": _fence(notice.text, 3), "text": notice.text}


def code(value: object) -> str:
    """Inline code that holds any text, also in a table."""
    text = _one_line(str(value)).replace("|", r"\|")
    fence, pad = _fence(text, 1), " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together anywhere in `text`."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), least)


def escaped(text: str) -> str:
    """One line that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    """One line, so that nothing in it can end the metadata or begin a title."""
    return " ".join(text.split())


def commit(root: Path = ROOT) -> str:
    """The commit of the checkout at `root`, and whether files were changed since; "unknown" if it is no checkout."""
    if not (root / ".git").exists():  # git would take a repository around it
        return "unknown"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in hooks
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with changes"]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
