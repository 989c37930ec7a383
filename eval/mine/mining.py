"""Mining of hard negatives: items that a model ranks high for a query although they are not right.

Queries and items are questions and passages (eval/mine/passages.py), or images and captions, or captions and images
(eval/mine/images.py).
A search with the model gives each query its best items, ranked from 1. Those from first_rank to last_rank are
candidates. The best `keep` candidates that are not left out are the negatives. A candidate is left out for the first of
these reasons that holds, and the others keep their ranks:
    right      it is a right item of the query, by its id, meaning or content
    unreadable it is an image that cannot be decoded
    unscored   a file with scores of another model is given, and the file has no score for it
    unknown    a margin is set, but no right item as above has a score (for example none is among the items)
    margin     its score is above the best score of a right item as above, minus the margin
    max_score  its score is above max_score
    right      its text is that of a right item under another title, if that item has no title or the model reads none
    repeated   an earlier candidate, not left out for a reason above, has the same content: text and title, or image
    answer     it contains an answer to the query, which is a question
A relative margin (an option) is a share of the absolute value of the best right score, so it also works for negative
scores.
Scores of another model, for example a cross-encoder, replace those of the search in the margins and in max_score, but
not in the ranks.

Shape letters: b queries in a block, n rows of queries, m items, D embedding width, k hits of a query.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from dyad.data.base.files import whole_file, write_errors, write_json
from dyad.data.config import AnswerMatch, MiningConfig
from dyad.data.loading.order import local_rows
from dyad.data.question_passage.answers import answer_finder
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.data.shards.storage import sha256_of
from dyad.eval.encode.embeddings import Ids, SizedItems, encode_corpus, identity_of, token_digest
from dyad.eval.encode.encoder import Encoder
from dyad.eval.mine.pair_scores import PairScores
from dyad.eval.search.index import Hits, Index
from dyad.train.distributed.agreement import raise_on_all, rank_0_only
from dyad.train.distributed.world import World, gather_objects

MINED, SUMMARY = "mined.jsonl", "mined.json"
FORMAT = 1
SEARCHED_BYTES = 2**30  # queries searched at a time, with their hits; for each search, an index in parts is made anew
BLOCK = 16_384  # queries whose negatives are chosen at a time
# the reasons to leave an item out that do not need its text, in their order; "": not left out
BY_NUMBERS = ("", "rank", "right", "unreadable", "unscored", "unknown", "margin", "max_score")


@dataclass(frozen=True)
class LabelledQuery:
    """A query with its right items, collected from all rows of the query, and its embedding.

    answers: texts that no negative may contain. keys: content keys (hashes of the content) of right items, int64.
    positions: indices of right items, int64: those given by id or by meaning, and for each key the first item that has
    it. query_D: embedding of the query, float32 (D,). texts: hashes (`content_key`) of the texts with which an item is
    right under any title.
    """

    id: str
    answers: tuple[str, ...]
    keys: Int64s
    positions: Int64s
    query_D: np.ndarray
    texts: frozenset[int] = frozenset()


class Side(NamedTuple):
    """Queries or items as inputs of a tower.

    tower: the tower that encodes them. inputs: the queries or items, read on request. ids: (start, stop) → ids of the
    inputs start … stop − 1. fingerprint: digest of their contents. read_as: the options by which they are prepared for
    the tower, as text. unreadable: (encoder, embeddings (n, D) of the inputs) → indices of the inputs that cannot be
    read, whose embeddings mean nothing; by default all can be read.
    """

    tower: Literal["x", "y"]
    inputs: SizedItems
    ids: Ids
    fingerprint: str
    read_as: str
    unreadable: Callable[[Encoder, np.ndarray], Int64s] = lambda encode, embeddings_nD: np.empty(0, np.int64)


class MiningData(Protocol):
    """Queries, each given by one or more of n rows, and the m items among which their hard negatives are searched.

    names: words for queries and for items, used in the summary and as folders of embeddings. row_keys (n,) int64: rows
    with equal keys are one query. item_keys (m,) int64: content keys (hashes of the content) of the items.
    """

    names: ClassVar[tuple[str, str]]

    @property
    def row_keys(self) -> Int64s: ...

    @property
    def item_keys(self) -> Int64s: ...

    def sides(self) -> tuple[Side, Side]:
        """Return (queries, items) as inputs of their towers: the n rows of queries and the m items."""
        ...

    def labelled(self, groups: Sequence[list[int]], queries_bD: np.ndarray) -> list[LabelledQuery]:
        """Return b queries with their right items.

        groups: the row indices of each query. queries_bD: embeddings of the queries, (b, D).
        """
        ...

    def item(self, position: int) -> tuple[str, str]:
        """Return (name, text) of the item with index `position`.

        Its name in mined.jsonl is, for example, a passage id.
        """
        ...


@dataclass(frozen=True)
class MiningInput:
    """The queries and items from which hard negatives are mined, with their embeddings.

    queries_nD: embeddings of the rows of queries, (n, D). items_mD: embeddings of the items, (m, D). Both may be
    memory-mapped. scores: question–passage scores of another model, to which margins and max_score apply; None: they
    apply to the scores of the search. unreadable: indices of items that are no negatives and set no margin, as their
    embeddings mean nothing.
    """

    data: MiningData
    queries_nD: np.ndarray
    items_mD: np.ndarray
    scores: PairScores | None = None
    unreadable: Int64s = field(default_factory=lambda: np.empty(0, np.int64))


def mine(
    source: MiningInput, config: MiningConfig, out: Path, world: World, identity: dict[str, Any]
) -> dict[str, Any]:
    """Mine hard negatives for all queries; write out/mined.jsonl and its summary out/mined.json; return the summary.

    All processes must call it together: the search and the queries are divided among them, and process 0 writes the
    lines. source: the queries and items with their embeddings. mined.jsonl has a line for each query: {"query_id",
    "negatives": ids of passages, texts of captions or keys of images, best first, "scores": search score of each}. If
    several rows are one query, the right items of all of them count. identity: origin of model and data, copied into
    the summary.

    The summary has the numbers of queries (under data.names[0]), of queries "without" negatives, of "negatives" and of
    items "found"; "left_out": reason → number of items; "settings", "search" and "identity". In the file it also has
    "sha256", that of mined.jsonl. Memory: SEARCHED_BYTES for queries and hits, and about 60 bytes for each query.

    Raises ConfigError for a bad index, DataError for damaged data, HardwareError if the files cannot be written.
    """
    data = source.data
    index = raise_on_all(world, lambda: Index(source.items_mD, config.index, world=world))
    counts: Counter[str] = Counter()
    with _open_mined(out / MINED, world) as write:
        for groups, queries_bD, hits in _searched(source, index, config.last_rank):
            own = local_rows(len(groups), world.rank, world.size)
            work = partial(_mine_block, source, config, groups[own], queries_bD[own], hits.of(own))
            for lines, part in gather_objects(raise_on_all(world, work), world):
                rank_0_only(world, partial(write, lines))
                counts.update(part)
    summary = {
        "format": FORMAT,
        **{name: counts.pop(name, 0) for name in (data.names[0], "without", "negatives", "found")},
        "left_out": dict(sorted(counts.items())),
        "settings": asdict(config),
        "search": index.how,
        "identity": identity,
    }

    end = write_errors(out / SUMMARY)(lambda: write_json(out / SUMMARY, summary | {"sha256": sha256_of(out / MINED)}))
    rank_0_only(world, end)
    return summary


def embed_all(encode: Encoder, data: MiningData, folder: Path, log: Callable[[str], None] | None = None) -> MiningInput:
    """Encode queries and items, write their embeddings into `folder`, and return a MiningInput without scores.

    All processes must call it together. The embeddings are those of the current weights of `encode`, in the folders
    `folder`/NAME for both of data.names. Embeddings that an earlier call wrote there, complete or not, are used again
    if the weights, the data and the options of `encode` that change embeddings are the same. log: function that prints
    a line; None: a progress bar on a terminal, lines on standard output elsewhere. Raises the errors of encode_corpus.
    """

    def encoded(name: str, of: Side) -> np.ndarray:
        identity = identity_of(encode.towers[of.tower], of.fingerprint, of.read_as, token_digest(of.inputs))
        return encode_corpus(encode, of.tower, of.inputs, folder / name, ids=of.ids, identity=identity, log=log)

    sides = data.sides()
    queries_nD, items_mD = map(encoded, data.names, sides)
    return MiningInput(data, queries_nD, items_mD, unreadable=sides[1].unreadable(encode, items_mD))


def grouped(keys_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group n rows by query: return (order, ends), where group g has the rows order[ends[g]:ends[g + 1]], ascending.

    keys_n: the key of the query of each row, (n,). order: the n row indices. ends: one number more than there are
    groups, from 0. Groups are sorted by their first rows.
    """
    _, first, group_n = np.unique(keys_n, return_index=True, return_inverse=True)
    first_n = first[group_n]
    order = np.argsort(first_n, kind="stable")
    return order, np.flatnonzero(np.diff(first_n[order], prepend=-1, append=len(keys_n)))


