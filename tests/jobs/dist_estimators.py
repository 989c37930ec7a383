"""Job for torchrun: estimators with state on W ranks equal one process (float64, 1e-10), over several steps.

Loss, metrics, gradients and the state of all samples; with samples that are there twice, equal items, ranks without
rows, a step undone, and a checkpoint in between. dist_losses.py has them beside all other objectives.
"""

import os
from collections import Counter

import torch
import torch.distributed as dist
from helpers.collectives import counted
from helpers.dist import dealt, joined, share
from torch import Tensor

from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.sums import tiles
from tests.train.losses.objectives.test_estimators import KEYS, NAMES, STEPS, B, build, embeddings, state

SPLITS = {2: [(3, 3), (6, 0), (1, 5), (4, 2)], 3: [(2, 2, 2), (0, 1, 5), (3, 3, 0), (6, 0, 0)]}
OF_ROWS = torch.tensor([0, 0, 3, 5])  # the row of each further column, and of each further row
UNDONE = 2  # this step is taken back, so it counts for nothing
CASES = [
    {"directions": directions, "duplicates": duplicates}
    for directions, duplicates in (("sum", "keep"), ("mean", "mask"), ("x", "mask"), ("y", "keep"))
]
Found = dict[str, Tensor]


def further_of(step: int, own: slice) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which further columns and rows are those of some rows; all of them in a step."""
    mine = (own.start <= OF_ROWS) & (own.stop > OF_ROWS)
    return mine, embeddings(step + 20, rows=len(OF_ROWS))


def steps(name: str, case: dict[str, str], sizes: list[tuple[int, ...]], rank: int) -> list[tuple[Found, Found, Found]]:
    """After each step: scalars and gradients of parameters; gradients of own embeddings; the state."""
    objective = build(name, gamma=0.7, **({"zeta_warmup": 0} if name == "nuclr" else {}), **case)
    results = []
    for step, of_ranks in enumerate(sizes):
        own = slice(sum(of_ranks[:rank]), sum(of_ranks[: rank + 1]))
        x, y = (e.detach()[own].clone().requires_grad_() for e in embeddings(step))
        ids, keys = torch.tensor(STEPS[step])[own], torch.tensor(KEYS[step])[own]
        mine, further = further_of(step, own)
        further, wrong = (e.detach()[mine].requires_grad_() for e in further)
        columns = Columns(further, OF_ROWS[mine] - own.start) if step % 2 else None
        both = step > 1 and case["directions"] != "x"
        rows = XNegatives(wrong, OF_ROWS[mine] - own.start, OF_ROWS[mine] + 100) if both else None
        result = objective(x, y, ids, x_keys=keys, negatives=columns, x_negatives=rows)
        learning = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        leaves = [x, y, further, wrong, *learning.values()]
        dx, dy, of_further, of_wrong, *more = torch.autograd.grad(result.loss, leaves, materialize_grads=True)
        scalars = {"loss": result.loss.detach(), **result.metrics, **dict(zip(learning, more, strict=True))}
        if step == UNDONE:
            objective.undo()
        kept = state(objective)
        assert objective.sample_state is not None
        whole = [kept]
        if len(of_ranks) > 1:
            dist.broadcast_object_list(whole, src=0)
            objective.sample_state.load(whole[0])
        results.append((scalars, {"x": dx, "y": dy, "further": of_further, "wrong": of_wrong}, whole[0]))
    return results


def close(got: Tensor, want: Tensor, *context: object) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, equal_nan=True, msg=lambda m: f"{context}: {m}")


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def check(name: str, case: dict[str, str], want: list[tuple[Found, Found, Found]]) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    got = steps(name, case, SPLITS[world_size], rank)
    for step, (found, expected) in enumerate(zip(got, want, strict=True)):
        sizes = SPLITS[world_size][step]
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for group in (0, 1, 2):
            assert found[group].keys() == expected[group].keys(), (name, case, step)
        for key, value in found[0].items():
            close(mean_over_ranks(value), expected[0][key], name, case, step, key)
        for key, value in found[1].items():
            part = further_of(step, own)[0] if key in ("further", "wrong") else own
            close(value / world_size, expected[1][key][part], name, case, step, key)
        for key, value in found[2].items():
            close(value, expected[2][key], name, case, step, key)


def check_what_is_sent(name: str, sent: Counter[str]) -> None:
    """y and its gradient once, 2·B·D, and some numbers per pair, whatever the number of samples."""
    width, rows, totals = 64, 8, []
    total = rows * dist.get_world_size()
    for n in (total, 1000 * total):
        objective = build(name, num_samples=n)
        x, y = (torch.randn(rows, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
        ids = torch.arange(rows) + rows * dist.get_rank()
        sent.clear()
        objective(x, y, ids).loss.backward()
        totals.append(sent.total())
    assert totals[0] == totals[1] <= 8 * (2 * total * width + 16 * total + 16), (name, totals)


def main() -> None:
    torch.set_num_threads(1)
    tiles.TILE, tiles.KEPT = 4, 400
    own_cases = share(CASES, int(os.environ["WORLD_SIZE"]))  # the others on the other number of ranks
    every = [(name, case) for name in NAMES for case in own_cases]
    alone = [(name, case, steps(name, case, [(B,)] * len(STEPS), 0)) for name, case in dealt(every)]
    dist.init_process_group("gloo")
    for name, case, want in joined(alone):
        check(name, case, want)
    sent: Counter[str] = Counter()
    for collective in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, collective, counted(collective, getattr(dist, collective), sent))
    for name in NAMES:
        check_what_is_sent(name, sent)
    print(f"rank {dist.get_rank()}: all checks hold", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
