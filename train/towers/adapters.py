"""Add low-rank adapters (LoRA, Hu et al. 2021) to a transformers encoder, and merge them into its weights, by peft."""

import copy

from torch import nn

from dyad.train.config import TextTowerConfig
from dyad.train.towers.published import explained


def add_adapters(encoder: nn.Module, config: TextTowerConfig) -> None:
    """Add LoRA adapters, in place, to the modules of `encoder` that model.text.lora_targets names; freeze all else.

    config: gives the names, the rank and the scale (alpha). Without names, peft chooses the attention projections. The
    adapters' product is zero at first, so the outputs do not change. Raises ConfigError for modules that do not exist.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = config.lora_targets
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets)  # pyright: ignore[reportArgumentType]: a float is fine
    linear = {name.rpartition(".")[2] for name, module in encoder.named_modules() if isinstance(module, nn.Linear)}
    with explained(f"model.text.lora_targets={targets}", f"Choose of {', '.join(sorted(linear))}"):
        inject_adapter_in_model(lora, encoder)


def merged(encoder: nn.Module) -> nn.Module:
    """Return a copy of `encoder` whose weights include its LoRA adapters, so that it needs no peft.

    An encoder without adapters is returned as it is, not copied.
    """
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
