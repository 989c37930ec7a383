"""Exact contrastive objectives over the all-gathered batch, at memory linear in it, for any PyTorch loop.

    from train.losses import build_objective

    objective = build_objective("clip")
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()])
    loss = objective(model.x(x), model.y(y)).loss  # (b, D) each; under torch.distributed over the batch of all ranks
    loss.backward()  # average the gradients over ranks (as DDP does), of objective.parameters() too
    optimizer.step()
    objective.clamp_()

Importing the package is light: torch comes with the first objective that is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.losses.registry import OBJECTIVES, build_objective

if TYPE_CHECKING:
    from train.losses.strip import Columns

__all__ = ["OBJECTIVES", "Columns", "build_objective"]


def __getattr__(name: str) -> Any:
    if name != "Columns":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.losses.strip import Columns

    return Columns
