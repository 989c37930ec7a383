"""Job for torchrun: objectives of plain pairs pass the trial of plugins; one over its own rows alone does not."""

from functools import partial

import torch.distributed as dist
from helpers.dist import HOLDS
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.run import objective_trial
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.objectives.base import Objective, ObjectiveResult
from dyad.train.losses.options.common import ObjectiveOptions
from jobs.dist_losses import OTHERS, needed_options


class OwnRows(Objective):
    """A hinge over the pairs of this rank, as one writes it for one GPU."""

    def of_embeddings(self, x_bD: Tensor, y_mD: Tensor | None, **inputs: object) -> ObjectiveResult:
        assert y_mD is not None
        scores = x_bD @ y_mD.T
        return ObjectiveResult((0.2 + scores - scores.diag()[:, None]).relu().mean(), {})


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
    options = ObjectiveOptions("own")
    type(options).__module__ = "plugin"
    try:
        objective_trial.compare_with_one_rank(options, lambda: OwnRows(options), world)
    except ConfigError as error:
        assert "objective=own: on " in str(error)
    else:
        raise AssertionError("not noticed")
    dist.barrier()
    assert dist.get_world_size() == world.size and dist.get_rank() == world.rank
    dist.destroy_process_group()
    print(HOLDS)


if __name__ == "__main__":
    main()
