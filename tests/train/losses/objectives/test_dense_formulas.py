"""The code that opens each module of objectives, run as it stands there in float64, against the objective itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import logistic as logistic_helper, robust as robust_helper
from helpers.reference import close, reference_loss
from torch import Tensor

from dyad.train.losses import OBJECTIVES, build_objective, objectives
from dyad.train.losses.gathered.batch import Columns
from dyad.train.losses.options.choices import Similarity

B, D, SAMPLES = 7, 5, 11
NO_LOSSES = {"base", "state_batch", "__init__"}


def defined(name: str) -> SimpleNamespace:
    """What the code in the docstring of a module of objectives defines. It sees torch and math alone."""
    text = import_module(f"dyad.train.losses.objectives.{name}").__doc__ or ""
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    with NamedTemporaryFile("w", prefix=f"docstring_of_{name}_", suffix=".py") as file:
        file.write(code)
        file.flush()
        return SimpleNamespace(**run_path(file.name, {"torch": torch, "F": F, "math": math}))


MODULES = {path.stem for path in Path(objectives.__file__ or "").parent.glob("*.py")} - NO_LOSSES
CODE = SimpleNamespace(**{name: defined(name) for name in MODULES})


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IDS, LENGTHS = torch.tensor([3, 1, 10, 0, 5, 8, 6]), torch.tensor([4, 1, 3, 2, 4, 0, 3])
LOG_Q, WEIGHTS, HARD = numbers(B), numbers(B).sigmoid(), numbers(B, 1, D, seed=5)
OWN = {"positives": torch.stack([torch.arange(B)] * 2, 1)}
TAUGHT, OF_TEACHER = (torch.arange(B).repeat_interleave(2), numbers(B, 3, seed=6))
OF_PAIRS = torch.tensor([0.0, 3.5, 1.0, 1.0, 5.0, 3.5, -2.0]).double()
LISTS = {
    "negatives": Columns(numbers(2 * B, D, seed=5), TAUGHT, teacher_k=OF_TEACHER[:, 1:].flatten()),
    "teacher": OF_TEACHER[:, 0],
}
GIVEN: dict[str, dict[str, Any]] = {
    "distill_kl": LISTS,
    "margin_mse": LISTS,
    "cosent": {"teacher": OF_PAIRS},
    "cosine_mse": {"teacher": OF_PAIRS},
    "epr": {"negatives": HARD},
    "cross_entropy": OWN,
    "listwise_ce": OWN,
    "one_sided_dpm": {"importance": LOG_Q},
    "cpc": {"lengths": LENGTHS},
    "nll": {"relevance": WEIGHTS},
    **{name: {"sample_ids_b": IDS} for name in ("sogclr", "isogclr", "fastclip_v0", "fastclip_v3", "nuclr")},
}
SHAPES = {
    **dict.fromkeys(("cross_entropy", "listwise_ce"), ((B, D), (B + 3, D))),
    "partial_auc": ((B, 1), (B + 2, 1)),
    "cpc": ((B, 4, D), (B, 4, D)),
}

# Of x and y as they are scored, and o, what `known` says of the objective before the step
Formula = Callable[[Tensor, Tensor, SimpleNamespace], Tensor]


def info_nce(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    return CODE.softmax.info_nce(x @ y.T / o.tau).mean()


def of_classes(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    return info_nce(x, y, o) - (math.log(len(y)) if o.partition == "mean" else 0.0)


def parts(o: SimpleNamespace) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The pair loss and the optimised certainty equivalent."""
    losses, oces = CODE.pair_losses, CODE.oce
    hinges = {name: partial(getattr(losses, name), margin=o.margin) for name in ("hinge", "squared_hinge")}
    pair_losses = {"identity": lambda d: d, "logistic": losses.logistic, **hinges}
    of_rows = {"kl": partial(oces.kl, tau=o.tau), "chi2": partial(oces.chi2, tau=o.tau)}
    return pair_losses[o.pair_loss], {**of_rows, "cvar": partial(oces.cvar, alpha=o.alpha)}[o.divergence]


