"""HR, nDCG and MRR of next items equal the definitions of RecBole and ranx, written anew in plain loops."""

import math

import numpy as np
import pytest
from helpers.eval import LOCAL

from dyad.data.sequence.histories import NextItems, next_items
from dyad.data.sequence.items import ItemNumbers
from dyad.data.sequence.log import Log
from dyad.data.shards.manifest import FileEntry
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.search.ranks import count_ranks
from dyad.eval.tasks.sequence.next_item import NextItem
from dyad.eval.tasks.sequence.next_item_baselines import ranks_by
from dyad.train.eval_config import Seen

ITEMS, USERS, STEPS, KS = 12, 40, 6, (1, 3, 5)


def _events(rng: np.random.Generator) -> NextItems:
    """The last event of each user is to be predicted; of some, its item is not one of training."""
    item_e = rng.integers(0, ITEMS, USERS * STEPS)
    last_e = np.arange(USERS * STEPS) % STEPS == STEPS - 1
    item_e[last_e] = rng.integers(0, ITEMS + 3, USERS)
    files = [FileEntry(name, 0, 0, "") for name in ("train", "test")]
    names = [str(i) for i in range(ITEMS + 3)]
    starts, users = np.arange(0, len(item_e) + 1, STEPS), [str(u) for u in range(USERS)]
    log = Log(item_e, last_e.astype(np.int64), np.arange(USERS * STEPS), starts, users, names, files)
    return next_items(log, ItemNumbers(names[:ITEMS]), STEPS, 1, 1)


def _by_definition(data: NextItems, score_nN: np.ndarray, seen: Seen) -> dict[str, list[float]]:
    """Sort the items of each event, of equal scores the lower number first, and walk down the list."""
    found: dict[str, list[float]] = {name: [] for name in ("MRR", *(f"{m}@{k}" for m in ("HR", "nDCG") for k in KS))}
    for i, target in enumerate(data.target_n.tolist()):
        start = i * STEPS
        history = data.log.item_e[start : start + STEPS - 1].tolist()
        legal = [j for j in range(ITEMS) if seen is Seen.keep or j == target or j not in history]
        ranking = sorted(legal, key=lambda j: (-score_nN[i, j], j))
        place = next((p for p, j in enumerate(ranking, 1) if j == target), None)
        found["MRR"].append(1 / place if place else 0.0)
        for k in KS:
            found[f"HR@{k}"].append(float(target in ranking[:k]))
            gains = [float(j == target) / math.log2(p + 1) for p, j in enumerate(ranking[:k], 1)]
            found[f"nDCG@{k}"].append(sum(gains))  # the ideal gain of one right item is 1
    return found


@pytest.mark.parametrize("seen", Seen)
def test_metrics_equal_their_definitions(seen: Seen) -> None:
    rng = np.random.default_rng(7)
    data = _events(rng)
    score_nN = rng.integers(0, 4, (USERS, ITEMS)).astype(np.float32)  # with ties
    wanted = _by_definition(data, score_nN, seen)
    assert (data.target_n >= ITEMS).any()

    known, of_items = data.target_n < ITEMS, Labels(np.arange(ITEMS), np.arange(ITEMS), ITEMS)
    rows = iter(score_nN[known])  # an unknown target is not scored
    by_scores = ranks_by(lambda _: lambda history_k: next(rows), data, seen)
    right = Matches(Labels(np.flatnonzero(known), data.target_n[known], USERS), of_items)
    hidden = Matches(Labels(*data.seen(), USERS), of_items) if seen is Seen.drop else None
    by_vectors = count_ranks(score_nN, np.eye(ITEMS, dtype=np.float32), right, LOCAL, hidden).rank
    for rank in (by_scores, by_vectors):
        found = NextItem("test", "test.jsonl", data=data, recall_k=KS, seen=seen)._values(rank)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-9, err_msg=name)
