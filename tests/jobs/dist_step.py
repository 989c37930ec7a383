"""Job for torchrun: the step on W ranks equals dense autograd of the whole batch in one process (float64, 1e-10).

Checked for towers that are trained, frozen and shared, for equal and unequal local batches, chunked and not, where each
rank keeps another number of graphs, with further columns of some ranks: the loss, the gradient of every parameter and
of the temperature, and that all ranks end with the same weights. Also: a value that is not finite on one rank,
clipping, batch norms, the small collectives, and what a lost process looks like.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.messages import raises
from helpers.step import (
    LOGIT_SCALE,
    OverAllColumns,
    batch,
    dense_gradients,
    dense_gradients_over_all_columns,
    gradients_of,
    rows,
    same_bits,
    snapshot,
    towers,
    train_step,
    with_extra,
    with_wrong_x,
)
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dyad.data.base.errors import UserError
from dyad.data.batch import Batch
from dyad.train.config import BatchNorm, OptimConfig, Precision
from dyad.train.distributed.failures import PeerFailure, report_failures
from dyad.train.distributed.world import (
    World,
    all_reduce_sum,
    any_rank,
    broadcast_object,
    init_world,
    patient_at_first,
    shutdown,
)
from dyad.train.losses import build_objective
from dyad.train.step.step import TrainStep
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.tower import TwoTower

B = 8
PER_ROW = [0, 0, 0, 0, 3, 1, 0, 2]  # further columns, or x: none of the first rank
SIZES = {2: [(4, 4), (5, 3), (0, 8)], 4: [(2, 2, 2, 2), (3, 2, 2, 1), (1, 5, 0, 2)]}


def own(whole: Batch, sizes: tuple[int, ...], rank: int) -> Batch:
    start = sum(sizes[:rank])
    return rows(whole, start, start + sizes[rank])


def equal_everywhere(tensors: dict[str, Tensor], world: World) -> bool:
    return same_bits(broadcast_object(tensors, world), tensors)


def model(kind: str) -> TwoTower:
    made = towers(shared=kind == "shared")
    if kind == "frozen":
        made.y_tower.requires_grad_(False)
    return made


def check_gradients(kind: str, sizes: tuple[int, ...], chunk_size: int | None, world: World) -> None:
    """Ranks keep different numbers of graphs: rank 1 all of them. The second batch has x that are wrong for a y."""
    keep_graphs = (1, B, 2, None)[world.rank]
    step = train_step(model(kind), B, world=world, chunk_size=chunk_size, keep_graphs=keep_graphs)
    for index in range(2):
        whole = batch(B, seed=index)
        whole = with_wrong_x(whole, PER_ROW) if index else whole
        step.objective.get_parameter("logit_scale").data.fill_(LOGIT_SCALE)
        want = dense_gradients(step.towers, whole)
        compare(step, own(whole, sizes, world.rank), index, want, (kind, sizes, chunk_size), world)


def check_further_columns(kind: str, sizes: tuple[int, ...], chunk_size: int | None, world: World) -> None:
    objective, keep_graphs = OverAllColumns(), (B, 1, None, 3)[world.rank]
    step = train_step(model(kind), B, world=world, objective=objective, chunk_size=chunk_size, keep_graphs=keep_graphs)
    for index in range(2):
        whole = with_extra(batch(B, seed=index), PER_ROW)
        objective.logit_scale.data.fill_(0.5)
        want = dense_gradients_over_all_columns(step.towers, whole)
        compare(step, own(whole, sizes, world.rank), index, want, ("extra", kind, sizes, chunk_size), world)


def compare(
    step: TrainStep, part: Batch, index: int, want: tuple[Tensor, dict[str, Tensor]], context: object, world: World
) -> None:
    """Loss and gradients of a step on this rank's part are those of the whole batch, and all ranks end alike."""
    loss, gradients = want
    scalars = step(part, index)
    got = gradients_of(step)
    assert got.keys() == gradients.keys(), (context, got.keys() ^ gradients.keys())
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m: f"{context}: {m}")
    assert abs(scalars["loss"] - float(loss)) < 1e-12, context
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert abs(scalars["grad_norm"] - float(norm)) < 1e-12 * float(norm) + 1e-12, context
    assert equal_everywhere(snapshot(step), world), context


