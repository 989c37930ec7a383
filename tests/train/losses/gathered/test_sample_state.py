"""Per-sample state: what is written is read, by whom it belongs to, and can be taken back."""

import math
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.dist import launch
from helpers.messages import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.train.losses.gathered import sample_state
from dyad.train.losses.gathered.sample_state import SampleState, StateRead
from dyad.train.losses.sums.all_gather import Layout

N = 10
INITIAL = {"log_u": math.nan, "tau": 0.5}


def visit(state: SampleState, *ids: int, dtype: torch.dtype = torch.float32) -> StateRead:
    return state.read(torch.tensor(ids, dtype=torch.int64), Layout((len(ids),), 0), dtype)


def write(state: SampleState, ids: tuple[int, ...], **new: list[float]) -> None:
    state.write(visit(state, *ids), {name: torch.tensor(values) for name, values in new.items()})


def whole(state: SampleState) -> dict[str, Tensor]:
    return state.gathered(torch.device("cpu"))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def bits(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def test_what_is_written_is_read() -> None:
    state = SampleState(N, INITIAL)
    old = visit(state, 7, 0, 3).old
    assert old.keys() == INITIAL.keys()
    assert old["log_u"].isnan().all() and (old["tau"] == 0.5).all()
    write(state, (7, 0, 3), log_u=[1.0, 2.0, 3.0])
    write(state, (3, 9), log_u=[4.0, 5.0], tau=[0.1, 0.2])
    old = visit(state, 9, 3, 0, 7).old
    assert old["log_u"].tolist() == [5, 4, 2, 1]
    assert torch.equal(old["tau"], torch.tensor([0.2, 0.1, 0.5, 0.5]))
    assert visit(state).ids_B.shape == (0,)
    write(state, (), log_u=[])
    assert state.samples_seen == 5


def test_what_was_never_visited_is_counted() -> None:
    state, certain = SampleState(N, INITIAL), SampleState(N, {"zeta": 0.0})
    shares = [state.share_never_visited]
    for ids in ((1, 2), (2, 3), (3, 3)):
        write(state, ids, log_u=[0.0, 0.0], tau=[1.0, 1.0])
        shares.append(state.share_never_visited)
    write(state, (4,), log_u=[math.nan])  # a visit that brings no number
    assert [*shares, state.share_never_visited] == [1, 0.8, 0.7, 0.7, 0.7]
    assert certain.share_never_visited == 0


def test_undo_restores_every_bit_once() -> None:
    state = SampleState(N, INITIAL)
    state.undo()
    write(state, (1, 2), log_u=[-0.0, 1e-42], tau=[0.1, 0.2])
    before, seen, share = whole(state), state.samples_seen, state.share_never_visited
    write(state, (2, 5, 2), log_u=[7.0, math.inf, 7.0], tau=[0.3, 0.4, 0.3])
    assert not same(whole(state), before)
    state.undo()
    assert same(whole(state), before)
    assert (state.samples_seen, state.share_never_visited) == (seen, share)
    write(state, (3,), log_u=[1.0])
    after = whole(state)
    state.undo()
    state.undo()  # takes back one write, not two
    assert same(whole(state), before) and not same(after, before)


def test_undo_after_a_call_that_wrote_nothing_changes_nothing() -> None:
    state = SampleState(4, {"u": math.nan})
    (layout,) = Layout.of(torch.zeros(2))
    visit = state.read(torch.tensor([1, 2]), layout)
    state.write(visit, {"u": torch.tensor([5.0, 6.0])})
    state.read(torch.tensor([1, 2]), layout)
    state.undo()
    assert state.read(torch.tensor([1, 2]), layout).old["u"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_ids_are_averaged_in_any_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([4, 1, 4, 0, 1, 4, 9, 4])
    values = 30 * torch.randn(len(ids), generator=generator, dtype=dtype)
    results = []
    for _ in range(5):
        order = torch.randperm(len(ids), generator=generator)
        seen = visit(SampleState(N, INITIAL), *ids[order].tolist(), dtype=dtype)
        assert seen.repeated
        back = order.argsort()
        results.append(torch.stack([seen.mean(values[order])[back], seen.log_mean(values[order])[back]]))
    assert all(torch.equal(results[0], result) for result in results)
    for row, i in enumerate(ids.tolist()):
        group = [v.item() for v, j in zip(values, ids.tolist(), strict=True) if j == i]
        log_mean = math.log(math.fsum(math.exp(v - max(group)) for v in group) / len(group)) + max(group)
        want = torch.tensor([math.fsum(group) / len(group), log_mean], dtype=dtype)
        torch.testing.assert_close(results[0][:, row], want)


def test_means_of_what_is_empty_infinite_or_alone() -> None:
    state = SampleState(N, INITIAL)
    values = torch.tensor([1.0, -math.inf, -math.inf])
    alone = visit(state, 1, 2, 3)
    assert not alone.repeated and alone.log_mean(values) is values and alone.mean(values) is values
    assert visit(state, 5, 2, 2).log_mean(values).tolist() == [1, -math.inf, -math.inf]
    assert visit(state, 2, 2, 5).log_mean(values).tolist() == pytest.approx([1 - math.log(2)] * 2 + [-math.inf])
    assert visit(state).log_mean(torch.zeros(0)).shape == (0,)


def test_numbers_of_one_sample_that_differ_are_our_mistake() -> None:
    with raises(AssertionError, "StateRead.mean"):
        write(SampleState(N, INITIAL), (2, 2), log_u=[0.0, 1.0])


@pytest.mark.parametrize("bad", [-1, N, 1 << 40])
def test_an_id_that_is_no_sample_is_refused(bad: int) -> None:
    with raises(ConfigError, bad, "objective.num_samples") as caught:
        visit(SampleState(N, INITIAL), 3, bad)
    assert len(str(caught.value).splitlines()) == 1


def test_ids_must_be_given_one_per_row() -> None:
    with raises(ConfigError, "sample_ids"):
        SampleState(N, INITIAL).read(None, Layout((2,), 0))
    with raises(ValueError, "sample_ids"):
        SampleState(N, INITIAL).read(torch.tensor([0, 1]), Layout((3,), 0))


def test_float64_is_kept_once_it_is_asked_for() -> None:
    state = SampleState(N, {"tau": 0.1})
    write(state, (1,), tau=[0.3])
    third = torch.tensor([1 / 3], dtype=torch.float64)
    state.write(visit(state, 2, dtype=torch.float64), {"tau": third})
    wide = visit(state, 1, 2, dtype=torch.float64).old["tau"]
    assert wide.tolist() == [torch.tensor(0.3).item(), 1 / 3]
    assert visit(state, 2).old["tau"].dtype == torch.float32
    assert whole(state)["tau"].dtype == torch.float64
    exact = SampleState(N, {"tau": 0.1})
    assert visit(exact, 0, dtype=torch.float64).old["tau"].item() == 0.1


def test_a_large_state_lies_in_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sample_state, "BLOCK", 4)  # several blocks
    small, large = SampleState(N, INITIAL), SampleState(N, INITIAL, memory_budget_mb=0)
    assert same(whole(small), whole(large))
    for state in (small, large):
        write(state, (1, 8), log_u=[1.0, 2.0], tau=[0.1, 0.2])
        write(state, (8, 9), log_u=[3.0, 4.0])
        state.undo()
    assert same(whole(small), whole(large))
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    assert not maps.exists() or f"{tmp_path}/" in maps.read_text()  # it is there, and only deleted


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with raises(HardwareError, "8,008 bytes", tmp_path.name, "memory_budget_mb"):
            whole(SampleState(1000, INITIAL, memory_budget_mb=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_takes_no_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with raises(HardwareError, "8,008 bytes", "absent", "memory_budget_mb"):
        whole(SampleState(1000, INITIAL, memory_budget_mb=0))


@pytest.mark.parametrize("budget", [0, 1])
def test_a_checkpoint_brings_everything_back(tmp_path: Path, budget: int) -> None:
    state = SampleState(N, INITIAL)
    write(state, (1, 2, 2), log_u=[-0.0, 1e-42, 1e-42], tau=[0.1, 0.2, 0.2])
    save_file(whole(state), tmp_path / "memory.safetensors")
    again = SampleState(N, INITIAL, memory_budget_mb=budget)
    write(again, (5,), log_u=[9.0])
    again.load(load_file(tmp_path / "memory.safetensors"))
    os.remove(tmp_path / "memory.safetensors")
    assert same(whole(again), whole(state))
    assert (again.samples_seen, again.share_never_visited) == (3, 0.8)
    again.undo()  # of before
    assert same(whole(again), whole(state))


def test_the_state_of_something_else_is_refused() -> None:
    state = SampleState(N, INITIAL)
    write(state, (1,), tau=[0.1])
    before = whole(state)
    with raises(ConfigError, "objective.num_samples", "init_from"):
        state.load(whole(SampleState(11, INITIAL)))
    with raises(ConfigError, "log_u"):
        state.load(whole(SampleState(N, {"log_u": 0.0})))
    with raises(ConfigError, "log_u"):
        state.load({})
    assert same(whole(state), before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_with_one_process(world_size: int) -> None:
    launch("dist_memory.py", world_size)
