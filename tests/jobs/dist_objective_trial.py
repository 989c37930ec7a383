"""Job for torchrun: objectives of plain pairs pass the trial of plugins; one over its own rows alone does not."""

from functools import partial

import torch
import torch.distributed as dist
from helpers.dist import HOLDS
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.run import objective_trial
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.objectives.base import Objective, ObjectiveResult
from dyad.train.losses.options.common import ObjectiveOptions, preset
from jobs.dist_losses import OTHERS, needed_options


class OwnRows(Objective):
    """A hinge over the pairs of this rank, as one writes it for one GPU."""

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: object) -> ObjectiveResult:
        assert y_mD is not None
        scores = x_bD @ y_mD.T
        return ObjectiveResult((0.2 + scores - scores.diag()[:, None]).relu().mean(), {})


class OwnMean(Objective):
    """An exact loss, with a running mean over the rows of this rank."""

    mean: Tensor

    def __init__(self, options: ObjectiveOptions) -> None:
        super().__init__(options)
        self.register_buffer("mean", torch.zeros(()))

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        scores = batch.pair_scores()
        self.mean.mul_(0.5).add_(self.of_all(scores.detach(), batch), alpha=0.5)
        return ObjectiveResult(scores.sum() * batch.rows.world_size / batch.rows.total, {})

    def of_all(self, scores: Tensor, batch: GatheredBatch) -> Tensor:
        return scores.mean()


class Mean(OwnMean):
    """The same with a mean over the rows of all ranks, which the loss uses."""

    def of_all(self, scores: Tensor, batch: GatheredBatch) -> Tensor:
        return batch.rows.sum_(scores.sum()) / batch.rows.total

    def of_batch(self, batch: GatheredBatch) -> ObjectiveResult:
        result = super().of_batch(batch)
        return ObjectiveResult(result.loss * self.mean, {})


def refused(options: ObjectiveOptions, formula: type[Objective], world: World, message: str) -> None:
    try:
        objective_trial.compare_with_one_rank(options, lambda: formula(options), world)
    except ConfigError as error:
        assert message in str(error), error
    else:
        raise AssertionError("not noticed")


def main() -> None:
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    tried = []
    for name, options in OBJECTIVES.items():
        if options.inputs == "pairs" and name not in OTHERS:
            needed = needed_options(name)
            needed |= {"num_samples": 100} if "num_samples" in needed else {}
            build = partial(build_objective, name, **needed)
            own = build().options
            type(own).__module__ = "plugin"
            objective_trial.compare_with_one_rank(own, build, world)
            tried.append(name)
    assert len(tried) > 15, tried
    options = preset("own", ObjectiveOptions)()
    type(options).__module__ = "plugin"
    refused(options, OwnRows, world, "objective=own: on ")
    refused(options, OwnMean, world, "its buffer 'mean' is another one on")
    objective_trial.compare_with_one_rank(options, lambda: Mean(options), world)
    dist.barrier()
    assert dist.get_world_size() == world.size and dist.get_rank() == world.rank
    dist.destroy_process_group()
    print(HOLDS)


if __name__ == "__main__":
    main()
