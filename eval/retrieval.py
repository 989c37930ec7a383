"""Retrieval in both directions: the rank of the right answer, by counting, without a matrix of all scores.

Truth: picture i and caption j are right for each other when j belongs to i, when the picture of j has the same
content as i, or when j has the same content as a caption of i (`truth=pairs`: only the first).

Rank of a query: 1 + the wrong items ahead of the best right one. A higher score is ahead; at equal scores the
earlier item is, as a stable sort would have it, so a collapsed model scores no better than chance. Other right
items are not in the way. Median and mean of ranks are open_clip's, recall is CLIP_benchmark's: with several
captions a picture counts when any of them is in the top K, text → image is averaged over captions.

n queries, m items, D embedding width, t queries of one strip of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eval.config import Truth
from eval.encode import Encoder, Evaluator, Report
from eval.index import search
from train.distributed import World, all_reduce_sum

if TYPE_CHECKING:
    from data.image_text import RetrievalSet

STRIP = 2**22  # scores held at a time: 16 MiB


@dataclass(frozen=True)
class Labels:
    """What items are about: item `index[p]` carries `label[p]`. An item may carry several; `index` ascends."""

    index: np.ndarray
    label: np.ndarray
    size: int

    @staticmethod
    def of(*carried: tuple[np.ndarray, np.ndarray], size: int) -> Labels:
        """From (index, label) arrays, in any order."""
        index, label = (np.concatenate(parts) for parts in zip(*carried, strict=True))
        order = np.argsort(index, kind="stable")
        return Labels(index[order], label[order], size)


class Matches:
    """Which of m items are right for each of n queries: those that share a label. Pairs are made strip by strip."""

    def __init__(self, queries: Labels, items: Labels) -> None:
        self.queries = queries
        self.shape = (queries.size, items.size)
        order = np.argsort(items.label, kind="stable")
        self._label, self._item = items.label[order], items.index[order]

    def pairs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(query − start, item) of all right pairs of queries [start, stop), each pair once, in order."""
        begin, end = np.searchsorted(self.queries.index, [start, stop])
        rows, labels = self.queries.index[begin:end] - start, self.queries.label[begin:end]
        low, high = np.searchsorted(self._label, labels, "left"), np.searchsorted(self._label, labels, "right")
        count = high - low
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        items = self._item[np.repeat(low, count) + within]
        unique = np.unique(np.repeat(rows, count) * self.shape[1] + items)
        return unique // self.shape[1], unique % self.shape[1]


def match_pairs(
    owner: np.ndarray, image_keys: np.ndarray, text_keys: np.ndarray, truth: Truth
) -> tuple[Matches, Matches]:
    """(image → text, text → image) truth of N pictures and M captions. owner (M,): the picture of each caption."""
    pictures, captions = np.arange(len(image_keys)), np.arange(len(owner))
    if truth is Truth.pairs:
        image_labels = Labels.of((pictures, pictures), size=len(pictures))
        text_labels = Labels.of((captions, owner), size=len(captions))
    else:
        same_image = np.unique(image_keys, return_inverse=True)[1]
        same_text = np.unique(text_keys, return_inverse=True)[1] + len(pictures)
        image_labels = Labels.of((pictures, same_image), (owner, same_text), size=len(pictures))
        text_labels = Labels.of((captions, same_image[owner]), (captions, same_text), size=len(captions))
    return Matches(image_labels, text_labels), Matches(text_labels, image_labels)


