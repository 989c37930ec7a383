"""Loss spikes: a step whose loss is far above the last ones is not taken."""

from __future__ import annotations

from collections import deque

WINDOW = 10  # finite losses of taken steps


class Spikes:
    """is_one(loss) for `factor` f: loss > mean + (f − 1)·size of the last WINDOW losses, once there are so many.

    Their size is their mean: loss > f · mean. Where losses go below zero or near it, that says nothing; there it is
    what is larger, the mean without its sign or the range of the losses. factor None: there are no spikes.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self.losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)

    def is_one(self, loss: float) -> bool:
        if self._factor is None or len(self.losses) < WINDOW:
            return False
        size = max(abs(self.mean), max(self.losses) - min(self.losses))
        return loss > self.mean + (self._factor - 1) * size
