"""Find the layers of a tower, which are sharded one by one; freeze all but the last; recompute activations."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile
from typing import Any

from torch import nn

from dyad.train.towers.libraries.published import explain_errors

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated layers of `module`, such as transformer blocks, which sharding gathers one after the other.

    They come in the order of the module's children, outermost layers only. Layers are two or more children of one class
    that together have more than half of the weights of the module that contains them: items of a ModuleList or the like
    (LISTS), or attributes that have children of their own. All other children are searched recursively. A module
    without layers yields nothing.
    """
    children = list(module.children())
    for alike in _by_class(children, isinstance(module, LISTS)):
        if len(alike) > 1 and 2 * _size(alike) > _size([module]):
            yield from (layer for child in children for layer in ([child] if child in alike else layers_of(child)))
            return
    for child in children:
        yield from layers_of(child)


def _by_class(modules: Sequence[nn.Module], listed: bool) -> Iterator[list[nn.Module]]:
    """Yield the modules of each class as one list.

    listed: whether `modules` are the items of a ModuleList or the like (LISTS); if not, the result leaves out lists and
    modules without children, which are no layers.
    """
    of_class: dict[type, list[nn.Module]] = {}
    for module in modules:
        if listed or (any(True for _ in module.children()) and not isinstance(module, LISTS)):
            of_class.setdefault(type(module), []).append(module)
    yield from of_class.values()


def _size(modules: Iterable[nn.Module]) -> int:
    """Return the number of weights of all `modules` together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def checkpoint_activations(model: Any) -> None:
    """Make a model of open_clip, timm or transformers, in place, recompute activations in the backward pass.

    This is activation checkpointing, for model.grad_checkpointing=true: less memory, more time, the same gradients.
    Raises ConfigError if the library raises an error, as the model does not support it. open_clip's ModifiedResNet, and
    a TimmModel that does not support it, raise none and recompute nothing.
    """
    problem = f"model.grad_checkpointing=true: {type(model).__name__} does not support it"
    with explain_errors(problem, "Set model.grad_checkpointing=false"):
        if hasattr(model, "set_grad_checkpointing"):  # open_clip and timm
            model.set_grad_checkpointing(True)
        else:
            renamed = getattr(model, "activation_checkpointing_enable", None)  # in transformers 5.x
            (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})


def layer_stack(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers in order: its longest nn.ModuleList as a list; without one, [model].

    For a model of transformers, model.text.unlocked_layers and model.image.unlocked_groups count these layers, from the
    last.
    """
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[model])


def freeze(trunk: nn.Module, parts: Sequence[nn.Module], count: int) -> None:
    """Freeze `trunk` except for the last `count` layers of `parts` and the parameters after them in trunk.parameters().

    parts: layers of the trunk, in the order in which trunk.parameters() yields their parameters; unless `count` is 0
    there must be at least one, and each must have parameters. count=0 freezes all. A count above the number of parts
    freezes only what comes before the first part.
    """
    trunk.requires_grad_(False)
    if count > 0:
        first = next(parts[-min(count, len(parts))].parameters())
        for parameter in dropwhile(lambda p: p is not first, trunk.parameters()):
            parameter.requires_grad_(True)
