"""One strict walk over a shard: where each sample's members lie, a CRC32 per sample, and everything that is wrong.

Stricter than tarfile and webdataset on purpose: both stop without a word at a damaged header, so that samples vanish.
Nothing is extracted, decoded or followed; only regular files with a known suffix count.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

PICTURES = ("jpg", "jpeg", "png", "webp")
TEXTS = ("txt", "json", "cls")
MAX_BYTES = {**dict.fromkeys(PICTURES, 64 << 20), **dict.fromkeys(TEXTS, 1 << 20), "json": 16 << 20}
MAX_EXTENDED = 1 << 20
MAX_PROBLEMS = 100  # listed per shard; all are counted
PIECE = 1 << 20

BLOCK = 512
ZEROS = bytes(BLOCK)
REGULAR, SPARSE = b"\x000" + b"7", b"S"
WITHOUT_PAYLOAD = b"123456"  # links, devices, folders: their size field is not followed by data
LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL = b"L", b"K", b"x", b"g"
PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]*)=")  # bytes of the whole record, name; no more digits than can be


@dataclass(frozen=True)
class Problem:
    """Something wrong at a byte offset of a shard. last: what follows cannot be read."""

    offset: int
    message: str
    last: bool = False

    def __str__(self) -> str:
        return f"offset {self.offset}: {self.message}"


@dataclass
class Problems:
    """The first MAX_PROBLEMS that are added. All are counted: every byte of a hostile file may be one."""

    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        self.count += 1
        if self.count <= MAX_PROBLEMS:
            self.first.append(problem)


@dataclass
class Sample:
    """offset: where its first header or its line starts; members: (suffix, offset, size in bytes) in file order."""

    key: str
    offset: int
    members: list[tuple[str, int, int]] = field(default_factory=list)
    crc32: int = 0

    def kinds(self) -> set[str]:
        """Its suffixes, all picture formats being one kind, and 'caption' when anything can hold one."""
        suffixes = {suffix for suffix, _, _ in self.members}
        kinds = {"picture" if suffix in PICTURES else suffix for suffix in suffixes}
        return kinds | ({"caption"} if suffixes & set(TEXTS) else set())


@dataclass
class Scan:
    """samples in file order; ignored: how many members of which suffix were passed over."""

    samples: list[Sample] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    ignored: Counter[str] = field(default_factory=Counter)


class _Broken(Exception):
    """The walk cannot go on; carries the Problem."""

    def __init__(self, offset: int, message: str) -> None:
        self.problem = Problem(offset, message, last=True)


@dataclass
class _Header:
    offset: int
    kind: bytes
    name: str
    size: int


def split_name(name: str) -> tuple[str, str]:
    """Key and suffix as webdataset has them: 'a/b.seg.PNG' -> ('a/b', 'seg.png'); no suffix: (name, '')."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


def scan_tar(stream: BinaryIO) -> Scan:
    """Walk a tar from its start; what is wrong goes into `problems`, and the walk ends where the structure is lost."""
    scan = Scan()
    try:
        for header in _headers(stream):
            _take(scan, header, stream)
    except _Broken as broken:
        scan.problems.add(broken.problem)
    for problem in _repeated_keys(scan.samples) + _half_samples(scan.samples):
        scan.problems.add(problem)
    if scan.ignored and not scan.samples and not scan.problems.count:
        scan.problems.add(Problem(0, f"none of its members ends in {', '.join(MAX_BYTES)}"))
    return scan


def stream_tar(stream: BinaryIO, scan: Scan) -> Iterator[tuple[Sample, dict[str, bytes]]]:
    """The same walk for what is read once: each sample with its members by suffix, as soon as it is whole.

    What is wrong goes into `scan`. Where the structure is lost the walk ends without the sample that it is in: whether
    that is whole cannot be known.
    """
    members: dict[str, bytes] = {}
    try:
        for header in _headers(stream):
            payload = _take(scan, header, stream)
            if len(scan.samples) == 2:  # a new one has begun
                yield scan.samples.pop(0), members
                members = {}
            if payload is not None:
                members.setdefault(split_name(header.name)[1], payload)
    except _Broken as broken:
        scan.problems.add(broken.problem)
    else:
        yield from ((sample, members) for sample in scan.samples)


# ---- tar structure -------------------------------------------------------------------------------------------------


def _headers(stream: BinaryIO) -> Iterator[_Header]:
    """Headers up to the end-of-archive marker, long names resolved. The caller must read the payloads."""
    offset, pax = 0, {}
    while (block := _block(stream, offset)) != ZEROS:
        header = _parsed(block, offset)
        offset += BLOCK
        if header.kind in (LONG_NAME, PAX):
            if header.size > MAX_EXTENDED:
                raise _Broken(header.offset, _too_big(header, MAX_EXTENDED))
            payload = _payload(stream, header)
            pax |= {"path": payload.rstrip(b"\0")} if header.kind == LONG_NAME else _pax_records(payload, header.offset)
        elif header.kind in (LONG_LINK, PAX_GLOBAL):
            _pass_over(stream, header)
        else:
            _apply(pax, header)
            pax = {}
            yield header
        offset += _padded(header.size)
    _check_end(stream, offset)


def _block(stream: BinaryIO, offset: int) -> bytes:
    block = stream.read(BLOCK)
    if not block:
        raise _Broken(offset, "the file ends here without an end-of-archive marker: it was cut")
    if len(block) < BLOCK:
        raise _Broken(offset, f"the file ends {len(block)} bytes into a member header: it was cut")
    return block


