"""Job for torchrun on 4 processes: on 1, 2, 3 and all of them every objective equals itself in one process (1e-10).

For every entry, the options and inputs that change what is sent, and the ways the pairs lie on the ranks and are
ordered, by turns or with "all" each: the mean over ranks of the loss, of each metric and of the gradient of each
parameter; the gradient of what a rank holds, over W, which is what averaging over ranks needs. Then log_partition on
each of its paths, and what is sent. What one process computes is held against dense references elsewhere.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.collectives import counted
from helpers.dist import dealt, joined, share
from helpers.pairwise import dense
from helpers.reference import used_path
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dyad.data.batch import KnownPositives
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.gathered.further_rows import XNegatives
from dyad.train.losses.sums import tiles
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.lse import Scales, log_partition

B, D = 8, 5
SIZES = {1: [(8,)], 2: [(0, 8)], 3: [(3, 0, 5)], 4: [(2, 2, 2, 2), (1, 5, 0, 2)]}
ORDERS = [list(range(B)), [6, 2, 0, 7, 3, 1, 5, 4]]
X_KEYS, Y_KEYS = torch.tensor([1, 2, 3, 4, 4, 5, 6, 7]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5])  # 3~4~5 but not 3~5
KNOWN = [(0, 1), (0, 8), (2, 5), (3, 2), (6, 5), (7, 9)]  # (row, content key) of what is right for it
FURTHER_ROWS, FURTHER_KEYS = [0, 0, 3, 5, 5, 5, 7], torch.tensor([1, 9, 3, 8, 4, 2, 5])
WRONG_ROWS, WRONG_KEYS = [0, 3, 3, 5, 7, 7], torch.tensor([9, 1, 8, 4, 10, 11])  # of x: some are those of pairs
FURTHER_POSITIVE = torch.tensor([True, False, True, False, True, False, False])
LISTED = [(0, 0), (0, 6), (1, 1), (2, 2), (2, 4), (4, 4), (5, 2), (6, 6), (7, 7), (7, 9)]  # 8 and on: further columns
EXCLUDED = [(0, 1), (1, 0), (3, 5), (3, 10), (6, 2), (7, 3)]


@dataclass(frozen=True)
class Case:
    """An objective, and which inputs it is given beside pairs and sample ids."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    gives: tuple[str, ...] = ()


def cases() -> list[Case]:
    plain = [Case(name, needed_options(name), OTHERS.get(name, ())) for name in OBJECTIVES]
    relations = [
        Case(name, {"duplicates": duplicates, "candidates": candidates}, ("keys",))
        for name, duplicates, candidates in product(
            ["clip", "one_sided_dpm"], ["mask", "positive"], ["all", "negatives"]
        )
    ]
    several = [
        Case("symmetric_dpm", {"positives": positives, "duplicates": duplicates, "partition": "mean"}, EVERYTHING)
        for positives, duplicates in product(["each", "exclude", "merge"], ["keep", "mask", "positive"])
    ]
    importance = [
        Case("one_sided_dpm", {"importance": source, "positives": positives}, ("importance",))
        for source, positives in product(["log_q", "zeta"], ["each", "exclude"])
    ]
    drawn = [Case("nce", {"noise": "uniform", "bias_learnable": True}, ("drawn",))]
    ball = Case("clip", {"tau_scaled": True, "partition": "mean", "rho": 0.3})
    hard = [Case(name, {}, ("further",)) for name in ("dpr", "info_nce", "gcl")]
    hard += [Case("listwise_ce", {"candidates": "list", "partition": p}, ("further",)) for p in ("sum", "mean")]
    own = {"setting": "supervised", "candidates": "list"}
    hard += [Case("coce", {**own, "divergence": d, "pair_loss": "logistic"}, ("further",)) for d in ("kl", "cvar")]
    right = [Case(name, {}, ("further", "keys", "known")) for name in ("dpr", "clip", "siglip", "coce")]
    weighed = [Case(name, needed_options(name), ("relevance",)) for name in OWN_PAIRS]
    weighed += [Case(name, {}, ("further", "further_relevance", "relevance")) for name in ("dpr", "siglip")]
    of_lists = (*EVERYTHING, "further_relevance", "listed_relevance")
    weighed += [Case(name, {"duplicates": "mask"}, of_lists) for name in ("symmetric_dpm", "nce", "binary_nce")]
    weighed += [Case("coce", {"directions": "mean", "pair_loss": p}, of_lists) for p in ("identity", "logistic")]
    weighed.append(Case("gcl", {"rho": 0.3, "positives": "exclude"}, of_lists))
    both = {"directions": "mean", "duplicates": "mask"}
    wrong = [Case(name, both, ("wrong", "further", "keys")) for name in ("clip", "gcl", "coce")]
    wrong += [Case("symmetric_dpm", {"duplicates": "positive"}, ("wrong", "further", "keys"))]
    wrong += [Case(name, {"duplicates": "mask"}, ("wrong", "keys")) for name in ("siglip", "binary_nce")]
    wrong += [Case("clip", {"candidates": "list", "partition": "mean"}, ("wrong", "further"))]
    nested = [Case(name, {"matryoshka": [1, 2]}, ("further", "keys")) for name in ("clip", "dpr", "siglip")]
    nested += [Case("distill_kl", {"matryoshka": [2], "contrastive": 0.5, "duplicates": "mask"}, (*TAUGHT, "keys"))]
    scored = [Case("cosent", {"learnable": True, "temperature": 0.5}, ("scored",))]
    return [*scored, *plain, *relations, *several, *importance, *drawn, ball, *hard, *right, *weighed, *wrong, *nested]


