"""model.batch_norm in one process; tests/jobs/dist_step.py and tests/faults/test_same_losses.py have the others."""

import pytest
import torch
from helpers.messages import raises
from helpers.step import LOGIT_SCALE, batch, dense_gradients, gradients_of, towers, train_step
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.train.config import BatchNorm
from dyad.train.towers.batch_norm import batch_norms, check_batch_norms, set_batch_norms
from dyad.train.towers.text.pooled import Pooled, Pooling
from dyad.train.towers.tower import Tower, TwoTower

GLOBAL, PER_CHUNK, FROZEN = BatchNorm["global"], BatchNorm.per_chunk, BatchNorm.frozen


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_frozen_statistics_stay_and_everything_else_trains(chunk_size: int | None) -> None:
    made, reference = towers(normed=True), towers(normed=True)
    set_batch_norms(made, FROZEN)
    step = train_step(made, 9, chunk_size=chunk_size)
    step.objective.get_parameter("logit_scale").data.fill_(LOGIT_SCALE)
    _, want = dense_gradients(reference.eval(), batch(9))
    step(batch(9), 0)
    for name, gradient in gradients_of(step).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-12)
    assert all(torch.equal(got, kept) for got, kept in zip(made.buffers(), reference.buffers(), strict=True))


def test_alone_all_is_as_torch_has_it() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, act_layer=nn.SiLU), nn.BatchNorm2d(4))
    x = torch.randn(5, 3, 6, 6)
    for choice in (GLOBAL, PER_CHUNK):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, act_layer=nn.SiLU), nn.BatchNorm2d(4))
        made.load_state_dict(plain.state_dict())
        before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        set_batch_norms(made, choice)
        assert torch.equal(made(x), plain(x)) and made.state_dict().keys() == before.keys()
        plain.load_state_dict(before)


def test_norms_of_a_frozen_tower_keep_their_statistics_and_need_no_choice() -> None:
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False)).requires_grad_(False)
    tower = Tower(trunk, nn.Linear(8, 5)).train()
    assert not batch_norms(tower)
    assert check_batch_norms(tower, GLOBAL, rows=4, chunks=9) == ""


def test_a_frozen_tower_with_batch_norms_runs_once_per_input() -> None:
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False)
    runs: list[int] = []
    trunk.register_forward_hook(lambda module, inputs, output: runs.append(1))
    x_tower = Tower(trunk, nn.Linear(8, 5), cache_mb=1)
    step = train_step(TwoTower(x_tower, towers().y_tower).double(), 9)
    for index in range(3):
        step(batch(9), index)
    assert len(runs) == 1


REFUSED = {
    "several chunks": (GLOBAL, 32, 4, 4),
    "single pairs": (PER_CHUNK, 3, 2, 3),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_statistics_is_refused(case: str) -> None:
    choice, rows, chunks, named = REFUSED[case]
    with raises(ConfigError, "chunk_size", named):
        check_batch_norms(towers(normed=True), choice, rows, chunks)


def test_a_choice_without_a_batch_norm_is_refused() -> None:
    with raises(ConfigError, "model.batch_norm=frozen"):
        check_batch_norms(towers(), FROZEN, 8, 1)


class Doubled(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().forward(x)


def test_a_norm_of_an_unknown_type_is_refused_where_its_forward_would_be_replaced() -> None:
    x, made = torch.randn(4, 6), TwoTower(Doubled(6), nn.BatchNorm1d(6)).train()
    set_batch_norms(made, GLOBAL)
    assert torch.equal(made.x_tower(x), 2 * made.y_tower(x)) and check_batch_norms(made, GLOBAL, 4, 1, ranks=1)
    with raises(ConfigError, "model.batch_norm=per_chunk"):
        check_batch_norms(made, GLOBAL, 4, 1, ranks=2)


def test_norms_inside_a_text_encoder_would_count_padding() -> None:
    text = Tower(Pooled(nn.Sequential(nn.BatchNorm1d(8)), Pooling.mean, 0), nn.Linear(8, 5))
    made = TwoTower(text, text).train()
    with raises(ConfigError):
        check_batch_norms(made, GLOBAL, 8, 1)
    set_batch_norms(made, FROZEN)
    assert "running statistics" in check_batch_norms(made, FROZEN, 8, 1)
