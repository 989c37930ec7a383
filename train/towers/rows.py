"""The rows of a text input as the host sees them: how many tokens each has, and row indices for the device.

A host that reads from a GPU waits until the GPU has done all work before. So the lengths come with a batch from the
loader, and only a caller without them, such as an evaluation, has them read from the tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dyad.data.batch import PADDING, Lengths

LENGTH_STEP = 8  # tokens; lengths are rounded up to a multiple of it


def token_counts(tokens: Tensor) -> Lengths:
    """Return the number of tokens of each row of `tokens`, (b, L) token ids, without the PADDING on the right; at least
    1.
    """
    numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != PADDING) * numbers).amax(1).clamp(min=1).cpu().numpy()


def padded_length(longest: int, limit: int) -> int:
    """Return the length to which rows of up to `longest` tokens are padded: the next multiple of 8, at most `limit`.

    Rounding keeps the number of different shapes small.
    """
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, limit)


def index_on(device: torch.device, rows: Sequence[int] | Lengths) -> Tensor:
    """Return the row indices `rows` as an int64 tensor on `device`. The host does not wait for the device."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
