"""Cache the features of a frozen trunk, so that each distinct input row is computed once while the cache has room.

A frozen text tower would otherwise take two thirds of each step. The bits of a cached output must not depend on the
other rows of its batch, or a resumed run would differ in its last bits: so missing rows are computed in blocks of a
fixed number of rows, texts in blocks of one length.

The key of a row is a hash of its bytes. Content keys of a batch cannot serve as keys: an image is augmented anew each
time, and captions of different words may share a content key (data.text_key). On a GPU the hash needs a copy of the
rows on the host, so the cache is off there by default.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dyad.data.batch import Lengths
from dyad.train.towers.text.rows import index_on, padded_length

BLOCK = {"cpu": 16, "cuda": 256}  # rows computed together, by type of device
CAPACITY = {"cpu": 512 << 20, "cuda": 0}  # bytes, by type of device, with model.frozen_cache_mb=null


class FrozenCache:
    """Caches the output of a frozen trunk for each input row, under a hash of the row's bytes.

    capacity: bytes of outputs to hold; once they are used up, further outputs are computed every time. 0: no output is
    cached, and inputs are neither hashed nor copied to the host. None: CAPACITY of the inputs' device. texts: for
    inputs that are rows of tokens, (a function from token ids to the number of tokens of each row, the id of padding);
    rows are cut to `padded_length` and computed with rows of equal length. None: inputs are no texts, or texts that are
    never cut.
    """

    def __init__(self, capacity: int | None, texts: tuple[Callable[[Tensor], Lengths], int] | None = None) -> None:
        self.capacity, self.texts = capacity, texts
        self._cached: dict[bytes, Tensor] = {}
        self._free, self._depends_on = 0, None

    @torch.no_grad()
    def __call__(
        self, compute: Callable[..., Tensor], inputs: Tensor, depends_on: Callable[[], Hashable], counts: Lengths | None
    ) -> Tensor:
        """Return compute(inputs), (b, …), without gradient, taking rows from the cache where possible.

        compute: the frozen part of a tower; if `texts` is set, it also gets the number of tokens of each row, as its
        second argument. inputs: pixels (b, 3, S, S), S the side in pixels, or token ids (b, L). depends_on(): a key of
        all that the outputs depend on besides `inputs` (precision, weights); when it changes, the cache is emptied.
        counts: the number of tokens of each row of texts, not used if `texts` is None; None: no texts, or to be counted
        here by `texts`. With a capacity above 0 the bits of a row's output do not depend on the other rows.
        """
        if self.texts is None:
            counts = None
        elif counts is None:
            counts = self.texts[0](inputs)
        if not (capacity := self.capacity_on(inputs.device)):
            return compute(inputs) if counts is None else compute(inputs, counts)
        limit = inputs.shape[1]
        lengths = [limit] * len(inputs) if counts is None else [padded_length(n, limit) for n in counts.tolist()]
        if (state := depends_on()) != self._depends_on:
            self._cached, self._free, self._depends_on = {}, capacity, state
        # rows are hashed without padding: the same text has the same key however long it was padded
        rows = zip(inputs.cpu().contiguous().numpy(), lengths, strict=True)
        keys = [hashlib.blake2b(row[:length].data, digest_size=16).digest() for row, length in rows]
        missing = {key: row for row, key in enumerate(keys) if key not in self._cached}
        fresh: dict[bytes, Tensor] = {}
        if missing:
            blocks = _blocks(list(missing.values()), lengths, BLOCK[inputs.device.type])
            parts = (inputs[index_on(inputs.device, block)][:, : lengths[block[0]]] for block in blocks)
            outputs = torch.cat([self._computed(compute, part) for part in parts])
            fresh = dict(zip((keys[row] for row in chain(*blocks)), outputs, strict=True))
        outputs = torch.stack([self._cached[key] if key in self._cached else fresh[key] for key in keys])
        for key, output in fresh.items():
            if output.nbytes <= self._free:
                self._cached[key] = output.clone()  # a slice would keep its whole block in memory
                self._free -= output.nbytes
        return outputs

    def capacity_on(self, device: torch.device) -> int:
        """Return how many bytes of outputs the cache may hold for inputs on `device`; 0: there is no cache.

        Raises KeyError for a default capacity and a device other than cpu and cuda.
        """
        return CAPACITY[device.type] if self.capacity is None else self.capacity

    def _computed(self, compute: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return compute(inputs), (b, …), for `inputs` of b rows, at most one block (16 rows on CPU, 256 on CUDA).

        compute: the frozen part of a tower, which always gets a whole block: copies of the first row fill it up, and
        for texts one row with a single token is added, because attention takes another code path when nothing is
        masked. The outputs of the added rows are dropped.
        """
        count = len(inputs)
        block = torch.cat([inputs, inputs[:1].expand(BLOCK[inputs.device.type] - count, *inputs.shape[1:])])
        if self.texts is None:
            return compute(block)[:count]
        short = torch.full_like(inputs[:1], self.texts[1])
        short[:, 0] = inputs[:1, 0]
        block = torch.cat([block, short])
        return compute(block, np.full(len(block), block.shape[1]))[:count]


def _blocks(rows: Sequence[int], lengths: list[int], size: int) -> list[list[int]]:
    """Split the row indices `rows` into blocks of at most `size` indices. All rows of a block have the same length.

    lengths[i]: the padded length of row i in tokens.
    """
    blocks = []
    for length in sorted({lengths[row] for row in rows}):
        members = [row for row in rows if lengths[row] == length]
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    return blocks
