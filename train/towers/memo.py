"""Outputs of a frozen trunk, computed once per input and remembered.

Frozen texts are two thirds of a step when they run every time. A remembered output must not depend on which rows came
together, or a resumed run would differ in the last bit: misses are computed in blocks of one fixed shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

BLOCK = {"cpu": 16, "cuda": 256}  # rows computed together
STEP = 8  # tokens


class FrozenCache:
    """Keeps outputs by the bytes of each input row.

    capacity: bytes of outputs to keep; when they are full, new ones are computed every time. pad: the token that fills
    up rows on the right; each row is then cut by `padded_length` and computed with others of its length.
    """

    def __init__(self, capacity: int, pad: int | None = None) -> None:
        self.capacity, self.pad = capacity, pad
        self._known: dict[bytes, Tensor] = {}
        self._free, self._depends_on = capacity, None

    @torch.no_grad()
    def __call__(self, compute: Callable[[Tensor], Tensor], inputs: Tensor, depends_on: Hashable) -> Tensor:
        """compute(inputs), (b, …), without gradient and bit for bit the same in any company.

        depends_on: everything else that outputs depend on; when it changes, all are forgotten.
        """
        if depends_on != self._depends_on:
            self._known, self._free, self._depends_on = {}, self.capacity, depends_on
        lengths = self._lengths(inputs)
        keys = [
            hashlib.blake2b(row[:length].data, digest_size=16).digest()
            for row, length in zip(inputs.cpu().contiguous().numpy(), lengths, strict=True)
        ]
        missing = {key: row for row, key in enumerate(keys) if key not in self._known}
        fresh: dict[bytes, Tensor] = {}
        for block in _alike(list(missing.values()), lengths, BLOCK[inputs.device.type]):
            outputs = self._computed(compute, inputs[block][:, : lengths[block[0]]])
            fresh.update(zip((keys[row] for row in block), outputs, strict=True))
        outputs = torch.stack([self._known[key] if key in self._known else fresh[key] for key in keys])
        for key, output in fresh.items():
            self._keep(key, output)
        return outputs

    def _lengths(self, inputs: Tensor) -> list[int]:
        """What each row is cut to: the same text is the same row, however it was filled up."""
        limit = inputs.shape[1]
        if self.pad is None:
            return [limit] * len(inputs)
        return [padded_length(n, limit) for n in token_counts(inputs, self.pad)]

    def _computed(self, compute: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Up to a block of rows, always in the same shape: what is missing is the first row again.

        With padding there is one more row, one token and nothing else: attention takes another path where nothing is
        masked, so something always is.
        """
        count = len(inputs)
        block = torch.cat([inputs, inputs[:1].expand(BLOCK[inputs.device.type] - count, *inputs.shape[1:])])
        if self.pad is not None:
            short = torch.full_like(inputs[:1], self.pad)
            short[:, 0] = inputs[:1, 0]
            block = torch.cat([block, short])
        return compute(block)[:count]

    def _keep(self, key: bytes, output: Tensor) -> None:
        size = output.numel() * output.element_size()
        if size <= self._free:
            self._known[key] = output.clone()  # a slice would keep its whole block alive
            self._free -= size


def token_counts(tokens: Tensor, pad: int) -> list[int]:
    """Tokens of each row without what fills it up on the right; at least 1."""
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != pad) * places).amax(1).clamp(min=1).tolist()


def padded_length(longest: int, limit: int) -> int:
    """To how many tokens rows with at most `longest` are cut: a multiple of 8, so that there are few shapes."""
    return min(-(-longest // STEP) * STEP, limit)


def _alike(rows: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """`rows` in blocks of one length and at most `size` rows; lengths: of all rows, by their place."""
    blocks = []
    for length in sorted({lengths[row] for row in rows}):
        members = [row for row in rows if lengths[row] == length]
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    return blocks
