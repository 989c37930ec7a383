"""Windows: parts of sequences that are short enough for a sample. Each step of a sequence is in one window."""

from dataclasses import dataclass

import numpy as np

from dyad.data.shards.content_keys import Int64s


@dataclass(frozen=True)
class Windows:
    """n windows of events, each within one sequence.

    starts, stops (n,): the first event of each window, and the event after its last.
    """

    starts: Int64s
    stops: Int64s

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Int64s:
        """The number of steps of each window, (n,)."""
        return self.stops - self.starts

    @property
    def firsts(self) -> Int64s:
        """The number of steps in all windows before each, (n + 1,); the last entry counts all."""
        return np.concatenate([[0], np.cumsum(self.sizes)])


def windows_of(starts: Int64s, length: int, ahead: int) -> Windows:
    """Cut sequences into windows of at most `length` steps, the last window of each as long as it can be.

    starts (U + 1,): the first event of each of U sequences, and the number of all events. ahead: how many steps after
    the last step of a window are in its sequence, at least: with 1 each step has a next one. A window without
    anything to predict (ahead=0, one step) is left out.
    """
    lowest = starts[:-1]
    sizes = np.maximum(starts[1:] - lowest - ahead, 0)
    counts = -(-sizes // length)
    sequence = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    stops = (lowest + sizes)[sequence] - (counts[sequence] - 1 - number) * length  # counted from the end
    begins = np.maximum(stops - length, lowest[sequence])
    enough = stops - begins + ahead > 1
    return Windows(begins[enough], stops[enough])