def _searched(source: MiningInput, index: Index, k: int) -> Iterator[tuple[list[list[int]], np.ndarray, Hits]]:
    """Search all queries; yield (their row indices, embeddings (b, D), hits, at most k each) of b queries at a time.

    All processes must iterate to the end. One search has as many queries as fit into SEARCHED_BYTES with their hits:
    each search reads all items, and puts those of an index that has several parts into it again.
    """
    order, ends = grouped(source.data.row_keys)
    count = max(1, SEARCHED_BYTES // (4 * source.queries_nD.shape[1] + 12 * k))  # a hit: score and position
    for start in range(0, len(ends) - 1, count):
        borders = ends[start : start + count + 1]
        queries = np.asarray(source.queries_nD[order[borders[:-1]]], dtype=np.float32)
        hits = index.search(queries, k)
        for first in range(0, len(queries), BLOCK):
            rows = slice(first, first + BLOCK)
            groups = [order[begin:end].tolist() for begin, end in pairwise(borders[first : first + BLOCK + 1])]
            yield groups, queries[rows], hits.of(rows)


# ---- one block of queries --------------------------------------------------------------------------------------------


def _mine_block(
    source: MiningInput, config: MiningConfig, groups: Sequence[list[int]], queries_bD: np.ndarray, hits: Hits
) -> tuple[bytes, Counter[str]]:
    """Choose the hard negatives of b queries; return (their lines of mined.jsonl, counts for the summary).

    The counts are of queries, queries without negatives, hits, negatives, and the hits left out for each reason.
    groups: the row indices of each query. queries_bD: their embeddings. hits: the items that the search found for them.
    """
    counts: Counter[str] = Counter()
    lines = []
    for i, query in enumerate(source.data.labelled(groups, queries_bD)):
        found = hits.scores[i] > -np.inf
        own = Hits(hits.scores[i][found], hits.positions[i][found])
        chosen = _choose_negatives(source, config, query, own, counts)
        counts.update({source.data.names[0]: 1, "without": not chosen})
        counts.update(negatives=len(chosen), found=len(own.positions))
        names, best = zip(*chosen, strict=True) if chosen else ((), ())
        line = {"query_id": query.id, "negatives": names, "scores": [float(f"{score:.6g}") for score in best]}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines).encode(), counts


