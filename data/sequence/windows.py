"""Cut sequences into windows, which are short enough for a training sample. No step is in two windows."""

from dataclasses import dataclass

import numpy as np

from dyad.data.shards.content_keys import Int64s


@dataclass(frozen=True)
class Windows:
    """n windows, each of consecutive events of one sequence.

    starts, stops (n,) int64: index of the first event of each window, and of the event after its last one.
    """

    starts: Int64s
    stops: Int64s

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Int64s:
        """The number of steps of each window, int64 (n,)."""
        return self.stops - self.starts

    @property
    def firsts(self) -> Int64s:
        """The number of steps of all windows before each window, int64 (n + 1,); the last entry counts all steps."""
        return np.concatenate([[0], np.cumsum(self.sizes)])


def windows_of(starts: Int64s, length: int, ahead: int) -> Windows:
    """Cut sequences into windows of `length` steps; only the first window of a sequence may be shorter.

    starts (U + 1,) int64: index of the first event of each of U sequences, and the number of all events. ahead: how
    many events at the end of a sequence are in no window: 1 if each step needs a next event, else 0. A window without
    anything to predict (ahead=0, one step) is left out.
    """
    lowest = starts[:-1]
    sizes = np.maximum(starts[1:] - lowest - ahead, 0)
    counts = -(-sizes // length)
    sequence = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    stops = (lowest + sizes)[sequence] - (counts[sequence] - 1 - number) * length  # windows are cut from the end
    begins = np.maximum(stops - length, lowest[sequence])
    enough = stops - begins + ahead > 1
    return Windows(begins[enough], stops[enough])
