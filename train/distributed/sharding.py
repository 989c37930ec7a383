"""Sharded towers (dist=fsdp2, hsdp): a rank holds a part of every weight, of its gradient and its optimiser state.

torch's fully_shard does it (FSDP2; Zhao et al. 2023, arXiv 2304.11277): a layer's weights are gathered when the layer
runs, forward and backward, and dropped after it. fsdp2: all ranks share one copy of the weights. hsdp: dist.shard_size
ranks share one, by default those of a machine; gradients are then also averaged over the copies.

A collective runs in every forward pass of a layer. So every rank must call each tower equally often: sharded towers do
not group texts by length, do not cache the features of a frozen trunk, and keep the graph of the last chunk alone.
"""

import os
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from dyad.data.base.errors import ConfigError
from dyad.train.config import DistConfig, Parallel
from dyad.train.distributed.sharded_tensors import split_sharded
from dyad.train.distributed.world import World, linked
from dyad.train.towers.layers import layers_of
from dyad.train.towers.text.rows import Grouped
from dyad.train.towers.tower import Tower, TwoTower

# Whether gradients are averaged when we ask for it. torch 2.11 and older average them in the last backward of a layer.
FINALIZED = hasattr(FSDPModule, "finalize_backward")


def shard_size(config: DistConfig, world_size: int, ranks_per_machine: int | None = None) -> int:
    """Return how many ranks share one copy of the weights, by the keys dist.*; 1: every rank has all weights.

    world_size: the number of ranks. ranks_per_machine: the default for hsdp; None: the LOCAL_WORLD_SIZE of this job.
    Raises ConfigError if the result does not divide world_size.
    """
    if config.name is Parallel.ddp:
        return 1
    ranks_per_machine = ranks_per_machine or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = config.shard_size or (world_size if config.name is Parallel.fsdp2 else ranks_per_machine)
    if world_size % size:
        choices = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(f"dist.shard_size={size}: does not divide the {world_size} processes. Choices: {choices}")
    return size


def shard(
    towers: Iterable[nn.Module], config: DistConfig, dtype: torch.dtype | None, compiled: bool, world: World
) -> None:
    """Shard towers in place, and move them to the device of this process; do nothing if `shard_size` is 1.

    dtype: that of autocast, None without autocast. On GPUs weights are gathered in `dtype`, and gradients are averaged
    in float32; on CPUs the dtype of the weights is used for both, since norms there take no mixed dtypes. compiled:
    whether to torch.compile each layer of the towers. Weights in half precision are converted to float32, and towers no
    longer group texts by length or cache features. Every rank must call it. Raises ConfigError as `shard_size` does.
    """
    if (size := shard_size(config, world.size)) == 1:
        return
    mesh = _mesh(size, world)
    gathered = dtype if world.device.type == "cuda" else None
    policy = MixedPrecisionPolicy(gathered, reduce_dtype=gathered and torch.float32, cast_forward_inputs=False)
    for tower in dict.fromkeys(towers):
        for module in tower.modules():
            if isinstance(module, Grouped):
                module.grouped = False
            elif isinstance(module, Tower):
                module.drop_cache()
        layers = list(layers_of(tower))
        for layer in layers if compiled else ():
            layer.compile()
        # The root, too, frees its weights after a forward pass: the next may be of other weights (an average, a target)
        for module in (*layers, tower):
            # Here a layer that was left in its file is read. fully_shard takes no channels-last weights
            for parameter in split_sharded(module.parameters())[0]:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32)).contiguous()
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # gloo of torch 2.8 gives the sum where it is asked for the mean
            module.set_force_sum_reduction_for_comms(world.device.type == "cpu")
        assert isinstance(tower, FSDPModule)
        if FINALIZED:
            tower.set_manual_backward_finalization(True)
        for name in ("features", "contexts"):
            if hasattr(tower, name):
                register_fsdp_forward_method(tower, name)


def describe_layers(towers: TwoTower, size: int) -> Iterator[str]:
    """Yield a line for the log on each tower: how many layers are gathered one by one, or a warning if there are none.

    A tower without weights has no line. size: how many ranks share one copy of the weights; for 1 nothing is yielded.
    """
    for side, tower in (("x", towers.x_tower), ("y", towers.y_tower)) if size > 1 else ():
        if count := len(list(layers_of(tower))):
            yield f"the {side} tower is gathered layer by layer, {count} layers"
        elif any(True for _ in tower.parameters()):
            problem = f"warning: the {side} tower has no layers of one class: all its weights are gathered at once"
            yield f"{problem}. Give its blocks one class, in an nn.ModuleList"


def _mesh(size: int, world: World) -> DeviceMesh:
    """Return the device mesh of fully_shard: (size,) for one copy of the weights, else (copies, size).

    size: how many ranks share one copy; it divides world.size. Every rank must call it.
    """
    copies = world.size // size
    if copies == 1:
        return init_device_mesh(world.device.type, (size,))
    with linked(world):
        return init_device_mesh(world.device.type, (copies, size), mesh_dim_names=("copy", "shard"))
