"""A stream gives every rank its steps whatever is in the shards, loses nothing, and tells what it cannot read."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.messages import raises
from helpers.shards import BLOCK, headers_of, overwrite, pairs, write_pairs, write_tar
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import AugmentConfig, BadSamples, DataConfig
from dyad.data.image_text.dataset import PairMaker
from dyad.data.image_text.stream import Reader, Stream, StreamBatch, StreamProgress, first_sample
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.shards.sources import parse_sources
from dyad.train.cli.compose import compose_config
from dyad.train.config_rules import validate

SPEC = ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def tokenize(texts: list[str]) -> Tensor:
    """'caption 17' → 17."""
    return torch.tensor([[int(text.split()[1])] for text in texts])


def stream_of(
    *shards: Path | str, batch: int = 8, buffer: int = 20, seed: int = 3, weights: str = "", **config: object
) -> Stream:
    settings = DataConfig(buffer=buffer, augment=AugmentConfig(flip=0.5, grey=0.5), **config)  # type: ignore[arg-type]
    sources = parse_sources([f"{shard}{weights}" for shard in shards])
    return Stream(sources, PairMaker(SPEC, tokenize, settings, seed), settings, seed=seed, global_batch_size=batch)


def uneven(folder: Path, sizes: Sequence[int]) -> list[Path]:
    """Shards of so many samples, numbered through."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [write_pairs(folder / f"{i}.tar", n, first) for i, (n, first) in enumerate(zip(sizes, firsts, strict=True))]


def numbers(batch: StreamBatch) -> list[int]:
    return batch.y[:, 0].tolist()


def steps(stream: Stream, first: int, last: int, workers: int = 0) -> Iterator[StreamBatch]:
    return stream.batches(first, last, workers=workers, timeout=60)  # type: ignore[return-value]


def together(streams: Sequence[Stream]) -> dict:
    """The state of all ranks, as it comes back from a checkpoint."""
    parts = [deepcopy(stream.progress) for stream in streams]
    states = [stream.state(lambda _: parts) for stream in streams]
    assert states.count(states[0]) == len(states)
    return json.loads(json.dumps(states[0]))


# What comes -----------------------------------------------------------------------------------------------------------


def test_a_pass_gives_every_sample_once(tmp_path: Path) -> None:
    stream = stream_of(*uneven(tmp_path, [5, 1, 30, 12]))
    drawn = list(islice(Reader(stream, 0, 1).samples(), 2 * 48))
    first, second = ([int(d.sample.key) for d in drawn[half : half + 48]] for half in (0, 48))
    assert sorted(first) == sorted(second) == list(range(48)) and first != second


def test_a_weight_is_how_often_a_shard_comes(tmp_path: Path) -> None:
    a, b = uneven(tmp_path, [2, 2])
    sources = parse_sources([f"{a}@3", str(b)])
    settings = DataConfig()
    stream = Stream(sources, PairMaker(SPEC, tokenize, settings, 0), settings, seed=0, global_batch_size=2)
    assert Counter(stream.shard_of(draw) for draw in range(8)) == {str(a): 6, str(b): 2}


@pytest.mark.parametrize("sizes", [[1, 120, 3], [5]])
def test_every_rank_takes_every_step(tmp_path: Path, sizes: list[int]) -> None:
    """W = 2 with 2 workers, of which some have no shard in a pass."""
    shards = uneven(tmp_path, sizes)
    taken = Counter[int]()
    for rank in range(2):
        stream = stream_of(*shards, batch=5)
        said = stream.begin(rank, 2, 2, None)
        assert ("several read the same shard" in said) and "read by 4 processes" in said
        batches = list(steps(stream, 0, 12, workers=2))
        assert [len(b) for b in batches] == [[2, 3][rank]] * 12
        taken.update(n for b in batches for n in numbers(b))
    assert taken.total() == 60


def test_two_runs_are_the_same_and_another_seed_is_not(tmp_path: Path) -> None:
    shards = uneven(tmp_path, [5, 40, 9, 30])

    def run(seed: int, workers: int) -> list[StreamBatch]:
        stream = stream_of(*shards, seed=seed)
        stream.begin(1, 2, workers, None)
        return list(steps(stream, 0, 8, workers))

    first, again = run(3, 2), run(3, 2)
    assert all(torch.equal(a.x, b.x) and numbers(a) == numbers(b) for a, b in zip(first, again, strict=True))
    assert [numbers(b) for b in run(3, 0)] != [numbers(b) for b in run(4, 0)]


