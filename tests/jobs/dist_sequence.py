"""Job for torchrun: steps on sequences of different lengths equal dense autograd, pair by pair (float64, 1e-10).

All ranks end a step with equal gradients and weights, so one of them, by turns, computes those of dense autograd.
Contexts by a GRU and by a causal transformer, of one sequence after the other; next items by info_nce with equal items
left out and by NCE with drawn noise; CPC with contexts of another width. Ranks with many, few and no sequences; chunks.
With "all", each objective, context and split meets each other, in chunks and in one piece; else each pair of them does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from helpers.step import gradients_of, train_step
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra
from dyad.train.context_config import ContextConfig, ContextKind
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.towers.sequence import ContextNetwork, SequenceTower
from dyad.train.towers.tower import Tower, TwoTower
from jobs.dist_step import equal_everywhere, snapshot

ITEMS, D, HORIZONS, TAU = 7, 6, 2, 0.3
LENGTHS = (3, 1, 2, 4, 2, 2)  # steps of the sequences of a global batch
SPLITS = {1: [(6,)], 2: [(3, 3), (6, 0)], 3: [(2, 0, 4), (1, 3, 2)], 4: [(2, 1, 0, 3), (1, 2, 2, 1)]}
LOG_Q = torch.log_softmax(torch.randn(ITEMS, generator=torch.Generator().manual_seed(5), dtype=torch.float64), 0)
Sequences = list[tuple[Tensor, Tensor]]  # the items of x, and those of y, of each sequence
Loss = Callable[[SequenceTower, Sequences, Tensor, Any], Tensor]


def tower(kind: ContextKind, context_width: int | None) -> TwoTower:
    torch.manual_seed(0)
    config = ContextConfig(kind=kind, layers=2, heads=2, width=8, dropout=0.0, embed_dim=context_width)
    made = SequenceTower(Tower(nn.Embedding(ITEMS, D), nn.Identity()), ContextNetwork(config, D))
    return TwoTower(made, made).double()


def sequences(seed: int, ahead: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    every = [torch.randint(ITEMS, (length + ahead,), generator=generator) for length in LENGTHS]
    return [(items[: len(items) - ahead], items[ahead:]) for items in every]


def batch(own: Sequences, noise: Tensor | None, rank: int) -> Batch:
    """The batch of a rank; `noise`: the items that it draws."""
    empty = torch.empty(0, dtype=torch.int64)
    x, y = (torch.cat([empty, *(pair[side] for pair in own)]) for side in (0, 1))
    places = torch.cat([empty, *(torch.arange(len(items)) for items, _ in own)]).numpy()
    ids = torch.arange(len(x)) + 100 * rank  # as keys of x: no two contexts are one
    made = Batch(x, y, ids, ids, y.clone(), x_places=places)
    if noise is not None:
        row = torch.zeros(len(noise), dtype=torch.int64)
        made.extra, made.y_log_q = Extra(noise, row, noise, row.bool(), log_q=LOG_Q[noise]), LOG_Q[y]
    return made


def contexts(of: SequenceTower, items: Tensor) -> Tensor:
    """The contexts of one sequence, each computed from the items up to its step alone."""
    e = of.trunk(items)
    return torch.stack([_last(of.context, e[: step + 1]) for step in range(len(items))])


def _last(network: ContextNetwork, e_TD: Tensor) -> Tensor:
    entered = network.enter(e_TD)
    if network.kind is ContextKind.gru:
        states = entered.new_zeros(2, network.inside)
        for step in entered:
            states = network.network(step[None], states)[1]
        return network.leave(states[-1])
    return network.leave(network._states(entered[None])[0, -1])


def info_nce(of: SequenceTower, whole: Sequences, noise: Tensor, objective: Any) -> Tensor:
    x = F.normalize(torch.cat([contexts(of, items) for items, _ in whole]), dim=1)
    items = torch.cat([targets for _, targets in whole])
    y, terms = F.normalize(of.trunk(items), dim=1), []
    for i in range(len(x)):
        among = [j for j in range(len(y)) if j == i or items[j] != items[i]]
        logits = objective.logit_scale.exp() * y[among] @ x[i]
        terms.append(logits.logsumexp(0) - logits[among.index(i)])
    return torch.stack(terms).mean()


def nce(of: SequenceTower, whole: Sequences, noise: Tensor, objective: Any) -> Tensor:
    """−log σ(a) of data and of −a of noise, a = log u − log q − log k with k = K drawn items (objectives.md 4.1)."""
    x = F.normalize(torch.cat([contexts(of, items) for items, _ in whole]), dim=1)
    items, k, terms = torch.cat([targets for _, targets in whole]), len(noise), []

    def a(row: Tensor, item: Tensor) -> Tensor:
        score = objective.logit_scale.exp() * F.normalize(of.trunk(item), dim=0) @ row
        return score + objective.bias - LOG_Q[item] - torch.log(torch.tensor(float(k), dtype=row.dtype))

    for i in range(len(x)):
        terms.append(F.softplus(-a(x[i], items[i])) + sum(F.softplus(a(x[i], item)) for item in noise))
    return torch.stack(terms).mean()


def cpc(of: SequenceTower, whole: Sequences, noise: Tensor, objective: Any) -> Tensor:
    of_all, terms = [(contexts(of, items), of.trunk(items)) for items, _ in whole], []
    for i, (c, _) in enumerate(of_all):
        for t in range(len(c)):
            for s in range(1, HORIZONS + 1):
                if t + s < len(c):
                    reached = [j for j, (_, e) in enumerate(of_all) if t + s < len(e)]
                    predicted = objective.logit_scale.exp() * objective.w_HDD[s - 1] @ c[t]
                    logits = torch.stack([of_all[j][1][t + s] @ predicted for j in reached])
                    terms.append(logits.logsumexp(0) - logits[reached.index(i)])
    return torch.stack(terms).mean()


CASES: dict[str, tuple[Loss, dict[str, Any], int]] = {  # objective → its loss by loops, its options, steps from x to y
    "info_nce": (info_nce, {"duplicates": "mask", "temperature": TAU, "directions": "x"}, 1),
    "nce": (nce, {"noise": "unigram", "temperature": TAU, "init_bias": -1.5}, 1),
    "cpc": (cpc, {"width": D, "context_width": 4, "horizons": HORIZONS}, 0),
}


def check(
    name: str, kind: ContextKind, sizes: tuple[int, ...], chunk_size: int | None, turn: int, world: World
) -> None:
    """turn: of the rank that compares."""
    reference, options, ahead = CASES[name]
    model = tower(kind, options.get("context_width"))
    objective = build_objective(name, **options).double()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).double()
    step = train_step(model, len(LENGTHS), world=world, objective=objective, chunk_size=chunk_size, keep_graphs=1)
    noise = torch.tensor([0, 3, 3, 6, 1])
    for index in range(2):
        whole, first = sequences(index, ahead), sum(sizes[: world.rank])
        own = whole[first : first + sizes[world.rank]]
        with_rows = [rank for rank, size in enumerate(sizes) if size]  # they draw all noise together
        drawn = noise[with_rows.index(world.rank) :: len(with_rows)] if own else noise[:0]
        drawn = drawn if name == "nce" else None
        of = model.x_tower
        assert isinstance(of, SequenceTower)
        compares, loss, want = (turn + index) % world.size == world.rank, 0.0, dict[str, Tensor]()
        if compares:
            whole_loss = reference(of, whole, noise, objective)
            named = dict([*model.named_parameters(), *objective.named_parameters()])
            trained = {key: p for key, p in named.items() if p.requires_grad}
            want = dict(zip(trained, torch.autograd.grad(whole_loss, [*trained.values()]), strict=True))
            loss = float(whole_loss)
        scalars, got = step(batch(own, drawn, world.rank), index), gradients_of(step)
        context = f"{name}, {kind}, {sizes}, {chunk_size}"
        if compares:
            assert abs(scalars["loss"] - loss) < 1e-10, (context, scalars["loss"], loss)
            assert got.keys() == want.keys(), context
            for key, gradient in want.items():
                torch.testing.assert_close(got[key], gradient, rtol=1e-9, atol=1e-11, msg=f"{context}: {key}")
        assert equal_everywhere(got, world) and equal_everywhere(snapshot(step), world), context


def ways(number: int, world_size: int) -> Iterable[tuple[ContextKind, tuple[int, ...], int | None]]:
    """Contexts, splits and sizes of chunks of the objective of this number."""
    splits, chunks = SPLITS[world_size], (None, 2)
    if "all" in sys.argv:
        return product(ContextKind, splits, chunks)
    turns = enumerate(ContextKind)
    return [(kind, splits[(number + i) % len(splits)], chunks[(i + number // 2) % 2]) for i, kind in turns]


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    for number, name in enumerate(CASES):
        for turn, (kind, sizes, chunk_size) in enumerate(ways(number, world.size)):
            check(name, kind, sizes, chunk_size, turn, world)
    print(f"rank {world.rank}: all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
