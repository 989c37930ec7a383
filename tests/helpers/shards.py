"""Small shards for the tests of data/."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dyad.data.shards.index import ShardIndex, index_shards
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import ShardSource

BLOCK = 512

Member = tuple[str, bytes]


def image(number: int = 0, size: tuple[int, int] = (8, 6), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Encoded bytes of an image of one colour that depends on `number`."""
    colour = (number * 37 % 256, number * 101 % 256, number % 256) if mode == "RGB" else number % 256
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path: Path, members: Iterable[Member], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar of regular files, in order, and return its path."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return path


def pairs(count: int, first: int = 0) -> list[Member]:
    """Members of `count` samples: a PNG and a text each."""
    return [
        member
        for n in range(first, first + count)
        for member in ((f"{n:06d}.png", image(n)), (f"{n:06d}.txt", f"caption {n}".encode()))
    ]


def write_pairs(path: Path, count: int, first: int = 0) -> Path:
    return write_tar(path, pairs(count, first))


def opened(*paths: Path | str) -> Shards:
    return open_shards([ShardSource(tuple(str(path) for path in paths))])


def index_shard(path: str) -> ShardIndex:
    """Return the index of one shard: the stored one, or that of a new scan, which is stored."""
    (index,) = index_shards([path])
    return index


def problems(path: Path) -> list[str]:
    return [str(problem) for problem in index_shard(str(path)).problems]


def headers_of(path: Path) -> list[int]:
    """Return the offset of the header of each member of a tar."""
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def stored(path: Path) -> Path:
    """Return the path of the JSON file of a shard's index."""
    return path.parent / ".index" / f"{path.name}.json"
