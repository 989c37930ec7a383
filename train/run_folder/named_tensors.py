"""Name the tensors of modules, and copy saved tensors of these names into them, whole or only this rank's rows."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.distributed.sharded_tensors import local, own_rows
from dyad.train.run_folder.tensor_files import SavedTensors, shape_of


def named_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of `modules` by name, "<key of the module>.<path in it>".

    They are the tensors themselves, with their autograd state, not copies. A tensor that is shared is returned once,
    under its first name. Pass the modules without their DistributedDataParallel wrappers, so that the names are the
    same for any number of ranks.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for part, module in modules.items():
        # keep_vars: the tensors themselves. Detached ones would be other objects, which do not show what is shared.
        for name, tensor in module.state_dict(prefix=f"{part}.", keep_vars=True).items():
            if isinstance(tensor, Tensor):  # not the per-sample state of an objective, which has a file of its own
                found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def restore_weights(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Copy `weights` (name → tensor) into `modules` (prefix of the names → module), in place.

    Names are those of `named_tensors`. Of a sharded tensor this rank's rows are copied. Weights whose prefix is not
    among `modules` are ignored. Raises ConfigError with the names that are missing, unexpected or of another shape,
    before anything is changed.
    """
    refuse_another_model(weights, modules)
    for name, tensor in named_tensors(modules).items():
        fill(tensor, weights, name)


def refuse_another_model(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError unless `weights` have the names and shapes of the tensors of `modules`.

    Weights whose prefix is not a key of `modules` are ignored.
    """
    own, ours = named_tensors(modules), tuple(f"{key}." for key in modules)
    given = {name: shape_of(weights, name) for name in weights if name.startswith(ours)}
    problems = {
        "not in the checkpoint": [n for n in own if n not in given],
        "not in this model": [n for n in given if n not in own],
        "of another shape": [
            f"{n} {tuple(given[n])} there, {tuple(own[n].shape)} here"
            for n in own
            if n in given and given[n] != own[n].shape
        ],
    }
    if shown := "".join(
        f"\n  {what}: {', '.join(names[:4])}" + f" and {len(names) - 4} more" * (len(names) > 4)
        for what, names in problems.items()
        if names
    ):
        raise ConfigError(f"the checkpoint is of another model:{shown}")


@torch.no_grad()
def fill(tensor: Tensor, saved: Mapping[str, Tensor], name: str) -> Tensor:
    """Copy saved[name] into `tensor` in place and return `tensor`; if it is sharded, copy only this rank's rows.

    The values take on the dtype and device of `tensor`. saved[name] must be the whole tensor, of the same shape.
    """
    rows = own_rows(tensor)
    if rows is not None and isinstance(saved, SavedTensors):
        local(tensor).copy_(saved.rows(name, rows))
    else:
        local(tensor).copy_(saved[name] if rows is None else saved[name][rows])
    return tensor


def state_like(parameter: Tensor, saved: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a copy of saved[name], a tensor of the optimiser state of `parameter`, for optimizer.load_state_dict.

    For a sharded parameter, a tensor of its shape is copied into a tensor that is sharded alike. In all other cases the
    copy is on the CPU; if it has the shape of the parameter, it takes on the parameter's memory format (for example
    channels last), because the fused AdamW ignores strides. A copy is needed because saved tensors are memory-mapped
    from a file that may be deleted.
    """
    if shape_of(saved, name) != parameter.shape:
        return saved[name].clone()
    if own_rows(parameter) is not None:
        return fill(torch.empty_like(parameter), saved, name)
    value = saved[name]
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
