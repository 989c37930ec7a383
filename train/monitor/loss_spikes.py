"""Detect loss spikes: losses far above the recent ones, whose steps are skipped."""

from collections import deque

WINDOW = 10  # the number of recent losses to which a loss is compared


class LossSpikes:
    """Decides whether a loss is a spike: loss > mean + (factor − 1) · size, over the last WINDOW losses.

    size is the larger of |mean| and the range (max − min) of these losses. If that is the mean itself, a spike is a
    loss above factor · mean; the range is larger for losses near zero or of both signs. Nothing is a spike before there
    are WINDOW losses. factor: the key optim.spike; None: nothing is a spike. losses: the last losses; the caller
    appends the loss of each step that was applied (not skipped).
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self.losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def mean(self) -> float:
        """Mean of `losses`; raises ZeroDivisionError while there are none."""
        return sum(self.losses) / len(self.losses)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss`, that of a new step, is a spike; does not append it to `losses`."""
        if self._factor is None or len(self.losses) < WINDOW:
            return False
        size = max(abs(self.mean), max(self.losses) - min(self.losses))
        return loss > self.mean + (self._factor - 1) * size
