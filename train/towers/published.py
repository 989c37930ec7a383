"""Models of others, as folders or by published names: weights and settings are read, code that comes along never runs.

NAME@REVISION is one state of a published model: a commit never changes.
"""

from __future__ import annotations

import os
from typing import Any

from data.errors import ConfigError, first_line

READ = ["*.json", "*.txt", "*.model", "*.safetensors"]


def refuse_code() -> None:
    """transformers would ask whoever sits at the terminal, for 15 s, whether to run it; call before a library loads."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def refuse_code_of(key: str, model_cfg: dict[str, Any] | None) -> None:
    """Raise ConfigError for an open_clip configuration that would have transformers run code for its tokenizer."""
    options = (model_cfg or {}).get("text_cfg", {}).get("tokenizer_kwargs") or {}
    if options.get("trust_remote_code"):
        raise ConfigError(f"{key}: its tokenizer_kwargs ask to run code that comes with the model, which is never done")


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