def test_noise_knows_neither_rank_nor_worker(tmp_path: Path) -> None:
    """A sample of a draw looks the same whoever reads it."""
    shards = uneven(tmp_path, [20, 20])

    def images(world_size: int) -> dict[int, Tensor]:
        found = {}
        for rank in range(world_size):
            stream = stream_of(*shards, batch=2 * world_size, buffer=1)
            stream.begin(rank, world_size, 0, None)
            for batch in steps(stream, 0, 20 // world_size):
                found |= dict(zip(numbers(batch), batch.x, strict=True))
        return found

    alone, shared = images(1), images(2)
    assert len(alone) == 40 and alone.keys() == shared.keys()
    assert all(torch.equal(alone[n], shared[n]) for n in alone)


def test_a_block_mixes_shards(tmp_path: Path) -> None:
    shards = uneven(tmp_path, [40, 40])
    (mixed,), (plain,) = (list(steps(stream_of(*shards, batch=40, buffer=b), 0, 1)) for b in (60, 1))
    assert len({n // 40 for n in numbers(plain)}) == 1
    assert len({n // 40 for n in numbers(mixed)}) == 2 and numbers(mixed) != sorted(numbers(mixed))


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (1, 0), (3, 2)])
def test_going_on_loses_nothing_and_says_what_comes_again(tmp_path: Path, world_size: int, workers: int) -> None:
    shards = uneven(tmp_path, [20, 3, 17, 1, 30, 9, 25, 14, 6, 40, 11, 24])
    streams = [stream_of(*shards) for _ in range(2)]
    taken: list[int] = []
    for rank, stream in enumerate(streams):
        stream.begin(rank, 2, 0, None)
        taken += [n for batch in steps(stream, 0, 7) for n in numbers(batch)]
    assert len(taken) == len(set(taken)) == 56
    state = together(streams)
    assert len(json.dumps(state)) < 300

    rest: list[int] = []
    readers = world_size * max(workers, 1)
    said = ""
    for number in range(readers):
        stream = stream_of(*shards)
        said = stream.begin(number // max(workers, 1), world_size, workers, state)
        drawn = Reader(stream, number, readers).samples()
        rest += [int(d.sample.key) for d in islice(drawn, 250) if d.draw < len(shards)]
    assert len(rest) == len(set(rest)) and {*taken, *rest} == set(range(200))
    again = len({*taken} & {*rest})
    assert 0 < again < 56 and f"goes on in pass 0. {len(state['taken'])} shards were read in part" in said
    assert f"{again} samples come again, none is left out" in said


def test_draws_that_are_through_do_not_come_again(tmp_path: Path) -> None:
    stream = stream_of(*uneven(tmp_path, [2] * 6))
    stream.begin(0, 1, 0, {"first": 1, "through": [2, 4], "taken": [[1, 1]]})
    assert [d.draw for d in islice(Reader(stream, 0, 1).samples(), 0, 10, 2)] == [1, 3, 5, 6, 7]
    assert [d.draw for d in islice(Reader(stream, 1, 2).samples(), 0, 6, 2)] == [1, 3, 5]
    assert [d.draw for d in islice(Reader(stream, 0, 2).samples(), 0, 6, 2)] == [6, 8, 10]


def test_what_workers_made_ahead_is_not_used_up(tmp_path: Path) -> None:
    stream = stream_of(*uneven(tmp_path, [30, 30, 30]), buffer=1)
    stream.begin(0, 1, 1, None)
    batches = steps(stream, 0, 10, workers=1)
    for _ in range(2):
        next(batches)
    state = together([stream])
    assert sum(count for _, count in state["taken"]) == 16 and state["first"] == 0 and not state["through"]


def test_progress() -> None:
    def took(taken: dict[int, int], ended: dict[int, int]) -> StreamBatch:
        nothing = torch.empty(0)
        return StreamBatch(nothing, nothing, nothing, nothing, nothing, taken=taken, ended=ended)

    progress = StreamProgress()
    progress.add(took({0: 4, 2: 1}, {0: 5, 4: 0}))
    assert progress.finished == {4} and progress.taken == {0: 4, 2: 1}
    progress.add(took({0: 1, 2: 7}, {2: 9}))
    assert progress.finished == {0, 4} and progress.taken == {2: 8} and progress.ended == {2: 9}


# What cannot be read --------------------------------------------------------------------------------------------------

DAMAGE = {
    "cut in a payload": (lambda p, at: os.truncate(p, at + 517), "inside member '000005.png': it was cut"),
    "cut in a header": (lambda p, at: os.truncate(p, at + 100), "the file ends 100 bytes into a member header"),
    "cut between members": (lambda p, at: os.truncate(p, at), "without an end-of-archive marker: it was cut"),
    "zero block": (lambda p, at: overwrite(p, at, bytes(BLOCK)), "a block of zeros, but data goes on at offset"),
    "random header": (lambda p, at: overwrite(p, at, random.Random(1).randbytes(BLOCK)), "no valid tar header"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_a_shard_is_told_and_ends_no_rank(tmp_path: Path, kind: str) -> None:
    broken, whole = uneven(tmp_path, [10, 10])
    at = headers_of(broken)[10]
    damage, message = DAMAGE[kind]
    damage(broken, at)
    stream = stream_of(broken, whole, batch=5, buffer=1)
    batches = list(steps(stream, 0, 6))
    counts = Counter(n for batch in batches for n in numbers(batch))
    assert set(counts) == {*range(4), *range(10, 20)}  # 4 is whole, but only what follows could say so
    told = [bad.reason for batch in batches for bad in batch.bad]
    assert told and all(line.startswith(f"{broken}: offset {at}: ") for line in told)
    assert message in told[0] and told[0].endswith("what is there and all that follows are left out")
    with raises(DataError, f"offset {at}"):
        list(steps(stream_of(broken, whole, batch=5, bad_samples=BadSamples.stop), 0, 6))


def test_half_a_sample_and_bad_ones_are_passed_over_and_told(tmp_path: Path) -> None:
    members = [
        *pairs(3),
        ("000003.png", pairs(1)[0][1]),
        *pairs(1, 4),
        ("000005.png", b"x"),
        ("000005.txt", b"caption 5"),
    ]
    stream = stream_of(write_tar(tmp_path / "a.tar", members), batch=4, buffer=1)
    batches = list(steps(stream, 0, 2))
    assert [numbers(b) for b in batches] == [[0, 1, 2, 4], [0, 1, 2, 4]]
    assert [bad.key for b in batches for bad in b.bad] == ["000003", "000005", "000003"]
    assert "has no txt member" in batches[0].bad[0].reason
    with raises(DataError, "'000003'"):
        list(steps(stream_of(tmp_path / "a.tar", batch=4, buffer=1, bad_samples=BadSamples.stop), 0, 2))


def test_a_shard_that_is_gone_is_told_and_all_gone_is_the_end(tmp_path: Path) -> None:
    shards = uneven(tmp_path, [6, 6, 6, 6])
    stream = stream_of(*shards, batch=6, buffer=1)
    shards[2].unlink()
    batches = list(steps(stream, 0, 6))
    assert {n for b in batches for n in numbers(b)} == {*range(12), *range(18, 24)}
    told = [bad.reason for b in batches for bad in b.bad]
    assert told and all(f"{shards[2]}: offset 0: cannot be read" in line for line in told)
    for shard in (shards[0], shards[1], shards[3]):
        shard.unlink()
    with raises(DataError) as caught:
        list(steps(stream, 6, 20))
    assert str(caught.value).count("\n") == 3


def test_empty_shards_are_no_fault_but_nothing_else_is(tmp_path: Path) -> None:
    empty, whole = write_tar(tmp_path / "empty.tar", []), write_pairs(tmp_path / "a.tar", 4)
    batches = list(steps(stream_of(empty, whole, batch=4), 0, 4))
    assert not any(b.bad for b in batches)
    with raises(DataError, empty):
        stream_of(empty)


def test_the_first_sample_alone(tmp_path: Path) -> None:
    shard = write_pairs(tmp_path / "a.tar", 3)
    os.truncate(shard, headers_of(shard)[5])
    assert first_sample(str(shard)).captions("txt") == ["caption 0"]
    for path in (
        tmp_path / "b.tar",
        write_tar(tmp_path / "c.tar", []),
        write_tar(tmp_path / "d.tar", [("0.npy", b"1")]),
    ):
        with raises(DataError, path):
            first_sample(str(path))


def test_too_many_bad_samples_in_a_row(tmp_path: Path) -> None:
    members = [*pairs(2), *((f"{n:06d}.png", b"x") for n in range(2, 9))]
    stream = stream_of(write_tar(tmp_path / "a.tar", members), batch=3, buffer=1, bad_in_a_row=7)
    with raises(DataError, "7 samples", "data.bad_in_a_row"):
        list(steps(stream, 0, 1))


# Configuration --------------------------------------------------------------------------------------------------------


def test_a_key_that_no_sample_has_shows_at_the_start(tmp_path: Path) -> None:
    shard = write_pairs(tmp_path / "a.tar", 30)
    with raises(DataError, shard, "'caption'"):
        stream_of(shard, captions=["caption"])


def test_ids_come_from_the_named_field(tmp_path: Path) -> None:
    ids = [7, 0, 2, 5, True, -1, "3", 1 << 63]
    members = [
        member
        for n, i in enumerate(ids)
        for member in [*pairs(1, n), (f"{n:06d}.json", json.dumps({"id": i}).encode())]
    ]
    shard = write_tar(tmp_path / "a.tar", members)
    first, second = steps(stream_of(shard, id_key="id", batch=4, buffer=1), 0, 2)
    assert first.sample_ids.tolist() == second.sample_ids.tolist() == [7, 0, 2, 5]
    assert ["no number of a sample" in bad.reason for bad in second.bad] == [True] * 4
    assert next(steps(stream_of(shard, batch=4), 0, 1)).sample_ids.tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["objective=sogclr"], "data.id_key"),
        (["objective=isogclr"], "data.id_key"),
        (["objective=fastclip_v3"], "data.id_key"),
        (["objective=nuclr"], "data.id_key"),
        (["objective=coce", "objective.nu=state"], "data.id_key"),
        (["objective=nce", "objective.density=file", "objective.noise_file=a.npy"], "data.id_key"),
        (["objective=nce", "objective.noise=unigram"], "objective.noise=unigram"),
        (["objective=one_sided_dpm", "objective.importance=log_q", "objective.importance_file=a.npy"], "data.id_key"),
        (["steps=null", "epochs=2"], "epochs=2.0"),
        (["task=question_passage"], "task=question_passage"),
        (["data.shuffle=full"], "data.shuffle=full"),
        (["data.buffer=0"], "data.buffer=0"),
        (["resume.allow_more_data=true"], "resume.allow_more_data"),
        (["data.mode=indexed", "data.id_key=id"], "data.id_key=id"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(words: list[str], named: str) -> None:
    with raises(ConfigError, named):
        check_stream(*words)


def check_stream(*words: str) -> None:
    keys = {"data.train": "a.tar", "data.mode": "stream", "steps": "2", **dict(word.split("=") for word in words)}
    validate(compose_config([f"{key}={value}" for key, value in keys.items()]), 1)


def test_a_stream_of_what_it_can_do_is_not_refused() -> None:
    check_stream()


@pytest.mark.parametrize("workers", [0, 2])
def test_noise_may_be_added_later(tmp_path: Path, workers: int) -> None:
    shards = uneven(tmp_path, [20, 10])
    at_once, later = (
        list(stream_of(*shards).batches(0, 3, workers=workers, timeout=60, noise_later=later))
        for later in (False, True)
    )
    for whole, pending in zip(at_once, later, strict=True):
        assert not torch.equal(whole.x, pending.x) and torch.equal(whole.x, pending.with_noise().x)


def test_a_share_of_less_than_a_shard_is_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a.tar", 1)
    with raises(ConfigError, "@0.2"):
        stream_of(tmp_path / "a.tar", weights="@0.2")


def test_pipes_are_refused() -> None:
    with raises(ConfigError, "'pipe:'"):
        stream_of("pipe:cat a.tar")
