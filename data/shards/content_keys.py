"""Content keys of items and hashes of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def content_key(data: bytes) -> int:
    """64-bit content key as an int64, by BLAKE2b. Items with equal bytes have equal keys."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def key_name(key: int) -> str:
    """The id of an item without an id of its own: its content key as 16 hexadecimal digits."""
    return f"{key & (1 << 64) - 1:016x}"


def hash_ids(ids: Iterable[str]) -> Int64s:
    """(2, n) int64: the 128-bit BLAKE2b of each id, as two numbers. Tables are sorted by row 0. Row 1 tells ids apart
    whose numbers in row 0 are equal."""
    digests = bytearray()  # not join(), which would hold an object for each of millions of ids
    for name in ids:
        digests += hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.frombuffer(digests, "<i8").reshape(-1, 2).T
