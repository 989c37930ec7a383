"""Identities between objectives, and what their minimisers recover of a distribution that can be enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.reference import build, close, embeddings, on_scores
from torch import Tensor

from dyad.train.losses.gathered.batch import Columns


def random_scores(n: int = 6, seed: int = 3) -> Tensor:
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def same_gradients(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-11) -> None:
    close(got, want, tolerance)
    gradients = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (got, want))
    for a, b in zip(*gradients, strict=True):
        close(a, b, tolerance)


def test_clip_is_cross_entropy_both_ways() -> None:
    x, y = embeddings(40, 8)
    objective = build("clip")
    logits = objective.logit_scale.exp() * F.normalize(x, dim=1) @ F.normalize(y, dim=1).T
    truth = torch.arange(40)
    want = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
    same_gradients(objective(x, y).loss, want, (x, y, objective.logit_scale))


def test_one_side_and_the_scale_of_clip() -> None:
    x, y = embeddings()
    tau = 0.3
    both = build("symmetric_dpm", temperature=tau)(x, y).loss
    sides = [build("info_nce", temperature=tau, directions=d)(x, y).loss * tau for d in "xy"]
    same_gradients(sides[0] + sides[1], both, (x, y))
    same_gradients(build("one_sided_dpm", temperature=tau)(x, y).loss, sides[0], (x, y))
    same_gradients(build("clip", temperature=tau)(x, y).loss, both / (2 * tau), (x, y))
    gcl = {"candidates": "negatives", "partition": "mean"}
    same_gradients(build("symmetric_dpm", **gcl)(x, y).loss, build("gcl")(x, y).loss, (x, y))


def test_dcl_is_clip_without_the_positives_in_the_sums() -> None:
    x, y = embeddings(40, 8)
    logits = F.normalize(x, dim=1) @ F.normalize(y, dim=1).T / 0.3
    off = logits.masked_fill(torch.eye(40, dtype=torch.bool), -math.inf)
    want = ((off.logsumexp(1) + off.logsumexp(0)) / 2 - logits.diagonal()).mean()
    same_gradients(build("dcl", temperature=0.3)(x, y).loss, want, (x, y))
    assert build("dcl")(x, x.detach()).loss < 0 < build("clip")(x, x.detach()).loss  # no bound: the temperature stays


def test_gcl_is_log_mean_exp() -> None:
    scores, tau = random_scores(), 0.5
    off = ~torch.eye(6, dtype=torch.bool)
    differences = (scores - scores.diag()[:, None])[off].view(6, 5)
    want = (tau * (differences / tau).exp().mean(1).log()).mean()
    value, gradient = on_scores(scores.detach(), "gcl", temperature=tau, directions="x")
    close(value, want.detach())
    close(gradient, torch.autograd.grad(want, scores)[0])


def test_cross_entropy_over_classes() -> None:
    """Is torch's own, minus log K; exactly it with partition=sum; and one-sided DPM over classes."""
    x, classes = embeddings(9, 5)[0], embeddings(4, 5, seed=1)[1]
    labels = torch.tensor([0, 3, 3, 1, 2, 0, 0, 1, 3])
    listed = torch.stack([torch.arange(9), labels], 1)
    want = F.cross_entropy(x @ classes.T, labels)
    for name, options, shift in (
        ("cross_entropy", {}, math.log(4)),
        ("cross_entropy", {"partition": "sum"}, 0.0),
        ("listwise_ce", {}, math.log(4)),
        ("one_sided_dpm", {"similarity": "dot", "temperature": 1.0}, 0.0),
    ):
        loss = build(name, **options)(x, classes, positives=listed).loss
        same_gradients(loss, F.cross_entropy(x @ classes.T, labels) - shift, (x, classes))
    assert want > 0