def _choose_negatives(
    source: MiningInput, config: MiningConfig, query: LabelledQuery, hits: Hits, counts: Counter[str]
) -> list[tuple[str, float]]:
    """Choose the negatives of a query among its hits; return (name, search score) of each, best first.

    The name is that in mined.jsonl; there are at most config.keep negatives. hits: the k items that the search found
    for this query, best first. For each hit that is left out, its reason is counted in `counts`: one that the module
    lists, "rank" (before config.first_rank), or "beyond_keep" (enough items were chosen before it).
    """
    keys_k = source.data.item_keys[hits.positions]
    reasons_k = _reasons_to_drop(source, config, query, hits, keys_k)
    counts.update(BY_NUMBERS[reason] for reason in reasons_k[reasons_k > 0])
    left = np.flatnonzero(reasons_k == 0).tolist()
    answers = query.answers if config.drop_answers else ()
    wrong = answer_finder(answers, AnswerMatch.regex if config.regex_answers else AnswerMatch.string)
    chosen: list[tuple[str, float]] = []
    seen: set[int] = set()
    for number, i in enumerate(left):
        if len(chosen) == config.keep:
            counts["beyond_keep"] += len(left) - number  # their texts are not read
            break
        key, (name, text) = int(keys_k[i]), source.data.item(int(hits.positions[i]))
        copy = content_key(text.encode()) in query.texts
        reason = "right" if copy else "repeated" if key in seen else "answer" if wrong.within(text) else ""
        seen.add(key)
        if reason:
            counts[reason] += 1
        else:
            chosen.append((name, float(hits.scores[i])))
    return chosen


