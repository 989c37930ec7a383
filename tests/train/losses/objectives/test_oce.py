"""Optimised certainty equivalents by their definitions, and the two ways to let ν learn."""

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.messages import raises
from helpers.robust import at_nu, oce, reference_coce
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective

DIVERGENCES = ["kl", "chi2", "cvar"]
TAUS = [0.05, 0.5, 8.0]
ALPHA = 0.3


def build(name: str = "partial_auc", **options: Any) -> Any:
    """In float64, with τ as given to all its digits."""
    tau = options.get("temperature", 0.5)
    objective: Any = build_objective(name, **{"temperature": tau, "alpha": ALPHA, **options}).double()
    objective.logit_scale.data.fill_(torch.tensor(1 / tau, dtype=torch.float64).log())
    return objective


def worst_case(losses: Tensor, divergence: str, tau: float) -> tuple[Tensor, Tensor]:
    """Value and weights w: the gradient in the losses."""
    y = losses.detach()[:, None].requires_grad_()
    loss = build(divergence=divergence, temperature=tau)(torch.zeros(1, 1, dtype=torch.float64), y).loss
    return loss.detach(), torch.autograd.grad(loss, y)[0][:, 0]


def some_losses(m: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def primal(losses: Tensor, w: Tensor, divergence: str, tau: float) -> Tensor:
    """Σ w ℓ − τ/m Σ φ(m w); for CVaR w is at most 1/(α m)."""
    t = len(losses) * w
    phi = {"kl": torch.xlogy(t, t) - t + 1, "chi2": (t - 1) ** 2 / 2, "cvar": torch.zeros_like(t)}[divergence]
    return w @ losses - tau * phi.mean()


def feasible(w: Tensor, divergence: str) -> Tensor:
    """Weights of CVaR have a cap: what is above it goes to the others."""
    w, cap = w / w.sum(), 1 / (ALPHA * len(w))
    for _ in range(200 if divergence == "cvar" else 0):
        w = w.clamp(max=cap)
        w = w + (1 - w.sum()) * (cap - w) / (cap - w).sum().clamp(min=1e-300)
    return w


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_identity_3_the_minimum_over_nu(divergence: str, tau: float) -> None:
    """By ternary search on the definition, which is convex in ν."""
    losses = some_losses()
    low, high = losses.min() - 20 * tau, losses.max() + tau
    tau_0d = torch.tensor(tau, dtype=torch.float64)
    for _ in range(300):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if at_nu(losses, a, tau_0d, divergence, ALPHA) < at_nu(losses, b, tau_0d, divergence, ALPHA):
            high = b
        else:
            low = a
    numeric = at_nu(losses, low, tau_0d, divergence, ALPHA)
    value, _ = worst_case(losses, divergence, tau)
    close(value, numeric)
    close(value, oce(losses, tau_0d, divergence, ALPHA))


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_identity_3_the_maximum_over_weights(divergence: str, tau: float) -> None:
    losses = some_losses()
    value, w = worst_case(losses, divergence, tau)
    assert w.min() >= 0
    close(w.sum(), torch.ones_like(value))
    close(primal(losses, w, divergence, tau), value)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        direction = torch.rand(len(w), generator=generator, dtype=torch.float64) ** 4
        for step in (1.0, 0.1, 1e-3):
            other = feasible((1 - step) * w + step * direction / direction.sum(), divergence)
            assert primal(losses, other, divergence, tau) <= value + 1e-9


def test_identity_3_the_kl_ball() -> None:
    """min_τ τ log mean exp(ℓ/τ) + τρ: at its τ, KL(w‖uniform) = ρ."""
    rho, losses = 0.4, some_losses(30)
    objective = build(divergence="kl", learnable=True, rho=rho)
    x, y = torch.zeros(1, 1, dtype=torch.float64), losses[:, None]
    low, high = -5.0, 5.0
    for _ in range(80):  # the slope in log 1/τ falls from + to −, reversed
        middle = (low + high) / 2
        objective.logit_scale.data.fill_(middle)
        slope = torch.autograd.grad(objective(x, y).loss, objective.logit_scale)[0]
        low, high = (middle, high) if slope < 0 else (low, middle)
    result = objective(x, y)
    close(result.metrics["weights_kl"], torch.tensor(rho, dtype=torch.float64))
    w = torch.softmax(losses * objective.logit_scale.exp(), 0).detach()
    close((w * (w * len(w)).log()).sum(), torch.tensor(rho, dtype=torch.float64))
    inside = torch.softmax(3 * some_losses(30, 1), 0)
    if (inside * (30 * inside).log()).sum() <= rho:
        assert inside @ losses <= result.loss


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_metrics_of_nu_and_the_weights(divergence: str, tau: float) -> None:
    losses = some_losses()
    _, w = worst_case(losses, divergence, tau)
    y = losses[:, None]
    metrics = build(divergence=divergence, temperature=tau)(torch.zeros(1, 1, dtype=torch.float64), y).metrics
    if "weights_kl" in metrics:
        close(metrics["weights_kl"], torch.xlogy(w, 12 * w).sum())
    if "zero_weights" in metrics:
        close(metrics["zero_weights"], (w == 0).double().mean())
    assert {"kl": "weights_kl", "chi2": "zero_weights", "cvar": "zero_weights"}[divergence] in metrics
    tau_0d, value = torch.tensor(tau, dtype=torch.float64), worst_case(losses, divergence, tau)[0]
    close(at_nu(losses, metrics["nu"], tau_0d, divergence, ALPHA), value)


# ν that learns.


def batch(b: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(b, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def others(b: int) -> tuple[list[list[int]], list[list[int]]]:
    return [[j for j in range(b) if j != i] for i in range(b)], [[i] for i in range(b)]


@pytest.mark.parametrize("pair_loss", ["identity", "hinge"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sgd_learns_one_nu(divergence: str, pair_loss: str) -> None:
    x, y = batch()
    objective = build("coce", divergence=divergence, pair_loss=pair_loss, nu="sgd", margin=0.4)
    objective.nu.data.fill_(0.3)
    loss = objective(x, y).loss
    nu, tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), torch.tensor(0.5, dtype=torch.float64)
    kind: dict[str, Any] = dict(divergence=divergence, pair_loss=pair_loss)
    want = reference_coce(x, y, tau, *others(7), **kind, nu=nu.expand(7))
    close(loss, want)
    got = torch.autograd.grad(loss, (x, y, objective.nu))
    for g, w in zip(got, torch.autograd.grad(want, (x, y, nu)), strict=True):
        close(g.squeeze(), w)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_nu_that_is_far_off_is_no_overflow(divergence: str) -> None:
    x, y = (e.detach().float().requires_grad_() for e in batch())
    for start in (-1e4, 1e4):
        objective: Any = build_objective("coce", divergence=divergence, nu="sgd", temperature=0.01)
        objective.nu.data.fill_(start)
        loss = objective(x, y).loss
        dx, dnu = torch.autograd.grad(loss, (x, objective.nu))
        assert loss.isfinite() and dx.isfinite().all()
        assert dnu.isfinite() and (dnu < 0) == (start < 0)  # back to where ν belongs


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sgd_starts_at_the_largest_nu_of_the_first_batch(divergence: str) -> None:
    """From 0 the first loss was a mean of e^(ℓ/τ): 1e10 here."""
    x, y = batch()
    objective = build("coce", divergence=divergence, nu="sgd", temperature=0.01, directions="mean")
    solved = [build("coce", divergence=divergence, nu="state", num_samples=7, temperature=0.01) for _ in range(2)]
    best = [o(*sides, torch.arange(7)).loss for o, sides in zip(solved, ((x, y), (y, x)), strict=True)]
    nu = torch.stack([o.sample_state.gathered(x.device)["nu_x"] for o in solved])
    largest = nu.amax(1)
    with torch.no_grad():
        unseen = objective(x, y).loss
    assert objective.nu.isnan().all()
    first = objective(x, y).loss
    close(first.detach(), unseen)
    close(objective.nu.detach(), largest)
    assert first <= sum(best) / 2 + (largest[:, None] - nu).mean()
    objective(x.flip(0), y)
    close(objective.nu.detach(), largest)


def test_undo_and_resume_keep_the_start_of_nu() -> None:
    x, y = batch()
    objective, resumed = (build("coce", nu="sgd") for _ in range(2))
    objective(x, y)
    resumed.load_state_dict(objective.state_dict())
    objective.undo()
    assert objective.nu.isnan().all()
    objective(x.flip(0), y)
    objective(x, y)
    objective.undo()
    assert objective.nu.isfinite().all()
    before = resumed.nu.detach().clone()
    resumed(x.flip(0), y)
    assert torch.equal(resumed.nu.detach(), before)


def test_the_start_of_nu_is_of_the_batch_after_a_load_too() -> None:
    objective, unseen = (build("coce", nu="sgd") for _ in range(2))
    x, y = batch()
    objective(x, y)
    objective.load_state_dict(unseen.state_dict())
    objective(x.flip(0), y)
    unseen(x.flip(0), y)
    assert torch.equal(objective.nu, unseen.nu) and objective.nu.isfinite().all()


class Asked(TorchDispatchMode):
    """How often numbers of a tensor decide what is computed: each time the CPU waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        )
        self.count += by_mask or func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nu", ["sgd", "closed_form"])
def test_a_step_with_a_known_nu_does_not_wait_for_the_device(nu: str) -> None:
    x, y = batch()
    objective = build("coce", nu=nu)
    objective(x, y)
    with Asked() as asked:
        objective(x, y).loss.backward()
    assert asked.count == 0


def test_a_further_side_of_known_samples_waits_for_the_device_once() -> None:
    x, y = batch()
    counts, ids = [], torch.arange(7)
    for directions in ("x", "mean"):
        objective = build("coce", nu="state", num_samples=7, directions=directions)
        objective(x, y, ids)
        with Asked() as asked:
            objective(x, y, ids).loss.backward()
        counts.append(asked.count)
    assert counts[1] - counts[0] == 1


@pytest.mark.parametrize("pair_loss", ["identity", "hinge"])
@pytest.mark.parametrize("b", [2, 6])
def test_the_first_visit_of_cvar_has_its_whole_gradient(b: int, pair_loss: str) -> None:
    """Also where some samples have been visited: those take the sum at their ν."""
    x, y = batch(b)
    stateful = build("coce", divergence="cvar", nu="state", num_samples=b, pair_loss=pair_loss)
    solved = build("coce", divergence="cvar", pair_loss=pair_loss)
    got, whole = (torch.autograd.grad(loss, x)[0] for loss in (stateful(x, y, torch.arange(b)).loss, solved(x, y).loss))
    close(got, whole)
    some = build("coce", divergence="cvar", nu="state", num_samples=9, pair_loss=pair_loss, margin=0.4)
    some(x[:2], y[:2], torch.tensor([0, 1]))
    nu = some.sample_state.gathered(x.device)["nu_x"][:b]
    loss, tau = some(x, y, torch.arange(b)).loss, torch.tensor(0.5, dtype=torch.float64)
    kind: dict[str, Any] = dict(divergence="cvar", pair_loss=pair_loss)
    new = [i for i in range(b) if nu[i].isnan()]
    candidates, own = others(b)
    want = 2 / b * reference_coce(x, y, tau, candidates, own[:2] + [[] for _ in new], **kind, nu=nu)
    if new:
        want = want + len(new) / b * reference_coce(x, y, tau, candidates, [[], [], *own[2:]], **kind)
    close(loss, want)
    close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(want, x)[0])


def test_state_of_no_sample_is_refused() -> None:
    with raises(ConfigError, "num_samples=0"):
        build("coce", nu="state", num_samples=0)


def test_sgd_reaches_the_closed_form_of_one_anchor() -> None:
    losses, x = some_losses()[:, None], torch.zeros(1, 1, dtype=torch.float64)
    for divergence in ("kl", "chi2"):
        objective = build(divergence=divergence, nu="sgd")
        for _ in range(400):
            objective.zero_grad()
            objective(x, losses).loss.backward()
            objective.nu.data.sub_(0.2 * objective.nu.grad)
        close(objective(x, losses).loss, build(divergence=divergence)(x, losses).loss, 1e-8)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_state_keeps_one_nu_per_sample(divergence: str) -> None:
    """The first visit is the closed form; then it steps by τ · ∂L_i/∂ν_i = τ (1 − mean_j φ*'(u_ij)) after the loss."""
    x, y = batch()
    ids = torch.tensor([5, 3, 9, 0, 1, 7, 8])
    objective = build("coce", divergence=divergence, nu="state", num_samples=10, nu_lr=0.05)
    solved = build("coce", divergence=divergence)(x, y)
    first = objective(x, y, ids)
    close(first.loss, solved.loss)
    close(first.metrics["nu"], solved.metrics["nu"])
    moved = (x + 0.5).detach().requires_grad_()
    before = objective.sample_state.gathered(torch.device("cpu"))
    second = objective(moved, y, ids)
    tau = torch.tensor(0.5, dtype=torch.float64)
    nu = before["nu_x"][ids].requires_grad_()
    want = reference_coce(moved, y, tau, *others(7), divergence=divergence, pair_loss="identity", nu=nu)
    close(second.loss, want)
    (slope,) = torch.autograd.grad(7 * want, nu, retain_graph=True)
    after = objective.sample_state.gathered(torch.device("cpu"))
    close(after["nu_x"][ids], (nu - tau * (0.05 * slope).clamp(min=-1)).detach())
    for g, w in zip(torch.autograd.grad(second.loss, (moved, y)), torch.autograd.grad(want, (moved, y)), strict=True):
        close(g, w)
    objective.undo()
    assert all(
        torch.equal(v, before[k]) or v.isnan().any() for k, v in objective.sample_state.gathered(x.device).items()
    )
    close(objective.sample_state.gathered(x.device)["nu_x"][ids], nu.detach())
    with torch.no_grad():
        close(objective(moved, y, ids).loss, want.detach())
    close(objective.sample_state.gathered(x.device)["nu_x"][ids], nu.detach())


def test_state_of_a_sample_that_is_there_twice() -> None:
    x, y = batch(4)
    objective = build("coce", divergence="kl", nu="state", num_samples=3, directions="mean")
    first = objective(x, y, torch.tensor([0, 1, 2, 1]))
    alone = build("coce", divergence="kl", nu="state", num_samples=4, directions="mean")
    alone(x, y, torch.tensor([0, 1, 2, 3]))
    for side in ("nu_x", "nu_y"):
        shared, apart = (o.sample_state.gathered(x.device)[side] for o in (objective, alone))
        close(shared, torch.stack([apart[0], (apart[1] + apart[3]) / 2, apart[2]]))
    assert first.loss.isfinite()


def test_state_needs_one_anchor_per_sample() -> None:
    x, y = batch()
    positives, ids = torch.tensor([(i, i) for i in range(7)] + [(0, 1)]), torch.arange(7)
    for pair_loss, fits in (("identity", True), ("hinge", False)):
        objective = build("coce", nu="state", num_samples=7, pair_loss=pair_loss)
        if fits:
            assert objective(x, y, ids, positives=positives).loss.isfinite()
            continue
        with raises(ConfigError):
            objective(x, y, ids, positives=positives)
    with raises(ConfigError):
        build("coce", nu="state", num_samples=7, directions="y")(x, y[:5], ids, positives=positives[:5])
    with raises(ConfigError, "sample_ids"):
        build("coce", nu="state", num_samples=7)(x, y)


def test_it_can_be_copied_and_moved() -> None:
    for nu, divergence in itertools.product(("closed_form", "sgd"), DIVERGENCES):
        x, y = batch()
        objective = build("coce", nu=nu, divergence=divergence)
        close(copy.deepcopy(objective)(x, y).loss, objective(x, y).loss)
