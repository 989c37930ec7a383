"""Draw noise items for noise contrastive estimation (NCE): k items for every global batch, from a density q over the
items of a catalogue.

The items are drawn with replacement, and may be items of the batch itself. The draw is a function of (seed, step), so
it is the same for any number of ranks and loader processes, and in a resumed run. In a global batch of G pairs, the
batch of pairs a … b − 1 gets the items ⌊a·k/G⌋ … ⌊b·k/G⌋ − 1 as further items of side y (Batch.extra) with log q.

Shape letters: E entries and N items of the catalogue; k drawn items; m items of side y of a batch.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dyad.data.base.errors import DataError
from dyad.data.batch import Batch, Extra, text_lengths
from dyad.data.loading.batch_parts import concatenated
from dyad.data.loading.catalogue import Catalogue
from dyad.data.log_weights import read_log_weights
from dyad.data.shards.content_keys import Int64s, key_name

Float64s = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
REMEDY = "Make the file of the data that is trained on: python -m data weights"


def _uniform(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items (N,) for the uniform density: −log N for each. file: not used."""
    return np.full(len(catalogue), -np.log(len(catalogue)))


def _unigram(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items (N,) for the density of positives; −inf for an item that is never one.

    q is proportional to the expected number of times that an epoch draws an item as a positive. file: not used.
    """
    with np.errstate(divide="ignore"):
        return np.log(catalogue.draws_N / catalogue.draws_N.sum())


def _of_file(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items (N,) from a file that `read_log_weights` reads, normalised.

    It is −inf for items that the file lacks. Raises DataError for an item of the file that the catalogue lacks, and for
    a positive that the file lacks, because NCE needs q > 0 for every positive; other errors as of `read_log_weights`.
    """
    weights = read_log_weights(str(file))
    place_n, log_q_N = catalogue.positions(weights.keys_n), np.full(len(catalogue), -np.inf)
    if len(unknown := weights.keys_n[place_n < 0]):
        raise DataError(
            f"{file}: {len(unknown):,} of its {len(place_n):,} items are not in the data, and none can be drawn. The "
            f"first has the content key {key_name(int(unknown[0]))}. {REMEDY}"
        )
    log_q_N[place_n] = weights.values_n - np.logaddexp.reduce(weights.values_n)
    if len(never := catalogue.starts[(catalogue.draws_N > 0) & np.isneginf(log_q_N)]):
        first = catalogue.text(int(never[0]))
        raise DataError(
            f"{file}: no log q of {len(never):,} items that are positives in the data. The first is "
            f"{getattr(first, 'text', first)!r:.200}. {REMEDY}"
        )
    return log_q_N


DENSITIES: dict[str, Callable[[Catalogue, str | None], Float64s]] = {
    "uniform": _uniform,
    "unigram": _unigram,
    "file": _of_file,
}


class DrawnItems:
    """Draws k noise items for each global batch from a density, and adds to a part of the batch its share of them.

    support: the number of items that can be drawn (q > 0). Forked processes share its arrays.
    """

    def __init__(self, catalogue: Catalogue, log_q_N: Float64s, count: int, pairs: int, seed: int) -> None:
        """Set up the draws. log_q_N: log of the probability of each item of the catalogue, −inf for 0. count: k, noise
        items for a global batch. pairs: G, pairs of a global batch. seed: seed of the run."""
        self.catalogue, self.log_q_N, self.count, self.pairs, self.seed = catalogue, log_q_N, count, pairs, seed
        self.support = int(np.isfinite(log_q_N).sum())
        # The texts of an item are drawn in proportion to how often data have them, so that the text alone does not tell
        # noise from data. An item that is never a positive has one text
        weight_E = np.where(catalogue.draws_E > 0, catalogue.draws_E, 1)
        share_N = np.exp(log_q_N) / np.add.reduceat(weight_E, catalogue.starts)
        sizes_N = np.diff(catalogue.starts, append=len(weight_E))
        self._cumulative_E = np.cumsum(weight_E * np.repeat(share_N, sizes_N))

    def __str__(self) -> str:
        """Return a line for the log about the density: how many items can be drawn, and its entropy."""
        log_q_n = self.log_q_N[np.isfinite(self.log_q_N)]
        effective = np.exp(-(np.exp(log_q_n) * log_q_n).sum())
        return (
            f"noise: {self.count:,} items are drawn for each batch, from {self.support:,} with the entropy of "
            f"{effective:,.1f} equally likely ones; the likeliest makes {np.exp(log_q_n.max()):.2%} of draws"
        )

    def entries(self, step: int) -> Int64s:
        """Return the indices (among E) of the catalogue entries drawn for the global batch of a step, int64 (k,).

        They depend only on the seed and the step, and an entry may come twice.
        """
        digest = hashlib.blake2b(f"{self.seed}/{step}/drawn items".encode(), digest_size=16).digest()
        draws_k = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8"))).random(self.count)
        total = self._cumulative_E[-1]
        below = np.minimum(draws_k * total, np.nextafter(total, 0))  # the product may round to the total itself
        return np.searchsorted(self._cumulative_E, below, side="right")

    def added(self, batch: Batch, step: int, rows: slice) -> Batch:
        """Return `batch` with its share of the noise items of the step as Batch.extra, and with Batch.y_log_q.

        The latter has log q of the batch's y items. Batch.y and Batch.extra.y are padded to one width. batch: the
        samples `rows` of the global batch of step `step`, on the CPU and without extra items, which would be lost.
        Raises DataError for an item of side y that cannot be drawn, because NCE needs q > 0 for every positive, and
        errors as Catalogue.text does.
        """
        bounds = np.arange(rows.start, rows.stop + 1) * self.count // self.pairs
        firsts = np.arange(len(batch)) if batch.x_places is None else np.flatnonzero(batch.x_places == 0)
        entries_k = self.entries(step)[bounds[0] : bounds[-1]]
        texts = [self.catalogue.text(entry) for entry in entries_k.tolist()]
        y_kL = self.catalogue.tokens(texts) if texts else batch.y[:0]
        y, extra_y = concatenated([batch.y, y_kL]).split([len(batch.y), len(y_kL)])  # padded to one width
        item_k = np.searchsorted(self.catalogue.starts, entries_k, side="right") - 1
        item_m = self.catalogue.positions(batch.y_keys.numpy())
        log_q_m = np.where(item_m < 0, -np.inf, self.log_q_N[item_m])
        if len(never := batch.y_keys[torch.from_numpy(np.isneginf(log_q_m))]):
            raise DataError(
                f"data.train: the item with content key {key_name(int(never[0]))} cannot be drawn as noise, where q "
                "must be above 0: the data have changed while they were read. Start again"
            )
        extra = Extra(
            y=extra_y,
            row=torch.from_numpy(np.repeat(firsts, np.diff(bounds))),
            keys=torch.from_numpy(self.catalogue.keys[item_k]),
            positive=torch.zeros(len(item_k), dtype=torch.bool),
            lengths=text_lengths(self.catalogue.tokenize, y_kL),
            log_q=torch.from_numpy(self.log_q_N[item_k].astype(np.float32)),
        )
        return replace(batch, y=y, extra=extra, y_log_q=torch.from_numpy(log_q_m.astype(np.float32)))