EVERYTHING = ("further", "listed", "excluded", "keys")
TAUGHT = ("further", "teacher")
OTHERS = {"cpc": ("lengths",), "distill_kl": TAUGHT, "margin_mse": TAUGHT}  # entries that are not plain pairs
OTHERS |= dict.fromkeys(("cosent", "cosine_mse"), ("scored",))
OWN_PAIRS = "simclr sogclr isogclr fastclip_v3 nuclr spectral spectral_alternating pca_penalty vicreg nll".split()
RELEVANCE, OF_FURTHER, OF_LISTED = (torch.linspace(0.05, 1.0, n, dtype=torch.float64) for n in (B, 7, 10))
SHAPES: dict[str, tuple[int, ...]] = {"cpc": (B, 4, D), "partial_auc": (B, 1)}


def needed_options(name: str) -> dict[str, Any]:
    """What an entry cannot do without."""
    known = {f.name for f in fields(OBJECTIVES[name])}
    return {key: value for key, value in {"num_samples": B + 3, "gamma_epochs": 30, "width": D}.items() if key in known}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Part:
    """The part of the global batch on rank `rank`, of ranks that hold `sizes` pairs, in the given order."""

    def __init__(self, case: Case, sizes: tuple[int, ...], order: list[int], rank: int) -> None:
        starts = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
        self.rows = order[starts[rank] : starts[rank + 1]]
        further = [k for row in order for k in range(len(FURTHER_ROWS)) if FURTHER_ROWS[k] == row]
        self.further = [k for k in further if FURTHER_ROWS[k] in self.rows]
        self.columns = {**{j: place for place, j in enumerate(order)}, **{B + k: B + p for p, k in enumerate(further)}}
        self.wrong = [k for row in self.rows for k in range(len(WRONG_ROWS)) if WRONG_ROWS[k] == row]
        shape = SHAPES.get(case.name, (B, D))
        self.leaves = {name: numbers(*shape, seed=seed)[self.rows] for name, seed in (("x", 1), ("y", 2))}
        self.given: dict[str, Any] = {"sample_ids_b": torch.tensor(self.rows, dtype=torch.int64)}
        for kind in case.gives:
            getattr(self, f"_{kind}")()
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def _keys(self) -> None:
        self.given |= {"x_keys": X_KEYS[self.rows], "y_keys": Y_KEYS[self.rows]}

    def _further(self) -> None:
        self.leaves["further"] = numbers(len(FURTHER_ROWS), D, seed=3)[self.further]
        rows = torch.tensor([self.rows.index(FURTHER_ROWS[k]) for k in self.further], dtype=torch.int64)
        positive = FURTHER_POSITIVE[self.further]
        self.given["negatives"] = Columns(self.leaves["further"], rows, FURTHER_KEYS[self.further], positive)

    def _wrong(self) -> None:
        self.leaves["wrong"] = numbers(len(WRONG_ROWS), D, seed=5)[self.wrong]
        rows = torch.tensor([self.rows.index(WRONG_ROWS[k]) for k in self.wrong], dtype=torch.int64)
        self.given["x_negatives"] = XNegatives(self.leaves["wrong"], rows, WRONG_KEYS[self.wrong])

    def _relevance(self) -> None:
        self.given["relevance"] = RELEVANCE[self.rows]

    def _further_relevance(self) -> None:
        self.given["negatives"] = replace(self.given["negatives"], relevance_k=OF_FURTHER[self.further])

    def _scored(self) -> None:
        self.given["teacher"] = torch.arange(B)[self.rows] // 2  # some scores are equal

    def _teacher(self) -> None:
        self.given["teacher"] = numbers(B, seed=8)[self.rows]
        scores_k = numbers(len(FURTHER_ROWS), seed=9)[self.further]
        self.given["negatives"] = replace(self.given["negatives"], teacher_k=scores_k)

    def _listed_relevance(self) -> None:
        own = [place for place, (i, _) in enumerate(LISTED) if i in self.rows]
        self.given["relevance"] = OF_LISTED[own]

    def _listed(self) -> None:
        self.given["positives"] = self._pairs(LISTED)

    def _excluded(self) -> None:
        self.given["excluded"] = self._pairs(EXCLUDED)

    def _known(self) -> None:
        own = [(self.rows.index(i), key) for i, key in KNOWN if i in self.rows]
        row, keys = torch.tensor(own, dtype=torch.int64).view(-1, 2).unbind(1)
        self.given["known_positives"] = KnownPositives(row, keys)

    def _pairs(self, pairs: list[tuple[int, int]]) -> Tensor:
        own = [(self.rows.index(i), self.columns[j]) for i, j in pairs if i in self.rows]
        return torch.tensor(own, dtype=torch.int64).view(-1, 2)

    def _importance(self) -> None:
        self.leaves["importance"] = self.given["importance"] = numbers(B, seed=4)[self.rows]

    def _drawn(self) -> None:
        self._further()
        log_q_k = numbers(len(FURTHER_ROWS), seed=6)[self.further]
        columns = replace(self.given["negatives"], positive_k=torch.zeros(len(log_q_k), dtype=torch.bool))
        self.given["negatives"] = replace(columns, importance_k=log_q_k)
        self.given["importance"] = numbers(B, seed=4)[self.rows]

    def _lengths(self) -> None:
        self.given["lengths"] = torch.tensor([4, 2, 4, 3, 4, 4, 1, 4])[self.rows]


Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def run(case: Case, part: Part) -> Found:
    """Loss and metrics, gradients of what the rank holds, of parameters. With state, of a second call too."""
    torch.manual_seed(0)
    objective = build_objective(case.name, **case.options).double()
    values: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for call in range(1 + (objective.sample_state is not None)):
        result = objective(part.leaves["x"], part.leaves["y"], **part.given)
        values |= {f"{name} {call}": v for name, v in [("loss", result.loss.detach()), *result.metrics.items()]}
        total = total + result.loss
    parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    inputs = {**part.leaves, **{f"parameter {name}": p for name, p in parameters.items()}}
    gradients = torch.autograd.grad(total, [*inputs.values()], materialize_grads=True)
    found = dict(zip(inputs, gradients, strict=True))
    held = {name: found.pop(name) for name in part.leaves}
    return values, held, found


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def close(got: Tensor, want: Tensor, *context: object) -> None:
    """As torch.testing.assert_close, which imports for seconds."""
    assert got.shape == want.shape, (*context, got.shape, want.shape)
    assert ((got - want).abs() <= 1e-12 + 1e-10 * want.abs()).all(), (*context, got, want)


