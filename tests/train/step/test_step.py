"""One optimiser step: exact under chunks, the same bits as a plain step, harmless when something is not finite."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.dist import in_ways, launch
from helpers.messages import raises
from helpers.step import (
    LOCAL,
    OverAllColumns,
    batch,
    dense_gradients,
    dense_gradients_over_all_columns,
    gradients_of,
    same_bits,
    snapshot,
    towers,
    train_step,
    with_extra,
)
from torch import Tensor, nn

from dyad.data.base.errors import UserError
from dyad.data.batch import Batch
from dyad.train.config import ModelConfig, OptimConfig, Precision
from dyad.train.distributed.devices import AUTOCAST
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import to_score_dtype
from dyad.train.step.optim import build_optimizer
from dyad.train.step.schedule import learning_rate
from dyad.train.step.seeded_rng import seeded_rng
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_image_text
from dyad.train.towers.tower import TwoTower

TINY = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "patch_size": 8,
        "patch_dropout": 0.5,
    },
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


class Words(nn.Module):
    """Tokens (b, L) → (b, 16), with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.linear = nn.Embedding(64, 24), nn.Dropout(0.4), nn.Linear(24, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.dropout(self.embed(tokens).mean(1)))


@pytest.fixture(scope="module")
def vit_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("model") / "tiny_with_patch_dropout.json"
    path.write_text(json.dumps(TINY))
    return ModelConfig(name=str(path))


def noisy_model(config: ModelConfig) -> TwoTower:
    torch.manual_seed(3)
    return TwoTower(build_image_text(config).towers.x_tower, Words())


def images_and_tokens(count: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y, ids = torch.randint(0, 64, (count, 8), generator=generator), torch.arange(count)
    return Batch(x, y, ids, ids, ids)


def all_graphs_kept(step: TrainStep, whole: Batch, index: int, count: int, precision: Precision) -> dict[str, Tensor]:
    """Gradients of the same chunks with the same noise, by one backward through everything."""
    sides = []
    for side, (tower, inputs) in enumerate(((step.towers.x_tower, whole.x), (step.towers.y_tower, whole.y))):
        embeddings = []
        for chunk, part in enumerate(inputs.tensor_split(count)):
            dtype = AUTOCAST[precision]
            with (
                seeded_rng(LOCAL.device, 1, index, 0, side, chunk),
                torch.autocast("cpu", dtype, enabled=dtype is not None),
            ):
                embedding = tower(part)
            embeddings.append(embedding.float())
        sides.append(torch.cat(embeddings))
    step.optimizer.zero_grad()
    step.objective(*sides).loss.backward()
    return gradients_of(step)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("keep_graphs", [1, 2, 3, 4, 9, None])
def test_two_passes_equal_the_same_chunks_with_all_graphs_kept_bit_for_bit(
    vit_config: ModelConfig, keep_graphs: int | None, precision: Precision
) -> None:
    whole, options = images_and_tokens(11), {"chunk_size": 3, "keep_graphs": keep_graphs, "precision": precision}
    step = train_step(noisy_model(vit_config), len(whole), **options)
    want = all_graphs_kept(step, whole, 7, 4, precision)
    other_noise = all_graphs_kept(step, whole, 8, 4, precision)
    step(whole, 7)
    assert same_bits(gradients_of(step), want)
    assert not torch.equal(want["y_tower.linear.weight"], other_noise["y_tower.linear.weight"])


@pytest.mark.parametrize("keep_graphs", [1, 2, 3, None])
def test_only_chunks_without_a_graph_run_again(keep_graphs: int | None) -> None:
    step = train_step(towers(noisy=True), 9, chunk_size=3, keep_graphs=keep_graphs)
    runs: list[int] = []
    step.towers.y_tower.register_forward_hook(lambda module, inputs, output: runs.append(len(inputs[0])))
    step(batch(9), 0)
    assert runs == [3] * (3 + 3 - (keep_graphs or 3))


def test_kept_graphs_change_no_bit_of_what_is_learnt() -> None:
    """With batch norms, dropout, further columns and a chunk without any."""
    whole = with_extra(batch(13), [2, 0, 1] + [0] * 10)
    ends = []
    for keep_graphs in (1, 2, 3, 4, None):
        objective = OverAllColumns()
        step = train_step(towers(noisy=True), 13, objective=objective, chunk_size=4, keep_graphs=keep_graphs)
        for index in range(3):
            step(whole, index)
        ends.append(snapshot(step))
    assert all(same_bits(end, ends[0]) for end in ends)
    assert not same_bits(ends[0], snapshot(train_step(towers(noisy=True), 13, objective=OverAllColumns())))


@pytest.mark.parametrize("keep_graphs", [1, 2, 3])
def test_running_statistics_count_every_row_once(keep_graphs: int) -> None:
    whole = batch(10)
    step, reference = (train_step(towers(noisy=True), 10, chunk_size=4, keep_graphs=keep_graphs) for _ in range(2))
    step(whole, 0)
    for side, inputs in (("x_tower", whole.x), ("y_tower", whole.y)):
        tower = reference.towers.get_submodule(side)
        for part in inputs.tensor_split(3):
            tower(part)
        want, got = tower.state_dict(), step.towers.get_submodule(side).state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(got[f"layers.1.{name}"], want[f"layers.1.{name}"]), name


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 9, 100, None])
def test_without_noise_chunks_change_nothing(chunk_size: int | None) -> None:
    whole = batch(9)
    step = train_step(towers(), 9, chunk_size=chunk_size)
    step.objective.get_parameter("logit_scale").data.fill_(torch.tensor(1 / 0.07, dtype=torch.float64).log())
    _, want = dense_gradients(step.towers, whole)
    step(whole, 0)
    got = gradients_of(step)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12)