@torch.inference_mode()
def count_ranks(
    queries_nD: np.ndarray, items_mD: np.ndarray, matches: Matches, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """(rank (n,), number of right items (n,)), both int64 and equal on all ranks, which share the strips of queries.

    Memory: twice STRIP scores, or m when that is more. Every query needs a right item.
    """
    n, m = matches.shape
    assert queries_nD.shape[0] == n and items_mD.shape[0] == m, (queries_nD.shape, items_mD.shape, matches.shape)
    items_Dm = torch.from_numpy(items_mD).to(world.device).T
    found = torch.zeros(2, n, dtype=torch.int64, device=world.device)
    size = max(1, STRIP // m)
    # reused, since fresh pages would cost more than the counting
    score, flag = torch.empty(2, min(size, n), m, device=world.device)
    for start in range(world.rank * size, n, world.size * size):
        stop = min(start + size, n)
        queries_tD = torch.from_numpy(queries_nD[start:stop]).to(world.device)
        pairs = [torch.from_numpy(p).to(world.device) for p in matches.pairs(start, stop)]
        score_tm = torch.mm(queries_tD, items_Dm, out=score[: stop - start])
        found[:, start:stop] = _strip_ranks(score_tm, flag[: stop - start], *pairs)
    rank, right = all_reduce_sum(found, world).cpu().numpy()
    assert right.all(), "a query without a right item has no rank"
    return rank, right


def _strip_ranks(score_tm: Tensor, flag_tm: Tensor, row: Tensor, item: Tensor) -> Tensor:
    """(2, t): rank and number of right items per row. Overwrites the scores of right items; flag_tm is scratch."""
    t, m = score_tm.shape
    score = score_tm[row, item]
    best_t = score.new_full((t,), -torch.inf).scatter_reduce_(0, row, score, "amax")
    right_t = torch.zeros(t, dtype=torch.int64, device=row.device).index_add_(0, row, torch.ones_like(row))
    is_best = score == best_t[row]
    first_t = torch.full_like(right_t, m).scatter_reduce_(0, row[is_best], item[is_best], "amin")
    score_tm[row, item] = -torch.inf
    ahead_t = torch.gt(score_tm, best_t[:, None], out=flag_tm).sum(dim=1, dtype=torch.int32)
    tied = (torch.eq(score_tm, best_t[:, None], out=flag_tm).amax(dim=1) > 0).nonzero()[:, 0]
    earlier = torch.arange(m, device=row.device) < first_t[tied, None]
    ahead_t[tied] += ((score_tm[tied] == best_t[tied, None]) & earlier).sum(dim=1, dtype=torch.int32)
    return torch.stack([1 + ahead_t.long(), right_t])


def rank_metrics(rank: np.ndarray, recall_k: Sequence[int]) -> dict[str, float]:
    """R@K, mean_rank, median_rank (1-based; the median is floored, as in open_clip)."""
    recalls = {f"R@{k}": float((rank <= k).mean()) for k in recall_k}
    return {**recalls, "mean_rank": float(rank.mean()), "median_rank": float(np.floor(np.median(rank)))}


def chance_recall(right: np.ndarray, m: int, k: int) -> float:
    """Expected R@K of a random order: per query 1 − C(m − right, K) / C(m, K), averaged."""
    draws = np.arange(min(k, m))
    missed = np.clip((m - right[:, None] - draws) / (m - draws), 0.0, 1.0).prod(axis=1)
    return float((1.0 - missed).mean())


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Both directions on one set of pictures and captions. picture_name, captions: how examples are told to people."""

    data: RetrievalSet
    picture_name: Callable[[int], str]
    captions: Sequence[str]
    truth: Truth = Truth.keys
    recall_k: Sequence[int] = (1, 5, 10)

    def report(self, encode: Encoder, examples: int = 0) -> Report:
        images, texts = encode("x", self.data.images), encode("y", self.data.texts)
        to_text, to_image = match_pairs(self.data.owner, self.data.image_keys, self.data.text_keys, self.truth)
        directions = {"image_to_text": (images, texts, to_text), "text_to_image": (texts, images, to_image)}
        metrics: dict[str, float] = {}
        chance: dict[str, float] = {}
        for name, (queries, items, matches) in directions.items():
            rank, right = count_ranks(queries, items, matches, encode.world)
            metrics |= {f"{name}_{k}": v for k, v in rank_metrics(rank, self.recall_k).items()}
            chance |= {f"{name}_R@{k}": chance_recall(right, matches.shape[1], k) for k in self.recall_k}
        metrics |= {"num_images": float(len(images)), "num_texts": float(len(texts))}
        details: dict[str, Any] = {"truth": self.truth.value}
        if examples:
            details["examples"] = {
                "image_to_text": _examples(images, texts, to_text, self.picture_name, self._caption, examples),
                "text_to_image": _examples(texts, images, to_image, self._caption, self.picture_name, examples),
            }
        return Report("zeroshot_retrieval", metrics, chance, details)

    def _caption(self, index: int) -> str:
        return self.captions[index]


def _examples(
    queries_nD: np.ndarray,
    items_mD: np.ndarray,
    matches: Matches,
    query_name: Callable[[int], str],
    item_name: Callable[[int], str],
    count: int,
) -> list[dict[str, Any]]:
    """The five best items of a few queries, evenly spread over the set."""
    picks = np.unique(np.linspace(0, len(queries_nD) - 1, count).astype(np.int64))
    found = []
    for query, scores, items in zip(picks.tolist(), *search(queries_nD[picks], items_mD, 5), strict=True):
        right = set(matches.pairs(query, query + 1)[1].tolist())
        answers = [
            {"item": item_name(item), "score": round(score, 4), "right": item in right}
            for item, score in zip(items.tolist(), scores.tolist(), strict=True)
        ]
        found.append({"query": query_name(query), "answers": answers})
    return found