def check_going_on(kind: str, chunk_size: int | None, world: World) -> None:
    """The first step after a resume is the undisturbed one, bit for bit."""
    undisturbed, resumed = (train_step(model(kind), B, world=world, chunk_size=chunk_size) for _ in range(2))
    first, second = (own(batch(B, seed), SIZES[world.size][1], world.rank) for seed in range(2))
    undisturbed(first, 0)
    for part in ("towers", "objective", "optimizer"):
        getattr(resumed, part).load_state_dict(deepcopy(getattr(undisturbed, part).state_dict()))
    assert undisturbed(second, 1) == resumed(second, 1)
    assert same_bits(gradients_of(undisturbed), gradients_of(resumed)), (kind, chunk_size)
    assert same_bits(snapshot(undisturbed), snapshot(resumed)), (kind, chunk_size)


def check_not_finite(chunk_size: int | None, world: World) -> None:
    """A NaN on the last rank: nobody changes anything, and all stop together."""
    sizes = SIZES[world.size][0]
    noisy = towers(noisy=True)
    step = train_step(noisy, B, world=world, chunk_size=chunk_size)
    step(own(batch(B), sizes, world.rank), 0)
    before = snapshot(step)
    broken = own(batch(B), sizes, world.rank)
    if world.rank == world.size - 1:
        broken = replace(broken, x=broken.x * float("nan"))
    assert step(broken, 1)["skipped"] == 1
    assert same_bits(snapshot(step), before)
    assert step(broken, 2)["skipped"] == 2
    with pytest.raises(UserError) as ended:
        step(broken, 3)
    assert ended.value.everywhere and str(ended.value).startswith("step 4: no finite loss" * (world.rank == 0))
    assert bool(str(ended.value)) == (world.rank == 0)
    assert same_bits(snapshot(step), before)
    assert step(own(batch(B), sizes, world.rank), 4)["skipped"] == 3
    assert not same_bits(snapshot(step), before)
    assert equal_everywhere(snapshot(step), world)


def check_clipping(world: World) -> None:
    step = train_step(towers(), B, world=world, optim=OptimConfig(clip_norm=0.01))
    before = step(own(batch(B), SIZES[world.size][1], world.rank), 0)["grad_norm"]
    after = torch.stack([g.norm() for g in gradients_of(step).values()]).norm()
    assert before > 0.02 and abs(float(after) - 0.01) < 1e-4


def check_sent_once(keep_graphs: int, world: World) -> None:
    """However many chunks and graphs, a tower's gradients are averaged once a step."""
    step = train_step(towers(), B, world=world, chunk_size=1, keep_graphs=keep_graphs)
    sent: list[int] = []

    def counting(group, bucket):  # DDP wants annotations of its own or none
        sent.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    for tower in step._parallel:
        assert isinstance(tower, DistributedDataParallel)
        tower.register_comm_hook(dist.group.WORLD, counting)
    step(own(batch(B), SIZES[world.size][0], world.rank), 0)
    assert sum(sent) == sum(p.numel() for p in step.towers.parameters())


