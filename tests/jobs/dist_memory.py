"""Job for torchrun: per-sample state on W ranks equals that of one process, bit for bit, however the rows lie on them.

Each visit reads, averages over equal ids and writes; some are undone. What is gathered for a checkpoint is what one
process has, and what one process has is taken over here: so a checkpoint of any world size goes on at any other.
"""

import math
from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from helpers.collectives import counted
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses.gathered import sample_state
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.sums.all_gather import Layout

N = 11  # not a multiple of W; with W = 3 the last slice is shorter
INITIAL = {"log_u": math.nan, "tau": 0.5, "zeta": 0.0}
IDS = [[0, 3, 5, 10], [3, 3, 10, 1, 3], [7], [2, 4, 6, 8, 9, 0], [5, 5, 5, 5]]
UNDONE = {1, 3}
SPLITS = {  # rows per rank of each visit
    2: [(2, 2), (4, 1), (0, 1), (6, 0), (1, 3)],
    3: [(2, 1, 1), (0, 2, 3), (0, 0, 1), (1, 5, 0), (4, 0, 0)],
}


def visit(state: SampleState, index: int, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """One visit with `sizes` rows on the ranks; returns what was read. New numbers depend on what was read."""
    start = sum(sizes[: _rank(sizes)])
    own = torch.tensor(IDS[index])[start : start + sizes[_rank(sizes)]]
    (layout,) = Layout.of(own)
    assert layout.sizes == sizes
    seen = state.read(own, layout, dtype)
    assert seen.ids_B.tolist() == IDS[index]
    generator = torch.Generator().manual_seed(index)
    value = torch.randn(len(IDS[index]), generator=generator, dtype=dtype)
    new = {"log_u": seen.log_mean(value), "tau": seen.mean(value) + seen.old["tau"]}
    state.write(seen, new)
    if index in UNDONE:
        state.undo()
    return seen.old


def _rank(sizes: tuple[int, ...]) -> int:
    return dist.get_rank() if len(sizes) > 1 else 0


@cache
def in_one_process(dtype: torch.dtype) -> list[tuple[dict[str, Tensor], dict[str, Tensor], int]]:
    """After each visit: what was read, all numbers, samples seen. Made before there are other ranks."""
    state, results = SampleState(N, INITIAL), []
    for index, ids in enumerate(IDS):
        read = visit(state, index, (len(ids),), dtype)
        results.append((read, state.gathered(torch.device("cpu")), state.samples_seen))
    return results


def same(got: dict[str, Tensor], want: dict[str, Tensor], *context: object) -> None:
    assert got.keys() == want.keys(), (context, got.keys())
    for name, values in want.items():
        assert got[name].dtype == values.dtype
        assert got[name].numpy().tobytes() == values.numpy().tobytes(), (context, name, got[name], values)


def check_visits(dtype: torch.dtype, first: int) -> None:
    """The visits from `first` on, after taking over the checkpoint of one process before it."""
    reference = in_one_process(dtype)
    state = SampleState(N, INITIAL)
    if first:
        state.load(reference[first - 1][1])
    for index, sizes in list(enumerate(SPLITS[dist.get_world_size()]))[first:]:
        want_read, want_whole, want_seen = reference[index]
        same(visit(state, index, sizes, dtype), want_read, "read", index, sizes)
        whole = state.gathered(torch.device("cpu"))
        same(whole, want_whole if dist.get_rank() == 0 else {}, "whole", index, sizes)
        assert state.samples_seen == want_seen
        assert state.nbytes == sum(want_whole[name].nbytes for name in INITIAL)
        assert state.share_never_visited == want_whole["log_u"].isnan().sum().item() / N


def check_a_bad_id_is_refused_alike(world_size: int) -> None:
    own = torch.tensor([1, N] if dist.get_rank() == world_size - 1 else [2])
    (layout,) = Layout.of(own)
    messages: list[Any] = [None] * world_size
    try:
        SampleState(N, INITIAL).read(own, layout)
    except ConfigError as error:
        dist.all_gather_object(messages, str(error))
    assert len(set(messages)) == 1 and f"sample id {N} " in messages[0], messages


def check_each_rank_saves_its_own() -> None:
    """state_dict has the part of this rank; that of another rank is refused."""
    state, again = SampleState(N, INITIAL), SampleState(N, INITIAL)
    visit(state, 0, SPLITS[dist.get_world_size()][0], torch.float32)
    again.load_state_dict(state.state_dict())
    same(again.gathered(torch.device("cpu")), state.gathered(torch.device("cpu")))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, state.state_dict())
    try:
        again.load_state_dict(parts[dist.get_rank() - 1])
    except ConfigError as error:
        assert "each rank saves and loads its own" in str(error)
    else:
        raise AssertionError("the state of another rank was loaded")


def check_what_is_sent() -> None:
    """The ids, and k numbers for each; the same for many more samples; nothing to write."""
    sent: Counter[str] = Counter()
    for name in ("all_gather_into_tensor", "all_reduce", "gather", "broadcast"):
        setattr(dist, name, counted(name, getattr(dist, name), sent))
    own = torch.arange(4)
    (layout,) = Layout.of(own)
    for n in (N, 1000 * N):
        state = SampleState(n, INITIAL)
        sent.clear()
        seen = state.read(own, layout)
        assert sent == {"all_gather_into_tensor": 8 * layout.total, "all_reduce": 4 * len(INITIAL) * layout.total}, sent
        state.write(seen, {"zeta": torch.zeros(layout.total)})
        state.undo()
        assert sent.total() == (8 + 4 * len(INITIAL)) * layout.total


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        in_one_process(dtype)
    dist.init_process_group("gloo")
    for dtype in (torch.float32, torch.float64):
        for first in (0, 2):
            check_visits(dtype, first)
    sample_state.BLOCK = 2  # a checkpoint is gathered in several blocks
    check_visits(torch.float32, 0)
    check_a_bad_id_is_refused_alike(dist.get_world_size())
    check_each_rank_saves_its_own()
    check_what_is_sent()
    print(f"rank {dist.get_rank()}: all checks hold", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
