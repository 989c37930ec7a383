"""Outputs of a frozen trunk, computed once per input and remembered.

Frozen texts are two thirds of a step when they run every time. A remembered output must not depend on which rows came
together, or a resumed run would differ in the last bit: misses are computed in blocks of one fixed shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 16  # rows computed together


class Memo(nn.Module):
    """`trunk` without gradient and always in eval(), its outputs kept by the bytes of each input row.

    capacity: bytes of outputs to keep; when they are full, new ones are computed every time. pad: the token that fills
    up rows, for a trunk that masks it: rows are then cut to the power of two that holds them.
    """

    def __init__(self, trunk: nn.Module, capacity: int, pad: int | None = None) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False).eval()
        self.capacity, self.pad = capacity, pad
        self._known: dict[tuple[torch.dtype | None, bytes], Tensor] = {}
        self._bytes = 0

    def train(self, mode: bool = True) -> Memo:
        super().train(mode)
        self.trunk.eval()
        return self

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(b, …) inputs → (b, …) outputs of the trunk, without gradient, bit for bit the same in any company."""
        device = inputs.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        keys = [(precision, row.tobytes()) for row in inputs.cpu().numpy()]
        fresh: dict[tuple[torch.dtype | None, bytes], Tensor] = {}
        first = {key: i for i, key in enumerate(keys) if key not in self._known}
        for rows in self._alike(inputs, list(first.values())):
            fresh |= zip((keys[i] for i in rows), self._computed(inputs[rows]), strict=True)
        outputs = torch.stack([self._known[key] if key in self._known else fresh[key] for key in keys])
        for key, output in fresh.items():
            self._keep(key, output)
        return outputs

    def _alike(self, inputs: Tensor, rows: list[int]) -> list[list[int]]:
        """`rows` in blocks that are cut to the same length."""
        lengths = self._lengths(inputs[rows]) if rows else []
        blocks = []
        for length in sorted(set(lengths)):
            members = [row for row, own in zip(rows, lengths, strict=True) if own == length]
            blocks += [members[start : start + BLOCK] for start in range(0, len(members), BLOCK)]
        return blocks

    def _lengths(self, inputs: Tensor) -> list[int]:
        """What each row is cut to; all of one block are cut alike."""
        if self.pad is None:
            return [0] * len(inputs)
        filled = (inputs != self.pad).sum(1).tolist()
        return [min(max(8, 1 << (n - 1).bit_length()), inputs.shape[1]) for n in filled]

    def _computed(self, inputs: Tensor) -> Tensor:
        """The trunk on up to BLOCK rows, always in the same shape: the rest of the block is the first row again.

        With padding, the last two rows are one that is full and one that is not, whatever the others are: a trunk may
        cut what no row fills, and attention may take another path where nothing is masked.
        """
        count = len(inputs)
        filling = inputs[:1].expand(BLOCK + 2 - count, *inputs.shape[1:])
        block = torch.cat([inputs, filling])
        if self.pad is not None:
            block = block[:, : self._lengths(inputs[:1])[0]].clone()
            block[-2:] = block[-2:, :1]
            block[-1, 1:] = self.pad
        return self.trunk(block)[:count]

    def _keep(self, key: tuple[torch.dtype | None, bytes], output: Tensor) -> None:
        size = output.numel() * output.element_size() + len(key[1])
        if self._bytes + size <= self.capacity:
            self._known[key] = output.clone()  # a slice would keep its whole block alive
            self._bytes += size