def test_a_chunk_may_be_empty() -> None:
    step = train_step(towers(), 9, chunk_size=2)  # five chunks
    step.objective.get_parameter("logit_scale").data.fill_(torch.tensor(1 / 0.07, dtype=torch.float64).log())
    few = batch(3)
    _, want = dense_gradients(step.towers, few)
    step(few, 0)
    for name, gradient in gradients_of(step).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize("per_row", [[0, 0, 3, 1, 0, 2, 1], [0, 0, 0, 1, 0, 0, 0], [0] * 7], ids=str)
def test_further_columns_are_embedded_with_the_pairs(per_row: list[int], chunk_size: int | None) -> None:
    whole = with_extra(batch(7), per_row)
    step = train_step(towers(), 7, objective=OverAllColumns(), chunk_size=chunk_size, keep_graphs=2)
    runs: list[int] = []
    step.towers.y_tower.register_forward_hook(lambda module, inputs, output: runs.append(1))
    loss, want = dense_gradients_over_all_columns(step.towers, whole)
    runs.clear()
    assert step(whole, 0)["loss"] == pytest.approx(float(loss), rel=1e-12)
    got = gradients_of(step)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12)
    chunks = -(-7 // (chunk_size or 7))
    assert len(runs) == 2 * chunks - min(2, chunks), "one forward for pairs and further columns together"


def test_one_chunk_has_the_bits_of_a_plain_step(vit_config: ModelConfig) -> None:
    whole, optim = images_and_tokens(10), OptimConfig(lr=3e-3, clip_norm=0.5, warmup=2)
    step = train_step(noisy_model(vit_config), 10, optim=optim, chunk_size=10)
    model, objective = noisy_model(vit_config).train(), build_objective("clip")
    optimizer = build_optimizer([*model.named_parameters("towers"), *objective.named_parameters("objective")], optim)
    for index in range(3):
        step(whole, index)
        with seeded_rng(LOCAL.device, 1, index, 0, 0, 0):
            x = model.x_tower(whole.x)
        with seeded_rng(LOCAL.device, 1, index, 0, 1, 0):
            y = model.y_tower(whole.y)
        optimizer.zero_grad()
        objective(x, y).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(index, 100, optim)
        optimizer.step()
        objective.clamp_()
    assert same_bits(step.towers.state_dict(), model.state_dict())
    assert torch.equal(step.objective.get_parameter("logit_scale"), objective.get_parameter("logit_scale"))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_temperature_alone_can_learn(chunk_size: int | None) -> None:
    model = towers()
    model.requires_grad_(False)
    step = train_step(model, 8, chunk_size=chunk_size)
    before = snapshot(step)
    step(batch(8), 0)
    assert gradients_of(step).keys() == {"logit_scale"}
    assert all(torch.equal(snapshot(step)[name], value) for name, value in before.items() if name != "logit_scale")


def test_noise_depends_on_its_key_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = []
    for key in ((0, 1, 2, 0, 3), (0, 1, 2, 0, 3), (0, 1, 2, 1, 3), (0, 12, 0, 3)):
        with seeded_rng(LOCAL.device, *key):
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[3])
    assert torch.equal(torch.get_rng_state(), before)


