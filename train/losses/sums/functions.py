"""Autograd functions and helpers: no second derivatives, given gradients, products, weights of rows, unit vectors."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` of an autograd function so that it raises RuntimeError under create_graph=True.

    The decorated backward computes its gradient without a graph, so a second derivative would silently miss a part.
    torch's once_differentiable raises only if the incoming gradient itself needs a gradient.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():  # inside a backward this is so only with create_graph=True
            raise RuntimeError(
                "this function has no second derivative: its gradient is formed in one pass, without a graph. Call "
                "backward or autograd.grad without create_graph=True"
            )
        return backward(ctx, *gradients)

    return checked


def with_gradients(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of `value` (0-d) whose gradient in inputs[k] is gradients[k], for gradients computed beforehand.

    Backward returns the gradients times the upstream gradient, in the dtypes of the inputs. `value` is detached.
    """
    return _WithGradients.apply(value.detach(), gradients, *inputs)  # pyright: ignore[reportReturnType]


class _WithGradients(torch.autograd.Function):
    """The autograd function of with_gradients: backward returns the given gradients times the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.types = [e.dtype for e in inputs]
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *((upstream * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.types, strict=True))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, of two matrices or two batches of matrices, with a gradient in full precision.

    Under autocast the backward of `@` would round its operands to half precision. The product has derivatives of any
    order.
    """
    return _Product.apply(left, right)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """The autograd function of `product`, a matrix product whose backward runs without autocast."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        with torch.autocast(upstream.device.type, enabled=False):
            d_left = product(upstream, right.mT) if ctx.needs_input_grad[0] else None
            return d_left, product(left.mT, upstream) if ctx.needs_input_grad[1] else None


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each row of `values`, (n, …), by its weight, (n,). If `weights` is None return `values` itself."""
    return values if weights is None else values * weights.view(-1, *[1] * (values.ndim - 1))


def normalized(vectors: Tensor) -> Tensor:
    """Return the vectors (…, D) divided by their lengths (at least 1e-12), as F.normalize does.

    Backward costs a third of that of F.normalize. The result has derivatives of any order.
    """
    return _Normalized.apply(vectors)[0]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]


class _Normalized(torch.autograd.Function):
    """The autograd function of `normalized`.

    The lengths (…, 1) are a second result, so that second derivatives include the path through the lengths.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
        lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_(min=1e-12)
        unit = vectors / lengths
        ctx.save_for_backward(unit, lengths)
        return unit, lengths

    @staticmethod
    def backward(ctx: Any, d_unit: Tensor, d_lengths: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        unit, lengths = ctx.saved_tensors
        with torch.autocast(unit.device.type, enabled=False):
            along = d_lengths * lengths - torch.linalg.vecdot(d_unit, unit)[..., None]
        return torch.addcmul(d_unit, unit, along).div_(lengths)
