"""A transformers encoder and the pooling of its states. Rows of similar length run together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from train.config import Pooling
from train.towers.memo import padded_length, token_counts

# Texts come in hundreds of shapes. For each, oneDNN and torch's layer above it keep a compiled product of megabytes:
# 1,024 of them unless told otherwise, gigabytes after 100,000 texts. The layers of an encoder share theirs, so 16 are
# as fast. Read at the first product.
for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "16")

# Rows that run together at least: fewer save padding, and lose what a larger product saves
MIN_GROUP = {"cpu": 16, "cuda": 64}


def _mean(states_bLH: Tensor, mask_bL: Tensor) -> Tensor:
    weight = mask_bL[:, :, None].to(states_bLH.dtype)
    return (states_bLH * weight).sum(1) / weight.sum(1)


def _last(states_bLH: Tensor, mask_bL: Tensor) -> Tensor:
    position = (mask_bL * torch.arange(mask_bL.shape[1], device=mask_bL.device)).argmax(1)
    return states_bLH[torch.arange(states_bLH.shape[0], device=mask_bL.device), position]


POOLINGS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    Pooling.cls: lambda states_bLH, mask_bL: states_bLH[:, 0],
    Pooling.mean: _mean,
    Pooling.last: _last,
}


class Pooled(nn.Module):
    """Tokens (b, L), padded on the right, → (b, H), float32 or better.

    A row's output depends on its own tokens alone, up to rounding: which rows run together and how long its padding is
    are matters of speed. All the encoder is given is tokens and which of them count: every text is segment 0.
    """

    def __init__(self, encoder: nn.Module, pooling: Pooling, pad: int) -> None:
        super().__init__()
        self.encoder, self.pooling, self.pad = encoder, pooling, pad

    def extra_repr(self) -> str:
        return f"pooling={self.pooling.value}, pad={self.pad}"

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = [padded_length(n, tokens.shape[1]) for n in token_counts(tokens, self.pad)]
        groups = group_by_length(lengths, MIN_GROUP[tokens.device.type])
        if len(groups) == 1:
            return self.encode_group(tokens[:, : max(lengths, default=1)])
        order = torch.tensor([row for group in groups for row in group], device=tokens.device)
        parts = tokens[order].split([len(group) for group in groups])
        pooled = [self.encode_group(part[:, : lengths[group[0]]]) for part, group in zip(parts, groups, strict=True)]
        return torch.cat(pooled)[order.argsort()]

    def encode_group(self, tokens: Tensor) -> Tensor:
        mask_bL = tokens != self.pad
        mask_bL[:, 0] = True  # attention to nothing at all is NaN
        states_bLH = self.encoder(input_ids=tokens, attention_mask=mask_bL.long()).last_hidden_state
        return POOLINGS[self.pooling](states_bLH.to(torch.promote_types(states_bLH.dtype, torch.float32)), mask_bL)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The encoder alone: the grouping is Python."""
        self.encoder.compile(*args, **kwargs)


def group_by_length(lengths: Sequence[int], least: int) -> list[list[int]]:
    """All rows in groups, the longest first; a group is as long as its first row.

    A group ends before a shorter row, once it has `least` rows; a last group that gets fewer joins the one before.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    starts = [0]
    for place, row in enumerate(order):
        if place - starts[-1] >= least and lengths[row] < lengths[order[starts[-1]]]:
            starts.append(place)
    if len(starts) > 1 and len(order) - starts[-1] < least:
        starts.pop()
    return [order[start:stop] for start, stop in pairwise([*starts, len(order)])]
