"""Which sample takes the place of a bad one, what the ledger says of it, and when it has been too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.batch import BadSample, Batch, with_auxiliary
from dyad.data.config import BadSamples, DataConfig
from dyad.data.loading.replacement import Replacements
from dyad.train.distributed.world import World
from dyad.train.monitor.bad_samples import BadSampleCounter
from dyad.train.run_folder.ledger import Ledger

SIZES = [50, 200]


def made(
    bad: set[int], *positions: tuple[int, int], most: int = 100, seed: int = 3
) -> tuple[list[int], list[BadSample]]:
    """The ids that stand at some positions, and what is told of it."""

    def make(epoch: int, sample_id: int) -> int:
        if sample_id in bad:
            raise SampleError(f"{sample_id} is bad")
        return sample_id

    found, told = Replacements(SIZES, seed, most).load(positions, make, lambda i: ("shard", str(i)))
    return found, list(told)


def test_a_good_sample_is_itself() -> None:
    assert made(set(), (0, 7), (4, 249)) == ([7, 249], [])


def test_a_substitute_depends_on_seed_epoch_and_id_alone() -> None:
    (first, second), told = made({7, 60}, (0, 7), (0, 60))
    assert told == [
        BadSample(0, 7, "shard", "7", "7 is bad", first),
        BadSample(1, 60, "shard", "60", "60 is bad", second),
    ]
    assert first < 50 <= second  # of the same source
    assert made({7, 60}, (0, 60)) == ([second], [BadSample(0, 60, "shard", "60", "60 is bad", second)])
    others = made({7}, (1, 7))[0] + made({7}, (0, 7), seed=4)[0] + made({8}, (0, 8))[0]
    assert first not in others


def test_a_substitute_that_is_bad_itself_is_replaced_in_turn() -> None:
    bad = set(range(1, 50))
    (found,), told = made(bad, (0, 7))
    assert found == 0 and len(told) > 1 and told[0].id == 7
    assert [one.replaced_by for one in told] == [*(one.id for one in told[1:]), 0] and {one.row for one in told} == {0}


def test_every_sample_of_the_source_may_come() -> None:
    found = Counter(made({7}, (epoch, 7))[0][0] for epoch in range(2000))
    assert set(found) == set(range(50)) - {7} and max(found.values()) < 80  # 41 in the mean


def test_too_many_in_a_row_and_none_at_all() -> None:
    with raises(DataError, "data.bad_in_a_row"):
        made(set(range(50)), (0, 7), most=5)
    with raises(SampleError, "7"):
        made({7}, (0, 7), most=0)


# ---- over the run --------------------------------------------------------------------------------------------------

GLOBAL = 1000


def batches(*bad: list[int]) -> Iterator[Batch]:
    """One per step; of each, the places of bad samples."""
    none = torch.zeros(0)
    for places in bad:
        told = tuple(BadSample(place, place, "a.tar", str(place), f"{place} is bad", 5) for place in places)
        yield Batch(none, none, none, none, none, bad=told)


def counted(run: Path, *bad: list[int], first: int = 0, state: dict | None = None, **keys: float) -> BadSampleCounter:
    with Ledger(run, first, print) as ledger:
        found = BadSampleCounter(DataConfig(**keys), [GLOBAL], World(), ledger, print)  # type: ignore[arg-type]
        if state:
            found.load_state_dict(state)
        for step, batch in enumerate(batches(*bad), first + 1):
            found.observe(batch, step)
            found.check()
    return found


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_the_ledger_tells_step_sample_and_reason(tmp_path: Path) -> None:
    found = counted(tmp_path, [], [4, 9], [0])
    assert found.total == 3 and found.check() == 3
    assert [(line["step"], line["id"]) for line in lines(tmp_path)] == [(2, 4), (2, 9), (3, 0)]
    assert lines(tmp_path)[0] == {
        **{"step": 2, "kind": "substitute", "id": 4, "shard": "a.tar", "key": "4", "reason": "4 is bad", "by": 5}
    }


def test_no_ledger_without_an_entry(tmp_path: Path) -> None:
    counted(tmp_path, [], [])
    Ledger(None, 0, print).write(1, "spike")
    assert not list(tmp_path.iterdir())


def test_the_ledger_is_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    counted(tmp_path, [1], [2], [3])
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "spike"}\n{"step": 1, "ki')
    told: list[str] = []
    Ledger(tmp_path, 2, told.append)
    assert [line["id"] for line in lines(tmp_path)] == [1, 2]
    assert told == [f"{tmp_path}/ledger.jsonl: damaged, left out: line 4"]


def test_a_row_of_bad_samples_goes_over_the_border_of_batches(tmp_path: Path) -> None:
    with raises(DataError, "step 2", "data.bad_in_a_row=5", "6 in all", tmp_path / "ledger.jsonl"):
        counted(tmp_path, [3, 998, 999], [0, 0, 1, 2], bad_in_a_row=5)
    assert len(lines(tmp_path)) == 7
    assert counted(tmp_path, [3, 998, 999], [0, 2, 3, 4, 5], bad_in_a_row=5).total == 8


def test_a_share_of_the_last_10000_samples(tmp_path: Path) -> None:
    one_in_a_hundred = list(range(0, GLOBAL, 100))
    assert counted(tmp_path, *[one_in_a_hundred] * 30).total == 300
    with raises(DataError, "step 11", "data.bad_share=0.01"):
        counted(tmp_path, *[one_in_a_hundred] * 10, [0, 50])
    with raises(DataError, "step 1", "101 of the last 401 samples", "data.bad_share=0.01 (100 of 10,000)"):
        counted(tmp_path, [*range(0, 800, 4)])
    assert counted(tmp_path, [*range(0, 800, 2)], bad_share=1).total == 400


@pytest.mark.parametrize("stop", [1, 9, 10])
def test_what_is_counted_outlives_a_stop(tmp_path: Path, stop: int) -> None:
    """The window, the row and the total are those of an undisturbed run."""
    steps = [[1, *range(5, GLOBAL, 100), 999], *[[0, *range(100, GLOBAL, 150), 999]] * 9, [0]]
    before = counted(tmp_path, *steps[:stop])
    state = json.loads(json.dumps(before.state_dict()))
    after = counted(tmp_path, *steps[stop:], first=stop, state=state)
    assert after.state_dict() == counted(tmp_path, *steps).state_dict()
    with raises(DataError, "step 11"):
        counted(tmp_path, *steps[stop:], first=stop, state=state, bad_share=0.0084)


def test_each_rank_knows_the_places_of_its_samples() -> None:
    found = BadSampleCounter(DataConfig(), [10], World(rank=2, size=3), Ledger(None, 0, print), print)
    found.observe(next(batches([0, 3])), 6)
    assert [position for position, _, _ in found._unshared] == [56, 59]  # rank 2 has places 6 to 9 of step 5


def test_samples_of_auxiliary_losses_have_places_of_their_own() -> None:
    """A large auxiliary batch of which 0.2 % are bad does not stop a run with a small batch of its own."""
    found = BadSampleCounter(DataConfig(), [64, 512], World(), Ledger(None, 0, print), print)
    for step in range(1, 200):
        own, auxiliary = batches([3] if step == 199 else [], [511])
        found.observe(with_auxiliary(own, auxiliary), step)
        found.check()
    assert found.total == 200
    assert found._recent[-3:] == [197 * 576 + 575, 198 * 576 + 3, 198 * 576 + 575] and len(found._recent) == 19


@pytest.mark.parametrize("wrong", [{"bad_in_a_row": 0}, {"bad_share": 1.5}, {"bad_share": -0.1}], ids=str)
def test_limits_must_be_possible(wrong: dict[str, float]) -> None:
    with raises(ConfigError, f"data.{next(iter(wrong))}="):
        DataConfig(**wrong)  # type: ignore[arg-type]
    assert DataConfig(bad_samples=BadSamples.stop).bad_in_a_row_limit == 0 and DataConfig().bad_in_a_row_limit == 100