def check_batch_norm(kind: str, sizes: tuple[int, ...], recomputed: bool, world: World) -> None:
    """Loss, gradient and running statistics are those of torch's module on the whole batch, with ranks without rows."""
    made, reference = (towers(normed=True, shared=kind == "shared") for _ in range(2))
    set_batch_norms(made, BatchNorm["global"])
    if recomputed:
        made.x_tower.forward = partial(checkpoint, made.x_tower.forward, use_reentrant=False)
    step = train_step(made, B, world=world)
    for index in range(3):
        whole = batch(B, seed=index)
        reference.load_state_dict(made.state_dict())
        step.objective.get_parameter("logit_scale").data.fill_(LOGIT_SCALE)
        want = dense_gradients(reference, whole)
        context = ("batch norm", kind, sizes, recomputed)
        compare(step, own(whole, sizes, world.rank), index, want, context, world)
        for got, buffer in zip(made.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(got, buffer, rtol=1e-12, atol=1e-14)


def check_no_second_derivative_of_batch_norm(world: World) -> None:
    made = towers(normed=True).x_tower
    set_batch_norms(made, BatchNorm["global"])
    x = batch(B).x.requires_grad_()
    with raises(RuntimeError):
        torch.autograd.grad(made(x).sum(), x, create_graph=True)


def check_batch_norm_in_bf16(world: World) -> None:
    made, reference = (towers(normed=True).float() for _ in range(2))
    set_batch_norms(made, BatchNorm["global"])
    whole = batch(B, dtype=torch.float32)
    step = train_step(made, B, world=world, precision=Precision.bf16)
    loss, _ = dense_gradients(reference, whole)
    assert step(own(whole, SIZES[world.size][1], world.rank), 0)["loss"] == pytest.approx(float(loss), rel=0.02)
    for got, buffer in zip(made.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(got, buffer, rtol=0.02, atol=0.002)


def check_running_statistics(world: World) -> None:
    """Of statistics per rank: means of what each rank saw; a second pass adds nothing."""
    sizes = SIZES[world.size][0]
    step = train_step(towers(noisy=True), B, world=world)
    whole = batch(B)
    layers = step.towers.get_submodule("x_tower.layers")
    assert isinstance(layers, torch.nn.Sequential)
    seen = [layers[0](own(whole, sizes, rank).x) for rank in range(world.size)]
    step(own(whole, sizes, world.rank), 0)
    mean = layers[1].running_mean
    torch.testing.assert_close(mean, 0.1 * torch.stack([part.mean(0) for part in seen]).mean(0).detach())


def check_costly_metrics(world: World) -> None:
    step = train_step(towers(), B, world=world, objective=build_objective("spectral"))
    whole = own(batch(B), SIZES[world.size][1], world.rank)
    found = ["rank" in step(whole, index, logs=lambda steps: steps == 2) for index in range(3)]
    assert found == [False, True, False]


def check_collectives(world: World) -> None:
    assert broadcast_object({"rank": world.rank}, world) == {"rank": 0}
    assert any_rank(world.rank == 1, world) and not any_rank(False, world)
    assert float(all_reduce_sum(torch.tensor(float(world.rank)), world)) == sum(range(world.size))


def check_lost_contact(world: World) -> None:
    """The last rank may be late once. Later all others wait for it; the first of them names it, and no other says a
    word. Then all have parted."""
    with raises(UserError), report_failures(world):
        raise of_all()
    last = world.size - 1
    group = dist.new_group()  # of half an hour
    patient_at_first(meet_late, 60, 1)(world, last)
    if world.rank < last:
        with raises(PeerFailure, f"rank {last} of {world.size}") as caught, report_failures(world, lambda: "the test"):
            all_reduce_sum(torch.zeros(1), replace(world, group=group))
        assert caught.value.printed_elsewhere == (world.rank > 0)
    if world.size > 1:
        with raises(RuntimeError):
            all_reduce_sum(torch.zeros(1), world)


def meet_late(world: World, late: int) -> None:
    time.sleep(2 if world.rank == late else 0)
    assert any_rank(True, world)


def of_all() -> UserError:
    error = UserError("of all")
    error.everywhere = True
    return error


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    all_sizes = SIZES[world.size]
    for number, kind in enumerate(("trained", "frozen", "shared")):
        for chunk_size in (None, B // world.size // 2):
            for sizes in all_sizes if kind == "trained" or "all" in sys.argv else all_sizes[number : number + 1]:
                check_gradients(kind, sizes, chunk_size, world)
                check_further_columns(kind, sizes, chunk_size, world)
            check_going_on(kind, chunk_size, world)
    check_not_finite(None, world)
    check_clipping(world)
    check_costly_metrics(world)
    for keep_graphs in (1, 2, B):
        check_sent_once(keep_graphs, world)
    check_running_statistics(world)
    check_batch_norm_in_bf16(world)
    check_no_second_derivative_of_batch_norm(world)
    for sizes in SIZES[world.size]:
        for kind, recomputed in (("two", False), ("two", True), ("shared", False)):
            check_batch_norm(kind, sizes, recomputed, world)
    check_collectives(world)
    check_lost_contact(world)
    print(f"rank {world.rank}: all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
