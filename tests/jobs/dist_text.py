"""Job for torchrun: steps on texts of any length, one encoder for both sides or two, equal dense autograd (1e-9).

Rows run in groups on the ranks and in one piece in the reference; further columns are ragged, some ranks have none.
With "all", each case runs in chunks and in one piece, else by turns.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from helpers.dist import share
from helpers.step import LOGIT_SCALE, OverAllColumns, dense_gradients, dense_gradients_over_all_columns, train_step
from torch import Tensor, nn

from dyad.data.batch import PADDING, Batch, Extra
from dyad.train.config import Pooling
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.towers.text import rows
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.tower import Tower, TwoTower
from jobs.dist_step import PER_ROW, SIZES, B, compare, own


class Encoder(nn.Module):
    """One round of attention among the tokens that count, called as a transformers encoder is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.value = nn.Embedding(40, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        states = self.embed(input_ids)
        scores = self.query(states) @ states.mT + attention_mask[:, None].log()
        return SimpleNamespace(last_hidden_state=states + scores.softmax(-1) @ self.value(states))


def texts(count: int, longest: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count, 1), generator=generator)
    tokens = torch.randint(1, 40, (count, longest), generator=generator)
    return tokens.masked_fill(torch.arange(longest) >= lengths, PADDING)


def batch(seed: int) -> Batch:
    ids, row = torch.arange(B), torch.arange(B).repeat_interleave(torch.tensor(PER_ROW))
    extra = Extra(texts(len(row), 32, seed + 200), row, 1000 + torch.arange(len(row)), torch.arange(len(row)) % 3 == 0)
    return Batch(texts(B, 16, seed), texts(B, 32, seed + 100), ids, ids, ids, extra)


def towers(shared: bool) -> TwoTower:
    torch.manual_seed(0)
    first, second = (Tower(Pooled(Encoder(), Pooling.mean, 0), nn.Identity()) for _ in range(2))
    return TwoTower(first, first if shared else second).double()


def check(shared: bool, further: bool, sizes: tuple[int, ...], chunk_size: int | None, world: World) -> None:
    objective = OverAllColumns() if further else None
    keep = (1, None)[world.rank % 2]
    step = train_step(towers(shared), B, world=world, objective=objective, chunk_size=chunk_size, keep_graphs=keep)
    for index in range(2):
        whole = batch(index)
        if not further:
            whole.extra = None
        scale = step.objective.get_parameter("logit_scale").data
        scale.fill_(0.5 if further else LOGIT_SCALE)  # as in the references
        rows.MIN_GROUP["cpu"] = 1000
        want = (dense_gradients_over_all_columns if further else dense_gradients)(step.towers, whole)
        rows.MIN_GROUP["cpu"] = 1
        compare(step, own(whole, sizes, world.rank), index, want, (shared, further, sizes, chunk_size), world)


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    turn = 0
    for shared in (True, False):
        for further in (False, True):
            for sizes in SIZES.get(world.size, [(B,)]):
                for chunk_size in share((None, 2), turn := turn + 1):
                    check(shared, further, sizes, chunk_size, world)
    print(f"rank {world.rank}: all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
