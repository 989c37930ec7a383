"""Three ranks on two machines, as LOCAL_RANK says: one rank of each hashes. Run by torchrun."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from dyad.data.base.errors import DataError, UserError
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.failures import process_group
from dyad.train.distributed.world import World, broadcast_object
from dyad.train.run_folder import digests
from dyad.train.run_folder.digests import SETTLED, digest_of, once_a_machine


def check(world: World) -> None:
    os.environ["LOCAL_RANK"] = ("0", "1", "0")[world.rank]
    file = Path(from_rank_0(world, lambda: tempfile.mkdtemp())) / "file"
    if world.rank == 0:
        file.write_bytes(b"content")
    broadcast_object(None, world)
    now, sha256_of = time.time, digests.sha256_of
    known: list[str] = []
    hashed: list[str | Path] = []

    def counted(path: str | Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    patch = pytest.MonkeyPatch()
    patch.setattr(digests.time, "time", lambda: now() + 2 * SETTLED)
    patch.setattr(digests, "sha256_of", counted)
    once_a_machine(world, lambda: known.append(digest_of(file)))
    assert digest_of(file) == sha256_of(file)
    assert len(hashed) == (1, 0, 1)[world.rank], hashed

    def fails() -> None:
        if world.rank == 2:
            raise DataError("damaged")

    patch.undo()
    with pytest.raises(UserError) as caught:  # the damage that the second machine meets stops all
        once_a_machine(world, fails)
    assert caught.value.everywhere and isinstance(caught.value, DataError) == (world.rank == 2)


def main() -> None:
    with process_group(60.0) as world:
        check(world)
        print(f"rank {world.rank}: all checks hold", flush=True)


if __name__ == "__main__":
    main()
