"""The choices of model.batch_norm: which statistics batch norms use in training. In eval() they use running statistics.

global: mean and variance of the global batch, so neither loss nor gradient depends on the number of ranks. The forward
pass exchanges each rank's count, and for each channel its mean and sum of squared deviations; the backward pass
exchanges two sums for each channel.

per_chunk: mean and variance of each chunk on each rank, as in torch's own modules.

frozen: the running statistics as loaded, in training as well; weight and bias of the norm still train.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dyad.data.base.errors import ConfigError
from dyad.train.config import BatchNorm
from dyad.train.losses.sums.functions import first_order_only
from dyad.train.towers.text.pooled import Pooled


class GlobalStatistics(_BatchNorm):
    """A batch norm that normalises by the mean and variance over the rows of all ranks (model.batch_norm=global).

    In eval() mode, and in a run of one process, it works as the batch norm that it replaces. Otherwise every rank must
    run it equally often, forward and backward, as both communicate. `set_batch_norms` turns other norms into it.
    counts: whether the inputs of this rank count in the statistics. False while this rank has no rows and runs a dummy
    row instead.
    """

    counts = True
    over_ranks: Any  # the method _over_ranks, which torch.compile leaves as it is

    def __init_subclass__(cls) -> None:
        # Not a decorator: torch.compiler.disable imports the compiler, for a second, and models without norms need none
        cls.over_ranks = torch.compiler.disable(_over_ranks)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalise x, (b, C, …), per channel; in train() mode on several ranks, every rank must call it.

        timm's BatchNormAct2d has a dropout and an activation too, which are applied after the norm.
        """
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        output = self.over_ranks(x)
        for name in ("drop", "act"):  # as timm's BatchNormAct2d does after the norm
            output = getattr(self, name, nn.Identity())(output)
        return output


class FrozenStatistics(_BatchNorm):
    """A batch norm that stays in eval() mode and so always uses its running statistics (model.batch_norm=frozen)."""

    def train(self, mode: bool = True) -> FrozenStatistics:
        """Stay in eval() mode, whatever `mode` says."""
        return super().train(False)


class RunningStatistics:
    """Saves (`read`) and restores (`write`) the running statistics of all batch norms in train() mode.

    These are means, variances and the count of batches. Every forward pass in training updates them, but a skipped step
    and the second forward pass of a chunk (which recomputes its embeddings) must not change them. towers: the module
    with the batch norms, in the modes that they have in training when this object is made. own: the floating-point
    buffers computed from this rank's rows only (model.batch_norm=per_chunk), which therefore differ between ranks.
    """

    def __init__(self, towers: nn.Module) -> None:
        norms = batch_norms(towers)
        self._buffers = [buffer for norm in norms for buffer in norm.buffers()]
        self._global = [norm for norm in norms if isinstance(norm, GlobalStatistics)]
        single = [buffer for norm in norms if norm not in self._global for buffer in norm.buffers()]
        self.own = [buffer for buffer in single if buffer.is_floating_point()]

    def read(self) -> list[Tensor]:
        """Return copies of the statistics, in a fixed order, for `write`."""
        return [buffer.clone() for buffer in self._buffers]

    def write(self, values: list[Tensor]) -> None:
        """Copy `values`, as `read` returned them, back into the batch norms."""
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)

    def begin_step(self, rows: int) -> None:
        """Tell the batch norms with global statistics, before the forward passes of a step, whether this rank counts.

        rows: the number of rows that this rank has in the batch. If it is 0, the rank runs one dummy row through the
        towers, to take part in the collectives; the statistics of the batch norms leave that row out.
        """
        for norm in self._global:
            norm.counts = rows > 0


