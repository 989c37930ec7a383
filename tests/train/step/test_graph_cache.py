"""How many graphs of chunks are cached: the size of one, the free memory, how many fit."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.step import LOCAL, batch, same_bits, snapshot, towers, train_step
from torch import Tensor, nn

from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.graph_cache import GraphCache, MemoryBudget, cgroup_headroom, cpu_memory, gpu_memory
from dyad.train.towers.tower import TwoTower

ROW = 8 * 8  # bytes the graph of one row saves: Linear, Tanh, Linear in float64, of which tanh's (b, 8) are new


class Fixed(MemoryBudget):
    """So many bytes for graphs."""

    def __init__(self, model: TwoTower, size: float) -> None:
        super().__init__(model, LOCAL.device)
        self.size = size

    def for_graphs(self) -> float:
        return self.size


def of_rows(model: TwoTower, graphs: GraphCache, count: int) -> Tensor:
    """Add a chunk of `count` rows."""
    inputs = batch(1000).x[:count]
    return graphs.add(lambda: [model.x_tower(inputs)], [inputs])[0]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0, [1, 1, 1, 1]),
        (29, [1, 1, 1, 1]),
        (30, [1, 2, 2, 2]),  # two are there, the third is what backward needs
        (40, [1, 2, 3, 3]),
        (49, [1, 2, 3, 3]),
        (50, [1, 2, 3, 4]),
    ],
)
def test_as_many_are_kept_as_leave_room_for_backward(budget: int, kept: list[int]) -> None:
    model, lengths = towers(), []
    graphs = GraphCache(None, Fixed(model, budget * ROW))
    for _ in kept:
        of_rows(model, graphs, 10)
        lengths.append(len(graphs))
    assert lengths == kept


def test_the_heaviest_graph_counts() -> None:
    """Once one had 20 rows, the others may have as many."""
    model, lengths = towers(), []
    graphs = GraphCache(None, Fixed(model, 55 * ROW))
    for rows in (10, 10, 20, 10, 5, 5, 5):
        of_rows(model, graphs, rows)
        lengths.append(len(graphs))
    assert lengths == [1, 2, 3, 1, 1, 1, 1]


def test_what_the_first_takes_for_all_counts_once() -> None:
    """Its casts of the weights are those of all chunks."""
    model, lengths = towers(), []
    graphs = GraphCache(None, Fixed(model, 70 * ROW))
    for rows in (30, 10, 10, 10, 10, 10):
        of_rows(model, graphs, rows)
        lengths.append(len(graphs))
    assert lengths == [1, 1, 2, 3, 4, 4]


def test_the_newest_are_kept() -> None:
    model = towers()
    graphs = GraphCache(2, MemoryBudget(model, LOCAL.device))
    embeddings = [of_rows(model, graphs, rows) for rows in (1, 2, 3, 4)]
    assert [graphs.pop()[0] is e for e in embeddings[:1:-1]] == [True, True]
    assert not graphs


def test_a_weighed_graph_gives_the_same_gradients() -> None:
    model = towers()
    graphs = GraphCache(None, Fixed(model, 1e9))
    both = of_rows(model, graphs, 7), model.x_tower(batch(1000).x[:7])
    assert torch.equal(*both)
    gradients = [torch.autograd.grad(e.square().sum(), list(model.x_tower.parameters())) for e in both]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_weighed_graph_is_freed() -> None:
    """Nothing but the embeddings holds it: no cycle that waits for the garbage collector."""
    saved: list[Callable[[], Tensor | None]] = []

    def remember(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        saved.append(weakref.ref(output))

    model = towers()
    graphs = GraphCache(None, Fixed(model, 0))
    model.get_submodule("x_tower.layers.1").register_forward_hook(remember)
    gc.disable()
    try:
        for _ in range(2):
            of_rows(model, graphs, 8)
        assert saved[0]() is None
    finally:
        gc.enable()


def test_tiny_graphs_all_fit_and_a_set_number_is_kept() -> None:
    model = towers()
    for wanted, kept in ((None, 5), (1, 1), (3, 3), (9, 5)):
        graphs = GraphCache(wanted, MemoryBudget(model, LOCAL.device))
        for _ in range(5):
            of_rows(model, graphs, 10)
        assert len(graphs) == kept


@pytest.mark.gpu
def test_on_a_gpu_a_graph_weighs_what_it_takes_and_kept_ones_change_no_bit() -> None:
    world, ends = World(device=torch.device("cuda", 0)), []
    for keep_graphs in (1, 2, None):
        objective, options = build_objective("clip").to(world.device), {"chunk_size": 3, "keep_graphs": keep_graphs}
        step = train_step(towers().to(world.device), 12, world=world, objective=objective, **options)
        step(batch(12), 0)
        ends.append(snapshot(step))
    assert all(same_bits(end, ends[0]) for end in ends)
    model, rows = towers().to(world.device), batch(1000).x.to(world.device)
    model.x_tower(rows)  # what libraries take for themselves comes first
    (embeddings,), size = MemoryBudget(model, world.device).measured(lambda: [model.x_tower(rows)], [])
    assert 1000 * ROW + embeddings.nbytes <= size <= 1000 * ROW + embeddings.nbytes + 4096
    free, total = gpu_memory(world.device)
    assert 0 < free <= total


def test_the_memory_of_a_machine_is_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = cpu_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    free, total = cpu_memory()
    assert 0 < free < total == whole // 4


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    process, groups = tmp_path / "cgroup", tmp_path / "groups"
    assert cgroup_headroom(process, groups) == math.inf
    process.write_text("3:cpuset:/\n0::/job/step\n")
    assert cgroup_headroom(process, groups) == math.inf
    for folder, limit, used in (
        (groups, "max", 900),
        (groups / "job", "1000", 700),
        (groups / "job/step", "5000", 600),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    assert cgroup_headroom(process, groups) == 1000 - 700 + 50


def test_moments_that_are_allocated_are_not_subtracted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the free memory lacks them already."""
    model = towers()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = MemoryBudget(model, LOCAL.device, optimizer)
    budget._on_gpu, budget._cpu_memory = True, None
    monkeypatch.setattr("dyad.train.step.graph_cache.gpu_memory", lambda device: (1000000, 1000000))
    before, weights = budget.for_graphs(), sum(p.nbytes for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert 2 * weights <= budget.for_graphs() - before <= 3 * weights
