"""Load a model of transformers, its tokenizer or image processor, without running code that comes with it."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import checked_path
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.libraries.published import (
    WRAPPERS,
    check_files,
    check_settings,
    explain_errors,
    file_of,
    listed,
    location_of,
    read_json,
    refuse_code,
    split_revision,
)

UNUSED_HEADS = ("pooler",)  # modules of encoders that a tower with a pooling of its own does not use
SAFE = {"trust_remote_code": False}

_in_files: ContextVar[bool] = ContextVar("_in_files", default=False)


@contextmanager
def weights_in_files() -> Iterator[None]:
    """In the `with` block, let `load_model` memory-map weights from their files, in the dtype of the files.

    Outside of such a block, `load_model` copies weights to memory as float32. With memory-mapped weights, a rank can
    load a model that is larger than the memory of its machine, and read only the part that it trains.
    """
    token = _in_files.set(True)
    try:
        yield
    finally:
        _in_files.reset(token)


@dataclass(frozen=True)
class TransformersModel:
    """A model of transformers, and the names of weights that only the model has or only its files have.

    key: the configuration key and value that named the model, for messages. pretrained: whether weights were loaded.
    missing: names of the model's weights that its files lack, which are random. unexpected: names of weights in its
    files that the model does not have, such as those of a head.
    """

    key: str
    model: Any
    pretrained: bool
    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()

    @property
    def calibration(self) -> Calibration | None:
        """The logit scale and bias among the weights; None for random weights or a model without a logit scale."""
        if not self.pretrained or (scale := getattr(self.model, "logit_scale", None)) is None:
            return None
        return Calibration.of(self.key, scale, getattr(self.model, "logit_bias", None))

    def refuse_missing(self, *used: nn.Module, pooled: bool) -> None:
        """Raise ConfigError if the files lack a weight of the modules `used`.

        pooled: whether the tower has a pooling of its own, so that weights of UNUSED_HEADS may be missing.
        """
        heads = [getattr(module, head, None) for module in used for head in UNUSED_HEADS] if pooled else []
        unused = {id(tensor) for head in heads if head for tensor in head.parameters()}
        needed = {id(tensor) for module in used for tensor in chain(module.parameters(), module.buffers())} - unused
        named = chain(self.model.named_parameters(), self.model.named_buffers())
        if names := [name for name, tensor in named if name in self.missing and id(tensor) in needed]:
            raise ConfigError(
                f"{self.key}: its weights lack {listed(names)}; unknown are {listed(sorted(self.unexpected))}. Such "
                "weights would be random. Take the whole model, or model.….from_scratch=true"
            )


def load_companion(key: str, name: str, companion: str) -> Any:
    """Load the tokenizer or image processor that comes with a model of transformers.

    companion: the class of transformers that loads it, "AutoTokenizer" or "AutoImageProcessor". key, name: as in
    `load_model`. Files that the hub's cache lacks are downloaded. Raises ConfigError when loading fails, and for files
    that `_checked` refuses.
    """
    import transformers

    location, revision = _checked(key, name)
    files = f"config.json, model.safetensors and the files of {companion}"
    with explain_errors(key, f"Without a network give the path of a folder with {files}"):
        return getattr(transformers, companion).from_pretrained(location, revision=revision, **SAFE)


def load_model(key: str, name: str, pretrained: bool, kind: str = "AutoModel") -> TransformersModel:
    """Load a model of transformers from `name`: a folder, pkg:PACKAGE/FOLDER or a published model.

    key: the configuration key with its value, for messages. pretrained: load the model's weights; else they are random.
    Weights are float32, except in a block of `weights_in_files`. Prefixes of WRAPPERS are stripped from their names.
    Weights that the files lack raise no error here, see TransformersModel.refuse_missing. Files that the hub's cache
    lacks are downloaded. Turns off the progress bars of transformers for this process. kind: the class of transformers
    that loads the model, "AutoModelForCausalLM" for a causal language model. No file of the model can choose code to
    run, neither a class that comes with the model nor an attention kernel. Raises ConfigError when loading fails, for
    files that `_checked` refuses, for weights that are a pickle, and for a model that as float32 is larger than the
    machine's memory, unless it is memory-mapped or on the meta device.
    """
    import transformers

    auto = getattr(transformers, kind)
    transformers.logging.disable_progress_bar()
    location, revision = _checked(key, name)
    if pretrained:
        _refuse_pickle(key, Path(location))
    mapped = pretrained and _in_files.get()
    with explain_errors(key, "Without a network give the path of a folder with config.json and model.safetensors"):
        dtype, prefixed = _weights_of(name) if pretrained else (torch.float32, False)
        settings = transformers.AutoConfig.from_pretrained(location, revision=revision, **SAFE)
        settings._attn_implementation = settings._experts_implementation = None  # torch's own
        if torch.get_default_device().type != "meta" and not mapped:  # else the weights need no memory
            with torch.device("meta"):
                _check_size(key, auto.from_config(settings, **SAFE))
        if not pretrained:
            return TransformersModel(key, auto.from_config(settings, dtype=torch.float32, **SAFE), False)
        with _without_report():
            model, found = auto.from_pretrained(
                location,
                revision=revision,
                config=settings,
                dtype=dtype if mapped else torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                key_mapping={rf"^({WRAPPERS})+": ""} if prefixed else None,
                **SAFE,
            )
        if prefixed:
            model._weight_conversions = None  # save_pretrained would write the prefix again
    return TransformersModel(key, model, True, frozenset(found["missing_keys"]), frozenset(found["unexpected_keys"]))


@contextmanager
def _without_report() -> Iterator[None]:
    """In the `with` block, transformers prints no table of missing and further weights; we refuse what matters."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _refuse_pickle(key: str, folder: Path) -> None:
    """Raise ConfigError if a folder has its weights as a pickle (pytorch_model.bin) and no .safetensors file.

    The message has a command that converts the weights by torch.load with weights_only: loading a pickle in another way
    could run code that it contains.
    """
    pickle, weights = folder / "pytorch_model.bin", folder / "model.safetensors"
    if pickle.is_file() and not any(folder.glob("*.safetensors*")):
        code = (
            "import sys, torch, safetensors.torch; of = torch.load(sys.argv[1], weights_only=True); "
            "safetensors.torch.save_file({k: v.clone().contiguous() for k, v in of.items()}, sys.argv[2], "
            "{'format': 'pt'})"
        )
        command = shlex.join(["python", "-c", code, str(pickle), str(weights)])
        raise ConfigError(
            f"{key}: its weights are a pickle, {pickle.name}, which is not read. Convert it once: {command}"
        )


