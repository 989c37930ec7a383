"""What is in a shard: whole ones read as webdataset reads them, damaged ones are refused by offset."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.messages import raises
from helpers.shards import (
    BLOCK,
    headers_of,
    image,
    index_shard,
    opened,
    overwrite,
    pairs,
    problems,
    write_pairs,
    write_tar,
)
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.writer import TarWriter

from dyad.data.base.errors import BadRow, DataError
from dyad.data.shards import scan_tar as scan_tar_module
from dyad.data.shards.rows import parse_row
from dyad.data.shards.scan_rows import scan_lines
from dyad.data.shards.scan_tar import MAX_BYTES, scan_tar, split_name
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource

# ---- whole shards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_reads_what_was_written(tmp_path: Path, tar_format: int) -> None:
    """Long names take a ustar prefix, a GNU long-name header or a PAX header; all kinds of names come back."""
    keys = ["a", "folder.x/b", "x" * 90 + "/" + "y" * 80, "żółw/ñ", "./dotted"]
    random.seed(0)
    sizes = {"JPG": 700, "txt": 512, "json": 0}
    members = [(f"{key}.{suffix}", random.randbytes(size)) for key in keys for suffix, size in sizes.items()]
    shards = opened(write_tar(tmp_path / "a.tar", members, tar_format))
    assert len(shards) == len(keys)
    for sample, key in enumerate(keys):
        payloads = [payload for name, payload in members if name.startswith(key + ".")]
        assert shards.key(sample) == key.removeprefix("./")
        assert shards.read(sample) == dict(zip(["jpg", "txt", "json"], payloads, strict=True))


def test_equals_webdataset(tmp_path: Path) -> None:
    """The same samples, keys and members as webdataset finds in a shard of its own writer."""
    path = tmp_path / "w.tar"
    with path.open("wb") as stream, TarWriter(stream) as writer:
        for n in range(20):
            writer.write({"__key__": f"k/{n:05d}", "png": image(n), "txt": f"text {n}", "json": {"n": n}})
    with path.open("rb") as stream:
        theirs = list(group_by_keys(tar_file_expander([{"url": "w.tar", "stream": stream}])))
    shards = opened(path)
    assert len(shards) == len(theirs) == 20
    for sample, other in enumerate(theirs):
        assert shards.key(sample) == other["__key__"]
        assert shards.read(sample) == {k: v for k, v in other.items() if not k.startswith("__")}


def test_names() -> None:
    assert split_name("a/b.seg.PNG") == ("a/b", "seg.png")
    assert split_name("a.b/c.jpg") == ("a.b/c", "jpg")
    assert split_name("./x.txt") == ("x", "txt")
    assert split_name("README") == ("README", "")


def test_other_members_are_counted_and_never_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        folder, link = tarfile.TarInfo("d"), tarfile.TarInfo("link.jpg")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(folder)
        tar.addfile(link)
        others = [("000000.pyd", b"\x80\x04N."), ("._000000.png", b"junk"), ("README", b"hello")]
        for name, payload in [*pairs(1), *others, *pairs(1, 1)]:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    index = index_shard(str(path))
    assert not index.problems
    assert index.ignored == {"": 1, "(no file)": 2, "png": 1, "pyd": 1}
    assert [sorted(opened(path).read(n)) for n in range(2)] == [["png", "txt"]] * 2


def test_a_large_ignored_member_between_is_not_read_along(tmp_path: Path) -> None:
    (png, txt) = pairs(1)
    path = write_tar(tmp_path / "a.tar", [png, ("000000.bin", bytes(200_000)), txt])
    assert opened(path).read(0) == {"png": png[1], "txt": txt[1]}


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes('{"q": "ünï"}\n{"q": 2}\r\n{"q": 3}'.encode())
    shards = opened(path)
    assert [shards.read(n)["json"].decode() for n in range(3)] == ['{"q": "ünï"}', '{"q": 2}', '{"q": 3}']
    assert shards.key(2) == "3"


def test_empty_shards_have_no_samples(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    shards = opened(write_tar(tmp_path / "none.tar", []), tmp_path / "none.jsonl", write_pairs(tmp_path / "z.tar", 2))
    assert len(shards) == 2 and shards.key(1) == "000001"


# ---- damage --------------------------------------------------------------------------------------------------------


DAMAGE: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "cut in a payload": (lambda p, at: os.truncate(p, at + 517), "{cut}"),
    "cut in a header": (lambda p, at: os.truncate(p, at + 100), "100 bytes"),
    "cut between members": (lambda p, at: os.truncate(p, at), ""),
    "zero block": (lambda p, at: overwrite(p, at, bytes(BLOCK)), "offset {next}"),
    "random header": (lambda p, at: overwrite(p, at, random.Random(1).randbytes(BLOCK)), ""),
    "bit flip in a header": (lambda p, at: overwrite(p, at, b"1"), ""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_with_its_offset(tmp_path: Path, kind: str) -> None:
    """Each of these makes webdataset deliver fewer samples without a word."""
    path = write_pairs(tmp_path / "a.tar", 10)
    at = headers_of(path)[10]
    damage, named = DAMAGE[kind]
    damage(path, at)
    index = index_shard(str(path))
    assert index.samples == 5
    with raises(DataError, path, f"offset {at}", named.format(cut=at + 517, next=at + BLOCK)):
        opened(path)


def test_half_sample_at_a_cut(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 10)
    at = headers_of(path)[11]
    os.truncate(path, at)
    assert problems(path) == [f"offset {at}: the file ends here without an end-of-archive marker: it was cut"]


def test_end_of_archive_must_be_whole(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    end = len(path.read_bytes().rstrip(b"\0")) // BLOCK * BLOCK + BLOCK
    os.truncate(path, end + 2 * BLOCK)
    assert not problems(path)
    os.truncate(path, end + BLOCK)
    assert problems(path) == [f"offset {end}: the end-of-archive marker is cut"]
    path.write_bytes(b"")
    assert "offset 0: the file ends here" in problems(path)[0]


def test_half_and_double_samples(tmp_path: Path) -> None:
    members = [
        *pairs(6),
        ("000006.png", image()),
        ("000007.txt", b"x"),
        *pairs(1, 2),
        ("000008.jpg", b"1"),
        ("000008.txt", b"2"),
    ]
    members += [("000009.png", b"1"), ("000009.png", b"2"), ("000009.txt", b"3")]
    path = write_tar(tmp_path / "a.tar", members)
    at = headers_of(path)
    assert sorted(problems(path)) == sorted(
        [
            f"offset {at[19]}: a second member '000009.png'",
            f"offset {at[14]}: key '000002' again, first at offset {at[4]}",
        ]
    )


def test_names_that_differ_behind_their_first_dot_are_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames film.00001.jpg, … would be held in memory together."""
    frames = write_tar(tmp_path / "a.tar", [(f"film.{n:05}.jpg", b"1") for n in range(1002)])
    (message,) = problems(frames)
    assert message.startswith(f"offset {headers_of(frames)[1000]}: over 1,000 members of the sample 'film'")
    monkeypatch.setattr(scan_tar_module, "MAX_SUFFIXES", 3)
    (message,) = problems(write_tar(tmp_path / "b.tar", [(f"{n}.{n}.jpg", b"1") for n in range(5)]))
    assert "or 3 suffixes" in message


