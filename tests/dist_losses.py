"""Job for torchrun: on W ranks, the objectives equal dense autograd of the whole batch in one process (float64, 1e-10).

For every objective, option of duplicates, kind of candidates and way the rows lie on the ranks: the mean over ranks of
the loss and of each metric; the gradient of the embeddings over W (what averaging over ranks needs);
the mean over ranks of the gradient of logit_scale. Also: the general path, the hand-over on any one rank, what is sent.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_losses import reference_loss, used_path
from torch import Tensor

from train.losses import build_objective, pairwise
from train.losses.gather import Layout
from train.losses.pairwise import log_partition

B, D = 8, 5
KEYS = (torch.tensor([1, 2, 3, 4, 4, 5, 6, 7]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5]))  # 3~4~5 but not 3~5
SIZES = {2: [(4, 4), (5, 3), (0, 8), (8, 0)], 4: [(2, 2, 2, 2), (3, 2, 2, 1), (1, 5, 0, 2), (0, 0, 8, 0)]}


def embeddings() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def close(got: Tensor, want: Tensor, *context: object) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m: f"{context}: {m}")


def own_rows(sizes: tuple[int, ...]) -> slice:
    start = sum(sizes[: dist.get_rank()])
    return slice(start, start + sizes[dist.get_rank()])


@cache
def in_one_process(name: str, duplicates: str, candidates: str) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Loss and metrics of the whole batch, and the gradients of x, y and, where it learns, logit_scale."""
    x, y = embeddings()
    logit_scale = build_objective(name).double().logit_scale
    dpm = name == "symmetric_dpm"
    options = dict(duplicates=duplicates, candidates=candidates, directions="sum" if dpm else "mean")
    loss = reference_loss(x, y, logit_scale, KEYS, tau_scaled=dpm, **options)
    scores = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).detach()
    values = {"loss": loss.detach(), "positive_score": scores.diagonal().mean()}
    values["negative_score"] = (scores.sum() - scores.trace()) / (B * (B - 1))
    if (duplicates, candidates) == ("keep", "all"):
        values["log_k"] = torch.tensor(float(B)).double().log()
        values["mi_bound"] = values["log_k"] - reference_loss(x, y, logit_scale).detach()
    inputs = (x, y, logit_scale) if logit_scale.requires_grad else (x, y)
    return values, torch.autograd.grad(loss, inputs)


def check_objective(name: str, duplicates: str, candidates: str, sizes: tuple[int, ...]) -> None:
    context = (name, duplicates, candidates, sizes)
    want, (want_dx, want_dy, *want_dscale) = in_one_process(name, duplicates, candidates)
    mine = own_rows(sizes)
    x, y = (e.detach()[mine].clone().requires_grad_() for e in embeddings())
    objective = build_objective(name, duplicates=duplicates, candidates=candidates).double()
    result = objective(x, y, x_keys=KEYS[0][mine], y_keys=KEYS[1][mine])
    result.loss.backward()
    got = {"loss": result.loss, **result.metrics}
    assert got.keys() == want.keys(), (context, got.keys())
    for key, value in got.items():
        close(mean_over_ranks(value), want[key], *context, key)
    for e, gradient in ((x, want_dx), (y, want_dy)):
        assert e.grad is not None
        close(e.grad / dist.get_world_size(), gradient[mine], *context, "embeddings")
    for gradient in want_dscale:
        assert objective.logit_scale.grad is not None
        close(mean_over_ranks(objective.logit_scale.grad), gradient, *context, "logit_scale")


def check_paths(sizes: tuple[int, ...]) -> None:
    """Bounded, general, and bounded handing over because of a row of one rank: all ranks take the same one."""
    mine = own_rows(sizes)
    for case, scale_value in (("bounded", 3.0), ("general", 5000.0), ("hand-over", 600.0)):
        x, y = (F.normalize(e, dim=1).detach() for e in embeddings())
        if case == "hand-over":  # float64 leaves room for logits down to about −580
            y = F.normalize(1e-3 * y + torch.eye(D, dtype=torch.float64)[0], dim=1)
            x = y.clone()
            x[4] *= -1
        scale = torch.tensor(scale_value, dtype=torch.float64, requires_grad=True)
        whole = [x.requires_grad_(), y.requires_grad_()]
        a = scale * (whole[0] @ whole[1].T)
        weights = torch.linspace(0.5, 1.5, B, dtype=torch.float64)
        want = weights @ a.logsumexp(1) + weights @ a.logsumexp(0)
        want_gradients = torch.autograd.grad(want, (*whole, scale))

        local = [e.detach()[mine].clone().requires_grad_() for e in whole]
        layout = Layout.of(local[0])
        rows, columns = log_partition(local[0], layout.gather(local[1]), scale, layout)
        assert used_path(rows) == ("general" if case == "hand-over" else case), case
        close(rows, a.logsumexp(1).detach()[mine], case, "rows")
        close(columns, a.logsumexp(0).detach()[mine], case, "columns")
        loss = weights[mine] @ rows + weights[mine] @ columns
        dx, dy, dscale = torch.autograd.grad(loss, (*local, scale))
        close(dx, want_gradients[0][mine], case, "x")
        close(dy, want_gradients[1][mine], case, "y")
        close(mean_over_ranks(dscale) * dist.get_world_size(), want_gradients[2], case, "scale")


def check_what_is_sent(duplicates: str, sent: Counter[str]) -> None:
    """y and its gradient once, 2·B·D, and a few numbers per pair."""
    world_size, count, width = dist.get_world_size(), 64, 32
    x, y = (torch.randn(count // world_size, width, requires_grad=True) for _ in range(2))
    keys = torch.arange(len(x))
    sent.clear()
    build_objective("clip", duplicates=duplicates)(x, y, x_keys=keys, y_keys=keys).loss.backward()
    numbers_per_pair = 2 + 2 * (duplicates != "keep")  # sums and their gradients; keys
    assert sent.total() <= 2 * count * width + numbers_per_pair * count + 16, sent
    assert sent["reduce_scatter_tensor"] == count * width, sent


def counted(name: str, collective: Callable[..., Any], sent: Counter[str]) -> Callable[..., Any]:
    def counting(*tensors: Any) -> Any:
        sent[name] += max(t.numel() for t in tensors if isinstance(t, Tensor))
        return collective(*tensors)

    return counting


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairwise.TILE = 4
    choices = (["clip", "symmetric_dpm"], ["keep", "mask", "positive"], ["all", "negatives"])
    world_size = dist.get_world_size()
    for sizes in SIZES[world_size]:
        for name, duplicates, candidates in itertools.product(*choices):
            check_objective(name, duplicates, candidates, sizes)
        check_paths(sizes)
    sent: Counter[str] = Counter()
    for collective in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, collective, counted(collective, getattr(dist, collective), sent))
    for duplicates in ("keep", "mask", "positive"):
        check_what_is_sent(duplicates, sent)
    print(f"rank {dist.get_rank()}: all checks hold", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
