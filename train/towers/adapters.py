"""Add low-rank adapters (LoRA, Hu et al. 2021) to the trunk of a tower by peft, and merge them into its weights.

torch's nn.MultiheadAttention, of which open_clip's transformers are made, holds its query, key and value weights as one
parameter, for which it calls no layer. peft's own wrapper of it adds the adapters' product to that parameter in every
forward pass and subtracts it afterwards, which rounds: the weights drift. AdaptedAttention leaves them as they are.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.config import ImageTowerConfig, TextTowerConfig
from dyad.train.towers.libraries.published import explain_errors


class AdaptedAttention(nn.MultiheadAttention):
    """An attention with adapters A (rank, width) and B (3 width, rank) of its query, key and value weights, as LoRA."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    @classmethod
    def adapt(cls, attention: nn.MultiheadAttention, rank: int, alpha: float) -> None:
        """Turn `attention` into an AdaptedAttention, in place. lora_B starts at zero, so outputs do not change yet; its
        own parameters keep their names. The scale of the adapters is alpha / rank."""
        weight = attention.in_proj_weight
        attention.__class__ = cls
        adapted = cast(AdaptedAttention, attention)
        adapted.lora_A, adapted.lora_scale = nn.Parameter(weight.new_empty(rank, weight.shape[1])), alpha / rank
        adapted.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(adapted.lora_A, a=5**0.5)  # as peft does

    def merge(self) -> None:
        """Add the adapters to the weights, and become a plain nn.MultiheadAttention again."""
        weight = self.in_proj_weight.detach()
        del self.lora_A, self.lora_B
        self.__class__ = nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters["in_proj_weight"] = nn.Parameter(weight)

    @property
    def in_proj_weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weights (3 width, width) with which the attention computes: its own and the adapters' product."""
        return cast(Tensor, self._parameters["in_proj_weight"]) + self.lora_scale * (self.lora_B @ self.lora_A)


def add_adapters(trunk: nn.Module, options: ImageTowerConfig | TextTowerConfig, key: str) -> None:
    """Add LoRA adapters, in place, to the modules of `trunk` that `options` names in lora_targets; freeze all else.

    options: also gives the rank and the scale (alpha). Without names, texts get adapters where peft's table of models
    says, images in every linear layer and nn.MultiheadAttention of an attention. key: model.image or model.text. The
    adapters' product is zero at first, so the outputs do not change. Raises ConfigError for modules that do not exist.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules = dict(trunk.named_modules())
    packed = {name: module for name, module in modules.items() if type(module) is nn.MultiheadAttention}
    unused = [f"{name}.out_proj" for name in packed]  # its forward is not called
    layers = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in unused]
    targets = options.lora_targets
    if targets is None and isinstance(options, ImageTowerConfig):
        targets = [name for name in (*layers, *packed) if "att" in name.lower()]
    own = [name for name in packed if targets and any(f".{name}".endswith(f".{target}") for target in targets)]
    others = targets and [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in own)]
    choices = ", ".join(sorted({name.rpartition(".")[2] for name in (*layers, *packed)}))
    advice = f"Choose of {choices}" if choices else "This tower has no layer for adapters: leave lora_rank out"
    if targets == []:
        missing = "the tower has no attention, which adapters go to unless lora_targets names layers"
        where = missing if options.lora_targets is None else "lora_targets=[] names no layer"
        raise ConfigError(f"{key}.lora_rank={options.lora_rank}: {where}. {advice}")
    trunk.requires_grad_(False)
    with explain_errors(f"{key}.lora_targets={options.lora_targets}", advice), _as_float32(trunk):
        if others != [] or not own:
            lora = LoraConfig(
                r=options.lora_rank,
                lora_alpha=options.lora_alpha,  # pyright: ignore[reportArgumentType]: a float is fine
                target_modules=others,
                exclude_modules=unused,
            )
            inject_adapter_in_model(lora, trunk)
    for name in own:
        AdaptedAttention.adapt(packed[name], options.lora_rank, options.lora_alpha)


@contextmanager
def _as_float32(trunk: nn.Module) -> Iterator[None]:
    """In the block, the weights of `trunk` have no values and say that they are float32: peft rounds to their dtype."""
    held = {parameter: parameter.data for parameter in trunk.parameters()}
    for parameter, data in held.items():
        parameter.data = torch.empty(1, device=data.device).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in held.items():
            parameter.data = data


def merged(trunk: nn.Module) -> nn.Module:
    """Return a copy of `trunk` whose weights include its LoRA adapters, so that it needs no peft.

    A trunk without adapters is returned as it is, not copied.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(module, BaseTunerLayer | AdaptedAttention) for module in trunk.modules()):
        return trunk
    plain = copy.deepcopy(trunk)
    for name, module in list(plain.named_modules()):
        vars(module).pop("peft_config", None)
        if isinstance(module, BaseTunerLayer | AdaptedAttention):
            module.merge()
        if isinstance(module, BaseTunerLayer):
            plain.set_submodule(name, module.get_base_layer())
    return plain
