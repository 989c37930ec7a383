"""Scan a tar shard strictly: find the byte offset and size of each member, a CRC32 per sample, and all errors.

tarfile and webdataset stop silently at a damaged header and lose the samples behind it; this scan reports a Problem. No
member is extracted to disk and no link is followed. A sample consists of consecutive members with the same key (the
name without suffix, as in webdataset). Only regular files with a known suffix (jpg, txt, json, …, listed in MAX_BYTES)
belong to samples.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

IMAGES = ("jpg", "jpeg", "png", "webp")
UNREAD = ("gif", "bmp", "tif", "tiff", "heic", "heif", "avif", "jxl")  # suffixes of image formats that are not read
TEXTS = ("txt", "json", "cls")
MAX_BYTES = {**dict.fromkeys(IMAGES, 64 << 20), **dict.fromkeys(TEXTS, 1 << 20), "json": 16 << 20}
MAX_EXTENDED = 1 << 20
MAX_MEMBERS = 1000  # of a sample
MAX_SUFFIXES = 1 << 16  # of a tar: the index has two bytes for the number of a suffix
MAX_PROBLEMS = 100  # listed per shard; all are counted
PIECE = 1 << 20

BLOCK = 512
ZEROS = bytes(BLOCK)
GZIP = b"\x1f\x8b"
REGULAR, SPARSE = b"\x000" + b"7", b"S"
WITHOUT_PAYLOAD = b"123456"  # links, devices, folders: their size field is not followed by data
LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL = b"L", b"K", b"x", b"g"
PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]*)=")  # bytes of the whole record, name; MAX_EXTENDED has 7 digits


@dataclass(frozen=True)
class Problem:
    """An error at a byte offset of a shard. last: whether the rest of the shard cannot be read because of this error.
    of_samples: whether it concerns samples that are in the index, which `python -m data pack` can put in order."""

    offset: int
    message: str
    last: bool = False
    of_samples: bool = False

    def __str__(self) -> str:
        return f"offset {self.offset}: {self.message}"


@dataclass
class Problems:
    """The errors found in one shard.

    first: at most MAX_PROBLEMS of the errors; count: the number of all errors. The list is bounded because a hostile
    file may have an error at each byte.
    """

    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        """Count an error, and keep it if there are fewer than MAX_PROBLEMS so far."""
        self.count += 1
        if self.count <= MAX_PROBLEMS:
            self.first.append(problem)


@dataclass
class ScannedSample:
    """A sample that a scan of a tar found.

    key: the name of its members without suffix. offset: byte offset of its first header. members: (suffix, byte offset
    of the data, size in bytes) of each member, in file order. crc32: CRC32 over the bytes of all members.
    """

    key: str
    offset: int
    members: list[tuple[str, int, int]] = field(default_factory=list)
    crc32: int = 0


@dataclass
class Scan:
    """The result of scanning a tar shard.

    samples: in file order. problems: the errors. ignored: number of skipped members by file extension; "(no file)" for
    those that are no regular files. Members that are too large are errors and not counted there. suffixes: all suffixes
    of members that belong to samples.
    """

    samples: list[ScannedSample] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    ignored: Counter[str] = field(default_factory=Counter)
    suffixes: set[str] = field(default_factory=set)


def unread_images(suffixes: Counter[str]) -> str:
    """Return a text for a message with the number of images in each format that is not read; "" if there are none.

    suffixes: number of files by suffix, lower case without the dot.
    """
    counts = ", ".join(f"{suffixes[suffix]:,} {suffix}" for suffix in UNREAD if suffixes[suffix])
    return f"{counts}: convert them to jpg, png or webp" if counts else ""


class _BrokenTar(Exception):
    """Raised when the rest of a tar cannot be read. Its arguments are the byte offset of the error and a message."""


@dataclass
class _Header:
    """The header of a tar member. offset: byte offset of the header; kind: the type flag (one byte); name: path of the
    member; size: bytes of the member's data."""

    offset: int
    kind: bytes
    name: str
    size: int

    def over_limit_message(self, limit: int) -> str:
        """Return the error message that this member is larger than `limit` bytes; the caller has compared them."""
        return f"member '{self.name}' has {self.size} bytes, more than the limit of {limit}"


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into key and suffix as webdataset does: 'a/b.seg.PNG' -> ('a/b', 'seg.png'); a leading './'
    is dropped.

    The suffix begins after the first dot of the file name. Without a dot the suffix is ''.
    """
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


def scan_tar(stream: BinaryIO) -> Scan:
    """Scan a tar from its start and return its samples and errors.

    Errors of the tar are not raised but added to `Scan.problems`; the scan ends where the rest cannot be read, such as
    at a damaged header. A tar whose members are all skipped is an error, an empty one is not.
    """
    scan = Scan()
    for _ in stream_tar(stream, scan):
        pass
    for problem in _sample_problems(scan.samples):
        scan.problems.add(problem)
    if scan.ignored and not scan.samples and not scan.problems.count:
        scan.problems.add(Problem(0, f"none of its members ends in {', '.join(MAX_BYTES)}"))
    return scan


def stream_tar(stream: BinaryIO, scan: Scan) -> Iterator[tuple[ScannedSample, dict[str, bytes]]]:
    """Scan a tar in one pass and yield each sample, as soon as it is complete, with its members (suffix -> bytes).

    scan: an empty Scan, to which samples and errors are added; no error of the tar is raised. Where the rest cannot be
    read, such as at a damaged header, the scan ends. The sample at that point is in `scan`, but not yielded, because it
    may lack members. Errors of whole samples, such as a repeated key, are found by `scan_tar` alone.
    """
    members: dict[str, bytes] = {}
    try:
        for header in _headers(stream):
            payload = _add_member(scan, header, stream)
            if payload is None:
                continue
            if members and len(scan.samples[-1].members) == 1:  # this member begins a new sample
                yield scan.samples[-2], members
                members = {}
            members.setdefault(split_name(header.name)[1], payload)
    except _BrokenTar as broken:
        scan.problems.add(Problem(*broken.args, last=True))
    else:
        if members:
            yield scan.samples[-1], members


# ---- tar structure -------------------------------------------------------------------------------------------------


def _headers(stream: BinaryIO) -> Iterator[_Header]:
    """Yield the headers of a tar's members up to the end-of-archive marker, with long names (GNU and PAX) resolved.

    The caller must read the member's data from the stream before it takes the next header. Raises _BrokenTar where the
    rest cannot be read, such as at a damaged header.
    """
    offset, pax = 0, {}
    while header := _read_header(stream, offset):
        offset += BLOCK
        if header.kind in (LONG_NAME, PAX):
            if header.size > MAX_EXTENDED:
                raise _BrokenTar(header.offset, header.over_limit_message(MAX_EXTENDED))
            payload = _read_payload(stream, header)
            pax |= {"path": payload.rstrip(b"\0")} if header.kind == LONG_NAME else _pax_records(payload, header.offset)
        elif header.kind in (LONG_LINK, PAX_GLOBAL):
            _read_payload(stream, header, skip=True)
        else:
            _apply_pax(pax, header)
            pax = {}
            yield header
        offset += _padded(header.size)
    _check_end(stream, offset)


def _read_header(stream: BinaryIO, offset: int) -> _Header | None:
    """Read the next header from a stream; return None for the block of zeros that ends a tar.

    offset: byte offset of the header in the file. Raises _BrokenTar for a damaged or incomplete header.
    """
    block = stream.read(BLOCK)
    if not block:
        raise _BrokenTar(offset, "the file ends here without an end-of-archive marker: it was cut")
    if len(block) < BLOCK:
        raise _BrokenTar(offset, f"the file ends {len(block)} bytes into a member header: it was cut")
    if block == ZEROS:
        return None
    if _byte_sum(block) != _number(block[148:156]):
        fault = "it is compressed by gzip: unpack it by gunzip" if block.startswith(GZIP) else "its checksum is wrong"
        raise _BrokenTar(offset, f"no valid tar header ({fault})")
    kind = block[156:157]
    size = 0 if kind in WITHOUT_PAYLOAD else _number(block[124:136])
    if size < 0:
        raise _BrokenTar(offset, "the header has no valid size")
    name = _until_nul(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _until_nul(block[345:500])):
        name = prefix + b"/" + name
    return _Header(offset, kind, _decode_name(name, offset), size)


def _byte_sum(block: bytes) -> int:
    """Return the checksum of a header block: the sum of its bytes, with blanks in place of the checksum field.

    zlib.adler32 is used because it is faster than sum(): its low 16 bits are (1 + the sum of the bytes) modulo 65521.
    The block is summed in three parts, each so short that its sum stays below 65520. The modulo then changes nothing.
    """
    parts = (block[:148], block[156:340], block[340:])
    return sum((zlib.adler32(part) & 0xFFFF) - 1 for part in parts) + 8 * ord(" ")


def _number(number: bytes) -> int:
    """Parse an integer field of a tar header, such as the size; 0 for an empty field, -1 for one that holds none.

    number: the bytes of the field, octal digits or GNU's base 256.
    """
    if number[0] == 0x80:
        return int.from_bytes(number[1:], "big")
    try:
        return int(_until_nul(number).strip() or b"0", 8)
    except ValueError:
        return -1


def _until_nul(text: bytes) -> bytes:
    return text.partition(b"\0")[0]


def _decode_name(name: bytes, offset: int) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        raise _BrokenTar(offset, f"the member name {name!r} is not UTF-8") from None


def _pax_records(payload: bytes, offset: int) -> dict[str, bytes]:
    """Parse the records of a PAX extended header and return name -> value. offset: byte offset of the header, for
    errors. Raises _BrokenTar for a damaged record."""
    records, at = {}, 0
    while at < len(payload):
        found = PAX_RECORD.match(payload, at)
        end = at + int(found[1]) if found else 0
        if not found or end <= found.end() or payload[end - 1 : end] != b"\n":
            raise _BrokenTar(offset, "damaged PAX header")
        records[found[2].decode("utf-8", "replace")] = payload[found.end() : end - 1]
        at = end
    return records


def _apply_pax(pax: dict[str, bytes], header: _Header) -> None:
    """Set the name and size of a tar member, in its header, from the PAX extended header before it.

    pax: records of the extended header, name -> value. header: the member's own header, which is changed in place.
    Raises _BrokenTar for a sparse member, a name that is not UTF-8 and an invalid size.
    """
    if header.kind == SPARSE or any(name.startswith("GNU.sparse") for name in pax):
        raise _BrokenTar(header.offset, f"member '{header.name}' is sparse; write the shard without --sparse")
    if "path" in pax:
        header.name = _decode_name(pax["path"], header.offset)
    if "size" in pax and header.kind not in WITHOUT_PAYLOAD:
        if not re.fullmatch(rb"[0-9]{1,19}", pax["size"]):
            raise _BrokenTar(header.offset, "damaged PAX header: size")
        header.size = int(pax["size"])


def _check_end(stream: BinaryIO, offset: int) -> None:
    """Check the end of a tar: after the block of zeros at `offset`, which was already read, at least one more such
    block must follow, and only zeros up to the end of the file. Raises _BrokenTar otherwise."""
    end = offset + BLOCK
    while piece := stream.read(PIECE):
        if piece.count(0) != len(piece):
            at = end + len(piece) - len(piece.lstrip(b"\0"))
            raise _BrokenTar(offset, f"a block of zeros, but data goes on at offset {at}: what follows would be lost")
        end += len(piece)
    if end < offset + 2 * BLOCK:
        raise _BrokenTar(offset, "the end-of-archive marker is cut")


def _padded(size: int) -> int:
    """Return the bytes that data of `size` bytes take in a tar: a whole number of blocks."""
    return -(-size // BLOCK) * BLOCK


def _read_payload(stream: BinaryIO, header: _Header, skip: bool = False) -> bytes:
    """Read a member's bytes, which follow its header in the stream, and return them.

    skip: discard the bytes and return b"" instead. Raises _BrokenTar when the file ends inside the member.
    """
    read, pieces = 0, []
    while read < _padded(header.size):
        piece = stream.read(min(_padded(header.size) - read, PIECE))
        if not piece:
            end = header.offset + BLOCK + read
            raise _BrokenTar(header.offset, f"the file ends at {end}, inside member '{header.name}': it was cut")
        read += len(piece)
        if not skip:
            pieces.append(piece)
    return b"".join(pieces)[: header.size]


# ---- samples -------------------------------------------------------------------------------------------------------


def _add_member(scan: Scan, header: _Header, stream: BinaryIO) -> bytes | None:
    """Read the tar member that follows `header` in the stream, add it to its sample in `scan`, and return its bytes.

    It belongs to the last sample; if its key differs from that sample's key, it begins a new sample. Return None for a
    skipped member: no regular file, no known suffix, no key, or too large; only the last is added to the errors. Raises
    _BrokenTar if the file ends inside the member, if the sample has MAX_MEMBERS already, or for a suffix after
    MAX_SUFFIXES others.
    """
    key, suffix = split_name(header.name)
    extension = suffix.rpartition(".")[2]
    if header.kind not in REGULAR or extension not in MAX_BYTES or key.endswith("/") or not key:
        scan.ignored[extension if header.kind in REGULAR else "(no file)"] += 1
        _read_payload(stream, header, skip=True)
        return None
    if header.size > MAX_BYTES[extension]:
        scan.problems.add(Problem(header.offset, header.over_limit_message(MAX_BYTES[extension])))
        _read_payload(stream, header, skip=True)
        return None
    payload = _read_payload(stream, header)
    if not scan.samples or scan.samples[-1].key != key:
        scan.samples.append(ScannedSample(key, header.offset))
    sample = scan.samples[-1]
    scan.suffixes.add(suffix)
    if len(sample.members) == MAX_MEMBERS or len(scan.suffixes) > MAX_SUFFIXES:
        raise _BrokenTar(
            header.offset,
            f"over {MAX_MEMBERS:,} members of the sample '{key}', or {MAX_SUFFIXES:,} suffixes: a suffix begins at the "
            "first dot of a file name, so rename a.01.jpg to a_01.jpg",
        )
    if any(suffix == other for other, _, _ in sample.members):
        scan.problems.add(Problem(header.offset, f"a second member '{header.name}'", of_samples=True))
    sample.members.append((suffix, header.offset + BLOCK, header.size))
    sample.crc32 = zlib.crc32(payload, sample.crc32)
    return payload


def _sample_problems(samples: list[ScannedSample]) -> Iterator[Problem]:
    """Yield the errors of whole samples: one for each sample that shares its key and a suffix with an earlier sample,
    then one for all samples whose members are not side by side.

    It is no error here if a sample lacks a member, such as the image. Readers that need the member report this.
    """
    first, apart = dict[str, tuple[int, set[str]]](), list[ScannedSample]()
    for sample in samples:
        offset, seen = first.setdefault(sample.key, (sample.offset, set()))
        suffixes = {suffix for suffix, _, _ in sample.members}
        if seen & suffixes:
            message = f"key '{sample.key}' again, first at offset {offset}"
            yield Problem(sample.offset, message, of_samples=True)
        elif seen:
            apart.append(sample)
        seen |= suffixes
    if apart:
        keys = len({sample.key for sample in apart})
        others = f" and of {keys - 1:,} other samples" if keys > 1 else ""
        message = f"the members of '{apart[0].key}'{others} are not side by side, as tar --sort=name writes them"
        yield Problem(apart[0].offset, message, of_samples=True)
