"""Low-rank adapters (LoRA, Hu et al. 2021) of a transformers encoder, by peft: added, and merged into its weights."""

from __future__ import annotations

import copy

from torch import nn

from dyad.data.base.errors import ConfigError, first_line
from dyad.train.config import TextTowerConfig


def add_adapters(encoder: nn.Module, config: TextTowerConfig) -> None:
    """Add adapters to the modules that `config` names, in place. Only the adapters train.

    They start at zero, so that outputs do not change at first. Raises ConfigError for modules that do not exist.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = None if config.lora_targets is None else list(config.lora_targets)
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets)  # pyright: ignore[reportArgumentType]: a float is fine
    try:
        inject_adapter_in_model(lora, encoder)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, module in encoder.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigError(
            f"model.text.lora_targets={targets}: {first_line(error)}. Choose of {', '.join(sorted(linear))}"
        ) from error


def merged(encoder: nn.Module) -> nn.Module:
    """A copy of the encoder with its adapters added into its weights; the encoder itself if it has no adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(module, BaseTunerLayer) for module in encoder.modules()):
        return encoder
    plain = copy.deepcopy(encoder)
    for name, module in list(plain.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            plain.set_submodule(name, module.get_base_layer())
    del plain.peft_config
    return plain
