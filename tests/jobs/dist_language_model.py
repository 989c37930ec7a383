"""Job for torchrun: steps of one-sided DPM on scores of answers equal loops over the lists of rows (float64, 1e-10).

Rows have 1 to 3 wrong answers; ranks have many, few and no rows; whole batches and chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers.step import gradients_of, train_step
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from dyad.data.batch import PADDING, Batch, Extra
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.towers.text.likelihood import Likelihood, One
from dyad.train.towers.text.rows import token_counts
from dyad.train.towers.tower import Tower, TwoTower
from jobs.dist_step import equal_everywhere, snapshot

TAU, VOCABULARY, L = 0.3, 11, 10
WRONG = (1, 3, 2, 1, 2, 3)  # wrong answers of each row of a global batch
SPLITS = {1: [(6,)], 2: [(3, 3), (6, 0)], 4: [(2, 1, 0, 3)]}
List = list[tuple[list[int], list[int]]]  # (prompt, answer) of a row, the right answer first


def towers() -> TwoTower:
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2, **off)
    return TwoTower(Tower(One(), nn.Identity()), Tower(Likelihood(GPT2LMHeadModel(shape)), nn.Identity())).double()


def lists(seed: int) -> list[List]:
    generator = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    prompts = [ids(1, 5) for _ in WRONG]
    return [[(prompt, ids(1, 4)) for _ in range(1 + wrong)] for prompt, wrong in zip(prompts, WRONG, strict=True)]


def tokens(pairs: List) -> Tensor:
    rows = [[len(prompt), *prompt, *answer] for prompt, answer in pairs]
    return torch.tensor([row + [PADDING] * (L - len(row)) for row in rows], dtype=torch.int64).reshape(-1, L)


def batch(own: list[List], rank: int) -> Batch:
    wrong = [(row, pair) for row, pairs in enumerate(own) for pair in pairs[1:]]
    ids = torch.arange(len(own)) + 100 * rank
    y, more = tokens([pairs[0] for pairs in own]), tokens([pair for _, pair in wrong])
    row = torch.tensor([row for row, _ in wrong], dtype=torch.int64)
    keys = 1000 * (rank + 1) + torch.arange(len(wrong))
    extra = Extra(more, row, keys, torch.zeros(len(wrong), dtype=torch.bool), lengths=token_counts(more))
    return Batch(torch.zeros(len(own), 1, dtype=torch.int64), y, ids, ids, ids, extra, y_lengths=token_counts(y))


def score(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """1/|y| Σ log p(y_t | x, y_<t), one answer at a time."""
    log_p = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return torch.stack([log_p[len(prompt) + t - 1, token] for t, token in enumerate(answer)]).mean()


def one_sided_dpm(model: nn.Module, whole: list[List], tau: Tensor) -> Tensor:
    """Mean over rows of τ · log Σ_j exp((s_j − s_0) / τ), over the list of the row alone."""
    terms = []
    for pairs in whole:
        scores = torch.stack([score(model, *pair) for pair in pairs])
        terms.append(tau * ((scores - scores[0]) / tau).exp().sum().log())
    return torch.stack(terms).mean()


def check(sizes: tuple[int, ...], chunk_size: int | None, world: World) -> None:
    model = towers()
    scorer: Any = model.y_tower.trunk.encoder  # pyright: ignore[reportAttributeAccessIssue]
    options = {"candidates": "list", "similarity": "dot", "temperature": TAU, "learnable": False}
    objective = build_objective("one_sided_dpm", **options).double()
    tau = (-objective.get_parameter("logit_scale").detach()).exp()  # a float32 number
    step = train_step(model, len(WRONG), world=world, objective=objective, chunk_size=chunk_size, keep_graphs=1)
    for index in range(2):
        whole, first = lists(index), sum(sizes[: world.rank])
        own = whole[first : first + sizes[world.rank]]
        loss = one_sided_dpm(scorer, whole, tau)
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        want = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))
        scalars, got = step(batch(own, world.rank), index), gradients_of(step)
        context = f"{sizes}, {chunk_size}"
        assert abs(scalars["loss"] - loss.item()) < 1e-10, (context, scalars["loss"], loss.item())
        for key, gradient in want.items():
            torch.testing.assert_close(got[key], gradient, rtol=1e-9, atol=1e-11, msg=f"{context}: {key}")
        assert equal_everywhere(snapshot(step), world), context


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    for sizes in SPLITS[world.size]:
        for chunk_size in (None, 2):
            check(sizes, chunk_size, world)
    print(f"rank {world.rank}: all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
