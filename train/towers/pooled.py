"""A transformers encoder that pools its token states into one embedding, with rows of similar length together."""

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.batch import PADDING, Lengths
from dyad.train.config import Pooling
from dyad.train.towers.rows import index_on, padded_length, token_counts

# For every shape of a matrix product, oneDNN and torch's layer above it cache compiled code of megabytes: 1,024 shapes
# by default, which is gigabytes after 100,000 texts. The layers of an encoder share shapes, so 16 are as fast. The
# variables are read at the first product.
for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(variable, "16")

# Fewest rows of a group. Smaller groups would save padding, but lose the speed of larger products.
MIN_GROUP = {"cpu": 16, "cuda": 512}


def pooled_states(states_bLH: Tensor, mask_bL: Tensor, pooling: Pooling) -> Tensor:
    """Pool the token states (b, L, H) of each row into one state, (b, H): L counts tokens, H is the encoder's width.

    mask_bL: False for padding. pooling: the first token, the last token, or the mean of all tokens.
    """
    if pooling is Pooling.cls:
        return states_bLH[:, 0]
    if pooling is Pooling.last:
        position = (mask_bL * torch.arange(mask_bL.shape[1], device=mask_bL.device)).argmax(1)
        return states_bLH[torch.arange(states_bLH.shape[0], device=mask_bL.device), position]
    weight = mask_bL[:, :, None].to(states_bLH.dtype)
    return (states_bLH * weight).sum(1) / weight.sum(1)


class Pooled(nn.Module):
    """Embeds token ids (b, L), with PADDING on the right, as (b, H) in float32 or better; H: the encoder's width.

    A row's output depends only on its own tokens, up to rounding: how rows are grouped and padded changes only the
    speed. The encoder gets token ids and attention mask, but no token types (every text is segment 0). pooling: None
    for an encoder that pools by itself, as the text model of CLIP. pad: the token id that the encoder gets for PADDING.
    grouped: whether rows of similar length run together; otherwise there is one call of the encoder a forward pass.
    one_length: whether rows are never cut, as SigLIP pools the state of the last place, whatever token is there.
    """

    def __init__(self, encoder: nn.Module, pooling: Pooling | None, pad: int, one_length: bool = False) -> None:
        super().__init__()
        self.encoder, self.pooling, self.pad = encoder, pooling, pad
        self.grouped = True
        self.one_length = one_length

    def extra_repr(self) -> str:
        """Return the pooling and the padding id as text for repr().

        The digest that identifies embeddings saved on disk covers this text (eval.encode.embeddings.identity_of), so
        embeddings of another pooling are never reused.
        """
        return f"pooling={self.pooling and self.pooling.name}, pad={self.pad}"

    def forward(self, tokens: Tensor, counts: Lengths | None = None) -> Tensor:
        """Embed token ids (b, L) as (b, H). counts: the tokens of each row; None: they are read from `tokens`."""
        if self.one_length:
            return self.encode_group(tokens)
        counts = token_counts(tokens) if counts is None else counts
        lengths = [padded_length(count, tokens.shape[1]) for count in counts.tolist()]
        groups = group_by_length(lengths, MIN_GROUP[tokens.device.type] if self.grouped else len(lengths))
        if len(groups) == 1:
            return self.encode_group(tokens[:, : max(lengths, default=1)].clone(memory_format=torch.contiguous_format))
        order = index_on(tokens.device, [row for group in groups for row in group])
        parts = zip(order.split([len(group) for group in groups]), groups, strict=True)
        # Copies, not views: strides and offsets would be further shapes to compile for
        pooled = [self.encode_group(tokens[:, : lengths[group[0]]][rows]) for rows, group in parts]
        return torch.cat(pooled)[order.argsort()]  # back in the order of the input

    def encode_group(self, tokens: Tensor) -> Tensor:
        """Embed token ids (b, L) of b texts as pooled states (b, H), by one call of the transformers encoder.

        H: the encoder's width. Rows are padded to L tokens; unlike in forward(), they are not grouped by length.
        """
        mask_bL = tokens != PADDING
        ids_bL = torch.where(mask_bL, tokens, self.pad)
        mask_bL[:, 0] = True  # a fully masked row of attention is NaN
        found = self.encoder(input_ids=ids_bL, attention_mask=mask_bL.long())
        states = found.pooler_output if self.pooling is None else found.last_hidden_state
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        return states if self.pooling is None else pooled_states(states, mask_bL, self.pooling)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the embedding of a group of rows, for any number of rows and tokens, with further arguments of
        torch.compile. The grouping by length is plain Python.
        """
        self.encode_group = torch.compile(self.encode_group, *args, dynamic=True, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def group_by_length(lengths: Sequence[int], min_rows: int) -> list[list[int]]:
    """Split row indices into groups of similar length, longest rows first, to save padding.

    Each group is padded to the length of its first row. lengths: tokens of each row. A group ends before a shorter row
    once it has `min_rows` rows. A last group with fewer rows joins the group before it.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    starts = [0]
    for position, row in enumerate(order):
        if position - starts[-1] >= min_rows and lengths[row] < lengths[order[starts[-1]]]:
            starts.append(position)
    if len(starts) > 1 and len(order) - starts[-1] < min_rows:
        starts.pop()
    return [order[start:stop] for start, stop in pairwise([*starts, len(order)])]