def test_a_sample_may_lack_any_member(tmp_path: Path) -> None:
    """Who needs the member says so; see test_odd_samples.py."""
    members = [*pairs(2), *(member for member in pairs(5, 2) if member[0].endswith("png")), ("7.txt", b"a")]
    assert not problems(write_tar(tmp_path / "a.tar", members)) and len(opened(tmp_path / "a.tar")) == 8


def test_members_that_are_not_side_by_side(tmp_path: Path) -> None:
    unsorted = sorted(pairs(12), key=lambda member: member[0].endswith("txt"))
    path = write_tar(tmp_path / "a.tar", unsorted)
    at, message = headers_of(path)[12], "the members of '000000' and of 11 other samples are not side by side"
    assert problems(path) == [f"offset {at}: {message}, as tar --sort=name writes them"]
    with raises(DataError, path, f"offset {at}", "'000000'", f"data pack {path}", "out=a_packed"):
        opened(path)
    apart = write_tar(tmp_path / "b.tar", [*pairs(1), *pairs(1, 1), ("000000.json", b"{}")])
    assert "the members of '000000' are not side by side" in problems(apart)[0] and len(problems(apart)) == 1


def test_limits_and_refusals(tmp_path: Path) -> None:
    long = write_tar(tmp_path / "long.tar", [("0.png", image()), ("0.txt", bytes((1 << 20) + 1)), *pairs(3, 1)])
    assert "has 1048577 bytes, more than the limit of 1048576" in problems(long)[0]
    assert len(problems(long)) == 1 and index_shard(str(long)).samples == 4
    arrays = write_tar(tmp_path / "npy.tar", [("0.npy", b"1"), ("1.npy", b"1")])
    assert problems(arrays) == ["offset 0: none of its members ends in jpg, jpeg, png, webp, txt, json, cls"]
    (tmp_path / "text.tar").write_text("no tar at all, but longer than a block " * 20)
    assert problems(tmp_path / "text.tar") == ["offset 0: no valid tar header (its checksum is wrong)"]
    (tmp_path / "packed.tar").write_bytes(gzip.compress(bytes(1024), compresslevel=0))
    assert problems(tmp_path / "packed.tar")[0].endswith("(it is compressed by gzip: unpack it by gunzip)")


