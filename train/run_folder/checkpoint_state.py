"""The content of a checkpoint, which `capture` collects from a run's objects and `restore` copies into them again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dyad.data.base.errors import ConfigError
from dyad.train.distributed.sharded_tensors import local, own_rows
from dyad.train.run_folder.checkpoint_parts import Part
from dyad.train.run_folder.named_tensors import fill, named_tensors, refuse_another_model, restore_weights, state_like
from dyad.train.run_folder.tensor_files import shape_of

MODEL, OPTIMIZER, SAMPLE_STATE = "model.safetensors", "optimizer.safetensors", "memory.safetensors"
AVERAGE, TARGET, STATE, MANIFEST = "average.safetensors", "target.safetensors", "state.json", "manifest.json"
OPTIONAL = (SAMPLE_STATE, AVERAGE, TARGET)
# field of CheckpointState → the file of its tensors
TENSORS = {"model": MODEL, "optimizer": OPTIMIZER, "sample_state": SAMPLE_STATE, "average": AVERAGE, "target": TARGET}
SCALARS, BEST = "optimizer_scalars", "best"  # keys of state.json
# entries of an optimiser's groups that follow from the configuration
OF_CONFIG = {"params", "lr", "lr_scale", "initial_lr", "weight_decay"}


@dataclass
class CheckpointState:
    """The content of a checkpoint.

    step: the number of finished optimiser steps. model: parameters and buffers by name. optimizer: tensors of the
    optimiser's state, by "<parameter name>/<key>", or by "<index of the parameter group>/<key>" if a group has them.
    scalars: values of the optimiser's state that are no tensors (numbers or None), by the same kinds of names.
    metadata: further entries of state.json, chosen by the caller. sample_state: the objective's per-sample state, one
    entry per training sample; empty if it has none. average: the moving average of the trained weights by name; empty
    if there is none. target: the weights of the target network by name; empty if there is none. part: with sharded
    towers, (index of the part that this rank writes, number of parts, name of this attempt to save, equal on all
    ranks); None: this object has the whole content. rows: name of a sharded weight → the slice of its rows (dimension
    0) that this object has.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    metadata: dict[str, Any]
    sample_state: Mapping[str, Tensor]
    scalars: dict[str, float | None] = field(default_factory=dict)
    average: Mapping[str, Tensor] = field(default_factory=dict)
    target: Mapping[str, Tensor] = field(default_factory=dict)
    part: Part | None = None
    rows: Mapping[str, slice] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Name of each safetensors file to write → its tensors by name; without files of OPTIONAL that have none."""
        found = {name: getattr(self, part) for part, name in TENSORS.items()}
        return {name: tensors for name, tensors in found.items() if tensors or name not in OPTIONAL}


def capture(
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    step: int,
    metadata: dict[str, Any],
    sample_state: Mapping[str, Tensor] | None = None,
    average: Mapping[nn.Parameter, Tensor] | None = None,
    target: Mapping[nn.Parameter, Tensor] | None = None,
    part: Part | None = None,
) -> CheckpointState:
    """Collect the content of a checkpoint from the objects of a run, and return it as a CheckpointState.

    The tensors are references, not copies: save or copy them before the next optimiser step. Of sharded tensors, they
    have this rank's rows. modules: prefix of weight names → module, without DDP wrapper; they must have all parameters
    of `optimizer`. step: finished optimiser steps. metadata: further entries of state.json, under other keys than
    "step" and SCALARS. sample_state: the objective's per-sample state, one entry per training sample; None if it has
    none. average: parameter → its moving average; None if there is none. target: trained parameter → weight of the
    target network; None if there is none. part: as in CheckpointState. Raises TypeError for an optimiser whose state
    has values other than tensors, numbers and None.
    """
    assert not {"step", SCALARS} & set(metadata), "these keys of state.json are the checkpoint's own"
    model = named_tensors(modules)
    name_of = {id(tensor): name for name, tensor in model.items()}
    slots = {  # AdamW's are all tensors, the step count too
        f"{name_of[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    slots |= {
        f"{i}/{key}": group[key]
        for i, group in enumerate(optimizer.param_groups)
        for key in sorted(group.keys() - optimizer.defaults.keys() - OF_CONFIG)
    }
    scalars = {key: value for key, value in slots.items() if not isinstance(value, Tensor)}
    if foreign := [key for key, value in scalars.items() if not isinstance(value, int | float | None)]:
        raise TypeError(f"no checkpoint holds what this optimiser keeps as '{foreign[0].rpartition('/')[2]}'")
    tensors = {key: local(value) for key, value in slots.items() if key not in scalars}
    copies = ({name_of[id(p)]: local(tensor) for p, tensor in (copy or {}).items()} for copy in (average, target))
    rows = {name: own for name, tensor in model.items() if (own := own_rows(tensor)) is not None}
    model = {name: local(tensor) for name, tensor in model.items()}
    per_sample = dict(sample_state or {})
    return CheckpointState(step, model, tensors, metadata, per_sample, scalars, *copies, part=part, rows=rows)


def restore(state: CheckpointState, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> list[dict[Any, Tensor]]:
    """Copy a checkpoint's weights into `modules` and its optimiser state into `optimizer`, bit for bit.

    modules: prefix of weight names → module, as for `capture`; weights of other prefixes are ignored. Returns a list of
    two mappings, the moving average and the target network's weights: each is trained parameter → new tensor on the
    device, and with the sharding, of the parameter; empty if the checkpoint has none. `state.sample_state` is not
    restored here. Raises ConfigError, with nothing changed, if the weights, the optimiser state, the average or the
    target are of another model.
    """
    refuse_another_model(state.model, modules)
    named = named_tensors(modules)
    # torch numbers optimiser state by the position of its parameter; the checkpoint names it
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = {str(i): group for i, group in enumerate(optimizer.state_dict()["param_groups"])}
    slots: dict[int, dict[str, Any]] = {}
    for entry in (*state.optimizer, *state.scalars):
        name, _, key = entry.rpartition("/")
        if name in groups and key not in optimizer.defaults.keys() | OF_CONFIG:
            groups[name][key] = state.scalars[entry] if entry in state.scalars else state.optimizer[entry].clone()
            continue
        if name not in named or id(named[name]) not in position:
            raise ConfigError(f"the checkpoint has optimiser state of '{name}', which this model does not train")
        own = state_like(named[name], state.optimizer, entry) if entry in state.optimizer else state.scalars[entry]
        slots.setdefault(position[id(named[name])], {})[key] = own
    check_adamw_state(slots, optimizer)
    copies = state.average, state.target
    trained = {name: tensor.shape for name, tensor in named.items() if id(tensor) in position}
    if wrong := [name for copy in copies for name in copy if trained.get(name) != shape_of(copy, name)]:
        what = f"an average or target of '{wrong[0]}', which this model does not train in this shape"
        raise ConfigError(f"the checkpoint has {what}")
    restore_weights(state.model, modules)
    optimizer.load_state_dict({"state": slots, "param_groups": [*groups.values()]})
    return [{named[n]: fill(torch.empty_like(named[n]), copy, n) for n in copy} for copy in copies]


def check_adamw_state(slots: Mapping[int, Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise ConfigError if `optimizer` is AdamW and a saved state has other keys or shapes than AdamW's state.

    slots: position of a parameter in the optimiser's groups, counted through all of them → its saved state, key →
    value; a parameter without saved state passes. Other optimisers are not checked. The check is needed because AdamW's
    fused kernel does not check shapes: it would write past the end of a tensor that is too short.
    """
    if not isinstance(optimizer, AdamW):
        return
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        shapes = {key: getattr(value, "shape", None) for key, value in slots.get(i, {}).items()}
        if shapes and shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            of = ", ".join(f"{key} {'' if shape is None else tuple(shape)}".strip() for key, shape in shapes.items())
            raise ConfigError(f"optimiser state of a weight {tuple(parameter.shape)} is none of AdamW: {of}")