def test_listwise_is_the_mean_over_each_relevant_item() -> None:
    x, items = embeddings(3, 5)[0], embeddings(7, 5, seed=1)[1]
    listed = torch.tensor([[0, 1], [0, 4], [1, 0], [2, 6], [2, 5], [2, 3]])
    own_list = [(0, {0, 1, 2, 4}), (1, {0, 1, 2, 3}), (2, {3, 4, 5, 6})]  # row, the items in its list
    excluded = torch.tensor([(i, j) for i, shown in own_list for j in range(7) if j not in shown])
    logits = x @ items.T
    want = torch.stack(
        [
            torch.stack(
                [-torch.log_softmax(logits[i, sorted(shown)], 0)[sorted(shown).index(int(j))] for j in relevant]
            ).mean()
            - math.log(4)
            for i, shown in own_list
            for relevant in [listed[listed[:, 0] == i, 1]]
        ]
    ).mean()
    loss = build("listwise_ce")(x, items, positives=listed, excluded=excluded).loss
    same_gradients(loss, want, (x, items))


@pytest.mark.parametrize("positives", ["each", "exclude"])
def test_listwise_over_the_lists_of_the_rows_alone(positives: str) -> None:
    """candidates=list: of row i its own column and its further ones, as data.passage.positives=all gives them."""
    x, y = (embeddings(4, 5, seed=seed)[0] for seed in (0, 1))
    further, row = embeddings(6, 5, seed=2)[0], torch.tensor([0, 0, 0, 2, 3, 3])
    relevant = torch.tensor([True, False, False, False, True, False])
    columns = Columns(further, row, positive_k=relevant)
    losses = []
    for i in range(4):
        own = (row == i).nonzero()[:, 0]
        logits = x[i] @ torch.cat([y[i : i + 1], further[own]]).T
        right = [0, *(1 + relevant[own].nonzero()[:, 0]).tolist()]
        hidden = right if positives == "exclude" else []
        shown = {p: [j for j in range(len(logits)) if j == p or j not in hidden] for p in right}
        losses.append(torch.stack([logits[shown[p]].logsumexp(0) - logits[p] for p in right]).mean())
    objective = build("listwise_ce", partition="sum", candidates="list", positives=positives)
    same_gradients(objective(x, y, negatives=columns).loss, torch.stack(losses).mean(), (x, y, further))


def test_epr_is_dpr_with_one_hard_negative() -> None:
    x, y = embeddings()
    hard = embeddings(9, 5, seed=1)[0]
    assert torch.equal(*(build(name)(x, y, negatives=hard[:, None]).loss for name in ("epr", "dpr")))
    logits = x @ torch.cat([y, hard]).T  # 2B − 1 negatives
    want = F.cross_entropy(logits, torch.arange(9))
    same_gradients(build("epr")(x, y, negatives=hard[:, None]).loss, want, (x, y, hard))


def test_simclr_is_mean_info_nce_with_twice_the_views() -> None:
    x, y = embeddings()
    z = F.normalize(torch.cat([x, y]), dim=1)
    logits = (z @ z.T / 0.07).masked_fill(torch.eye(18, dtype=torch.bool), -math.inf)  # 2N − 2 negatives
    want = F.cross_entropy(logits, torch.arange(18).roll(9))
    same_gradients(build("simclr")(x, y).loss, want, (x, y))
    itself, partner = (torch.stack([torch.arange(18), torch.arange(18).roll(k)], 1) for k in (0, 9))
    info_nce = build("info_nce")(torch.cat([x, y]), torch.cat([x, y]), positives=partner, excluded=itself).loss
    same_gradients(info_nce, want, (x, y))


def test_shifts() -> None:
    scores = random_scores(seed=4).detach()
    c = torch.linspace(-1, 2, 6, dtype=torch.float64)
    value, gradient = on_scores(scores, "clip", directions="x")
    close(gradient.sum(1), torch.zeros(6))
    close(on_scores(scores + c[:, None], "clip", directions="x")[0], value, 1e-10)
    column, gradient = on_scores(scores, "clip", directions="y")
    close(gradient.sum(0), torch.zeros(6))
    assert abs(on_scores(scores + c[:, None], "clip", directions="y")[0] - column) > 0.1
    close(on_scores(scores + 3.0, "clip")[0], on_scores(scores, "clip")[0], 1e-10)


