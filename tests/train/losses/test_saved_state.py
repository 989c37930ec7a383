"""The state of objectives in one's own loop: state_dict has it, undo restores it, and no bad batch erases it."""

import io
from typing import Any

import pytest
import torch
from helpers.messages import raises
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective, ObjectiveResult

N, B, D = 20, 8, 5
STATEFUL: list[tuple[str, dict[str, Any]]] = [
    ("sogclr", {"num_samples": N, "gamma": 0.5}),
    ("fastclip_v3", {"num_samples": N, "gamma": 0.5, "rho": 1.0}),
    ("isogclr", {"num_samples": N, "gamma": 0.5, "tau_lr": 0.1}),
    ("nuclr", {"num_samples": N, "gamma": 0.5, "zeta_warmup": 0, "zeta_lr": 0.1}),
    ("coce", {"num_samples": N, "nu": "state"}),
    ("coce", {"nu": "sgd"}),
    ("spectral_alternating", {"lambda_momentum": 0.5, "width": D}),
]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, B, D, generator=generator)
    return x.requires_grad_(), y, torch.randperm(N, generator=generator)[:B]


@pytest.mark.parametrize(("name", "options"), STATEFUL)
def test_a_saved_objective_goes_on_with_the_same_loss(name: str, options: dict[str, Any]) -> None:
    objective, again = (build_objective(name, **options) for _ in range(2))
    for seed in range(5):
        objective(*batch(seed))
    file = io.BytesIO()
    torch.save(objective.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for seed in (7, 8):
        assert torch.equal(objective(*batch(seed)).loss, again(*batch(seed)).loss)


def test_state_of_another_objective_or_number_of_samples_is_refused() -> None:
    saved = build_objective("sogclr", num_samples=N, gamma=0.5).state_dict()
    with raises(ConfigError, "log_u_x, log_u_y of 20 samples, rank 0 of 1", "21 samples"):
        build_objective("sogclr", num_samples=N + 1, gamma=0.5).load_state_dict(saved)
    with raises(ConfigError, "log_u_x, log_u_y of", "tau_x"):
        build_objective("isogclr", num_samples=N, gamma=0.5).load_state_dict(saved, strict=False)


@pytest.mark.parametrize(("name", "options"), STATEFUL)
@pytest.mark.parametrize("first", [True, False])
def test_a_batch_that_is_not_finite_erases_no_state(name: str, options: dict[str, Any], first: bool) -> None:
    objective, undisturbed = (build_objective(name, **options) for _ in range(2))
    for each in (objective, undisturbed) if not first else ():
        each(*batch(0))
    x, y, ids = batch(0)
    assert not objective(x * torch.nan, y, ids).loss.isfinite()
    assert torch.equal(objective(*batch(2)).loss, undisturbed(*batch(2)).loss)


@pytest.mark.parametrize(("name", "options"), STATEFUL[:5])
def test_one_row_that_is_not_finite_erases_no_state(name: str, options: dict[str, Any]) -> None:
    objective = build_objective(name, **options)
    objective(*batch(0))
    assert objective.sample_state is not None
    before = objective.sample_state.gathered(torch.device("cpu"))
    x, y, ids = batch(0)
    objective(x * torch.ones(B, 1).index_fill(0, torch.tensor(3), torch.nan), y, ids)
    after = objective.sample_state.gathered(torch.device("cpu"))
    for state in objective.sample_state.names:
        assert torch.equal(before[state].isfinite(), after[state].isfinite()), state


class Averaged(Objective):
    """The squared distance of the pairs minus its running mean, a buffer."""

    mean: Tensor

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.register_buffer("mean", torch.zeros(()))

    def of_batch(self, batch: Any) -> ObjectiveResult:
        loss = batch.pair_scores().mean()
        self.mean.mul_(0.5).add_(0.5 * loss.detach())
        return ObjectiveResult(loss - self.mean, {})


def test_undo_restores_the_buffers_of_any_objective() -> None:
    objective = Averaged(build_objective("vicreg").options)
    objective(*batch(0)[:2])
    before = objective.state_dict()["mean"].clone()
    objective(*batch(1)[:2])
    assert objective.state_dict()["mean"] != before
    objective.undo()
    objective.undo()
    assert objective.state_dict()["mean"] == before


class Sized(Averaged):
    """As above, with a running mean of each number of the embeddings, whose width the first batch says."""

    def of_batch(self, batch: Any) -> ObjectiveResult:
        own = batch.x_bD.detach().mean(0)
        self.mean = own if self.mean.ndim == 0 else 0.5 * (self.mean + own)
        return ObjectiveResult(batch.pair_scores().mean(), {})


def test_undo_restores_a_buffer_of_another_shape() -> None:
    objective = Sized(build_objective("vicreg").options)
    objective(*batch(0)[:2])
    assert objective.mean.shape == (D,)
    objective.undo()
    assert torch.equal(objective.state_dict()["mean"], torch.zeros(()))