def _parsed(block: bytes, offset: int) -> _Header:
    if _byte_sum(block) != _octal(block[148:156]):
        raise _Broken(offset, "no valid tar header (its checksum is wrong)")
    kind = block[156:157]
    size = 0 if kind in WITHOUT_PAYLOAD else _octal(block[124:136])
    if size < 0:
        raise _Broken(offset, "the header has no valid size")
    name = _until_nul(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _until_nul(block[345:500])):
        name = prefix + b"/" + name
    return _Header(offset, kind, _decoded(name, offset), size)


def _byte_sum(block: bytes) -> int:
    """Sum of the header's bytes with blanks for the checksum field; adler32's low half is 1 + that sum below 65521."""
    parts = (block[:148], block[156:340], block[340:])
    return sum((zlib.adler32(part) & 0xFFFF) - 1 for part in parts) + 8 * ord(" ")


def _octal(number: bytes) -> int:
    """A header number: octal digits, or GNU's base 256; -1 when it is neither."""
    if number[0] == 0x80:
        return int.from_bytes(number[1:], "big")
    try:
        return int(_until_nul(number).strip() or b"0", 8)
    except ValueError:
        return -1


def _until_nul(text: bytes) -> bytes:
    return text.partition(b"\0")[0]


def _decoded(name: bytes, offset: int) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        raise _Broken(offset, f"the member name {name!r} is not UTF-8") from None


def _pax_records(payload: bytes, offset: int) -> dict[str, bytes]:
    records, at = {}, 0
    while at < len(payload):
        found = PAX_RECORD.match(payload, at)
        end = at + int(found[1]) if found else 0
        if not found or end <= found.end() or payload[end - 1 : end] != b"\n":
            raise _Broken(offset, "damaged PAX header")
        records[found[2].decode("utf-8", "replace")] = payload[found.end() : end - 1]
        at = end
    return records


def _apply(pax: dict[str, bytes], header: _Header) -> None:
    if header.kind == SPARSE or any(name.startswith("GNU.sparse") for name in pax):
        raise _Broken(header.offset, f"member '{header.name}' is sparse; write the shard without --sparse")
    if "path" in pax:
        header.name = _decoded(pax["path"], header.offset)
    if "size" in pax and header.kind not in WITHOUT_PAYLOAD:
        if not re.fullmatch(rb"[0-9]{1,19}", pax["size"]):
            raise _Broken(header.offset, "damaged PAX header: size")
        header.size = int(pax["size"])


def _check_end(stream: BinaryIO, offset: int) -> None:
    """After the first block of zeros (already read) at `offset`: at least one more, and nothing else to the end."""
    end = offset + BLOCK
    while piece := stream.read(PIECE):
        if piece.count(0) != len(piece):
            at = end + len(piece) - len(piece.lstrip(b"\0"))
            raise _Broken(offset, f"a block of zeros, but data goes on at offset {at}: what follows would be lost")
        end += len(piece)
    if end < offset + 2 * BLOCK:
        raise _Broken(offset, "the end-of-archive marker is cut")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _payload(stream: BinaryIO, header: _Header) -> bytes:
    padded = stream.read(_padded(header.size))
    if len(padded) < _padded(header.size):
        end = header.offset + BLOCK + len(padded)
        raise _Broken(header.offset, f"the file ends at {end}, inside member '{header.name}': it was cut")
    return padded[: header.size]


def _pass_over(stream: BinaryIO, header: _Header) -> None:
    left = _padded(header.size)
    while left:
        piece = stream.read(min(left, PIECE))
        if not piece:
            raise _Broken(
                header.offset, f"{left} bytes of member '{header.name}' are missing at the end: the file was cut"
            )
        left -= len(piece)


def _too_big(header: _Header, limit: int) -> str:
    return f"member '{header.name}' has {header.size} bytes, more than the limit of {limit}"


# ---- samples -------------------------------------------------------------------------------------------------------


def _take(scan: Scan, header: _Header, stream: BinaryIO) -> bytes | None:
    """Add a member to the last sample or a new one; count and skip what is no regular file with a known suffix.

    Returns what is in it; None when it was skipped.
    """
    key, suffix = split_name(header.name)
    extension = suffix.rpartition(".")[2]
    if header.kind not in REGULAR or extension not in MAX_BYTES or key.endswith("/") or not key:
        scan.ignored[extension if header.kind in REGULAR else "(no file)"] += 1
        _pass_over(stream, header)
        return None
    if header.size > MAX_BYTES[extension]:
        scan.problems.add(Problem(header.offset, _too_big(header, MAX_BYTES[extension])))
        _pass_over(stream, header)
        return None
    payload = _payload(stream, header)
    if not scan.samples or scan.samples[-1].key != key:
        scan.samples.append(Sample(key, header.offset))
    sample = scan.samples[-1]
    if any(suffix == known for known, _, _ in sample.members):
        scan.problems.add(Problem(header.offset, f"a second member '{header.name}'"))
    sample.members.append((suffix, header.offset + BLOCK, header.size))
    sample.crc32 = zlib.crc32(payload, sample.crc32)
    return payload


def _repeated_keys(samples: list[Sample]) -> list[Problem]:
    first: dict[str, int] = {}
    return [
        Problem(sample.offset, f"key '{sample.key}' again, first at offset {known}")
        for sample in samples
        if (known := first.setdefault(sample.key, sample.offset)) != sample.offset
    ]


def _half_samples(samples: list[Sample]) -> list[Problem]:
    """Samples without a picture or caption where any has one, or without a member that at least half of them have."""
    counts = Counter(kind for sample in samples for kind in sample.kinds())
    usual = {kind for kind, count in counts.items() if 2 * count >= len(samples) or kind in ("picture", "caption")}
    return [
        Problem(sample.offset, f"half a sample: '{sample.key}' has no {' and no '.join(sorted(missing))}")
        for sample in samples
        if (missing := usual - sample.kinds())
    ]
