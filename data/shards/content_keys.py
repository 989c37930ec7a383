"""Compute content keys (64-bit hashes of the bytes of an item, such as an image or a text), hashes of ids, and digests
of JSON values."""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def content_key(data: bytes) -> int:
    """Hash the bytes of an item (such as an image or a text) to its content key, a signed 64-bit integer (BLAKE2b).

    Items with equal bytes have equal keys.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def key_name(key: int) -> str:
    """Convert a content key to 16 hexadecimal digits, which serve as the id of an item without an id of its own."""
    return f"{key & (1 << 64) - 1:016x}"


def key_of_name(name: object) -> int | None:
    """Convert 16 hexadecimal digits back to a content key (the inverse of key_name); None for any other `name`."""
    if not isinstance(name, str) or not re.fullmatch("[0-9a-f]{16}", name):
        return None
    return int.from_bytes(bytes.fromhex(name), signed=True)


def hash_ids(ids: Iterable[str]) -> Int64s:
    """Hash each id (a text) by 128-bit BLAKE2b. Return int64 (2, n) for n ids.

    Column i holds the two 64-bit halves of the hash of id i.
    """
    digests = bytearray()  # not join(), which would hold an object for each of millions of ids
    for name in ids:
        digests += hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.frombuffer(digests, "<i8").reshape(-1, 2).T


def json_digest(value: Any) -> str:
    """Return the SHA-256, in hexadecimal digits, of a value written as JSON. The order of the keys of dicts counts."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
