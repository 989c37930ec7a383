"""Job for torchrun: four processes with a mesh of two dimensions. One of them waits for another in a mesh group."""

import time
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from dyad.train.distributed.sharding import _mesh
from dyad.train.distributed.world import abort_group, broadcast_object, init_world, shutdown

WAIT = 5.0  # seconds for which the other ranks do not come


def main() -> None:
    world = init_world(timeout=60, cpu=True)
    group, start = _mesh(2, world).get_group("copy"), time.monotonic()
    assert group is not dist.group.WORLD and group.size() == 2
    broadcast_object(None, world)
    if world.rank == 0:
        Timer(0.5, abort_group, (world,)).start()  # as the listener does
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - start < WAIT
    else:
        time.sleep(WAIT)
    print("all checks hold", flush=True)
    shutdown(world, broken=True)


if __name__ == "__main__":
    main()
