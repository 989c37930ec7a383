"""Numbers that stand for things: content keys of items, 128-bit hashes of the ids that a file gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def content_key(data: bytes) -> int:
    """64-bit content id: equal bytes are the same item. int64, BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def key_name(key: int) -> str:
    """The id of what a file gives none: 16 hexadecimal digits of its content key."""
    return f"{key & (1 << 64) - 1:016x}"


def hashed(ids: Iterable[str]) -> Int64s:
    """(2, n) int64: BLAKE2b of each id. Row 0 is what tables are sorted by, row 1 tells ids that share it apart."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in ids)
    return np.frombuffer(digests, "<i8").reshape(-1, 2).T