def check_objective(case: Case, want: Found, sizes: tuple[int, ...], order: list[int]) -> None:
    part = Part(case, sizes, order, dist.get_rank())
    found = run(case, part)
    for got_group, want_group in ((found[0], want[0]), (found[2], want[2])):
        assert got_group.keys() == want_group.keys(), (case, sizes, got_group.keys(), want_group.keys())
        for name, value in got_group.items():
            close(mean_over_ranks(value), want_group[name], case, sizes, order, name)
    for name, gradient in found[1].items():
        mine = want[1][name][{"further": part.further, "wrong": part.wrong}.get(name, part.rows)]
        close(gradient / dist.get_world_size(), mine, case, sizes, order, name)


def check_paths(sizes: tuple[int, ...]) -> None:
    """Bounded, general, and bounded handing over because of a row of one rank: all ranks take the same one."""
    start = sum(sizes[: dist.get_rank()])
    mine = slice(start, start + sizes[dist.get_rank()])
    weights = {name: numbers(B, seed=seed) for name, seed in (("row", 7), ("column", 8))}
    scales = [1.0 + numbers(B, seed=seed).abs() for seed in (9, 10)]
    for path, size in (("bounded", 3.0), ("general", 5000.0), ("hand-over", 600.0), ("scales", 1.0)):
        x, y = (F.normalize(numbers(B, D, seed=seed), dim=1) for seed in (1, 2))
        if path == "hand-over":  # float64 leaves room for logits down to about −580
            y = F.normalize(1e-3 * y + torch.eye(D, dtype=torch.float64)[0], dim=1)
            x = y.clone()
            x[4] *= -1
        given = [x, y, *weights.values(), *(scales if path == "scales" else [torch.tensor(size, dtype=torch.float64)])]
        whole = [v.clone().requires_grad_() for v in given]
        own = (0, 1, 4) if path == "scales" else (0, 1)  # the others are global, the same on every rank
        local = [(v[mine] if i in own else v).clone().requires_grad_() for i, v in enumerate(given)]
        scale_of = [Scales(v[4], v[5]) if path == "scales" else v[4] for v in (whole, local)]
        rows_B, columns_B = dense(whole[0], whole[1], scale_of[0], set(), whole[2], whole[3])
        pull = torch.linspace(0.5, 1.5, B, dtype=torch.float64)
        want = torch.autograd.grad(pull @ rows_B + pull @ columns_B, whole)
        (layout,) = Layout.of(local[0])
        rows, columns = log_partition(
            local[0],
            layout.gather(local[1]),
            scale_of[1],
            layout,
            row_weights_B=local[2],
            column_weights_M=local[3],
        )
        assert used_path(rows) == ("bounded" if path == "bounded" else "general"), path
        close(rows, rows_B.detach()[mine], path, "rows")
        close(columns, columns_B.detach(), path, "columns")
        got = torch.autograd.grad(pull[mine] @ rows + pull[mine] @ columns[mine], local)
        for i, (gradient, expected) in enumerate(zip(got, want, strict=True)):
            if i in own:
                close(gradient, expected[mine], path, i)
            else:  # this rank's share
                close(mean_over_ranks(gradient) * dist.get_world_size(), expected, path, i)


