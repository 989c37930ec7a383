"""The order of training samples: which sample ids each optimiser step uses, as a function of (seed, epoch, position).

No list of ids is kept, and no state. An epoch leaves out the samples that do not fill its last batch; the ids are
rotated from epoch to epoch, so that each epoch leaves out other samples. With shuffle="window", chunks of CHUNK
consecutive ids are permuted; then single samples are permuted inside windows of at least WINDOW positions, or of the
whole epoch if it is shorter. With shuffle="full", single samples are permuted over the whole epoch. The order does not
depend on the world size, the number of workers or the division into shards.

G is the number of samples in a global batch, over all ranks.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from dyad.data.base.errors import ConfigError

CHUNK = 256  # consecutive ids that stay together when chunks are permuted, so that reads stay local
WINDOW = 65_536  # smallest number of samples that are permuted among each other
ROUNDS = 6  # rounds of the Feistel network

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class Order:
    """The order in which a run uses its training samples.

    sizes, weights: number of samples and weight of each source. In an epoch a source of weight w gives each of its
    samples ⌊w⌋ times, and a random share w - ⌊w⌋ of its samples once more: round(w · size) samples in all. seed:
    determines all random choices; it may be a text, so that two orders of one run differ. global_batch_size: samples of
    one step, over all ranks. shuffle: 'window' permutes chunks of ids and then samples inside windows, so that reads
    stay local; 'full' permutes single samples over the whole epoch. samples_per_epoch: samples that all sources give in
    an epoch; steps_per_epoch: number of whole global batches of these. Raises ConfigError when an epoch has no whole
    global batch, and when the weight of a source gives none of its samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int | str,
        global_batch_size: int,
        shuffle: str = "window",
    ) -> None:
        assert len(sizes) == len(weights) and global_batch_size > 0 and shuffle in ("window", "full")
        self.seed, self.global_batch_size = seed, global_batch_size
        self.sizes, self.weights = list(sizes), list(weights)
        counts = [round(weight * size) for size, weight in zip(sizes, weights, strict=True)]
        for count, size, weight in zip(counts, sizes, weights, strict=True):
            if size and not count:
                raise ConfigError(f"weight {weight} of a source with {size} samples is less than one sample per epoch.")
        self._starts = [0, *accumulate(counts)]
        self.samples_per_epoch = self._starts[-1]
        self.steps_per_epoch = self.samples_per_epoch // global_batch_size
        if not self.steps_per_epoch:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is more than the {self.samples_per_epoch} samples of an epoch. "
                f"Set global_batch_size={1 << max(self.samples_per_epoch.bit_length() - 1, 0)}, say."
            )
        self._used = self.steps_per_epoch * global_batch_size
        self._chunk = CHUNK if shuffle == "window" else 1
        self._window = min(self._used, max(WINDOW, 4 * global_batch_size) if shuffle == "window" else self._used)

    @property
    def left_out(self) -> float:
        """The share of its samples that an epoch leaves out, since they fill no whole global batch."""
        return 1 - self.steps_per_epoch * self.global_batch_size / self.samples_per_epoch

    def ids(self, step: int) -> Ids:
        """Return the sample ids of the global batch of optimiser step `step`: (G,) int64, sorted.

        G is global_batch_size. step: counted from 0 over all epochs. An id occurs twice only if its source has a weight
        above 1.
        """
        epoch, batch = divmod(step, self.steps_per_epoch)
        position = np.arange(self.global_batch_size, dtype=np.int64) + batch * self.global_batch_size
        shuffled = self._shuffled(position, epoch)
        left_over = self.samples_per_epoch - self._used  # rotate by the samples that each epoch leaves out
        return np.sort(self._base_ids((shuffled + epoch * left_over) % self.samples_per_epoch, epoch))

    def local(self, step: int, rank: int, world_size: int) -> tuple[int, Ids]:
        """Return the epoch of optimiser step `step`, and one rank's consecutive part of the ids of its global batch.

        The parts of two ranks differ by at most one id in length; a part may be empty if there are more ranks than
        samples.
        """
        return step // self.steps_per_epoch, self.ids(step)[local_rows(self.global_batch_size, rank, world_size)]

    def _shuffled(self, position: Ids, epoch: int) -> Ids:
        """Map positions in the shuffled order of an epoch to its unshuffled order, which `ids` then rotates.

        position: (n,) int64, each below the number of samples that the epoch uses. The map is a permutation: positions
        are permuted inside each window (a range of consecutive positions), then whole chunks of consecutive positions.
        """
        windows = self._used // self._window
        window = np.minimum(position // self._window, windows - 1)  # the last one takes the rest
        result = np.empty_like(position)
        for number in np.unique(window).tolist():
            start = number * self._window
            size = self._window if number < windows - 1 else self._used - start
            inside = window == number
            result[inside] = start + permuted(position[inside] - start, size, self._keys(epoch, f"window {number}"))
        return permuted_chunks(result, self._used, self._chunk, self._keys(epoch, "chunks"))

    def _base_ids(self, appearance: Ids, epoch: int) -> Ids:
        """Return the sample id at each position of an unshuffled epoch. appearance: (n,) int64, the positions.

        In an unshuffled epoch the sources follow one another, and a source of weight w gives each sample ⌊w⌋ times and
        a random share w - ⌊w⌋ of its samples once more.
        """
        result = np.empty_like(appearance)
        first_id = 0
        for source, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            start, end = self._starts[source : source + 2]
            inside = (appearance >= start) & (appearance < end)
            local = appearance[inside] - start
            extra = local >= int(weight) * size
            chosen = permuted_chunks(local[extra] % size, size, self._chunk, self._keys(epoch, f"source {source}"))
            local[extra], local[~extra] = chosen, local[~extra] % size
            result[inside] = first_id + local
            first_id += size
        return result

    def _keys(self, epoch: int, purpose: str) -> list[int]:
        """Return ROUNDS 64-bit integers, a hash of seed, epoch and purpose, as the keys of a permutation."""
        digest = hashlib.blake2b(f"{self.seed}/{epoch}/{purpose}".encode(), digest_size=8 * ROUNDS).digest()
        return np.frombuffer(digest, "<u8").tolist()


def weights_of_rows(sizes: Sequence[int], weights: Sequence[float]) -> Sequence[float]:
    """Return the weight of each sample, that of its source, as a list in the order of ids: about how often an epoch
    uses it.

    sizes, weights: number of samples and weight of each source.
    """
    return np.repeat(np.asarray(weights, np.float64), sizes).tolist()


def local_rows(count: int, rank: int, world_size: int) -> slice:
    """Return the slice of `count` rows, such as the rows of a global batch, that belongs to one rank.

    The slices of the ranks are consecutive, and differ by at most one row in length.
    """
    return slice(*(r * count // world_size for r in (rank, rank + 1)))


def permuted_chunks(position: Ids, size: int, chunk: int, keys: Sequence[int]) -> Ids:
    """Map positions in [0, size) by a permutation that moves each chunk of `chunk` consecutive positions as a whole.

    position: (n,) int64, any of these positions. keys: random integers that determine the permutation. A shorter last
    chunk gets a random place.
    """
    full, short = divmod(size, chunk)
    start = keys[0] % (full + 1) * chunk
    in_short = (position >= start) & (position < start + short)
    other = position[~in_short]
    other = other - short * (other >= start + short)  # as if the short chunk were not there
    result = position - start + full * chunk
    result[~in_short] = permuted(other // chunk, full, keys) * chunk + other % chunk
    return result


def permuted(value: Ids, size: int, keys: Sequence[int]) -> Ids:
    """Map integers in [0, size) by a pseudorandom permutation of this interval.

    value: (n,) int64, the integers to map. keys: random integers that determine the permutation, one for each round.
    The permutation is a Feistel network on the next power of two, applied again to results outside the interval ("cycle
    walking", Black and Rogaway 2002).
    """
    bits = max(size - 1, 1).bit_length()
    low = np.uint64(bits - bits // 2)
    result = value.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], low, np.uint64(bits // 2), keys)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(value: np.ndarray, low_bits: np.uint64, high_bits: np.uint64, keys: Sequence[int]) -> np.ndarray:
    """Map the integers `value` (uint64) by a Feistel network, a bijection of [0, 2^(low_bits + high_bits)).

    The first round XORs the low_bits lower bits with a hash of the high_bits upper bits, the next round the upper bits
    with a hash of the lower bits, and so on alternately. keys: one random integer per round.
    """
    one = np.uint64(1)
    low, high = value & ((one << low_bits) - one), value >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            high ^= _hash(low, key) >> (np.uint64(64) - high_bits) if high_bits else np.uint64(0)
        else:
            low ^= _hash(high, key) >> (np.uint64(64) - low_bits)
    return high << low_bits | low


def _hash(value: np.ndarray, key: int) -> np.ndarray:
    """Hash unsigned 64-bit integers by SplitMix64's mixer (Steele, Lea and Flood 2014), without its first shift.

    key: an integer that is XORed to them first, so that each key gives another hash. The products wrap at 2^64 on
    purpose.
    """
    mixed = (value ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