@pytest.mark.parametrize("name", ["symmetric_dpm", "clip", "gcl"])
def test_order_of_pairs_and_of_sides(name: str) -> None:
    x, y = embeddings()
    x_keys, y_keys = torch.tensor([1, 2, 3, 4, 4, 5, 6, 7, 8]), torch.tensor([1, 1, 2, 3, 4, 4, 5, 5, 5])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    objective = build(name, duplicates="positive")
    first = objective(x, y, x_keys=x_keys, y_keys=y_keys)
    second = objective(x[order], y[order], x_keys=x_keys[order], y_keys=y_keys[order])
    close(second.loss, first.loss)
    close(objective(y, x, x_keys=y_keys, y_keys=x_keys).loss, first.loss)
    for metric, value in first.metrics.items():
        close(second.metrics[metric], value)


def test_one_positive_is_the_same_however_several_are_taken() -> None:
    x, y = embeddings()
    for candidates in ("all", "negatives"):
        losses = [build("clip", candidates=candidates, positives=p)(x, y).loss for p in ("single", "each", "exclude")]
        for loss in losses:
            same_gradients(build("clip", candidates=candidates, positives="merge")(x, y).loss, loss, (x, y))


# What a minimiser recovers. A batch with a pair as often as its count has the joint distribution as its own; the scores
# of a free table are had as the products of its rows with unit vectors.

TAU = 0.5
COUNTS = torch.tensor(
    [[3, 1, 1, 2, 1], [1, 4, 1, 1, 2], [2, 1, 3, 1, 1], [1, 1, 2, 5, 1], [1, 2, 1, 1, 1], [4, 1, 1, 1, 3]]
)
BLOCKS = torch.tensor(
    [[3, 1, 0, 0, 0], [1, 4, 0, 0, 0], [2, 1, 0, 0, 0], [0, 0, 2, 5, 1], [0, 0, 1, 1, 2], [0, 0, 3, 1, 1]]
)


def pairs_of(counts: Tensor) -> tuple[Tensor, Tensor]:
    """x and y of every pair, each pair as often as its count."""
    i, j = counts.nonzero().unbind(1)
    return tuple(v.repeat_interleave(counts[i, j]) for v in (i, j))  # pyright: ignore[reportReturnType]


