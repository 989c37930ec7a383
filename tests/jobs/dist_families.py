"""Job for torchrun on 3 processes: on 2 and 3 of them the logistic and spectral families and CPC equal one process.

To 1e-10 in float64, for every option that changes what is computed and every way the pairs lie on the ranks: loss,
metrics, the gradients of embeddings and of parameters. Then NCE of given log-probabilities, the running second moment,
targets, what is refused on all ranks alike, and what is sent. The harness is that of dist_losses.py.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from helpers.collectives import counted
from helpers.dist import dealt, joined, share
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dyad.data.base.errors import ConfigError
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.logistic import nce_from_log_u
from dyad.train.losses.sums import tiles
from jobs.dist_losses import (
    EVERYTHING,
    FURTHER_KEYS,
    ORDERS,
    Y_KEYS,
    B,
    Case,
    D,
    Found,
    Part,
    check_objective,
    close,
    mean_over_ranks,
    numbers,
    run as run_case,
)

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
SIZES = {2: [(8, 0), (3, 5)], 3: [(0, 1, 7), (4, 3, 1)]}
DUPLICATES = ["keep", "mask", "positive"]
SENT = {  # numbers per rank and step: y and its gradient, 2 B D; second moments and their gradient, each D²
    "siglip": lambda count, width: 2 * count * width,
    "local_nce": lambda count, width: 2 * count * width,
    "nce": lambda count, width: 2 * count * width,
    "binary_nce": lambda count, width: 2 * count * width,
    "spectral": lambda count, width: 5 * width**2,
    "spectral_alternating": lambda count, width: 2 * width**2,
    "pca_penalty": lambda count, width: 2 * width**2,
    "vicreg": lambda count, width: 4 * width**2 + 4 * width,
}


def cases(folder: Path) -> list[Case]:
    file = {"density": "file", "noise_file": str(folder / "log_q.npy"), "bias_learnable": True}
    by_key = str(folder / "log_q.safetensors")
    logistic = [
        Case(name, {"duplicates": duplicates, **options}, ("keys",))
        for duplicates, (name, options) in product(
            DUPLICATES,
            [
                ("siglip", {"init_bias": -1.0}),
                ("local_nce", {}),
                ("nce", {"density": "uniform", "num_samples": 50, "k": 3.0}),
                ("nce", file),
                ("nce", {**file, "noise_file": by_key}),
                ("binary_nce", {}),
                ("binary_nce", {"negatives_per_positive": 3}),
            ],
        )
    ]
    lists = [
        Case(name, {"duplicates": duplicates}, EVERYTHING)
        for name, duplicates in product(["siglip", "local_nce", "nce", "binary_nce"], DUPLICATES)
    ]
    weights = {"importance": "log_q", "importance_file": by_key}
    lists += [Case("one_sided_dpm", weights, EVERYTHING), Case("one_sided_dpm", weights, ("keys",))]
    cpc = [
        Case("cpc", {"width": D, "horizons": horizons, "shared_w": shared, "learnable": True}, gives)
        for horizons, shared, gives in product([1, 3], [False, True], [(), ("lengths",)])
    ]
    spectral = [
        *(Case("spectral", {"pairs": pairs}) for pairs in ("offdiag", "all")),
        *(Case("spectral_alternating", {"directions": directions}) for directions in ("x", "y", "sum", "mean")),
        *(
            Case("pca_penalty", {"penalty": 0.7, "cov": cov, "center": center})
            for cov, center in product(["first", "both"], [False, True])
        ),
        *(Case("vicreg", {"gamma": gamma}) for gamma in (1.0, 3.0)),
    ]
    return [*logistic, *lists, *cpc, *spectral]


def own(sizes: tuple[int, ...]) -> slice:
    start = sum(sizes[: dist.get_rank()])
    return slice(start, start + sizes[dist.get_rank()])


def check_given_log_probabilities(sizes: tuple[int, ...]) -> None:
    """Data lie on the ranks as `sizes` says, noise the other way round."""
    log_u, log_q = numbers(2 * B, seed=11), -numbers(2 * B, seed=12).abs()
    mine = own(sizes)
    other = slice(2 * B - mine.stop, 2 * B - mine.start)
    for k in (None, 2.5):
        results = []
        for data, noise in ((slice(B), slice(B, 2 * B)), (mine, other)):
            leaf = log_u.clone().requires_grad_()
            log_z = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
            if data is not mine:  # one process, by the formula
                used = k or 1.0
                a = leaf - log_z - log_q - torch.tensor(used, dtype=torch.float64).log()
                zero = torch.zeros_like(a)
                loss = torch.logaddexp(-a, zero)[data].mean() + used * torch.logaddexp(a, zero)[noise].mean()
            else:
                loss = nce_from_log_u(leaf[data], leaf[noise], log_q[data], log_q[noise], k, log_z)
            results.append((loss, *torch.autograd.grad(loss, (leaf, log_z))))
        for got, want in zip(*reversed(results), strict=True):
            close(mean_over_ranks(got), want.detach(), "nce_from_log_u", sizes, k)


def check_running_moment(sizes: tuple[int, ...]) -> None:
    mine = own(sizes)
    objective = build_objective("spectral_alternating", lambda_momentum=0.75, width=D).double()
    running: Tensor | float = 0.0
    for call in range(3):
        x, y = (numbers(B, D, seed=seed + 20 * call) for seed in (1, 2))
        objective(x[mine], y[mine])
        batch = torch.stack([e.T @ e / B for e in (x, y)])
        running = 0.75 * running + 0.25 * batch if call else batch
    assert isinstance(running, Tensor)
    close(objective.get_buffer("moments_2DD"), running, "moments", sizes)


def check_targets(sizes: tuple[int, ...]) -> None:
    """Against the formula of the whole batch."""
    mine = own(sizes)
    x, y, x_target, y_target = (numbers(B, D, seed=seed) for seed in range(31, 35))
    leaves = x.requires_grad_(), y.requires_grad_()
    sides = (x, y_target), (y, x_target)
    want = torch.stack([((e @ (nu.T @ nu) / B - 2 * nu) * e).sum() / B for e, nu in sides]).sum()
    targets = {"x_target": x_target[mine], "y_target": y_target[mine]}
    got = build_objective("spectral_alternating").double()(x[mine], y[mine], **targets).loss
    results = [(loss, *torch.autograd.grad(loss, leaves)) for loss in (got, want)]
    for ours, theirs in zip(*results, strict=True):
        close(mean_over_ranks(ours), theirs.detach(), "targets", sizes)


def check_refusals(sizes: tuple[int, ...]) -> None:
    """On every rank, so that none waits for another."""
    mine = own(sizes)
    x, y = (numbers(B, D, seed=seed)[mine] for seed in (1, 2))
    uneven, one_step = x[:, None].expand(-1, 2 + dist.get_rank(), -1), x[:, None]
    no_noise = torch.where(torch.arange(B)[mine] == 2, -torch.inf, x[:, 0])
    refused: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: build_objective("binary_nce", negatives_per_positive=B)(x, y), ConfigError),
        (lambda: build_objective("cpc", width=D)(uneven, uneven), ValueError),
        (lambda: build_objective("cpc", width=D)(one_step, one_step), ValueError),
        (lambda: nce_from_log_u(x[:, 0], x[:, 0], x[:, 0], no_noise), ValueError),
    ]
    for call, error in refused:
        try:
            call()
        except error:
            continue
        raise AssertionError(f"rank {dist.get_rank()} went on")


def check_what_is_sent() -> None:
    sent: Counter[str] = Counter()
    collectives = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, collective in collectives.items():
        setattr(dist, name, counted(name, collective, sent))
    try:
        check_sent(sent)
    finally:
        for name, collective in collectives.items():
            setattr(dist, name, collective)


def check_sent(sent: Counter[str]) -> None:
    count, width = 16 * dist.get_world_size(), 24
    x, y = (torch.randn(16, width, requires_grad=True) for _ in range(2))
    keys = torch.arange(len(x))
    for name, numbers_of in SENT.items():
        known = [{"duplicates": d} for d in DUPLICATES] if numbers_of is SENT["siglip"] or name == "nce" else [{}]
        for options in known:
            sent.clear()
            build_objective(name, **options)(x, y, x_keys=keys, y_keys=keys).loss.backward()
            of_keys = 16 * count * (options.get("duplicates", "keep") != "keep")
            least = 4 * numbers_of(count, width)
            assert least <= sent.total() <= least + of_keys + 192, (name, sent)
    steps, horizons = 4, 2
    x, y = (torch.randn(16, steps, width, requires_grad=True) for _ in range(2))
    sent.clear()
    build_objective("cpc", width=width, horizons=horizons)(x, y).loss.backward()
    sums = (steps - 1) * (2 * count + 8)  # of the columns of every step, and their gradient
    assert sent["all_gather_into_tensor"] <= 4 * count * steps * width + 8 * (count + 8), sent
    assert sent.total() <= 4 * (2 * count * steps * width + sums) + 8 * (count + 24), sent


def check_all(every: list[tuple[Case, Found]], layouts: list[tuple[int, ...]]) -> None:
    for number, sizes in enumerate(layouts):
        # in this order each case meets ranks without rows in a group of one of both sizes
        for case, want in share(every, number + dist.get_world_size()):
            check_objective(case, want, sizes, ORDERS[0])
        check_given_log_probabilities(sizes)
        check_running_moment(sizes)
        check_targets(sizes)
        check_refusals(sizes)
    check_what_is_sent()


def main() -> None:
    torch.set_num_threads(1)
    tiles.TILE, tiles.KEPT = 4, 400
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "log_q.npy", -numbers(B, seed=13).abs().numpy())
        keys_n = torch.cat([Y_KEYS, FURTHER_KEYS]).unique()
        by_key = f"{folder}/log_q.safetensors"
        write_log_weights(LogWeights(by_key, LOG_Q, keys_n.numpy(), numbers(len(keys_n), seed=14).numpy()))
        every = cases(Path(folder))
        wanted = [run_case(case, Part(case, (B,), ORDERS[0], 0)) for case in dealt(every)]
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0)
        for world_size in range(3, max(rank, 1), -1):
            group = PrefixStore(f"of {world_size}", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size)
            wanted = joined(wanted) if world_size == 3 else wanted
            check_all([*zip(every, wanted, strict=True)], SIZES[world_size])
            dist.destroy_process_group()
    print(f"rank {rank}: all checks hold", flush=True)


if __name__ == "__main__":
    main()