def batch_norms(towers: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms of `towers` that are in train() mode, in which they use statistics of the batch.

    Batch norms in frozen parts of a tower are in eval() mode and are not returned.
    """
    return [module for module in towers.modules() if isinstance(module, _BatchNorm) and module.training]


def set_batch_norms(towers: nn.Module, choice: BatchNorm) -> None:
    """Make the batch norms of `towers` use the statistics that model.batch_norm=`choice` names, in place.

    The caller must put the towers in train() mode first, and must not call it twice for one tower. Norms in frozen
    parts, which are in eval() mode, stay as they are. The class of a norm changes, except for per_chunk; the names of
    parameters and buffers do not.
    """
    kind, _ = CHOICES[choice]
    for norm in batch_norms(towers) if kind else ():
        norm.__class__ = _kind(kind, type(norm))
        norm.train()


def check_batch_norms(towers: nn.Module, choice: BatchNorm, rows: int, chunks: int, ranks: int = 1) -> str:
    """Check that model.batch_norm=`choice` works for these towers; return a line for the log, "" without batch norms.

    rows: the number of pairs on the rank that has the fewest. chunks: the number of chunks in which a rank embeds its
    pairs. ranks: the number of processes. Call it after `set_batch_norms`, in train() mode. Raises ConfigError if
        a choice other than `global` finds no batch norm
        a text encoder of transformers has batch norms in train() mode, which would count padding
        `global` meets a norm in more than one chunk, or on several ranks one whose class has a forward() of its own
        `per_chunk` meets chunks of one pair
    """
    norms = [m for m in towers.modules() if isinstance(m, FrozenStatistics)] + batch_norms(towers)
    in_text = any(isinstance(m, Pooled) and batch_norms(m) for m in towers.modules())
    key, found = f"model.batch_norm={choice.name}", f"{len(norms)} batch norm{'s' * (len(norms) > 1)}"
    is_global, is_own = choice is BatchNorm["global"], choice is BatchNorm.per_chunk
    foreign = next((name for norm in norms if ranks > 1 and (name := _own_forward(norm))), "")
    broken = {
        f"{key}: no tower has a batch norm that could use it. Leave it out": not (is_global or norms),
        f"{key}: {found}, of which the text encoder's would count padding. Take model.batch_norm=frozen, or another "
        "encoder": in_text,
        f"{key}: {found} need the global batch in one chunk, and chunk_size makes {chunks}. Leave chunk_size out "
        "(chunk_size=null), or set model.batch_norm=per_chunk (statistics of each chunk on each rank: another loss), "
        "model.batch_norm=frozen (running statistics), or take a model without batch norm": bool(is_global and norms)
        and chunks > 1,
        f"{key}: {foreign} has a forward of its own, which the statistics of {ranks} processes would replace. Set "
        "model.batch_norm=per_chunk (statistics of each chunk on each rank: another loss), or take one process": bool(
            foreign
        ),
        f"{key}: a chunk of one pair has no statistics. Set chunk_size to 3 or more, or a larger "
        "global_batch_size": is_own and rows // chunks < 2,
    }
    for message, is_broken in broken.items():
        if is_broken:
            raise ConfigError(message)
    return f"{found}: {CHOICES[choice][1]} ({key})" if norms else ""


PER_CHUNK = "statistics of each chunk on each rank: chunk_size and the number of ranks change the loss"
# model.batch_norm → (the class that each batch norm is turned into, None to leave it; the meaning, for the log)
CHOICES: dict[BatchNorm, tuple[type[_BatchNorm] | None, str]] = {
    BatchNorm["global"]: (GlobalStatistics, "statistics of the global batch, for any number of processes"),
    BatchNorm.per_chunk: (None, PER_CHUNK),
    BatchNorm.frozen: (FrozenStatistics, "running statistics, as loaded, in training as well"),
}


def _own_forward(norm: _BatchNorm) -> str:
    """Return the name of a batch norm's original class if it has a custom forward(), which GlobalStatistics overrides.

    `set_batch_norms` has made `norm` an instance of GlobalStatistics, whose forward() computes what torch's and timm's
    do, with the statistics of all ranks. Returns "" for any other `norm`, and if the original forward() is torch's or
    timm's.
    """
    if not isinstance(norm, GlobalStatistics) or hasattr(norm, "act"):
        return ""
    original = type(norm).__bases__[1]
    return "" if original.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) else original.__name__


@cache
def _kind(kind: type[_BatchNorm], norm: type[_BatchNorm]) -> type[_BatchNorm]:
    """Return a subclass of both `kind` and `norm`, in this order.

    kind: GlobalStatistics or FrozenStatistics, whose methods override those of `norm`. norm: the class of an existing
    batch norm.
    """
    return type(f"{kind.__name__}_{norm.__name__}", (kind, norm), {})


def _over_ranks(norm: GlobalStatistics, x: Tensor) -> Tensor:
    """Normalise x by the mean and variance over all ranks, and update the running statistics of `norm`, as torch does.

    x: (b, C, …), the input of `norm` on this rank, with C channels. Returns a tensor of its shape. Every rank must call
    it, because the ranks exchange their statistics.
    """
    count, mean_C, var_C = _statistics(x.detach(), norm.counts)
    if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        unbiased_C = var_C * (count / (count - 1).clamp(min=1))
        norm.running_mean.lerp_(mean_C.to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased_C.to(norm.running_var.dtype), momentum)
    affine = (norm.weight, norm.bias) if norm.affine else (torch.ones_like(mean_C), torch.zeros_like(mean_C))
    # sharded weights are gathered in bf16; CUDA wants those of bf16 inputs in the dtype of the statistics
    affine = (of.to(mean_C.dtype) for of in affine)
    return _Normalised.apply(x, *affine, mean_C, var_C, norm.counts / count, norm.eps)  # pyright: ignore[reportReturnType]


def _statistics(x: Tensor, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count of elements per channel over all ranks (0-d), and the channels' means (C,) and variances (C,).

    x: (b, C, …), the input of a batch norm on this rank, with C channels. counts: False leaves the rows of this rank
    out. The results are bit-equal on every rank, in float32 or better. Each rank sums squared deviations from its own
    mean; the sums are combined as in Chan et al. 1979, which avoids cancellation. Every rank must call it (all-gather).
    """
    dims, channels = [dim for dim in range(x.ndim) if dim != 1], x.shape[1]
    var_C, mean_C = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
    count = torch.full_like(mean_C[:1], x.numel() // channels if counts else 0)
    own = torch.cat([count, mean_C, count * var_C])
    every = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(every, own)
    counts_W1, means_WC, squares_WC = every.view(-1, len(own)).split([1, channels, channels], 1)
    total = counts_W1.sum()
    mean_C = (counts_W1 * means_WC).sum(0) / total
    return total, mean_C, (squares_WC + counts_W1 * (means_WC - mean_C).square()).sum(0) / total


class _Normalised(torch.autograd.Function):
    """Computes weight (x - mean) / sqrt(var + eps) + bias per channel; mean and var are over the rows of all ranks.

    share: the weight of one element of x in mean and var: 1 / (the count of elements per channel over all ranks), or 0
    if the rows of this rank are left out of the statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, share: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, share)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of a batch norm's input x, weight and bias, and None for the other arguments of forward.

        The gradients of weight and bias are those of this rank's rows alone, which data parallelism averages later.
        gradient: dy, the gradient of the output. The gradient of x includes the paths through the batch's mean and
        variance: dx = (weight / std) (dy - mean(dy) - x̂ mean(dy x̂)), with x̂ = (x - mean) / std, and means over the
        rows of all ranks. torch's backward with fixed statistics gives the first term; the other two are affine in x̂,
        so F.batch_norm computes them. Every rank must call it (all-reduce).
        """
        x, weight, mean, var, share = ctx.saved_tensors
        inverse_std = (var + ctx.eps).rsqrt()
        # the kernels for CUDA refuse None in the places of the statistics saved in training
        fixed = (x, weight, mean, var, mean, inverse_std, False, ctx.eps, [True, True, True])
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(gradient, *fixed)
        sums = torch.cat([dweight, dbias])
        dist.all_reduce(sums)
        of_weight, of_bias = (sums.view(2, -1) * weight * inverse_std * share).unbind()
        dx = dx - F.batch_norm(x, mean, var, of_weight, of_bias, eps=ctx.eps)
        return dx, dweight, dbias, None, None, None, None
