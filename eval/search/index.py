"""Find the k rows of a corpus with the highest inner products, exactly or with an approximate index of FAISS.

The corpus is a matrix, float32 or float16, in RAM or memory-mapped; it may be larger than the memory. It is searched in
parts of consecutive rows (shards), and the results of the shards are merged. A shard has as many rows as fit into
`shard_bytes` in the form that the index holds; its boundaries depend on nothing else. Large shards make an approximate
index more accurate and a GPU faster; exact search on a CPU is as fast with small ones. Queries are searched in blocks
of BLOCK. The pairs (shard, block) are divided among the processes, which together make the same calls as one process
would, so the result does not depend on their number.

Ties: of rows with equal scores the lower row index comes first, also if not all of these rows fit into the k best. So
an exact search returns the first k rows of a stable sort by float32 score. An approximate index finds any of the rows
with equal scores, and the rows that it finds are put into this order. The last bits of a score depend on the place of
the row in a matrix product and on the number of threads. So the scores of equal rows may differ in these bits, and then
the rows are in the order of these scores.

Scores are float32 inner products of float32 vectors, because with bf16 two of a hundred found rows change. On a CPU,
FAISS does the search. On a GPU, and where FAISS is not installed, torch does the exact search. An approximate index is
moved to the GPU if FAISS's GPU build supports it.

Symbols: n queries, m corpus rows, D vector width, k results per query, q queries of a block, s rows of a shard.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import ConfigError
from dyad.data.loading.order import local_rows
from dyad.eval.encode.process_memory import drop_pages
from dyad.eval.search.index_spec import EXACT, Spec, load_faiss
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.devices import has_faiss_gpu
from dyad.train.distributed.world import World, gather_objects

SHARD_BYTES, EXACT_ON_CPU = 2**30, 2**26  # bytes of a shard
SCRATCH = 2**28  # bytes of GPU memory that FAISS uses beside a shard; by default it would reserve 1.5 GB
BLOCK = 1024  # queries of a block
SAMPLE = 65_536  # corpus rows that an index is trained on, or PER_LIST rows for each of its lists if these are more
PER_LIST = 64
SAMPLED = 200  # queries by which an approximate index is compared with an exact search
TOO_FEW = "Number of training points"  # beginning of FAISS's message about fewer rows than lists or codes
NO_PCA = "PCA matrix cannot output"  # part of it about a PCA of fewer rows than numbers, or to more than the width
SLAB = 2**24  # bytes of a corpus that are converted to float32 at a time
STRIP, STRIP_GPU = 2**20, 2**28  # scores in memory at a time
ALONE = World()


class Hits(NamedTuple):
    """The k corpus rows found for each of n queries, best first.

    scores (n, k): float32, descending. positions (n, k): int64 indices of corpus rows. If an approximate index finds
    fewer than k rows for a query, the remaining entries have the score −inf and the position m, the number of corpus
    rows: using m as an index raises an IndexError, while FAISS's −1 would silently mean the last row.
    """

    scores: np.ndarray
    positions: np.ndarray

    def of(self, queries: slice | np.ndarray) -> "Hits":
        """Return Hits (found corpus rows and their scores) for only some queries, a slice or indices."""
        return Hits(self.scores[queries], self.positions[queries])

    def found(self, query: int) -> list[tuple[int, float]]:
        """Return (corpus row, score) for each row that a search found for the query with index `query`, best first."""
        pairs = zip(self.positions[query].tolist(), self.scores[query].tolist(), strict=True)
        return [(position, score) for position, score in pairs if score != -np.inf]


class Index:
    """A corpus of vectors (m, D), prepared for many searches.

    spec: an argument of FAISS's index_factory and search options, such as "IVF256,PQ32;nprobe=16"; "Flat" is exact. An
    index is trained (lists, codebooks) once, on evenly spread rows of the corpus. shard_bytes: size of a shard, a part
    of consecutive rows; None: SHARD_BYTES, or EXACT_ON_CPU for exact search without a GPU. The index of a shard is kept
    until another shard is searched. world: all its processes make the index and search together, with the same queries;
    ALONE: this process only. With several threads an HNSW graph differs a little from run to run.

    A corpus that is too small to train the index is searched exactly. Attributes: exact: whether searches are exact.
    how: {"index": the spec in use}, with the entries "instead_of" and "because" if the spec in use is not `spec`.

    Vectors must be finite; otherwise the constructor or a search raises ValueError. Raises ConfigError for a bad spec,
    and for an approximate index if FAISS is not installed.
    """

    def __init__(
        self, corpus_mD: np.ndarray, spec: str = "Flat", *, shard_bytes: int | None = None, world: World = ALONE
    ) -> None:
        parsed = Spec.parsed(spec)
        self.corpus, self.world = corpus_mD, world
        self.how, learnt = {"index": spec}, None
        if not parsed.exact:
            learnt, reason = from_rank_0(world, lambda: _train_index(load_faiss(), parsed, corpus_mD))
            if learnt is None:
                self.how = {"index": EXACT, "instead_of": spec, "because": reason}
        self.exact = learnt is None
        self._searcher = _Exact() if learnt is None else _Approximate(load_faiss(), parsed, learnt)
        self._rows = max(
            1, (shard_bytes or self._searcher.shard_bytes) // self._searcher.bytes_per_row(corpus_mD.shape[1])
        )
        self._shard: tuple[int, Any] = (-1, None)  # (first row, what the searcher made of these rows)

    def search(self, queries_nD: np.ndarray, k: int) -> Hits:
        """Find the k corpus rows with the highest scores (inner products) for each of n queries.

        All processes must call it together with the same queries. queries_nD (n, D): the query vectors. k: 1 or more;
        if it is above m, the result has m rows for each query, not k.
        """
        m, width = self.corpus.shape
        assert k > 0 and queries_nD.shape[1] == width, (k, queries_nD.shape, self.corpus.shape)
        n, k = len(queries_nD), min(k, m)
        best = Hits(np.full((n, k), -np.inf, np.float32), np.full((n, k), m, np.int64))
        for start, first in self._work(n):
            rows, stop = slice(first, min(first + BLOCK, n)), min(start + self._rows, m)
            if self._shard[0] != start:
                self._shard = (-1, None)  # frees its memory before the next one is made
                self._shard = (start, self._searcher.filled(self.corpus, start, stop))
            found = self._searcher.search(self._shard[1], _finite("queries", queries_nD[rows]), min(k, stop - start))
            found = Hits(found.scores, np.where(found.positions < 0, m, found.positions + start))
            best.scores[rows], best.positions[rows] = _merged([best.of(rows), found], k)
        for first in range(0, n, BLOCK) if self.world.size > 1 else ():
            rows = slice(first, first + BLOCK)
            parts = gather_objects(best.of(rows), self.world)  # the ranks have searched consecutive parts of the corpus
            best.scores[rows], best.positions[rows] = _merged(parts, k)
        return best

    def recall_against_exact(self, hits: Hits, queries_nD: np.ndarray, sample: int = SAMPLED) -> float:
        """Return the share of the k best corpus rows of an exact search that are in `hits`.

        hits: the results of an earlier search with queries_nD, the n query vectors; k is its number of results per
        query. It is the mean over at most `sample` evenly spread queries, which are searched exactly. All processes
        must call it together.
        """
        rows = evenly_spaced(len(queries_nD), sample)
        exact = Index(self.corpus, world=self.world).search(queries_nD[rows], hits.positions.shape[1]).positions
        return float(np.mean([np.isin(e, h).mean() for e, h in zip(exact, hits.positions[rows], strict=True)]))

    def recall_metrics(self, hits: Hits, queries_nD: np.ndarray) -> dict[str, float]:
        """Return {"recall_against_exact@<k>": the result of `recall_against_exact`}; {} if the index is exact.

        All processes must call it together.
        """
        name = f"recall_against_exact@{hits.positions.shape[1]}"
        return {} if self.exact else {name: self.recall_against_exact(hits, queries_nD)}

    def _work(self, n: int) -> list[tuple[int, int]]:
        """Return the (shard, block) pairs that this process searches, ordered by shard.

        A pair is (first corpus row of the shard, first query of the block). n: the number of queries. The processes
        divide all pairs evenly.
        """
        pairs = [(row, query) for row in range(0, len(self.corpus), self._rows) for query in range(0, n, BLOCK)]
        return pairs[local_rows(len(pairs), self.world.rank, self.world.size)]


# ---- a shard -------------------------------------------------------------------------------------------------------


class _Exact:
    """Exact search of a shard (a part of the corpus): by FAISS on a CPU, by torch on a GPU or if FAISS is missing."""

    def __init__(self) -> None:
        self.faiss, self.on_gpu = None, torch.cuda.is_available()
        if not self.on_gpu:
            with suppress(ConfigError):
                self.faiss = load_faiss()
        self.shard_bytes = SHARD_BYTES if self.on_gpu else EXACT_ON_CPU

    def bytes_per_row(self, width: int) -> int:
        return 4 * width

    def filled(self, corpus: np.ndarray, start: int, stop: int) -> np.ndarray | Tensor:
        """Return the corpus rows start … stop − 1 as float32: a tensor on the GPU if there is one, else an array."""
        shard = _shard(corpus, start, stop)
        return torch.from_numpy(shard).cuda() if self.on_gpu else shard

    def search(self, shard: Any, queries_qD: np.ndarray, k: int) -> Hits:
        """Find for each query the k rows of `shard`, a part of the corpus, with the highest inner products.

        shard: the result of `filled`. queries_qD (q, D): q query vectors of width D, float32. k: at most the number of
        its rows. Positions count from the first row of this part.
        """
        if self.on_gpu:
            return _best_rows(torch.from_numpy(queries_qD).cuda(), shard, k)
        if self.faiss is None:
            return _best_rows(torch.from_numpy(queries_qD), torch.from_numpy(shard), k)
        # the (k + 1)-th hit shows whether rows with the score of the k-th hit are left out
        more = min(k + 1, len(shard))
        scores, positions = self.faiss.knn(queries_qD, shard, more, self.faiss.METRIC_INNER_PRODUCT)
        best = _in_order(scores, positions)
        best = Hits(best.scores[:, :k], best.positions[:, :k])
        tied = (scores[:, k - 1] == scores[:, -1]) & (more > k)
        if tied.any():
            exact = _best_rows(torch.from_numpy(queries_qD[tied]), torch.from_numpy(shard), k)
            best.scores[tied], best.positions[tied] = exact
        return best


class _Approximate:
    """Approximate search with a trained FAISS index, which is filled with one part of the corpus (shard) at a time.

    It has the same methods as _Exact. learnt: the trained, empty index, serialised by faiss.serialize_index, as uint8.
    """

    shard_bytes = SHARD_BYTES

    def __init__(self, faiss: ModuleType, spec: Spec, learnt: np.ndarray) -> None:
        self.faiss, self.spec = faiss, spec
        self.empty = faiss.deserialize_index(learnt)
        self.resources = faiss.StandardGpuResources() if has_faiss_gpu(faiss) else None
        if self.resources is not None:
            self.resources.setTempMemory(SCRATCH)

    def bytes_per_row(self, width: int) -> int:
        """Return the bytes that a vector of this width takes in the FAISS index.

        The number of bytes depends on the kind of index, so it is measured by adding random vectors.
        """
        sample = np.random.default_rng(0).standard_normal((256, width), dtype=np.float32)
        with self.spec.errors():
            index = self.faiss.clone_index(self.empty)
            index.add(sample)
            sizes = [len(self.faiss.serialize_index(i)) for i in (self.empty, index)]
        return max(1, -(-(sizes[1] - sizes[0]) // len(sample)))

    def filled(self, corpus: np.ndarray, start: int, stop: int) -> Any:
        """Return a FAISS index with the corpus rows start … stop − 1, on the GPU if FAISS's GPU build supports it."""
        index, space = self.faiss.clone_index(self.empty), self.faiss.ParameterSpace()
        with self.spec.errors():
            if self.resources is not None:
                device = torch.cuda.current_device() if torch.cuda.is_available() else 0
                with suppress(RuntimeError):  # not every index exists for GPUs
                    index = self.faiss.index_cpu_to_gpu(self.resources, device, index)
                    space = self.faiss.GpuParameterSpace()
            self.spec.set_options(space, index)
            for _, rows in _slabs(corpus, start, stop):
                index.add(rows)
        return index

    def search(self, index: Any, queries_qD: np.ndarray, k: int) -> Hits:
        """Find the k best rows for each query in a FAISS index that holds a part of the corpus.

        index: the result of `filled`. queries_qD (q, D): q query vectors of width D, float32. Positions count from the
        first row of this part. If the index finds fewer than k rows for a query, the missing rows have the position −1
        and the score −inf.
        """
        with self.spec.errors():
            scores, positions = index.search(queries_qD, k, params=self.spec.search_parameters(self.faiss, index, k))
        scores[positions < 0] = -np.inf
        return _in_order(scores, positions)


