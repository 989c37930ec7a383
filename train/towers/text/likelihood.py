"""The score of an answer to a prompt: its length-normalised log-likelihood by a causal language model.

s(x, y) = 1/|y| Σ_t log p(y_t | x, y_<t), for a prompt x and an answer y of |y| tokens. The score is a function of the
pair, so prompt and answer are one input row of the y tower, whose embedding of width 1 is s. The x tower gives 1, so
that the product of both embeddings is s.

A row of tokens (1 + L,) holds the number of tokens of the prompt, the tokens of the prompt, the tokens of the answer,
and PADDING.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, SampleError
from dyad.data.batch import PADDING, Lengths
from dyad.train.towers.text.rows import Grouped, padded_length, token_counts
from dyad.train.towers.text.tokenizer_lock import call_tokenizer


class One(nn.Module):
    """The trunk of the x tower of task=language_model: gives 1 for each of b input rows, (b, 1)."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1, 1), persistent=False)

    def forward(self, rows: Tensor, _: Lengths | None = None) -> Tensor:
        return self.one.repeat(len(rows), 1)


class Likelihood(Grouped):
    """Scores answers to prompts by the length-normalised log-likelihood of the answer, (b, 1) in float32 or float64.

    Inputs are rows of tokens, int64 (b, 1 + L): the number of tokens of the prompt, the tokens of the prompt, the
    tokens of the answer, and PADDING. An answer without tokens has the score 0.
    """

    count = staticmethod(token_counts)

    def __init__(self, encoder: nn.Module) -> None:
        """Wrap `encoder`, a causal language model of transformers that gives logits (b, L, V) of the next token."""
        super().__init__()
        self.encoder = encoder

    def encode_group(self, tokens: Tensor) -> Tensor:
        """Score rows of tokens (b, 1 + L), (b, 1), by one call of the model. Rows are not grouped by length here."""
        starts_b1, ids_bL = tokens[:, :1], tokens[:, 1:]
        is_token = ids_bL != PADDING
        ids_bL = ids_bL.where(is_token, 0)  # no state depends on later tokens
        is_token[:, 0] = True  # a fully masked row of attention is NaN
        logits = self.encoder(input_ids=ids_bL, attention_mask=is_token.long(), use_cache=False).logits
        logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        log_p = -F.cross_entropy(logits.transpose(1, 2), ids_bL[:, 1:], reduction="none")
        places = torch.arange(1, ids_bL.shape[1], device=tokens.device)
        is_answer = is_token[:, 1:] & (places >= starts_b1)
        return (log_p * is_answer).sum(1, keepdim=True) / is_answer.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class PromptTokenizer:
    """Converts prompts and answers to rows of tokens for Likelihood.

    tokenizer: a tokenizer of transformers. limit: the most tokens of prompt and answer together. begin: the id of a
    token that is put before every prompt, so that the first token of an answer to an empty prompt has a likelihood too.
    """

    tokenizer: Any
    limit: int
    begin: int

    def __call__(self, prompts: Sequence[str], answers: Sequence[str], prompt: int, answer: int) -> Tensor:
        """Convert n prompts, each with an answer, to rows int64 (n, 1 + L) for Likelihood.

        A row holds the number of tokens of the prompt, the tokens of the prompt, the tokens of the answer, and PADDING.
        Each text is tokenised by itself, without special tokens. prompt: the most tokens of a prompt, `begin` included;
        a longer prompt keeps its last ones. answer: the most tokens of an answer, which keeps its first ones. If both
        together exceed `limit`, the prompt is cut further. Raises ConfigError if `answer` is not below `limit`,
        SampleError for an answer without tokens.
        """
        self.check(answer)
        asked, given = self._ids(prompts), self._ids(answers)
        if not all(given):
            raise SampleError("an answer has no tokens, so it has no likelihood")
        pairs = [(ids, own[:answer]) for ids, own in zip(asked, given, strict=True)]
        heads = [[self.begin, *_last(ids, min(prompt, self.limit - len(own)) - 1)] for ids, own in pairs]
        rows = [[len(head), *head, *own] for head, (_, own) in zip(heads, pairs, strict=True)]
        width = padded_length(max(map(len, rows), default=1), 1 + min(prompt + answer, self.limit))
        return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows]).long().reshape(-1, width)

    def check(self, answer: int) -> None:
        """Raise ConfigError if `answer` tokens of an answer leave no room for a prompt within `limit`."""
        if answer >= self.limit:
            raise ConfigError(
                f"data.passage.length={answer}: this model takes {self.limit} tokens of prompt and answer together. "
                f"Set it below {self.limit}"
            )

    def full_lengths(self, texts: Sequence[str], _: Sequence[str] | None = None) -> list[int]:
        """Return the number of tokens of each prompt or answer before it is cut, without `begin`."""
        return [len(ids) for ids in self._ids(texts)]

    def lengths(self, tokens: Tensor) -> Lengths:
        """Return the number of entries of each row of `tokens`, (b, 1 + L), without padding: int64 (b,) in NumPy."""
        return token_counts(tokens)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return call_tokenizer(self.tokenizer, list(texts), add_special_tokens=False).input_ids if texts else []


def _last(ids: Sequence[int], count: int) -> Sequence[int]:
    return ids[max(len(ids) - count, 0) :]