HUGE = b"\x80" + (1 << 40).to_bytes(11, "big")  # GNU's base-256 size


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A ustar header with a right checksum, whatever its fields say."""
    block = bytearray(BLOCK)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157], block[257:263] = kind, b"ustar\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"a.txt", b"zzz"), "the header has no valid size"),
        (header(b"\xff.txt", b"0"), "is not UTF-8"),
        (header(b"a.txt", b"0", b"S"), "is sparse"),
        (header(b"x", b"16", b"x") + padded(b"99 path=b.txt\n"), "damaged PAX header"),
        (header(b"x", b"13", b"x") + padded(b"11 size=-1\n") + header(b"a.txt", b"0"), "damaged PAX header: size"),
        (header(b"x", b"11622", b"x") + padded(b"9" * 5000 + b" path=b.txt\n"), "damaged PAX header"),
        (
            header(b"x", b"11624", b"x") + padded(b"5012 size=" + b"1" * 5001 + b"\n") + header(b"a.txt", b"0"),
            "damaged PAX",
        ),
        (header(b"x", HUGE, b"L"), "more than the limit"),
        (header(b"a.bin", HUGE) + bytes(BLOCK), "the file ends at 1024, inside member 'a.bin': it was cut"),
        (header(b"g", b"7", b"g") + padded(b"7 a=bc\n") + header(b"k", b"0", b"K"), "the file ends here"),
    ],
)
def test_odd_headers(content: bytes, message: str) -> None:
    found = [str(problem) for problem in scan_tar(io.BytesIO(content)).problems.first]
    assert len(found) == 1 and message in found[0], found


def test_pax_size_is_followed() -> None:
    blocks = header(b"x", b"11", b"x"), padded(b"9 size=3\n"), header(b"a.txt", b"0"), padded(b"abc"), bytes(2 * BLOCK)
    scan = scan_tar(io.BytesIO(b"".join(blocks)))
    assert not scan.problems.count, scan.problems
    assert scan.samples[0].members == [("txt", 3 * BLOCK, 3)] and scan.samples[0].crc32 == zlib.crc32(b"abc")


def test_a_full_pax_header_is_read_in_one_pass() -> None:
    records = b"6 a=b\n" * ((1 << 20) // 6)
    blocks = header(b"x", b"%o" % len(records), b"x"), padded(records), header(b"a.txt", b"0"), bytes(2 * BLOCK)
    begun = time.process_time()
    assert not scan_tar(io.BytesIO(b"".join(blocks))).problems.count
    assert time.process_time() - begun < 5, "it took a minute when the rest was copied for each record"


def test_every_single_byte_matters(tmp_path: Path) -> None:
    """Whatever byte of headers, payloads or padding is lost at the end, the scan says so."""
    whole = write_pairs(tmp_path / "a.tar", 1).read_bytes()
    end = len(whole.rstrip(b"\0")) // BLOCK * BLOCK + 3 * BLOCK
    for cut in range(0, end, 37):
        assert scan_tar(io.BytesIO(whole[:cut])).problems.count, cut
    assert not scan_tar(io.BytesIO(whole[:end])).problems.count


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (b'{"a": 1}\n{"a": \n', "offset 9: line 2"),
        (b'{"a": 1}\n{"a": "\xc3\xa9\xff"}\n', "offset 9: line 2"),
        (b'{"a": 1}\n[1]\n', "offset 9: line 2"),
        (b'{"a": 1}\n"' + b"x" * MAX_BYTES["json"], "line 2"),
        (b"[" * 100_000, "line 1"),
        (b'{"a": 1}{"a": 2}\n', "offset 0: line 1"),
    ],
    ids=["JSON", "UTF-8", "list", "long", "nested", "two objects"],
)
def test_json_lines_damage(tmp_path: Path, lines: bytes, named: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines)
    with raises(DataError, named):
        opened(path)


def test_a_line_that_is_too_long_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * (MAX_BYTES["json"] + 3_000_000) + b'\n{"b": 2}\n')
    index = index_shard(str(path))
    assert [problem.message for problem in index.problems] == ["line 2 is longer than 16777216 bytes"]
    shards = Shards([ShardSource((str(path),))], [index])
    assert shards.read(1) == {"json": b'{"b": 2}'} and shards.key(1) == "3"


def test_problems_are_counted_and_the_first_are_kept() -> None:
    """A byte of a hostile file may be one, and each as an object is a hundred times as much."""
    found = scan_lines(io.BytesIO(b"{\n" * 10_000)).problems
    assert found.count == 10_000 and len(found.first) == 100


def row_of(size: int) -> bytes:
    return b'{"a": "' + b"x" * (size - 9) + b'"}'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'[{"a": 1},\n {"a": }]', "offset 12: row 2 (line 2)"),
        (b'[{"a": 1}', "offset 9: row 2 (line 1)"),
        (b'[{"a": 1},', "offset 10: row 2 (line 1)"),
        (b'[{"a": 1} {"a": 2}]', "offset 10: row 2 (line 1)"),
        (b'[{"a": 1},\n\n[2]]', "offset 12: row 2 (line 3)"),
        (b'[{"a": 1}, 7]', "offset 11: row 2 (line 1)"),
        (b'[{"a": 1}]\n{"a": 2}', "offset 11: row 2 (line 2)"),
        (b'[{"a": 1},\n{"a": "\xc3\xa9\xff"}]', "line 2"),
        (b'[{"a": 1},\n{"a": "\xc3', "line 2"),
        (b'"text"', "offset 0"),
        (b"", "offset 0"),
        (b"[" * 100_000, "offset 1: row 1 (line 1)"),
        (b'[{"a": ' + b"[" * 500 + b"]" * 500 + b"}]", "offset 1: row 1 (line 1)"),
        (b'[{"a": [' + b"[]," * 5_000_000 + b"[]]}]", "offset 1: row 1 (line 1)"),
        (b"[" + row_of(MAX_BYTES["json"] + 1) + b"]", "row 1 (line 1)"),
        (b'["' + b"x" * (MAX_BYTES["json"] + 1), "row 1 (line 1)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_json_array_damage(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with raises(DataError, named, f"python -m data index {path}"):
        opened(path)


def test_a_row_of_the_largest_size(tmp_path: Path) -> None:
    """Longer than any piece that is read at once, between short ones."""
    large = row_of(MAX_BYTES["json"])
    (tmp_path / "a.json").write_bytes(b'[{"b": 1},' + large + b',{"b": 2}]')
    (tmp_path / "a.jsonl").write_bytes(b'{"b": 1}\n' + large + b'\n{"b": 2}')
    for name in ("a.json", "a.jsonl"):
        shards = opened(tmp_path / name)
        assert [shards.read(n)["json"] for n in range(3)] == [b'{"b": 1}', large, b'{"b": 2}']


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "offset 0: line 1"),
        (b"sentence 1\tsentence 2\tlabel\n", "offset 0: line 1"),
        (b"7\ta\tb\tc\n", "offset 0: line 1"),
        (b"id,text,title\n1,a,b\n", "offset 0: line 1"),
        (b"\xc3\xa9\xff\n", "offset 0: line 1"),
        (b"id\ttext\ttitle\n1\ta\tb\n2\ta\n", "offset 20: line 3"),
        (b"id\ttext\ttitle\n1\ta\tb\n2\t\xc3\xa9\xff\tb\n", "offset 20: line 3"),
        (b'id\ttext\ttitle\n1\ta\tb\n2\t"a\tb\n3\tc\td\n', "offset 20: line 3"),
        (b'id\ttext\ttitle\n1\t"a"b\tb\n', "offset 14: line 2"),
        (b'id\ttext\ttitle\n1\t"' + (b"x" * 999 + b"\n") * 17_000, "line 2"),
        (b'id\ttext\ttitle\n1\t"a\nb\nc', "line 2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_table_damage(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    with raises(DataError, named):
        opened(path)


def test_table_rows_keep_their_bytes_and_lines(tmp_path: Path) -> None:
    rows = [b"1\ta\tb", b'2\t"two\r\nlines, ""quoted"""\tb', b"3\tc\td"]
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbfid\ttext\ttitle\r\n" + b"\r\n".join(rows) + b"\n")
    shards = opened(tmp_path / "a.tsv")
    assert [shards.read(n)["tsv"] for n in range(3)] == rows
    assert [shards.key(n) for n in range(3)] == ["2", "3", "5"]


def test_a_row_that_csv_refuses_is_a_bad_row() -> None:
    for row in (b'1\t"a', b"1\ta\rb"):
        with raises(BadRow, "unreadable row"):
            parse_row({"tsv": row}, lambda: (["id", "text"], True))
