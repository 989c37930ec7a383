"""Losses and gradients of sentence-transformers' MultipleNegativesRankingLoss, where the definitions coincide."""

from __future__ import annotations

import math

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from dyad.train.losses import build_objective

B, D = 7, 12


class Nothing(nn.Module):
    """The loss wants a model and computes on embeddings."""


def leaves(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(B, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("hard", [0, 1, 3])
@pytest.mark.parametrize(
    ("objective", "directions"), [("info_nce", ("query_to_doc",)), ("clip", ("query_to_doc", "doc_to_query"))]
)
def test_loss_and_gradients(objective: str, directions: tuple[str, ...], hard: int) -> None:
    model = SentenceTransformer(modules=[Nothing()], device="cpu")
    theirs = MultipleNegativesRankingLoss(model, scale=20.0, directions=directions, partition_mode="per_direction")  # type: ignore[arg-type]
    ours = build_objective(objective, temperature=0.05, learnable=False).double()
    ours.get_parameter("logit_scale").data.fill_(math.log(20.0))  # more digits than float32 gave it
    inputs = leaves(2 + hard)
    want = theirs.compute_loss_from_embeddings(inputs, torch.zeros(0))
    negatives = torch.stack(inputs[2:], 1) if hard else None
    got = ours(inputs[0], inputs[1], negatives=negatives).loss
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    for mine, other in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
