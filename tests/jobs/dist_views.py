"""Job for torchrun: one tower with a projection head for both views, batch norms over all ranks, equals dense autograd.

Loss and gradients of steps in float64 (1e-10), for equal and unequal parts of the batch, some ranks without rows.
"""

from __future__ import annotations

import torch
from helpers.step import LOGIT_SCALE, batch, dense_gradients, train_step
from torch import nn

from dyad.train.config import BatchNorm, Head, ModelConfig
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.heads import HEADS, build_head
from dyad.train.towers.tower import Tower, TwoTower
from jobs.dist_step import SIZES, B, compare, own


def towers(head: Head) -> TwoTower:
    torch.manual_seed(0)
    tower = Tower(nn.Linear(6, 8), build_head(ModelConfig(head=head, head_width=8, embed_dim=5), 8))
    return TwoTower(tower, tower).double()


def check(head: Head, sizes: tuple[int, ...], world: World) -> None:
    made, reference = towers(head), towers(head)
    set_batch_norms(made, BatchNorm["global"])
    step = train_step(made, B, world=world)
    made.to(world.device)  # as an Encoder does: the buffers stay those whose means the step averages
    assert {id(b) for b in made.buffers()} >= {id(b) for b in step.terms[0].statistics._buffers}
    for index in range(2):
        whole = batch(B, seed=index)
        reference.load_state_dict(made.state_dict())
        step.objective.get_parameter("logit_scale").data.fill_(LOGIT_SCALE)
        compare(step, own(whole, sizes, world.rank), index, dense_gradients(reference, whole), (head, sizes), world)


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    for head in HEADS:
        for sizes in SIZES.get(world.size, [(B,)]):
            check(head, sizes, world)
    print(f"rank {world.rank}: all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
