"""Metrics and baselines of next items against loops over small logs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.rows import tokenize
from torch import nn

from dyad.data.base import progress
from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, SequenceConfig
from dyad.data.sequence.histories import NextItems, next_items
from dyad.data.sequence.items import ItemNumbers, ItemTexts
from dyad.data.sequence.log import log_of, read_log
from dyad.data.shards.manifest import FileEntry
from dyad.eval.config import Baseline
from dyad.eval.encode.encoder import Encoder
from dyad.eval.metrics.matches import MISSED
from dyad.eval.tasks.sequence import next_item_baselines
from dyad.eval.tasks.sequence.next_item import NextItem
from dyad.eval.tasks.sequence.next_item_baselines import SCORERS, ranks_by
from dyad.train.context_config import ContextConfig
from dyad.train.distributed.world import World
from dyad.train.eval_config import Seen
from dyad.train.towers.sequence import ContextNetwork, SequenceTower
from dyad.train.towers.tower import Tower

ITEMS = 8


@pytest.fixture
def events(tmp_path: Path) -> NextItems:
    """Two later events of each user, of which some are of an unknown item."""
    generator, rows = np.random.default_rng(0), {"train": ["user,item,time"], "val": ["user,item,time"]}
    for user in range(30):
        items = [*generator.integers(ITEMS, size=2 + user % 5).tolist(), ITEMS if user % 10 == 9 else user % ITEMS]
        for time, item in enumerate(items):
            rows["val" if time >= len(items) - 2 else "train"].append(f"u{user},i{item},{time}")
    rows["train"] += [f"all,i{item},{item}" for item in range(ITEMS)]
    for part, lines in rows.items():
        (tmp_path / f"{part}.csv").write_text("\n".join(lines))
    log = read_log([str(tmp_path / "train.csv"), str(tmp_path / "val.csv")], SequenceConfig())
    return next_items(log, ItemNumbers([name for name in log.items if name != f"i{ITEMS}"][:ITEMS]), 4, 1, 1)


def sequences(events: NextItems) -> list[list[int]]:
    """The items of training of each user."""
    log = events.log
    return [
        [int(log.item_e[e]) for e in range(a, b) if events.train_e[e]]
        for a, b in zip(log.starts[:-1].tolist(), log.starts[1:].tolist(), strict=True)
    ]


def scores(baseline: Baseline, events: NextItems, history: list[int]) -> list[float]:
    users, n = sequences(events), range(len(events.items.names))
    count = Counter(item for items in users for item in items)
    if baseline is Baseline.popularity:
        return [count[j] for j in n]
    if baseline is Baseline.successors:
        after = Counter(b for items in users for a, b in pairwise(items) if a == history[-1])
        return [after[j] + count[j] / (1 + sum(count.values())) for j in n]
    having = [{user for user, items in enumerate(users) if j in items} for j in n]
    cosine = [[len(a & b) / math.sqrt(len(a) * len(b)) if a and b else 0.0 for b in having] for a in having]
    return [sum(cosine[i][j] for i in {*history} - {j}) for j in n]


@pytest.mark.parametrize("seen", [*Seen])
@pytest.mark.parametrize("baseline", [Baseline.popularity, Baseline.successors, Baseline.item_knn])
def test_baselines_by_counting(baseline: Baseline, seen: Seen, events: NextItems) -> None:
    got = ranks_by(SCORERS[baseline], events, seen)
    for i, target in enumerate(events.target_n.tolist()):
        history = events.before(i).tolist()
        if target >= len(events.items.names):
            assert got[i] == MISSED
            continue
        s = [round(score, 9) for score in scores(baseline, events, history)]
        ahead = [j for j in range(len(s)) if s[j] > s[target] or (s[j] == s[target] and j < target)]
        if seen is Seen.drop:
            ahead = [j for j in ahead if j not in history]
        assert got[i] == 1 + len(ahead), i


def test_item_knn_ranks_alike_with_and_without_all_cosines(
    events: NextItems, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0)
    found = ranks_by(SCORERS[Baseline.item_knn], events, Seen.keep, "item_knn")
    assert "item_knn [" in capsys.readouterr().err
    monkeypatch.setattr(next_item_baselines, "SHARE", 0)
    assert (found == ranks_by(SCORERS[Baseline.item_knn], events, Seen.keep)).all()


def test_a_log_without_training_has_no_baselines_that_count(events: NextItems) -> None:
    """Of an export. All items had the count 0, and the order of their numbers was the baseline."""
    with raises(DataError, "export"):
        ranks_by(SCORERS[Baseline.popularity], replace(events, train_e=events.train_e & False), Seen.keep)


def test_repeats_of_the_history_are_counted(events: NextItems) -> None:
    repeats = [target in events.before(i) for i, target in enumerate(events.target_n.tolist())]
    assert events.repeated_n.tolist() == repeats and 0 < sum(repeats) < len(repeats)
    sizes = NextItem("val", "log", replace(events, without_history=7), (1,), Seen.keep)._sizes()
    assert (sizes["num_repeats"], sizes["num_without_history"]) == (sum(repeats), 7)


def test_metrics_are_those_of_one_right_item(events: NextItems) -> None:
    """The definitions of RecBole and ranx: with one relevant item, DCG is its gain and the ideal is 1."""
    evaluator = NextItem("val", "log", events, (1, 5, 10), Seen.keep)
    rank = np.array([1, 2, 5, 6, 11, MISSED, 1, 10])
    values = evaluator._values(rank)
    for k in (1, 5, 10):
        hit = [float(r <= k) for r in rank.tolist()]
        dcg = [sum(1 / math.log2(place + 1) for place in range(1, k + 1) if place == r) for r in rank.tolist()]
        np.testing.assert_allclose(values[f"HR@{k}"], hit, atol=1e-12)
        np.testing.assert_allclose(values[f"nDCG@{k}"], dcg, atol=1e-12)
    reciprocal = [0.0 if r == MISSED else 1 / r for r in rank.tolist()]
    np.testing.assert_allclose(values["MRR"], reciprocal, atol=1e-12)
    chance = evaluator._chance()
    known = np.mean(events.target_n < ITEMS)
    assert chance["HR@5"] == pytest.approx(known * 5 / ITEMS) and chance["HR@10"] == pytest.approx(known)
    assert {*evaluator.higher_is_better()} == {*values}
    assert evaluator._sizes()["num_unknown"] == (events.target_n >= ITEMS).sum() > 0


def test_chance_is_among_the_items_that_can_be_answers(events: NextItems) -> None:
    """The mean over all places of the right item among the items that seen=drop leaves to each event."""
    evaluator = NextItem("val", "log", events, (1, 5), Seen.drop)
    wanted = []
    for i, target in enumerate(events.target_n.tolist()):
        places = range(1, 1 + ITEMS - len({*events.before(i).tolist()} - {target}))
        wanted.append(np.mean([1 / place for place in places]) if target < ITEMS else 0.0)
    chance = evaluator._chance()
    assert chance["MRR"] == pytest.approx(np.mean(wanted))
    assert chance["HR@5"] > NextItem("val", "log", events, (1, 5), Seen.keep)._chance()["HR@5"]


class Lengths(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cos(tokens[:, :1].float() * torch.arange(1, 5))


def test_bm25_is_left_out_where_no_item_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    events = [("ann", "?", 0.0, 0), ("ann", "!!", 1.0, 0), ("ann", "?", 2.0, 1)]
    log = log_of(events, [FileEntry(name, 0, 0, "") for name in ("train", "val")])
    items = ItemTexts(log.items, None, np.empty(0, np.int64), tokenize, DataConfig())
    tower = SequenceTower(Tower(Lengths(), nn.Identity()), ContextNetwork(ContextConfig(), 4))
    baselines = (Baseline.bm25, Baseline.popularity)
    evaluator = NextItem("val", "log", next_items(log, items, 4, 1, 1), (1,), Seen.keep, baselines=baselines)
    report = evaluator.report(Encoder({"x": tower, "y": tower}, World()))
    assert [*report.details["baselines"]] == ["popularity"]
    assert "left out: the baseline bm25: BM25: there is no word in the 2 passages" in capsys.readouterr().err
