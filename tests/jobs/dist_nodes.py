"""Four processes, two on each of two machines: one of each downloads, slowly and straight to the place."""

import os
import sys
import time
from pathlib import Path

from dyad.train.distributed.agreement import node_first
from dyad.train.distributed.world import init_world, shutdown

rank = int(os.environ["RANK"])
os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
node = Path(sys.argv[1]) / str(rank // 2)
node.mkdir(exist_ok=True)
target, downloads = node / "weights", node / f"download-{rank % 2}"


def weights() -> str:
    if not target.exists():
        downloads.touch()
        with target.open("w") as file:
            for _ in range(5):
                print("part", file=file, flush=True)
                time.sleep(0.1)
    return target.read_text()


world = init_world(timeout=60, cpu=True)
assert node_first(world, weights) == "part\n" * 5
assert downloads.exists() == (rank % 2 == 0)
shutdown(world)
print("all checks hold")