def gcl(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    how = (lambda d: d), partial(CODE.oce.kl, tau=o.tau)
    return CODE.robust.coce(x, y, *how) + CODE.robust.coce(y, x, *how)


def coce(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    return CODE.robust.coce(x, y, *parts(o)) + (o.rho or 0.0) * o.tau


def fastclip_v0(d_BB: Tensor, tau: Tensor, u_B: Tensor, gamma: float) -> Tensor:
    zero_B, u_B = CODE.estimators.estimate(d_BB / tau, u_B, gamma)
    return (u_B.log() + zero_B / u_B).mean()


def both(of_side: Callable[..., Tensor], *names: str) -> Formula:
    """The sum over both directions. names: what else of_side takes, by option or, of each sample, by state."""

    def loss(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
        total = torch.zeros(()).double()
        for side, s_BB in (("x", x @ y.T), ("y", y @ x.T)):
            of_samples = {name: o.before.get(f"{name}_{side}") for name in ("log_u", "tau", "zeta")}
            old = {name: v[IDS] for name, v in of_samples.items() if v is not None}
            more = [old.get(name, getattr(o, name, None)) for name in names]
            d_BB = s_BB - s_BB.diagonal()[:, None]
            total = total + of_side(d_BB, old.get("tau", o.tau), old["log_u"].exp(), o.gamma, *more)
        return total

    return loss


def of_lists(formula: Callable[..., Tensor], x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    lists = torch.cat([y[:, None], LISTS["negatives"].embeddings_kD.view(B, 2, D)], 1)
    return formula((x[:, None] * lists).sum(2), OF_TEACHER, o.tau, o.teacher_temperature)


def vicreg(x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    return CODE.spectral.vicreg(x, y, o.invariance, o.variance, o.covariance, o.gamma, o.eps)


DENSE: dict[str, Formula] = {
    "symmetric_dpm": lambda x, y, o: 2 * o.tau * CODE.softmax.clip(x, y, o.tau),
    "clip": lambda x, y, o: CODE.softmax.clip(x, y, o.tau),
    "gcl": gcl,
    "dcl": lambda x, y, o: gcl(x, y, o) / (2 * o.tau) + math.log(B - 1),
    "one_sided_dpm": lambda x, y, o: CODE.softmax.one_sided_dpm(x, y, o.tau, LOG_Q),
    "info_nce": info_nce,
    "simclr": lambda x, y, o: CODE.softmax.simclr(x, y, o.tau),
    "dpr": info_nce,
    "epr": lambda x, y, o: info_nce(x, torch.cat([y, HARD[:, 0]]), o),
    "cross_entropy": of_classes,
    "listwise_ce": of_classes,
    "coce": coce,
    "partial_auc": lambda x, y, o: CODE.robust.partial_auc(x, y, *parts(o)),
    "nce": lambda x, y, o: CODE.logistic.nce(x, y, o.tau, o.bias, o.k or B - 1),
    "binary_nce": lambda x, y, o: CODE.logistic.nce(x, y, o.tau, o.bias, 1) / 2,
    "local_nce": lambda x, y, o: CODE.logistic.siglip(x, y, o.tau, o.bias - math.log(B - 1)),
    "siglip": lambda x, y, o: CODE.logistic.siglip(x, y, o.tau, o.bias),
    "cpc": lambda x, y, o: CODE.cpc.cpc(x, y, o.w_HDD.expand(o.horizons, -1, -1), LENGTHS, o.tau),
    "sogclr": both(partial(CODE.estimators.fastclip_v3, rho=0.0)),
    "isogclr": both(CODE.estimators.fastclip_v3, "rho"),
    "fastclip_v0": both(fastclip_v0),
    "fastclip_v3": both(CODE.estimators.fastclip_v3, "rho"),
    "nuclr": both(CODE.estimators.nuclr, "zeta", "num_samples"),
    "spectral": lambda x, y, o: CODE.spectral.spectral(x, y),
    "spectral_alternating": lambda x, y, o: CODE.spectral.spectral_alternating(x, y),
    "pca_penalty": lambda x, y, o: CODE.spectral.pca_penalty(x, y, o.penalty),
    "vicreg": vicreg,
    "nll": lambda x, y, o: CODE.likelihood.nll(x, y, WEIGHTS),
    "distill_kl": lambda x, y, o: of_lists(CODE.distillation.distill_kl, x, y, o),
    "margin_mse": lambda x, y, o: of_lists(CODE.distillation.margin_mse, x, y, o),
    "cosent": lambda x, y, o: CODE.scored_pairs.cosent((x * y).sum(1), OF_PAIRS, o.tau),
    "cosine_mse": lambda x, y, o: CODE.scored_pairs.cosine_mse((x * y).sum(1), OF_PAIRS, o.divisor),
}
HINGES = ("identity", "hinge", "squared_hinge", "logistic")
STATE = {"num_samples": SAMPLES, "gamma": 0.7, "temperature": 0.3}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "one_sided_dpm": [{"importance": "log_q"}],
    "cross_entropy": [{}, {"partition": "sum"}],
    "coce": [
        *({"divergence": d, "pair_loss": ell, "alpha": 0.3} for d in ("kl", "chi2", "cvar") for ell in HINGES),
        *({"divergence": d, "learnable": True, "rho": 0.4} for d in ("kl", "chi2")),
    ],
    "partial_auc": [{"pair_loss": ell, "divergence": d} for ell, d in (("hinge", "cvar"), ("logistic", "kl"))],
    "nce": [{"bias_learnable": True}, {"k": 3.0, "init_bias": 0.5}],
    "cpc": [{"width": D, "horizons": 2, "shared_w": shared, "learnable": True} for shared in (False, True)],
    **{name: [STATE] for name in ("sogclr", "fastclip_v0", "fastclip_v3")},
    "isogclr": [{**STATE, "tau_lr": 0.02}],
    "nuclr": [{**STATE, "zeta_warmup": 0.0, "zeta_lr": 0.2}],
    "pca_penalty": [{"penalty": 0.7}],
    "distill_kl": [{}, {"temperature": 0.5, "teacher_temperature": 2.0}],
    "cosent": [{}, {"temperature": 0.5, "learnable": True}],
    "cosine_mse": [{"divisor": 5.0}],
}
CASES = [(name, options) for name in OBJECTIVES for options in OPTIONS.get(name, [{}])]


def in_float64(name: str, options: dict[str, Any]) -> Any:
    objective: Any = build_objective(name, **options).double()
    for parameter_name, parameter in objective.named_parameters():
        if parameter_name != "logit_scale":  # W away from the identity, and the bias from its start
            parameter.data += 0.3 * numbers(*parameter.shape)
    return objective


def known(objective: Any) -> SimpleNamespace:
    """Its options and parameters by name, tau, and before: its state per sample."""
    state = objective.sample_state
    scale = getattr(objective, "logit_scale", None)
    more = {"tau": None if scale is None else (-scale).exp(), "before": state and state.gathered(torch.device("cpu"))}
    return SimpleNamespace(**{**vars(objective.options), **dict(objective.named_parameters()), **more})


def dense(name: str, x: Tensor, y: Tensor, o: SimpleNamespace) -> Tensor:
    if o.similarity is Similarity.cosine:
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return DENSE[name](x, y, o)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_objective_is_its_dense_formula(name: str, options: dict[str, Any]) -> None:
    objective, (of_x, of_y) = in_float64(name, options), SHAPES.get(name, ((B, D), (B, D)))
    if objective.sample_state:  # the running means of two steps before
        for seed in (10, 20):
            objective(numbers(*of_x, seed=seed), numbers(*of_y, seed=seed + 1), **GIVEN[name])
    o = known(objective)
    leaves = x, y = numbers(*of_x, seed=1).requires_grad_(), numbers(*of_y, seed=2).requires_grad_()
    loss = objective(x, y, **GIVEN.get(name, {})).loss
    want = dense(name, x, y, o)
    close(loss, want, 1e-10)
    leaves = *leaves, *(p for p in objective.parameters() if p.requires_grad)
    gradients = (torch.autograd.grad(value, leaves, materialize_grads=True) for value in (loss, want))
    for got, expected in zip(*gradients, strict=True):
        close(got, expected, 1e-10)


def independent(name: str, objective: Any, x: Tensor, y: Tensor) -> Tensor:
    """The reading of tests/helpers, anchor by anchor or pair by pair."""
    options = {key: value for key, value in vars(objective.options).items() if value is not None}
    if name == "coce":
        lists = [[j for j in range(B) if j != i] for i in range(B)], [[i] for i in range(B)]
        taken = {key: options[key] for key in ("divergence", "pair_loss", "alpha", "margin")}
        return robust_helper.reference_coce(x, y, (-objective.logit_scale).exp(), *lists, **taken)
    if name in ("siglip", "local_nce", "nce", "binary_nce"):
        return logistic_helper.reference(name, objective, x, y)
    return reference_loss(x, y, objective.logit_scale, **options)


@pytest.mark.parametrize("name", ["symmetric_dpm", "clip", "gcl", "dcl", "info_nce", "dpr", "coce", "siglip", "nce"])
def test_a_dense_formula_is_an_independent_reading(name: str) -> None:
    objective, x, y = in_float64(name, {}), numbers(B, D, seed=1), numbers(B, D, seed=2)
    close(dense(name, x, y, known(objective)), independent(name, objective, x, y), 1e-10)


def test_every_objective_has_a_dense_formula_and_every_formula_is_compared() -> None:
    assert set(DENSE) == set(OBJECTIVES)
    text = Path(__file__).read_text()
    functions = [name for code in vars(CODE).values() for name, value in vars(code).items() if callable(value)]
    assert len(functions) > 20 and all(re.search(rf"[.\"]{name}\b", text) for name in functions), functions