def test_scalars_say_what_happened() -> None:
    whole = batch(8)
    step = train_step(towers(), 8, optim=OptimConfig(lr=0.1, warmup=4), chunk_size=4)
    loss, _ = dense_gradients(step.towers, whole)
    scalars = step(whole, 1)
    assert scalars["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert scalars["lr"] == 0.05
    assert scalars["logit_scale"] == pytest.approx(1 / 0.07)
    assert scalars["skipped"] == 0
    assert scalars["mi_bound"] == pytest.approx(scalars["log_k"] - scalars["loss"])
    norm = torch.stack([g.norm() for g in gradients_of(step).values()]).norm()
    assert scalars["grad_norm"] == pytest.approx(float(norm))


def test_a_wrong_mode_is_put_right(vit_config: ModelConfig) -> None:
    step = train_step(noisy_model(vit_config), 4)
    step.towers.eval()
    step(images_and_tokens(4), 0)
    assert step.towers.get_submodule("y_tower.dropout").training


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_what_is_not_finite_changes_nothing_and_ends_the_run(chunk_size: int | None) -> None:
    whole = batch(8)
    broken = replace(whole, y=whole.y.clone())
    broken.y[5, 0] = float("inf")
    step = train_step(towers(noisy=True), 8, chunk_size=chunk_size)
    undone: list[int] = []
    objective = step.objective
    objective.undo = lambda: undone.append(1)  # type: ignore[method-assign]
    step(whole, 0)
    before = snapshot(step)
    assert [step(broken, i)["skipped"] for i in (1, 2)] == [1, 2]
    assert (
        same_bits(snapshot(step), before) and len(undone) == 3
    )  # the first was tried twice: see losses/sums/conditions.py
    assert step(whole, 3)["skipped"] == 2
    after = snapshot(step)
    assert not same_bits(after, before)
    for i in (4, 5):
        step(broken, i)
    with raises(UserError, "step 7", "optim.lr"):
        step(broken, 6)
    assert same_bits(snapshot(step), after)


def test_fp16_finds_its_scale_and_keeps_it_in_the_state() -> None:
    whole = batch(8, dtype=torch.float32)
    step = train_step(towers().float(), 8, precision=Precision.fp16, chunk_size=4)
    start = step.state_dict()
    start["scaler"]["scale"] = 2.0**30
    step.load_state_dict(json.loads(json.dumps(start)))
    before = snapshot(step)
    skipped = [step(whole, i)["skipped"] for i in range(24)]
    assert skipped[4] == 5, "five overflows in a row are no reason to stop while the scale can shrink"
    assert skipped[-1] == skipped[-2] < 24
    assert not same_bits(snapshot(step), before)
    state = step.state_dict()
    assert state["scaler"]["scale"] == 2.0 ** (30 - skipped[-1])
    again = train_step(towers().float(), 8, precision=Precision.fp16)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state


def test_fp16_stops_when_no_scale_helps() -> None:
    whole = batch(8, dtype=torch.float32)
    step = train_step(towers().float(), 8, precision=Precision.fp16)
    broken = replace(whole, x=whole.x * float("nan"))
    for i in range(2):
        step(broken, i)
    with raises(UserError, "step 3"):
        step(broken, 2)


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCORED = {
    ("cpu", BRAIN, BRAIN): SINGLE,
    ("cpu", DOUBLE, DOUBLE): DOUBLE,
    ("cuda", BRAIN, BRAIN): BRAIN,
    ("cuda", HALF, HALF): HALF,
    ("cuda", BRAIN, SINGLE): SINGLE,
}


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_embeddings_are_scored_in_one_precision(case: tuple[str, torch.dtype, torch.dtype]) -> None:
    device, of_x, of_y = case
    scored = to_score_dtype([torch.ones(2, 3, dtype=of_x), torch.ones(2, 3, dtype=of_y)], torch.device(device))
    assert [e.dtype for e in scored] == [SCORED[case]] * 2


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16])
def test_half_precision_is_near_single(precision: Precision) -> None:
    whole = batch(8, dtype=torch.float32)
    half, single = (train_step(towers().float(), 8, precision=p) for p in (precision, Precision.fp32))
    if precision is Precision.fp16:
        state = half.state_dict()
        half.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 256.0}})
    assert half(whole, 0)["loss"] == pytest.approx(single(whole, 0)["loss"], rel=0.02)
    got, want = gradients_of(half), gradients_of(single)
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-4, name


