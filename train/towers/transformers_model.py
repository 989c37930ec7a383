"""Load a model of transformers with its tokenizer or image processor, without running code that comes with it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.train.towers.published import (
    check_settings,
    explained,
    file_of,
    location_of,
    read_json,
    refuse_code,
    split_revision,
)

_in_files: ContextVar[bool] = ContextVar("_in_files", default=False)


@contextmanager
def weights_in_files() -> Iterator[None]:
    """In the block, `load_model` maps weights into memory and leaves them in their files, in the files' dtype.

    So every rank can load a model larger than the memory of its machine, and read the part that it trains alone.
    """
    token = _in_files.set(True)
    try:
        yield
    finally:
        _in_files.reset(token)


def load_model(key: str, name: str, companion: str, pretrained: bool) -> tuple[Any, Any]:
    """Load (model, companion) of transformers from `name`: a folder, pkg:PACKAGE/FOLDER or a published model.

    key: the configuration key with its value, for messages. companion: AutoTokenizer or AutoImageProcessor. pretrained:
    load the model's weights; else they are random. No file of the model can choose code to run, neither a class that
    comes with the model nor an attention kernel. Raises ConfigError when loading fails.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    location, revision = split_revision(location_of(name))
    if location.startswith(("/", ".")) and not os.path.isdir(location):
        raise ConfigError(f"{key}: there is no folder {location}")
    check_settings(key, file_of(name, "config.json", fetch=True))
    if file_of(name, "adapter_config.json", fetch=False):
        raise ConfigError(f"{key}: holds adapters beside another model. Merge them into it (peft: merge_and_unload)")
    refuse_code()
    safe = {"trust_remote_code": False}
    mapped = pretrained and _in_files.get()
    single = {"dtype": _dtype_of(name) if mapped else torch.float32, **safe}
    files = f"config.json, model.safetensors and the files of {companion}"
    with explained(key, f"Without a network give the path of a folder with {files}"):
        beside = getattr(transformers, companion).from_pretrained(location, revision=revision, **safe)
        settings = transformers.AutoConfig.from_pretrained(location, revision=revision, **safe)
        settings._attn_implementation = settings._experts_implementation = None  # torch's own
        if torch.get_default_device().type != "meta" and not mapped:  # they need no memory
            with torch.device("meta"):
                _check_size(key, transformers.AutoModel.from_config(settings, **safe))
        if pretrained:
            single |= {"revision": revision, "config": settings, "use_safetensors": True}
            return transformers.AutoModel.from_pretrained(location, **single), beside
        return transformers.AutoModel.from_config(settings, **single), beside


def checkpoint_activations(model: Any) -> None:
    """Make a model of transformers recompute its activations in backward, as model.grad_checkpointing=true asks."""
    renamed = getattr(model, "activation_checkpointing_enable", None)  # in transformers 5.x
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers: the longest list of modules in it."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[model])


def _dtype_of(name: str) -> torch.dtype:
    """Return the dtype of the weights in the first file of a model; float32 if there are several, or no file."""
    index = file_of(name, "model.safetensors.index.json", fetch=True)
    first = "model.safetensors" if index is None else min(read_json(index)["weight_map"].values())
    if (path := file_of(name, first, fetch=True)) is None:
        return torch.float32
    with safe_open(path, "pt") as opened:
        kinds = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get("".join(kinds), torch.float32)


def _check_size(key: str, model: nn.Module) -> None:
    """Raise ConfigError if the float32 weights of a model, built on the meta device, exceed the machine's memory.

    key: the configuration key that names the model, for the message.
    """
    numbers = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    needed, memory = 4 * numbers / 2**30, psutil.virtual_memory().total / 2**30
    if needed > memory:
        raise ConfigError(f"{key}: {numbers:.3g} weights take {needed:.3g} GiB, this machine has {memory:.3g} GiB")
