"""Job for torchrun: on W ranks, the robust objectives equal one process with the whole batch (float64, 1e-10).

The mean over ranks of loss and metrics, the gradients of the embeddings over W, the mean of those of the parameters;
for sizes that differ and may be 0, both directions, listed pairs, duplicates, and every way to ν, state included.
"""

from typing import Any

import torch
import torch.distributed as dist
from helpers.dist import dealt, joined, share
from torch import Tensor

from dyad.train.losses import build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.sums import tiles

B, M, D = 8, 10, 5
SIZES = {2: [(5, 3), (0, 8)], 3: [(3, 3, 2), (0, 6, 2)]}
COLUMNS = {2: (3, 7), 3: (4, 0, 6)}  # where y is no partner of x
KEYS = (torch.tensor([1, 2, 3, 4, 4, 5, 6, 7]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5]))
POSITIVES = torch.tensor([(0, 1), (0, 8), (1, 0), (2, 2), (3, 3), (3, 9), (5, 7), (6, 1), (7, 4)])
EXCLUDED = torch.tensor([(0, 2), (2, 0), (4, 4), (6, 9)])
Case = tuple[str, dict[str, Any], str]
CASES: list[Case] = [
    *(
        ("coce", {"divergence": divergence, "pair_loss": pair_loss, "directions": "mean"}, inputs)
        for divergence, pair_loss in (("kl", "identity"), ("chi2", "hinge"), ("cvar", "logistic"))
        for inputs in ("pairs", "lists")
    ),
    ("coce", {"divergence": "chi2", "duplicates": "positive", "pair_loss": "hinge", "directions": "sum"}, "keys"),
    ("coce", {"divergence": "kl", "duplicates": "mask", "setting": "semi", "directions": "y"}, "keys"),
    ("coce", {"divergence": "kl", "learnable": True, "rho": 0.2, "directions": "sum"}, "pairs"),
    ("coce", {"divergence": "kl", "nu": "sgd", "directions": "sum"}, "pairs"),
    ("coce", {"divergence": "chi2", "nu": "state", "num_samples": 20, "directions": "mean"}, "pairs"),
    ("partial_auc", {"divergence": "cvar", "pair_loss": "squared_hinge"}, "scores"),
    ("partial_auc", {"divergence": "kl"}, "scores"),
]


Found = dict[str, Tensor]


def batch(inputs: str) -> tuple[list[Tensor], Found]:
    """x, y and the further inputs of the whole batch, by local row = global row."""
    generator = torch.Generator().manual_seed(1)
    width, columns = (1 if inputs == "scores" else D), (M if inputs in ("scores", "lists") else B)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (B, columns))
    more = {
        "pairs": {"sample_ids_b": torch.tensor([3, 1, 4, 15, 9, 2, 6, 1])},
        "lists": {"positives": POSITIVES, "excluded": EXCLUDED},
        "keys": {"x_keys": KEYS[0], "y_keys": KEYS[1]},
        "scores": {},
    }
    return [x, y], more[inputs]


def own(whole: Tensor, name: str, rows: slice) -> Tensor:
    """This rank's part of an input; pairs have local rows."""
    if name not in ("positives", "excluded"):
        return whole[rows]
    mine = (whole[:, 0] >= rows.start) & (whole[:, 0] < rows.stop)
    return whole[mine] - torch.tensor([rows.start, 0])


def part(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def run(objective: Any, leaves: list[Tensor], more: Found, further: Tensor | None) -> list[Found]:
    """Two steps: state shows in the second."""
    steps = []
    for _ in range(2):
        objective.zero_grad()
        for leaf in leaves:
            leaf.grad = None
        negatives = None if further is None else Columns(further, torch.zeros(len(further), dtype=torch.int64))
        result = objective(*leaves, negatives=negatives, **more)
        result.loss.backward()
        found = {"loss": result.loss.detach(), **result.metrics}
        found |= {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
        found |= {name: leaf.grad for name, leaf in zip("xy", leaves, strict=True) if leaf.grad is not None}
        steps.append({name: value.clone() for name, value in found.items()})
    return steps


def in_one_process(case: Case) -> tuple[Case, list[Found], Found]:
    """What the steps find, and the state they leave, before there are other ranks."""
    name, options, inputs = case
    (x, y), more = batch(inputs)
    objective = build_objective(name, **options).double()
    steps = run(objective, [x.requires_grad_(), y.requires_grad_()], more, further_columns(inputs))
    return case, steps, state_of(objective)


def state_of(objective: Any) -> Found:
    return objective.sample_state.gathered(torch.device("cpu")) if objective.sample_state else {}


def further_columns(inputs: str) -> Tensor | None:
    return torch.linspace(-1, 1, 3 * D, dtype=torch.float64).view(3, D).cos() if inputs == "pairs" else None


def check(case: Case, want: list[Found], want_state: Found, sizes: tuple[int, ...]) -> None:
    name, options, inputs = case
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, more = batch(inputs)
    parts = [part(sizes, rank), part(COLUMNS[world_size] if len(whole[1]) == M else sizes, rank)]
    local = [e[rows].clone().requires_grad_() for e, rows in zip(whole, parts, strict=True)]
    own_more = {key: own(value, key, parts[0]) for key, value in more.items()}
    further = further_columns(inputs)
    objective = build_objective(name, **options).double()
    got = run(objective, local, own_more, None if further is None else further[part((1, 2, 0), rank)])
    for step, (found, wanted) in enumerate(zip(got, want, strict=True)):
        assert found.keys() == wanted.keys(), (name, options)
        for key, value in found.items():
            if key in "xy":
                close(value / world_size, wanted[key][parts["xy".index(key)]], case, sizes, step, key)
            else:
                dist.all_reduce(value)
                close(value / world_size, wanted[key], case, sizes, step, key)
    for key, value in state_of(objective).items():
        close(value, want_state[key], case, sizes, key)


def close(got: Tensor, want: Tensor, *context: object) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, equal_nan=True, msg=lambda m: f"{context}: {m}")


def main() -> None:
    torch.set_num_threads(1)
    tiles.TILE, tiles.KEPT = 4, 400
    alone = [in_one_process(case) for case in dealt(CASES)]
    dist.init_process_group("gloo")
    every, world_size = joined(alone), dist.get_world_size()
    for number, sizes in enumerate(SIZES[world_size]):
        for found in share(every, number + world_size):
            check(*found, sizes)
    print(f"rank {dist.get_rank()}: all checks hold", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
