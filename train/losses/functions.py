"""What autograd functions of the objectives share: gradients without a graph, and without autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses create_graph=True: a second derivative would silently miss the part of this function."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():  # in a backward: exactly with create_graph=True
            raise RuntimeError(
                "this function has no second derivative: its gradient is formed in one pass, without a graph. Call "
                "backward or autograd.grad without create_graph=True"
            )
        return backward(ctx, *gradients)

    return checked


def with_gradients(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """`value`, 0-d, as a function of the inputs that has these gradients."""
    return _WithGradients.apply(value.detach(), gradients, *inputs)  # pyright: ignore[reportReturnType]


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.types = [e.dtype for e in inputs]
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *((pull * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.types, strict=True))


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, both matrices or batches of them, whose gradient is not rounded where backward is in autocast."""
    return _Product.apply(left, right)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        with torch.autocast(pull.device.type, enabled=False):
            d_left = product(pull, right.mT) if ctx.needs_input_grad[0] else None
            return d_left, product(left.mT, pull) if ctx.needs_input_grad[1] else None