def _checked(key: str, name: str) -> tuple[str, str | None]:
    """Check the files of the model `name`; return its location (a folder or published name) and revision (or None).

    Also makes transformers refuse to run code of models (`refuse_code`). key: the configuration key with its value, for
    messages. Raises ConfigError for a folder that does not exist, a folder of adapters, and for what `check_files` and
    `check_settings` refuse.
    """
    location, revision = split_revision(location_of(name, key))
    if location.startswith(("/", ".")) and not os.path.isdir(location):
        raise ConfigError(f"{key}: there is no folder {location}")
    check_files(key, name)
    check_settings(key, file_of(name, "config.json", fetch=True))
    if file_of(name, "adapter_config.json", fetch=False):
        raise ConfigError(f"{key}: holds adapters beside another model. Merge them into it (peft: merge_and_unload)")
    refuse_code()
    return location, revision


def _weights_of(name: str) -> tuple[torch.dtype, bool]:
    """Read a model's first .safetensors file; return (dtype of its weights, whether any name has a WRAPPERS prefix).

    name: the model. The dtype is bfloat16 or float16 if all weights in the file have it, else float32. WRAPPERS are the
    prefixes "module." and "_orig_mod." that DDP and torch.compile put before names. Returns (float32, False) if there
    is no file.
    """
    index = file_of(name, "model.safetensors.index.json", fetch=True)
    first = "model.safetensors" if index is None else min(read_json(index)["weight_map"].values())
    if (path := file_of(name, first, fetch=True)) is None:
        return torch.float32, False
    with safe_open(checked_path(path), "pt") as opened:
        kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    prefixed = any(re.match(WRAPPERS, key) for key in kinds)
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get("".join({*kinds.values()}), torch.float32), prefixed


def _check_size(key: str, model: nn.Module) -> None:
    """Raise ConfigError if the float32 weights of a model, built on the meta device, exceed the machine's memory.

    key: the configuration key that names the model, for the message.
    """
    numbers = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    needed, memory = 4 * numbers / 2**30, psutil.virtual_memory().total / 2**30
    if needed > memory:
        raise ConfigError(f"{key}: {numbers:.3g} weights take {needed:.3g} GiB, this machine has {memory:.3g} GiB")
