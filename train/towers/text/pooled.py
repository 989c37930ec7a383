"""Embed texts by a transformers encoder whose token states are pooled into one embedding."""

import os

import torch
from torch import Tensor, nn

from dyad.data.batch import PADDING
from dyad.train.config import Pooling
from dyad.train.towers.text.rows import Grouped, token_counts

# For every shape of a matrix product, oneDNN and torch's layer above it cache megabytes of compiled code: for 1,024
# shapes by default, which is gigabytes after 100,000 texts. The layers of an encoder share shapes, so 16 shapes are as
# fast. The variables are read at the first product.
for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(variable, "16")


def pooled_states(states_bLH: Tensor, mask_bL: Tensor, pooling: Pooling) -> Tensor:
    """Pool the token states (b, L, H) of each row into one state, (b, H): L counts tokens, H is the encoder's width.

    mask_bL: bool, False for padding, with at least one True in each row. pooling: the state of the first token (cls),
    of the last token (last), or the mean of all tokens (mean).
    """
    if pooling is Pooling.cls:
        return states_bLH[:, 0]
    if pooling is Pooling.last:
        position = (mask_bL * torch.arange(mask_bL.shape[1], device=mask_bL.device)).argmax(1)
        return states_bLH[torch.arange(states_bLH.shape[0], device=mask_bL.device), position]
    weight = mask_bL[:, :, None].to(states_bLH.dtype)
    return (states_bLH * weight).sum(1) / weight.sum(1)


class Pooled(Grouped):
    """Embeds token ids (b, L), with PADDING on the right, as (b, H) in float32 or float64; H: the encoder's width.

    The encoder gets token ids and attention mask, but no token types (every text is segment 0). encoder: a model of
    transformers. pooling: how states become one embedding; None: the encoder pools by itself, as the text model of CLIP
    does. pad: the token id that the encoder gets for PADDING. one_length: whether rows are never cut to the longest
    text; True for SigLIP, which pools the state of the last place of a row, even if that place is padding.
    changes: what the configuration changed of the tokenizer, as the end of the text for repr(); "": nothing.
    """

    count = staticmethod(token_counts)

    def __init__(
        self, encoder: nn.Module, pooling: Pooling | None, pad: int, one_length: bool = False, changes: str = ""
    ) -> None:
        super().__init__()
        self.encoder, self.pooling, self.pad = encoder, pooling, pad
        self.one_length, self.changes = one_length, changes

    def extra_repr(self) -> str:
        """Return the pooling, the padding id, and the changes of the tokenizer, as text for repr().

        The digest that identifies embeddings saved on disk covers this text (eval.encode.embeddings.identity_of), so
        embeddings of another pooling, or of texts with another end or case, are never reused.
        """
        return f"pooling={self.pooling and self.pooling.name}, pad={self.pad}{self.changes}"

    def encode_group(self, tokens: Tensor) -> Tensor:
        """Embed token ids (b, L) of b texts as pooled states (b, H), by one call of the transformers encoder.

        H: the encoder's width. Rows are not grouped by length here, unlike in forward().
        """
        mask_bL = tokens != PADDING
        ids_bL = torch.where(mask_bL, tokens, self.pad)
        mask_bL[:, 0] = True  # a fully masked row of attention is NaN
        found = self.encoder(input_ids=ids_bL, attention_mask=mask_bL.long())
        states = found.pooler_output if self.pooling is None else found.last_hidden_state
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        return states if self.pooling is None else pooled_states(states, mask_bL, self.pooling)
