"""Keep in a run folder the files that describe the run's model: with its checkpoints, a run needs no other file.

Kept are open_clip's config .json, and the small files of a model's local folder: configuration, tokenizer, image
processor and licences; neither weights nor code. The copy of NAME is RUN/model/<8 hex digits of a hash of NAME>/<last
part of NAME>. This module does not import torch.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import leads_inside, open_foreign, remove, write_bytes
from dyad.train.config import ImageTower, ModelConfig, TextTower, TrainConfig
from dyad.train.towers.libraries.published import ALLOWED_FILES, MAX_BYTES, config_file

KEPT = "model"  # the folder of the copies in a run folder
KEYS = ("model.name", "model.image.name", "model.text.name")
FROM_FILES = (ImageTower.open_clip, ImageTower.transformers, TextTower.open_clip, TextTower.transformers)
PATTERNS = [pattern for pattern in ALLOWED_FILES if pattern != "*.safetensors"]
PATTERNS += [f"[0-9]*_*/{pattern}" for pattern in PATTERNS]  # modules of a SentenceTransformer
PATTERNS += ["NOTICE*", "LICEN[CS]E*", "COPYING*", "README*"]  # which a model card quotes
# files of such folders that do not describe the model
IGNORED = re.compile(r"(^|/)(NOTICE|LICEN[CS]E|COPYING|README|requirements|\w*(results|state|metrics)\.json$)", re.I)


def model_names(config: TrainConfig) -> list[str]:
    """Return the names of models, as the user wrote them, that are read for the towers of a run and of its `also`."""
    model = config.model
    towers = [tower for tower in (model.image, model.text) if tower.kind in FROM_FILES]
    words = [word.partition("=") for text in config.also.values() for word in shlex.split(str(text))]
    names = [*(tower.name or model.name for tower in towers), *(value for key, _, value in words if key in KEYS)]
    return [*dict.fromkeys(filter(None, names))]


def kept_name(name: str | None, run: Path | None) -> str | None:
    """Return the path of the copy of the model `name` in a run folder; `name` itself if the folder has none."""
    if name and run and (copy := _copy(name, run)).exists() and leads_inside(copy, run):
        return str(copy)
    return name


def kept_model(model: ModelConfig, run: Path | None) -> ModelConfig:
    """Return `model` with the copies in a run folder in place of the names of models (KEYS) that have one.

    run: the run folder; None: nothing is replaced.
    """
    image, text = (replace(tower, name=kept_name(tower.name, run)) for tower in (model.image, model.text))
    return replace(model, name=kept_name(model.name, run), image=image, text=text)


def keep_files(config: TrainConfig, run: Path, origin: Path | None) -> None:
    """Copy the files that describe the models of `config` to a run folder, unless it has a copy of them.

    origin: the run folder from which the run's weights come; its copies are copied, rather than the originals. Nothing
    is copied of published models, and of pkg:PACKAGE/FOLDER. Raises OSError if that fails.
    """
    for name in model_names(config):
        copy = _copy(name, run)
        if copy.exists() or not (files := _files(kept_name(name, origin) or name)):
            continue
        partial = copy.parent.with_name(f".{copy.parent.name}.partial")
        remove(partial)
        inside = partial if _source(name).suffix == ".json" else partial / copy.name
        for file, source in files.items():
            (inside / file).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(inside / file, _content(source))
        os.rename(partial, copy.parent)  # last: a half written copy must not look whole


def refuse_changed_files(config: TrainConfig, run: Path | None) -> None:
    """Raise ConfigError if a file of a model has changed since it was copied to the run folder `run`.

    A file or folder that does not exist any more is no change; further files, licences and records of a training
    (IGNORED) are none, too.
    """
    for name in model_names(config) if run else []:
        if (kept := kept_name(name, run) or name) == name or not _source(name).exists():
            continue
        now, then = _files(name), {file: path for file, path in _files(kept).items() if not IGNORED.search(file)}
        if changed := [file for file in then if file in now and _content(now[file]) != _content(then[file])]:
            raise ConfigError(
                f"{name}: {changed[0]} is not what it was when {run} began. Put back {then[changed[0]]}, or begin "
                "anew: another run.name, without resume= and init_from"
            )


def lost_files(names: Iterable[str | None], run: Path) -> bool:
    """Whether one of the `names` of models is a file or folder that does not exist, and `run` has a copy of it."""
    return any(name and kept_name(name, run) != name and not _source(name).exists() for name in names)


def _source(name: str) -> Path:
    """Return the path of the file or folder that `name` means, if it means one."""
    return config_file(name) if name.endswith(".json") else Path(name.removeprefix("local-dir:")).expanduser()


def _copy(name: str, run: Path) -> Path:
    """Return the path that the copy of the model `name` has in a run folder, whether it exists or not."""
    return run / KEPT / hashlib.sha256(name.encode()).hexdigest()[:8] / _source(name).name


def _files(name: str) -> dict[str, Path]:
    """Return the files that describe the model `name`: path within its folder → path. {} for a name that is no path."""
    path = _source(name)
    if path.is_file() and path.name != "open_clip_config.json":
        return {path.name: path}
    folder = path.parent if path.is_file() else path
    found = [file for pattern in PATTERNS for file in sorted(folder.glob(pattern))]
    return {str(file.relative_to(folder)): file for file in found if file.is_file() and file.stat().st_size < MAX_BYTES}


def _content(path: Path) -> bytes:
    with open_foreign(path, MAX_BYTES) as file:
        return file.read()