def minimised(loss: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, float]:
    table = start.clone().requires_grad_()
    settings: dict[str, Any] = dict(max_iter=400, tolerance_grad=1e-9, tolerance_change=0, history_size=30)
    optimizer = torch.optim.LBFGS([table], line_search_fn="strong_wolfe", **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(table)
        value.backward()
        return value

    optimizer.step(closure)
    return table.detach(), float(loss(table).detach())


def entropy(p: Tensor) -> float:
    return -float(torch.special.xlogy(p, p).sum())


def spread(values: Tensor) -> float:
    return float(values.max() - values.min())


def distributions(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = counts.double() / counts.sum()
    return p, p.sum(1), p.sum(0)


def symmetric(counts: Tensor) -> Callable[[Tensor], Tensor]:
    """The objective over all pairs, as a function of the table."""
    i, j = pairs_of(counts)
    objective = build("symmetric_dpm", similarity="dot", temperature=TAU, partition="mean")
    unit = torch.eye(counts.shape[1], dtype=torch.float64)
    return lambda table: objective(table[i], unit[j]).loss


def test_symmetric_dpm_recovers_the_ratio_of_densities() -> None:
    p, p_x, p_y = distributions(COUNTS)
    table, value = minimised(symmetric(COUNTS), random_scores(6)[:, :5].detach())
    assert spread(table / TAU - (p / (p_x[:, None] * p_y)).log()) < 1e-4
    # the likelihoods have p(y) and p(x) beside e^(s/τ), whose entropies do not depend on the scores
    of_marginals = entropy(p_x) + entropy(p_y)
    conditional = 2 * entropy(p) - of_marginals  # H(Y|X) + H(X|Y)
    assert value + TAU * of_marginals == pytest.approx(TAU * conditional, abs=1e-8)
    weights = p_y * (table / TAU).exp()
    torch.testing.assert_close(weights / weights.sum(1, keepdim=True), p / p_x[:, None], rtol=1e-4, atol=1e-5)
    weights = p_x[:, None] * (table / TAU).exp()
    torch.testing.assert_close(weights / weights.sum(0), p / p_y, rtol=1e-4, atol=1e-5)


def test_blocks_of_the_support_have_a_constant_each() -> None:
    p, p_x, p_y = distributions(BLOCKS)
    start = random_scores(6)[:, :5].detach()
    start[:3] += 2.0
    start[BLOCKS == 0] = -60.0  # never together: as low as may be
    table, _ = minimised(symmetric(BLOCKS), start)
    constant = table / TAU - (p / (p_x[:, None] * p_y)).log()
    blocks = constant[:3, :2], constant[3:, 2:]
    assert all(spread(c) < 1e-4 for c in blocks)
    assert abs(float(blocks[0].mean() - blocks[1].mean())) > 0.5


@pytest.mark.parametrize("candidates", ["every y once", "drawn with p(y), weighed"])
def test_one_sided_dpm_recovers_the_conditional(candidates: str) -> None:
    p, p_x, p_y = distributions(COUNTS)
    i, j = pairs_of(COUNTS)
    unit = torch.eye(5, dtype=torch.float64)
    options: dict[str, Any] = dict(similarity="dot", temperature=TAU)
    if candidates == "every y once":
        listed = torch.stack([torch.arange(len(i)), j], 1)
        objective = build("one_sided_dpm", **options)
        table, value = minimised(lambda s: objective(s[i], unit, positives=listed).loss, torch.zeros(6, 5).double())
    else:
        log_q = p_y.log()[j]
        objective = build("one_sided_dpm", importance="log_q", partition="mean", **options)
        table, value = minimised(lambda s: objective(s[i], unit[j], importance=log_q).loss, torch.zeros(6, 5).double())
    constants = table / TAU - (p / p_x[:, None]).log()
    assert all(spread(row) < 1e-4 for row in constants)
    assert value == pytest.approx(TAU * (entropy(p) - entropy(p_x)), abs=1e-8)


def test_expected_info_nce_bounds_the_information() -> None:
    """One pair of the joint and K − 1 draws of y, every draw there is: log K − L ≤ I, and grows with K."""
    counts = torch.tensor([[3, 1], [1, 2], [1, 2]])  # both y as frequent: K − 1 draws are all tuples, once each
    p, p_x, p_y = distributions(counts)
    information = entropy(p_x) + entropy(p_y) - entropy(p)
    unit, i_of, j_of = torch.eye(2, dtype=torch.float64), *pairs_of(counts)
    bounds = []
    for k in (2, 3, 4):
        trials = [
            (i, (j, *others)) for i, j in zip(i_of, j_of, strict=True) for others in product((0, 1), repeat=k - 1)
        ]
        rows = torch.stack([i for i, _ in trials])
        columns = torch.tensor([j for _, drawn in trials for j in drawn])
        first = torch.stack([torch.arange(len(rows)), torch.arange(len(rows)) * k], 1)
        every = torch.cartesian_prod(torch.arange(len(rows)), torch.arange(len(columns)))
        foreign = every[every[:, 1] // k != every[:, 0]]  # each row has its own K candidates
        given = {"positives": first, "excluded": foreign}
        objective = build("info_nce", similarity="dot", temperature=1.0)

        def loss(table: Tensor, objective: Any = objective, trial: Any = (rows, unit[columns], given)) -> Tensor:
            return objective(table[trial[0]], trial[1], **trial[2]).loss

        table, value = minimised(loss, torch.zeros(3, 2).double())
        assert all(spread(row) < 1e-4 for row in table - (p / (p_x[:, None] * p_y)).log())
        bounds.append(math.log(k) - value)
    assert 0 < bounds[0] < bounds[1] < bounds[2] < information
