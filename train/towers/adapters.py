"""Add low-rank adapters (LoRA, Hu et al. 2021) to the trunk of a tower by peft, and merge them into its weights.

open_clip's transformers use torch's nn.MultiheadAttention, which holds its query, key and value weights as one
parameter and calls no layer for them. peft's own wrapper of this module adds the adapters' product to the parameter in
every forward pass and subtracts it afterwards, which rounds: the weights drift. AdaptedAttention does not change them.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.config import ImageTowerConfig, TextTower, TextTowerConfig
from dyad.train.towers.libraries.published import explain_errors


class AdaptedAttention(nn.MultiheadAttention):
    """An nn.MultiheadAttention with LoRA adapters of its query, key and value weights, which are one parameter W.

    It computes with W + lora_scale · lora_B lora_A. W: (3 width, width); lora_A: (rank, width); lora_B: (3 width,
    rank). Made by `adapt` only, never by its constructor.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    @classmethod
    def adapt(cls, attention: nn.MultiheadAttention, rank: int, alpha: float) -> None:
        """Turn `attention` into an AdaptedAttention in place, with adapters of the scale alpha / rank.

        `attention` must have its query, key and value weights in one parameter. lora_B starts at zero, so the outputs
        do not change yet. The existing parameters keep their names, and train or not as before.
        """
        weight = attention.in_proj_weight
        attention.__class__ = cls
        adapted = cast(AdaptedAttention, attention)
        adapted.lora_A, adapted.lora_scale = nn.Parameter(weight.new_empty(rank, weight.shape[1])), alpha / rank
        adapted.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(adapted.lora_A, a=5**0.5)  # as peft does

    def merge(self) -> None:
        """Add the adapters to the weights, and turn this module back into a plain nn.MultiheadAttention, in place.

        The sum is a new parameter, which trains.
        """
        weight = self.in_proj_weight.detach()
        del self.lora_A, self.lora_B
        self.__class__ = nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters["in_proj_weight"] = nn.Parameter(weight)

    @property
    def in_proj_weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The query, key and value weights with the adapters' product added: (3 width, width)."""
        return cast(Tensor, self._parameters["in_proj_weight"]) + self.lora_scale * (self.lora_B @ self.lora_A)


def add_adapters(trunk: nn.Module, options: ImageTowerConfig | TextTowerConfig, key: str) -> None:
    """Add LoRA adapters, in place, to the modules of `trunk` that `options` names in lora_targets; freeze all else.

    options: the tower's configuration, which also gives the rank and the scale (alpha). If lora_targets is None, a text
    model of transformers gets adapters in the modules that peft's table names for it, and any other trunk in every
    nn.MultiheadAttention and linear layer, out_proj of the former excepted, with "att" in its dotted name, such as
    blocks.0.attn.qkv. key: "model.image" or "model.text", for messages. The adapters' product is zero at first, so the
    outputs do not change. Raises ConfigError for lora_targets that name no module; and if lora_targets is None, for a
    trunk without attention or a text model that peft's table lacks.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules = dict(trunk.named_modules())
    packed = {name: module for name, module in modules.items() if type(module) is nn.MultiheadAttention}
    unused = [f"{name}.out_proj" for name in packed]  # its forward is not called
    layers = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in unused]
    targets = options.lora_targets
    if targets is None and options.kind is not TextTower.transformers:
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
    """In the `with` block, replace the data of all weights of `trunk` by float32 placeholders of the same shapes.

    peft creates adapters in the dtype of the weights, which may be half precision; here they become float32. At the
    end of the block the weights have their own data again.
    """
    held = {parameter: parameter.data for parameter in trunk.parameters()}
    for parameter, data in held.items():
        parameter.data = torch.empty(1, device=data.device).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in held.items():
            parameter.data = data


def merged(trunk: nn.Module) -> nn.Module:
    """Return a copy of `trunk` with its LoRA adapters added to the weights and no adapter modules.

    A trunk without adapters is returned itself, not copied.
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
