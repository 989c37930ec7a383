"""Changes of a file by chance, that a careless or hostile writer could make."""

from __future__ import annotations

import random
import re
from pathlib import Path

NUMBERS = b"0 -1 -7 NaN Infinity -Infinity 1e999 1e30 1e-30 9223372036854775808 1000000000000000000".split()
NUMBERS += b"4294967296 0.5 null true".split()
INSERTED = [
    b"[" * 20_000,
    b'{"a":' * 5_000,
    b"(" * 500,
    bytes(64),
    b"\xff\xfe\xc3(",
    b"\r",
    b"\n\n",
    b'"',
    b"\t,\t",
    b"&a *a",
]
MAGIC = [
    b"PK\x03\x04",
    b"\x1f\x8b\x08",
    b"\x80\x04\x95",
    b"ARROW1",
    b"PAR1",
    b"\x93NUMPY",
    b"BZh9",
    b"\xef\xbb\xbf",
    b"#!/bin/sh\n",
]


def _place(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content) + 1)
    return start, min(len(content), start + chance.choice((1, 4, 16, 64, 512)))


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 4, 32)) if content else 0):
        changed[chance.randrange(len(content))] = chance.choice((0, 255, 127, 128, chance.randrange(256)))
    return bytes(changed)


def head(content: bytes, chance: random.Random) -> bytes:
    """Other bytes near the begin or the end, where formats keep their lengths."""
    near = min(64, len(content))
    return (
        flip(content[:near], chance) + content[near:]
        if chance.random() < 0.5
        else (content[: len(content) - near] + flip(content[len(content) - near :], chance))
    )


def cut(content: bytes, chance: random.Random) -> bytes:
    start, end = _place(content, chance)
    return chance.choice((content[:start], content[start:], content[:start] + content[end:]))


def double(content: bytes, chance: random.Random) -> bytes:
    start, end = _place(content, chance)
    return chance.choice((content + content, content[:end] + content[start:]))


def splice(content: bytes, chance: random.Random) -> bytes:
    (a, b), (c, d) = sorted((_place(content, chance), _place(content, chance)))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def insert(content: bytes, chance: random.Random) -> bytes:
    start, _ = _place(content, chance)
    return content[:start] + chance.choice(INSERTED) + content[start:]


def number(content: bytes, chance: random.Random) -> bytes:
    found = [*re.finditer(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?", content)]
    if not found:
        return flip(content, chance)
    which, value = chance.choice(found), chance.choice(NUMBERS)
    if chance.random() < 0.3:  # as long as it was: nothing else moves
        value = b"9" * len(which[0])
    return content[: which.start()] + value + content[which.end() :]


def swap(content: bytes, chance: random.Random) -> bytes:
    """Two words change places: names of fields, values, texts."""
    found = [*re.finditer(rb'"[^"\n]{0,80}"|[\w.]+', content)]
    if len(found) < 2:
        return cut(content, chance)
    a, b = sorted(chance.sample(found, 2), key=lambda word: word.start())
    return content[: a.start()] + b[0] + content[a.end() : b.start()] + a[0] + content[b.end() :]


def kind_of_value(content: bytes, chance: random.Random) -> bytes:
    """A value becomes one of another kind."""
    found = [*re.finditer(rb'(?<=[:,\[ ])("[^"\n]{0,80}"|-?[\d.]+|true|false|null|\[\]|\{\})', content)]
    if not found:
        return flip(content, chance)
    which = chance.choice(found)
    value = chance.choice(
        (b"[]", b"{}", b"null", b'""', b'"\\ud800"', b"[[1]]", b'{"a": 1}', b"0", b"-1", b'"../../etc"')
    )
    return content[: which.start()] + value + content[which.end() :]


def whole(content: bytes, chance: random.Random) -> bytes:
    return chance.choice(
        (b"", b"\0" * 4096, chance.choice(MAGIC), chance.choice(MAGIC) + content, b"[" * 100_000, b"null")
    )


DAMAGE = (flip, head, cut, double, splice, insert, number, number, number, swap, kind_of_value, kind_of_value, whole)


def mutate(path: Path, chance: random.Random) -> str:
    """Damage a file once or twice; return how."""
    content, done = path.read_bytes(), []
    for _ in range(chance.choice((1, 1, 2))):
        damage = chance.choice(DAMAGE)
        content = damage(content, chance)
        done.append(damage.__name__)
    path.write_bytes(content)
    return f"{path.name}: {', '.join(done)}"