def _train_index(faiss: ModuleType, spec: Spec, corpus: np.ndarray) -> tuple[np.ndarray | None, str]:
    """Train the FAISS index that `spec` describes on evenly spread rows of the corpus, without adding rows to it.

    Returns (the serialised index as bytes in an array, ""), or (None, FAISS's error message) if the corpus has too few
    rows for the training. Raises ConfigError for other errors of FAISS, ValueError for rows that are not finite.
    """
    index = spec.built(faiss, corpus.shape[1])
    lists = faiss.try_extract_index_ivf(index)
    count = min(len(corpus), max(SAMPLE, PER_LIST * (lists.nlist if lists else 0)))
    rows = evenly_spaced(len(corpus), count)
    try:
        with spec.errors():
            index.train(_finite("corpus", corpus[rows]))
    except ConfigError as error:
        reasons = [TOO_FEW, *([NO_PCA] if len(rows) < corpus.shape[1] else [])]
        few = next((each for each in reasons if each in str(error)), None)
        if few is None:
            raise
        return None, few + str(error).partition(few)[2].partition(". ")[0]
    drop_pages(corpus)
    return faiss.serialize_index(index), ""


# ---- rows of a corpus ----------------------------------------------------------------------------------------------


def _finite(name: str, rows: np.ndarray) -> np.ndarray:
    """Return the rows as contiguous float32. Raises ValueError, which begins with `name`, for NaN and infinity.

    The check is needed because vectors may come from a file: without it, a damaged vector would never be found, and no
    error would say so.
    """
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: holds values that are not finite")
    return rows


