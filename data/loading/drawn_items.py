"""Items that are drawn from a density q over the catalogue for every global batch: the noise of NCE.

The k items are drawn with replacement, and may be items of the batch itself. The draw is a function of (seed, step), so
it is the same for any number of ranks and loader processes, and in a resumed run. Of a global batch of G pairs, pairs a
to b − 1 bring the items ⌊a·k/G⌋ to ⌊b·k/G⌋ − 1, as further items of side y (Batch.extra) with log q.

Shape letters: E entries and N items of the catalogue; k drawn items; m items of side y of a batch.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dyad.data.base.errors import DataError
from dyad.data.batch import Batch, Extra, lengths_by
from dyad.data.loading.batch_parts import stacked
from dyad.data.loading.catalogue import Catalogue
from dyad.data.log_weights import read_log_weights
from dyad.data.shards.content_keys import Int64s, key_name

Float64s = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
REMEDY = "Make the file of the data that is trained on: python -m data weights"


def _uniform(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items: equal for all."""
    return np.full(len(catalogue), -np.log(len(catalogue)))


def _unigram(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items, in proportion to how often an epoch draws them as positives; −inf for the others."""
    with np.errstate(divide="ignore"):
        return np.log(catalogue.draws_N / catalogue.draws_N.sum())


def _of_file(catalogue: Catalogue, file: str | None) -> Float64s:
    """Return log q of the N items by a file of log q by content key, normalised; −inf for items that it lacks.

    Raises DataError for an item that the catalogue lacks, and for a positive that the file lacks: q must be above 0
    wherever data are.
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
    """Draws items from a density, and adds them to batches. Processes that are forked share its arrays.

    support: the number of items that can be drawn.
    """

    def __init__(self, catalogue: Catalogue, log_q_N: Float64s, count: int, pairs: int, seed: int) -> None:
        """log_q_N: log of the probability of each item of the catalogue, −inf for 0. count: k, items of a global batch.
        pairs: G, pairs of a global batch. seed: of the run."""
        self.catalogue, self.log_q_N, self.count, self.pairs, self.seed = catalogue, log_q_N, count, pairs, seed
        self.support = int(np.isfinite(log_q_N).sum())
        # an item shows its texts as often as data do, as their text alone must not tell noise from data; an item that
        # is never a positive has one text
        weight_E = np.where(catalogue.draws_E > 0, catalogue.draws_E, 1)
        share_N = np.exp(log_q_N) / np.add.reduceat(weight_E, catalogue.starts)
        sizes_N = np.diff(catalogue.starts, append=len(weight_E))
        self._cumulative_E = np.cumsum(weight_E * np.repeat(share_N, sizes_N))

    def __str__(self) -> str:
        """A line on the density: how many items it can draw, and how even it is."""
        log_q_n = self.log_q_N[np.isfinite(self.log_q_N)]
        effective = np.exp(-(np.exp(log_q_n) * log_q_n).sum())
        return (
            f"noise: {self.count:,} items are drawn for each batch, from {self.support:,} with the entropy of "
            f"{effective:,.1f} equally likely ones; the likeliest makes {np.exp(log_q_n.max()):.2%} of draws"
        )

    def entries(self, step: int) -> Int64s:
        """Return the entries of the catalogue that are drawn for the global batch of a step, (k,)."""
        digest = hashlib.blake2b(f"{self.seed}/{step}/drawn items".encode(), digest_size=16).digest()
        draws_k = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8"))).random(self.count)
        total = self._cumulative_E[-1]
        below = np.minimum(draws_k * total, np.nextafter(total, 0))  # the product may round to the total itself
        return np.searchsorted(self._cumulative_E, below, side="right")

    def added(self, batch: Batch, step: int, rows: slice) -> Batch:
        """Return the batch of some rows of the global batch of a step, with the items that they bring, and log q.

        batch: has no further items. Raises DataError for an item of side y that cannot be drawn: q must be above 0
        wherever data are.
        """
        bounds = np.arange(rows.start, rows.stop + 1) * self.count // self.pairs
        firsts = np.arange(len(batch)) if batch.x_places is None else np.flatnonzero(batch.x_places == 0)
        entries_k = self.entries(step)[bounds[0] : bounds[-1]]
        texts = [self.catalogue.text(entry) for entry in entries_k.tolist()]
        y_kL = self.catalogue.tokens(texts) if texts else batch.y[:0]
        y, extra_y = stacked([batch.y, y_kL]).split([len(batch.y), len(y_kL)])  # of one width
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
            lengths=lengths_by(self.catalogue.tokenize, y_kL),
            log_q=torch.from_numpy(self.log_q_N[item_k].astype(np.float32)),
        )
        return replace(batch, y=y, extra=extra, y_log_q=torch.from_numpy(log_q_m.astype(np.float32)))