def _reasons_to_drop(
    source: MiningInput, config: MiningConfig, query: LabelledQuery, hits: Hits, keys_k: np.ndarray
) -> np.ndarray:
    """Find the first reason to leave out each of the k hits (items that the search found) of a query.

    Returns (k,) indices into BY_NUMBERS, the tuple of reasons; 0 stands for no reason. Not checked are "repeated",
    "answer", and whether the item is right under any title. keys_k: content keys (hashes of the content) of the hits.
    Margins and max_score apply to source.scores, or to the scores of the search if source.scores is None.
    """
    right_k = np.isin(keys_k, query.keys) | np.isin(hits.positions, query.positions)
    unreadable_k = np.isin(hits.positions, source.unreadable)
    right = np.setdiff1d(query.positions, source.unreadable)
    if source.scores is None:
        scores_k = hits.scores
        right_scores = source.items_mD[right].astype(np.float32) @ query.query_D
    else:
        names = ([source.data.item(p)[0] for p in some.tolist()] for some in (hits.positions, right))
        scores_k, right_scores = (source.scores.of(query.id, ids) for ids in names)
    right_scores = np.concatenate([right_scores, scores_k[right_k & ~unreadable_k]])
    right_scores = right_scores[~np.isnan(right_scores)]
    best = float(right_scores.max()) if len(right_scores) else np.nan
    limits = [] if config.margin is None else [best - config.margin]
    limits += [] if config.relative_margin is None else [best - config.relative_margin * abs(best)]
    limit = min(limits, default=np.inf)  # NaN: no right item has a score
    conditions = [
        np.arange(1, len(keys_k) + 1) < config.first_rank,
        right_k,
        unreadable_k,
        np.isnan(scores_k),
        np.full(len(keys_k), np.isnan(limit)),
        scores_k > limit,
        scores_k > (np.inf if config.max_score is None else config.max_score),
    ]
    return np.select(conditions, range(1, len(BY_NUMBERS)), 0)


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open_mined(path: Path, world: World) -> Iterator[Callable[[bytes], Any]]:
    """Context manager: yield a function that appends lines to a new file, which replaces `path` when the block ends.

    `path` never holds an incomplete file. If the block raises, an older file at `path` stays as it was, but its summary
    (mined.json) is deleted at the beginning in any case. All processes must enter and leave it together; only process 0
    may call the function. Raises HardwareError if the file cannot be written.
    """
    errors = write_errors(path)
    with ExitStack() as stack:

        def begin() -> BinaryIO:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / SUMMARY).unlink(missing_ok=True)  # it describes the file that is about to be replaced
            return stack.enter_context(whole_file(path))

        file = rank_0_only(world, errors(begin))
        yield errors(lambda lines: file and file.write(lines))
        rank_0_only(world, errors(stack.close))
