"""Detect loss spikes: losses far above the recent ones, whose steps are skipped."""

from collections import deque

WINDOW = 10  # finite losses of applied steps


class LossSpikes:
    """Decides whether a loss is a spike: loss > mean + (factor − 1) · size, over the last WINDOW losses.

    Only losses of steps that were applied (not skipped) count. size is |mean|, so that a spike is a loss > factor ·
    mean; where losses are near zero or change sign, size is their range (max − min) if that is larger. Nothing is a
    spike before there are WINDOW losses, or if factor is None.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self.losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)

    def is_spike(self, loss: float) -> bool:
        if self._factor is None or len(self.losses) < WINDOW:
            return False
        size = max(abs(self.mean), max(self.losses) - min(self.losses))
        return loss > self.mean + (self._factor - 1) * size