def _slabs(corpus: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first row, rows) of consecutive parts of the corpus rows start … stop − 1, as float32.

    A part has about SLAB bytes. If the corpus is a memory-mapped file, its pages are dropped from memory after each
    part.
    """
    step = max(1, SLAB // (4 * corpus.shape[1]))
    for row in range(start, stop, step):
        yield row, _finite("corpus", corpus[row : min(row + step, stop)])
        drop_pages(corpus)


def _shard(corpus: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the corpus rows start … stop − 1 as float32; a view, not a copy, of a contiguous float32 matrix in RAM."""
    if not isinstance(corpus, np.memmap) and corpus.dtype == np.float32 and corpus.flags.c_contiguous:
        return _finite("corpus", corpus[start:stop])
    shard = np.empty((stop - start, corpus.shape[1]), np.float32)
    for row, rows in _slabs(corpus, start, stop):
        shard[row - start :][: len(rows)] = rows
    return shard


# ---- the k best ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _best_rows(queries_qD: Tensor, shard_sD: Tensor, k: int) -> Hits:
    """Find for each query the k rows of a part of the corpus with the highest inner products.

    Positions count from the first row of the part. Of rows with equal scores the one with the lower position comes
    first. k: at most s. queries_qD (q, D), shard_sD (s, D): q query vectors and the s corpus rows of the part. The
    scores are computed for a few queries at a time.
    """
    size = max(1, (STRIP_GPU if shard_sD.is_cuda else STRIP) // len(shard_sD))
    parts = [_best_rows_of_strip(part @ shard_sD.T, k) for part in queries_qD.split(size)]
    scores, positions = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return Hits(scores, positions)


def _best_rows_of_strip(score_ts: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (scores, positions), (t, k) each, of the k best of s scores for each of t queries.

    Equal scores are in the order of their positions.
    """
    last_t = score_ts.topk(k, dim=1).values[:, -1:]
    chosen_ts = score_ts >= last_t
    tied = (chosen_ts.sum(dim=1) > k).nonzero()[:, 0]
    if len(tied):  # of the scores equal to the k-th, only the first ones
        equal = score_ts[tied] == last_t[tied]
        room = k - (score_ts[tied] > last_t[tied]).sum(dim=1, keepdim=True)
        chosen_ts[tied] &= ~equal | (equal.cumsum(dim=1, dtype=torch.int32) <= room)
    positions_tk = chosen_ts.nonzero()[:, 1].view(-1, k)
    scores_tk, order = score_ts.gather(1, positions_tk).sort(dim=1, descending=True, stable=True)
    return scores_tk, positions_tk.gather(1, order)


def _in_order(scores: np.ndarray, positions: np.ndarray) -> Hits:
    """Return search results of FAISS as Hits, with corpus rows of equal scores in the order of their indices.

    scores, positions (queries, k): the scores and corpus rows found, by descending score. Changes `positions` in place.
    """
    rows = (scores[:, 1:] == scores[:, :-1]).any(axis=1).nonzero()[0]
    order = np.lexsort((positions[rows], -scores[rows]), axis=-1)
    positions[rows] = np.take_along_axis(positions[rows], order, axis=1)
    return Hits(scores, positions)


def _merged(parts: Sequence[Hits], k: int) -> Hits:
    """Return the k best results for each query among the search results of several parts of the corpus.

    parts: the results of each part, in corpus order; of equal scores the one of the earlier part comes first.
    """
    scores, positions = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Hits(np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1))
