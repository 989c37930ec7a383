"""torchrun job: two ranks write the bytes that one process writes, and stop together."""

import tempfile
from pathlib import Path

import torch.distributed as dist
from helpers.mining import random_source

from dyad.data.base.errors import UserError
from dyad.data.config import MiningConfig
from dyad.eval.mine import mining
from dyad.eval.mine.mining import mine
from dyad.train.distributed.world import World, broadcast_object


def main() -> None:
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    folder = Path(broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "", world))
    if world.rank == 0:
        random_source(folder / "data", 0)
    dist.barrier()
    found, _, _ = random_source(folder / f"data{world.rank}", 0)
    mining.BLOCK, mining.SEARCHED_BYTES = 7, 10_000  # 10 queries searched at a time
    config = MiningConfig(first_rank=2, last_rank=50, margin=0.1)
    alone, together = folder / f"alone{world.rank}", folder / "together"
    expected = mine(found, config, alone, World(), {"of": "a test"})
    assert mine(found, config, together, world, {"of": "a test"}) == expected
    for name in ("mined.jsonl", "mined.json"):
        assert (together / name).read_bytes() == (alone / name).read_bytes()

    refuses_together(found, config, folder, world)
    print("all checks hold")
    dist.destroy_process_group()


def refuses_together(found, config, folder: Path, world: World) -> None:
    (folder / "file").touch()
    dist.barrier()
    try:
        mine(found, config, folder / "file" / "out", world, {})
    except UserError as error:
        assert "cannot be written" in str(error) and error.printed_elsewhere == (world.rank != 0)
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    main()