def check_small_loss(sizes: tuple[int, ...]) -> None:
    """Float32 has its digits where an own column is on another strip than the first."""
    start = sum(sizes[: dist.get_rank()])
    mine = slice(start, start + sizes[dist.get_rank()])
    x = F.normalize(numbers(B, 64, seed=1), dim=1).float()
    y = F.normalize(x + 0.2 * F.normalize(numbers(B, 64, seed=2), dim=1), dim=1).float()
    a = 20.0 * F.normalize(x.double(), dim=1) @ F.normalize(y.double(), dim=1).T
    want = (F.cross_entropy(a, torch.arange(B)) + F.cross_entropy(a.T, torch.arange(B))) / 2
    got = mean_over_ranks(build_objective("clip", temperature=0.05)(x[mine], y[mine]).loss.double())
    assert want < 1e-3 and (got - want).abs() < 1e-5 * want, (sizes, got, want)


SENT = ["symmetric_dpm", "clip", "gcl", "one_sided_dpm", "info_nce", "dpr", "epr", "cross_entropy", "listwise_ce"]


def check_what_is_sent(sent: Counter[str]) -> None:
    """y and its gradient once, 2·B·D, and a few numbers per pair."""
    count, width = 16 * dist.get_world_size(), 32
    x, y = (torch.randn(16, width, requires_grad=True) for _ in range(2))
    keys = torch.arange(len(x))
    for name, duplicates in product(SENT, ("keep", "mask", "positive")):
        sent.clear()
        build_objective(name, duplicates=duplicates)(x, y, x_keys=keys, y_keys=keys).loss.backward()
        bytes_per_pair = 8 + 16 * (duplicates != "keep")  # sums and their gradients; keys
        assert sent.total() <= 8 * count * width + bytes_per_pair * count + 192, (name, sent)
        assert sent["reduce_scatter_tensor"] == 4 * count * width, (name, sent)
    sent.clear()
    build_objective("simclr")(x, y).loss.backward()
    assert sent.total() <= 4 * (2 * 2 * count * width + 2 * 2 * count) + 192, sent


def main() -> None:
    torch.set_num_threads(1)
    tiles.TILE, tiles.KEPT = 4, 400
    rank = int(os.environ["RANK"])
    wanted = [run(case, Part(case, (B,), ORDERS[0], 0)) for case in dealt(cases())]
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    for world_size in range(4, rank, -1):
        group = PrefixStore(f"of {world_size}", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size)
        wanted = joined(wanted) if world_size == 4 else wanted
        every = [*zip(cases(), wanted, strict=True)]
        for number, sizes in enumerate(SIZES[world_size]):
            for case, want in share(every, world_size + number):
                check_objective(case, want, sizes, ORDERS[(world_size + number) % len(ORDERS)])
            check_paths(sizes)
            check_small_loss(sizes)
        if world_size == 4:
            sent: Counter[str] = Counter()
            for collective in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
                setattr(dist, collective, counted(collective, getattr(dist, collective), sent))
            check_what_is_sent(sent)
        dist.destroy_process_group()
    print(f"rank {rank}: all checks hold", flush=True)


if __name__ == "__main__":
    main()
