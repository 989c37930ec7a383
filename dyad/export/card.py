"""Write the model card, README.md of an export: metadata for the hub, training, scores, data, licences and limits."""

import hashlib
import html
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from yaml import YAMLError

from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.files import open_foreign
from dyad.data.base.json_text import LARGEST
from dyad.data.base.secrets import public_path
from dyad.data.shards.licences import Notice, notices
from dyad.data.shards.sources import written_sources
from dyad.export.library import ExportSource, Library
from dyad.train.cli.also import auxiliary_configs
from dyad.train.cli.unread_keys import unmet
from dyad.train.config import TextTower, TrainConfig
from dyad.train.run_folder.folder import by_section, maths_keys
from dyad.train.towers.libraries.calibration import SETTINGS
from dyad.train.towers.libraries.published import location_of, read_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dyad", "torch", "transformers", "open_clip_torch", "sentence-transformers", "onnx", "onnxruntime")
CARD, UNKNOWN = "README.md", "unknown"  # the file of a card; the licence of a model until a person chooses one
TEMPLATE = Path(__file__).with_name("templates") / "card.md.j2"


def card(library: Library, source: ExportSource, difference: float, licence: str = UNKNOWN) -> str:
    """Return the model card (README.md) of an export, as Markdown. Licence texts near the data are quoted in it.

    library: the export format. source: the trained model, with the configuration and scores that the card shows.
    difference: the result of `compare_embeddings`: the largest difference between a coordinate of our embeddings and of
    the library's, divided by the L2 norm of the embedding. licence: that of the model, chosen by a person; UNKNOWN: not
    yet.
    """
    config = source.config
    scores = [(result, metric, score) for result in source.results for metric, score in result.scores.items()]
    evaluations = [
        EvalResult(
            task_type=result.hub_task,
            dataset_type=re.sub(r"[^\w.-]+", "_", result.dataset),
            dataset_name=_one_line(result.dataset),
            metric_type=metric,
            metric_value=score.value,
        )
        for result, metric, score in scores
    ]
    index = {"model_name": _one_line(source.name), "eval_results": evaluations} if evaluations else {}
    written = ModelCard.from_template(
        ModelCardData(license=licence, **library.front, **index),
        template_path=str(TEMPLATE),
        library=library,
        source=source,
        config=config,
        data=", ".join(code(public_path(path)) for path in _trained_on(config)),
        snippet=library.snippet(Path("THIS_FOLDER"), source),
        difference=difference,
        chosen=licence != UNKNOWN,
        scores=scores,
        settings=by_section(
            {key: value for key, value in maths_keys(config).items() if value and not unmet(key, [config])}
        ),
        temperature=source.calibration and source.calibration.temperature,
        commit=commit(),
        versions=_versions(),
        notices=[_quoted(notice) for notice in notices(list(_origins(config)))],
        code=code,
        escaped=escaped,
    )
    return f"{written}\n"


def digest(text: str) -> str:
    """Return the SHA-256 digest, in hexadecimal, of the text of a card without its line `license: …`.

    A person may replace this line; any other change of the card changes the digest.
    """
    return hashlib.sha256(re.sub(r"(?m)^license:.*$", "", text, count=1).encode()).hexdigest()


def licence_of_earlier_export(folder: Path) -> str:
    """Return the licence that the card of an earlier export in `folder` names; UNKNOWN if there is none.

    Raises ConfigError if anything but the licence in the card has been changed, because an export replaces the card,
    for a licence that is no single name, and for a damaged file SETTINGS; OSError if the card cannot be read.
    """
    path, settings = folder / CARD, folder / SETTINGS
    if not settings.is_file() or not path.is_file():
        return UNKNOWN
    if not isinstance(saved := read_json(settings), dict):
        raise ConfigError(f"{settings} is not of an export: no JSON object. Choose another folder, or remove this one")
    text = ""
    with suppress(ValueError), open_foreign(path, LARGEST, folder) as file:  # too large: not as it was written
        text = file.read().decode(errors="replace")
    if saved.get("card") != digest(text):
        raise ConfigError(
            f"{path} is not as this version wrote it, and an export replaces it: move it elsewhere, export "
            "again, and put your changes into the new one. A changed value of license: alone is kept"
        )
    try:
        licence = getattr(ModelCard(text).data, "license", None) or UNKNOWN
        if not isinstance(licence, str):
            raise ValueError(f"{licence} is not one name")
    except (ValueError, YAMLError) as error:
        reason = first_line(error)
        raise ConfigError(f"{path}: license: must be one name, such as license: mit ({reason})") from error
    return licence


def _trained_on(config: TrainConfig) -> list[str]:
    """Return the paths of all sources of training data that `config` names, including those of auxiliary losses."""
    losses = [config, *auxiliary_configs(config).values()]
    return [*dict.fromkeys(each.path for of in losses for each in written_sources(of.data.train, "data.train"))]


def _origins(config: TrainConfig) -> Iterator[str]:
    """Yield the paths of the training data, the corpus and the initial weights that `config` names.

    Their licence files may lie beside them. Weights that are not on this machine are left out.
    """
    yield from _trained_on(config)
    if config.data.passage.corpus:
        yield config.data.passage.corpus
    model, text = config.model, config.model.text
    named = text.name if text.kind is TextTower.transformers and not text.from_scratch else None
    encoder = named and location_of(named)
    for weights in (encoder, model.pretrained, model.image.pretrained, text.pretrained):
        if weights and Path(weights).expanduser().exists():  # otherwise a published name
            yield weights


def _quoted(notice: Notice) -> dict[str, str]:
    """Convert a licence notice to the values that the card's template takes: name, text and fence.

    name: path of the licence file, without private folders, escaped for HTML. text: the licence text. fence: the
    backticks that the template puts before and after the text, so that it is not rendered as Markdown.
    """
    name = html.escape(_one_line(public_path(notice.file)))
    return {"name": name, "fence": _fence(notice.text, 3), "text": "\n".join(notice.text.splitlines())}


def code(value: object) -> str:
    """Return `value` as inline code of Markdown on one line; any characters in it are safe in a table cell."""
    text = _one_line(str(value)).replace("|", r"\|")
    fence, pad = _fence(text, 1), " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """Return backticks to put around `text` as Markdown code: `least` or more, and more than `text` has in a row."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def escaped(text: str) -> str:
    """Return `text` on one line, escaped so that Markdown and HTML show it literally."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    """Return `text` on one line, each run of white space as one space.

    So no part of it can begin a line, where it could end the card's metadata block or be a Markdown heading.
    """
    return " ".join(text.split())


def commit(root: Path = ROOT) -> str:
    """Return the hash of the git commit checked out at `root`, with " with changes" after it for changed files.

    Files that git does not track do not count. Returns "unknown" if `root` is no git checkout, or git fails.
    """
    # Both paths are given, because git would take a repository around `root`, or that of a hook which starts it.
    repository = [f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    command = ["git", *repository, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with changes"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in hooks
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _versions() -> str:
    """Return the versions of Python and of the installed packages among PACKAGES, as one line."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
