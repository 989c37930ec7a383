"""The random numbers of a sample: for its augmentation, and the choice of its caption, positives and negatives.

They are a function of the seed, the epoch and the sample id, and so the same in any process, on any rank, and after a
resume. Streams take the number of the draw in place of the epoch, and the position in the shard in place of the id.
"""

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def uniforms(seed: int, epoch: int, sample_id: int, count: int) -> Floats:
    """Return `count` random numbers in [0, 1), float64 (count,), that depend only on the arguments.

    Each sample has its own stream of the random generator Philox; a larger `count` begins with the same numbers.
    sample_id: 0 or more.
    """
    key, counter = np.array([seed % 2**64, epoch], np.uint64), np.array([0, 0, 0, sample_id], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)
