"""Cache the features of a frozen tower, so that each distinct input row is computed once.

A frozen text tower would otherwise take two thirds of each step. The bits of a cached output must not depend on the
other rows of its batch, or a resumed run would differ in its last bits: so missing rows are computed in blocks of one
fixed shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

BLOCK = {"cpu": 16, "cuda": 256}  # rows computed together
LENGTH_STEP = 8  # tokens; lengths are rounded up to a multiple of it


class FrozenCache:
    """Caches the output of a frozen tower for each input row, under a hash of the row's bytes.

    capacity: bytes of outputs to hold; once they are used up, further outputs are computed every time. pad: the id of
    the padding token (on the right) of text inputs, None for images; text rows are cut to `padded_length` and computed
    with rows of equal length.
    """

    def __init__(self, capacity: int, pad: int | None = None) -> None:
        self.capacity, self.pad = capacity, pad
        self._cached: dict[bytes, Tensor] = {}
        self._free, self._depends_on = capacity, None

    @torch.no_grad()
    def __call__(self, compute: Callable[[Tensor], Tensor], inputs: Tensor, depends_on: Hashable) -> Tensor:
        """Return compute(inputs), (b, …), without gradient, taking rows from the cache where possible.

        compute: the frozen part of a tower. inputs: pixels (b, 3, S, S) or token ids (b, L). depends_on: a key of all
        that the outputs depend on besides `inputs` (precision, weights); when it changes, the cache is emptied. The
        bits of a row's output do not depend on the other rows.
        """
        if depends_on != self._depends_on:
            self._cached, self._free, self._depends_on = {}, self.capacity, depends_on
        limit = inputs.shape[1]
        counts = [limit] * len(inputs) if self.pad is None else token_counts(inputs, self.pad)
        lengths = [padded_length(count, limit) for count in counts]
        # Without its padding: the same text has the same key however long it was padded.
        keys = [
            hashlib.blake2b(row[:length].data, digest_size=16).digest()
            for row, length in zip(inputs.cpu().contiguous().numpy(), lengths, strict=True)
        ]
        missing = {key: row for row, key in enumerate(keys) if key not in self._cached}
        fresh: dict[bytes, Tensor] = {}
        for block in _blocks(list(missing.values()), lengths, BLOCK[inputs.device.type]):
            outputs = self._computed(compute, inputs[block][:, : lengths[block[0]]])
            fresh.update(zip((keys[row] for row in block), outputs, strict=True))
        outputs = torch.stack([self._cached[key] if key in self._cached else fresh[key] for key in keys])
        for key, output in fresh.items():
            size = output.numel() * output.element_size()
            if size <= self._free:
                self._cached[key] = output.clone()  # a slice would keep its whole block in memory
                self._free -= size
        return outputs

    def _computed(self, compute: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return compute(inputs), (b, …), for `inputs` of b rows, at most one block (16 rows on CPU, 256 on CUDA).

        compute: the frozen part of a tower. It always gets a whole block: copies of the first row fill it up, and for
        texts one row with a single token is added, because attention takes another code path when nothing is masked.
        The outputs of the added rows are dropped.
        """
        count = len(inputs)
        block = torch.cat([inputs, inputs[:1].expand(BLOCK[inputs.device.type] - count, *inputs.shape[1:])])
        if self.pad is not None:
            short = torch.full_like(inputs[:1], self.pad)
            short[:, 0] = inputs[:1, 0]
            block = torch.cat([block, short])
        return compute(block)[:count]


def token_counts(tokens: Tensor, pad: int) -> list[int]:
    """Return the number of tokens of each row of `tokens`, (b, L) token ids, without the padding; at least 1.

    pad: the id of the padding token, which is on the right.
    """
    numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != pad) * numbers).amax(1).clamp(min=1).tolist()


def padded_length(longest: int, limit: int) -> int:
    """Return the length to which rows of up to `longest` tokens are padded: the next multiple of 8, at most `limit`.

    Rounding keeps the number of different shapes small.
    """
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, limit)


def _blocks(rows: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """Split the row indices `rows` into blocks of at most `size` indices. All rows of a block have the same length.

    lengths[i]: the padded length of row i in tokens.
    """
    blocks = []
    for length in sorted({lengths[row] for row in rows}):
        members = [row for row in rows if lengths[row] == length]
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    return blocks