def test_the_temperature_is_clamped_after_the_step() -> None:
    step = train_step(towers(), 8, optim=OptimConfig(lr=100.0))
    step(batch(8), 0)
    assert 0 <= float(step.objective.get_parameter("logit_scale").detach()) <= torch.tensor(100.0).log() + 1e-6


@pytest.mark.compiler
def test_a_compiled_step_learns_the_same() -> None:
    whole = batch(8)
    compiled, plain = (train_step(towers(shared=True), 8, compile=c, chunk_size=4) for c in (True, False))
    for i in range(2):
        assert compiled(whole, i)["loss"] == pytest.approx(plain(whole, i)["loss"], rel=1e-9)


def test_costly_metrics_are_computed_when_logged() -> None:
    """On two ranks: check_costly_metrics of tests/jobs/dist_step.py."""
    step = train_step(towers(), 8, objective=build_objective("spectral"))
    found = ["rank" in step(batch(8), index, logs=lambda steps: steps == 2) for index in range(3)]
    assert found == [False, True, False]


@in_ways
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_any_number_of_ranks(world_size: int, ways: str) -> None:
    """tests/jobs/dist_step.py says what is checked."""
    launch("dist_step.py", world_size, ways)


@in_ways
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_y_items_that_belong_to_no_row(world_size: int, ways: str) -> None:
    """tests/jobs/dist_columns.py says what is checked."""
    launch("dist_columns.py", world_size, ways)


@pytest.mark.parametrize("directions", ["x", "y", "sum"])
def test_an_objective_that_freezes_a_side(directions: str) -> None:
    objective = build_objective("spectral_alternating", directions=directions)
    model = towers()
    before = [[p.clone() for p in tower.parameters()] for tower in (model.x_tower, model.y_tower)]
    train_step(model, 6, objective=objective, optim=OptimConfig(lr=1e-2, weight_decay=0), chunk_size=4)(batch(6), 0)
    moved = [
        any(not p.equal(old) for p, old in zip(tower.parameters(), olds, strict=True))
        for tower, olds in zip((model.x_tower, model.y_tower), before, strict=True)
    ]
    assert moved == [directions != "y", directions != "x"]
