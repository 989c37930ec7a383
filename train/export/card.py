"""README.md of an export: what a hub reads of a model, and what a stranger has to know before using it."""

from __future__ import annotations

import html
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from data.notices import Notice, notices
from data.secrets import public_path
from data.sources import parts
from train.config import Task, TextTower, TrainConfig
from train.export.library import Library, Source
from train.panels import Score
from train.runs.folder import by_section, what_matters
from train.towers.published import package_folder

ROOT = Path(__file__).parents[2]
PACKAGES = ("dyad", "torch", "transformers", "open_clip_torch", "sentence-transformers", "onnx", "onnxruntime")
UNUSED = {
    Task.image_text: ("data.question.", "data.passage.", "data.negatives.", "model.shared"),
    Task.question_passage: ("data.augment.", "data.image_key", "data.caption", "data.max_image_pixels", "model.image."),
}
SCORES_SAY = {
    Task.image_text: "which of the given texts or pictures fits best, not whether any fits. Zero-shot results depend\n"
    "  on the prompts.",
    Task.question_passage: "which of the given passages fits best, not whether it is true or answers at all.\n"
    "  Longer texts are cut.",
}
TEMPLATE = """\
---
{front}
---
# {title}

{kind} trained by Dyad on {data}: {steps}, objective {objective}.

## How to load it

{snippet}

Checked when it was written: {library} loaded this folder in a process of its own without a network, and its embeddings
were those of the run, to {difference:.1g} of their length.

## What it scored

{scores}

## How it was trained

| | |
|---|---|
{settings}

## Data and licence

Trained on {data}. No licence was chosen for the model: whoever publishes it chooses one that the data and the weights
it began with allow, and puts it in the place of `unknown` at the top of this file.

{notices}

## Limits

- What is wrong or one-sided in the data is in the model. Nobody has checked it for harm, bias or private facts.
- A score says {scores_say}
- The figures hold for the data sets named, some of which may be close to the training data. Measure it on your own
  data before you rely on it.
"""


def card(library: Library, source: Source, difference: float) -> str:
    """The whole file. difference: what `exported.difference` found; source.results: evaluations of this very step."""
    config, trained_on = source.config, _data(source.config)
    theirs = "\n\n".join(map(_quoted, notices(list(_origins(config)))))
    steps = "" if source.step is None else f"{source.step:,} steps of "
    return TEMPLATE.format(
        front=_front(library, source),
        title=escaped(source.name),
        kind=library.kind,
        data=trained_on,
        steps=f"{steps}{config.global_batch_size:,} pairs",
        objective=code(config.objective.name),
        snippet=library.snippet(Path("THIS_FOLDER"), source),
        library=library.name,
        difference=difference,
        scores=_scores(source),
        settings="\n".join(f"| {name} | {value} |" for name, value in _settings(source)),
        notices=theirs or "Nothing beside the data says whose they are.",
        scores_say=SCORES_SAY[config.task],
    )


def _front(library: Library, source: Source) -> str:
    """The hub's metadata, as its own library writes it."""
    measured = [
        EvalResult(
            task_type=result.hub_task,
            dataset_type=re.sub(r"[^\w.-]+", "_", result.dataset),
            dataset_name=_line(result.dataset),
            metric_type=metric,
            metric_value=found.value,
        )
        for result in source.results
        for metric, found in result.scores.items()
    ]
    index = {"model_name": _line(source.name), "eval_results": measured} if measured else {}
    return ModelCardData(license="unknown", **library.front, **index).to_yaml()


def _scores(source: Source) -> str:
    rows = [_row(result.dataset, *named) for result in source.results for named in result.scores.items()]
    if not rows:
        return "Nothing was measured at this step: `python -m eval checkpoint=RUN` does it, then export again."
    head = "| data set | metric | value | 95 % interval | chance |\n|---|---|---|---|---|"
    told = "Interval: bootstrap over the queries, or over their topics. Chance: what a random order gets."
    return "\n".join([head, *rows, "", told])


def _row(dataset: str, metric: str, found: Score) -> str:
    between = "" if found.low is None else f"{found.low:.3f} – {found.high:.3f}"
    chance = "" if found.chance is None else f"{found.chance:.2g}"
    return f"| {escaped(dataset)} | {metric} | {found.value:.3f} | {between} | {chance} |"


def _settings(source: Source) -> Iterator[tuple[str, str]]:
    """What changes the weights, by the part of the configuration it stands in; what is off is left out."""
    config = source.config
    idle = {"model.text.lora_": not config.model.text.lora_rank, "data.negatives.": not config.data.negatives.per_row}
    unused = (*UNUSED[config.task], *(key for key, is_idle in idle.items() if is_idle))
    used = {key: value for key, value in what_matters(config).items() if value and not key.startswith(unused)}
    for section, values in by_section(used).items():
        yield "optim (AdamW)" if section == "optim" else section, code(values)
    if source.logit_scale is not None:
        yield "temperature at the end", f"{math.exp(-source.logit_scale):.4g}"
    if source.step is not None:
        yield "seen", f"{source.step:,} steps, {source.step * config.global_batch_size:,} pairs"
    yield "exported by", f"commit {commit()}; {_versions()}"


def _data(config: TrainConfig) -> str:
    return ", ".join(code(public_path(path)) for path, _ in parts(config.data.train, "data.train"))


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


def _quoted(notice: Notice) -> str:
    """Their text to the letter: nothing in it is read as part of the card."""
    fence, name = _fence(notice.text, 3), html.escape(_line(public_path(notice.file)))
    return f"<details><summary>{name}</summary>\n\n{fence}text\n{notice.text}\n{fence}\n\n</details>"


def code(value: object) -> str:
    """Inline code that holds any text, also in a table."""
    text = _line(str(value)).replace("|", r"\|")
    fence, pad = _fence(text, 1), " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together anywhere in `text`."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), least)


def escaped(text: str) -> str:
    """One line that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", _line(text))


def _line(text: str) -> str:
    """One line, so that nothing in it can end the metadata or begin a title."""
    return " ".join(text.split())


def commit(root: Path = ROOT) -> str:
    """Of the checkout at `root`, with a word when its files were changed since; "unknown" when it is none."""
    found = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
    if len(found) != 2 or Path(found[0]) != root.resolve():  # in a repository of somebody else
        return "unknown"
    return f"{found[1]}{' with changes' if _git(root, 'status', '--porcelain', '--untracked-files=no') else ''}"


def _git(root: Path, *words: str) -> str:
    """What git says, nothing when it fails or is not there."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of a hook, say
    try:
        done = subprocess.run(["git", *words], cwd=root, env=own, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _versions() -> str:
    return ", ".join([f"Python {platform.python_version()}", *filter(None, map(_version, PACKAGES))])


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
