"""Index and reading of shards: whole ones equal tarfile's reading, damaged ones are named, never shortened in silence."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import random
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import webdataset

from data.errors import ConfigError, DataError
from data.index import BYTES_PER_PROCESS, index_shards
from data.order import Order
from data.scan import MAX_BYTES, scan_tar, split_name
from data.shards import Shards, index_shard, open_shards
from data.sources import Source, parse_sources
from tests.helpers_shards import pairs, picture, write_pairs, write_tar

BLOCK = 512


def opened(*paths: Path | str) -> Shards:
    return open_shards([Source(tuple(str(path) for path in paths))])


def problems(path: Path) -> list[str]:
    return [str(problem) for problem in index_shard(str(path)).problems]


# ---- whole shards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_reads_what_was_written(tmp_path: Path, tar_format: int) -> None:
    """Long names take a ustar prefix, a GNU long-name header or a PAX header; all kinds of names come back."""
    keys = ["a", "folder.x/b", "x" * 90 + "/" + "y" * 80, "żółw/ñ", "./dotted"]
    random.seed(0)
    members = [
        (f"{key}.{s}", random.randbytes(n)) for key in keys for s, n in (("JPG", 700), ("txt", 512), ("json", 0))
    ]
    shards = opened(write_tar(tmp_path / "a.tar", members, tar_format))
    assert len(shards) == len(keys)
    for sample, key in enumerate(keys):
        payloads = [payload for name, payload in members if name.startswith(key + ".")]
        assert shards.key(sample) == key.removeprefix("./")
        assert shards.read(sample) == dict(zip(["jpg", "txt", "json"], payloads, strict=True))


def test_equals_webdataset(tmp_path: Path) -> None:
    """The same samples, keys and members as webdataset finds in a shard of its own writer."""
    path = tmp_path / "w.tar"
    with webdataset.TarWriter(str(path)) as writer:  # type: ignore[attr-defined]
        for n in range(20):
            writer.write({"__key__": f"k/{n:05d}", "png": picture(n), "txt": f"text {n}", "json": {"n": n}})
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False))  # type: ignore[attr-defined]
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
    assert [shards.read(n) for n in range(3)] == [
        {"json": '{"q": "ünï"}'.encode()},
        {"json": b'{"q": 2}'},
        {"json": b'{"q": 3}'},
    ]
    assert shards.key(2) == "3"


def test_empty_shards_have_no_samples(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    shards = opened(write_tar(tmp_path / "none.tar", []), tmp_path / "none.jsonl", write_pairs(tmp_path / "z.tar", 2))
    assert len(shards) == 2 and shards.key(1) == "000001"


# ---- damage --------------------------------------------------------------------------------------------------------


def headers_of(path: Path) -> list[int]:
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


DAMAGE: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "cut in a payload": (lambda p, at: os.truncate(p, at + 517), "the file ends at {cut}, inside member '000005.png'"),
    "cut in a header": (lambda p, at: os.truncate(p, at + 100), "the file ends 100 bytes into a member header"),
    "cut between members": (lambda p, at: os.truncate(p, at), "the file ends here without an end-of-archive marker"),
    "zero block": (lambda p, at: overwrite(p, at, bytes(BLOCK)), "a block of zeros, but data goes on at offset {next}"),
    "random header": (lambda p, at: overwrite(p, at, random.Random(1).randbytes(BLOCK)), "no valid tar header"),
    "bit flip in a header": (lambda p, at: overwrite(p, at, b"1"), "no valid tar header"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_with_its_offset(tmp_path: Path, kind: str) -> None:
    """Each of these makes webdataset deliver fewer samples without a word."""
    path = write_pairs(tmp_path / "a.tar", 10)
    at = headers_of(path)[10]
    damage, message = DAMAGE[kind]
    damage(path, at)
    index = index_shard(str(path))
    assert index.samples == 5
    with pytest.raises(DataError, match=message.format(at=at, cut=at + BLOCK + 5, next=at + BLOCK)) as caught:
        opened(path)
    assert str(path) in str(caught.value) and "1 of 1 shards are broken" in str(caught.value)


def test_half_sample_at_a_cut(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 10)
    at = headers_of(path)[11]
    os.truncate(path, at)
    assert problems(path) == [
        f"offset {at}: the file ends here without an end-of-archive marker: it was cut",
        f"offset {headers_of(path)[10]}: half a sample: '000005' has no caption and no txt",
    ]


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
        ("000006.png", picture()),
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
            f"offset {at[18]}: a second member '000009.png'",
            f"offset {at[14]}: key '000002' again, first at offset {at[4]}",
            f"offset {at[12]}: half a sample: '000006' has no caption and no txt",
            f"offset {at[13]}: half a sample: '000007' has no picture",
        ]
    )


def test_captions_missing_in_most_samples(tmp_path: Path) -> None:
    members = [*pairs(2), *(member for member in pairs(5, 2) if member[0].endswith("png"))]
    assert len(problems(write_tar(tmp_path / "a.tar", members))) == 5


def test_limits_and_refusals(tmp_path: Path) -> None:
    long = write_tar(
        tmp_path / "long.tar", [("0.png", picture()), ("0.txt", bytes(MAX_BYTES["txt"] + 1)), *pairs(3, 1)]
    )
    assert "has 1048577 bytes, more than the limit of 1048576" in problems(long)[0]
    assert len(problems(long)) == 2 and index_shard(str(long)).samples == 4
    arrays = write_tar(tmp_path / "npy.tar", [("0.npy", b"1"), ("1.npy", b"1")])
    assert problems(arrays) == ["offset 0: none of its members ends in jpg, jpeg, png, webp, txt, json, cls"]
    (tmp_path / "text.tar").write_text("no tar at all, but longer than a block " * 20)
    assert problems(tmp_path / "text.tar") == ["offset 0: no valid tar header (its checksum is wrong)"]


def header(name: bytes, size: bytes, kind: bytes = b"0", **fields: bytes) -> bytes:
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
        (header(b"x", b"14", b"x") + b"99 path=b.txt\n".ljust(BLOCK, b"\0"), "damaged PAX header"),
        (header(b"x", b"13", b"x") + b"11 size=-1\n".ljust(BLOCK, b"\0") + header(b"a.txt", b"0"), "damaged PAX header"),
        (header(b"x", b"17", b"x") + b"15 size=abcde\n\n".ljust(BLOCK, b"\0") + header(b"a.txt", b"0"), "damaged PAX header"),
        (header(b"x", b"\x80" + (1 << 40).to_bytes(11, "big"), b"L"), "more than the limit"),
        (header(b"a.bin", b"\x80" + (1 << 40).to_bytes(11, "big")) + bytes(BLOCK), "bytes of member 'a.bin' are missing at the end"),
        (header(b"g", b"7", b"g") + b"7 a=bc\n".ljust(BLOCK, b"\0") + header(b"k", b"0", b"K"), "the file ends here"),
    ],
)  # fmt: skip
def test_odd_headers(content: bytes, message: str) -> None:
    found = [str(problem) for problem in scan_tar(io.BytesIO(content)).problems]
    assert len(found) == 1 and message in found[0], found


def test_pax_size_is_followed() -> None:
    body = (
        header(b"x", b"11", b"x")
        + b"9 size=3\n".ljust(BLOCK, b"\0")
        + header(b"a.txt", b"0")
        + b"abc".ljust(BLOCK, b"\0")
    )
    scan = scan_tar(io.BytesIO(body.replace(b"x" + bytes(123) + b"11", b"x" + bytes(123) + b"11") + bytes(2 * BLOCK)))
    assert not scan.problems, scan.problems
    assert scan.samples[0].members == [("txt", 3 * BLOCK, 3)] and scan.samples[0].crc32 == zlib.crc32(b"abc")


def test_every_single_byte_matters(tmp_path: Path) -> None:
    """Whatever byte of headers, payloads or padding is lost at the end, the scan says so."""
    whole = write_pairs(tmp_path / "a.tar", 1).read_bytes()
    end = len(whole.rstrip(b"\0")) // BLOCK * BLOCK + 3 * BLOCK
    for cut in range(0, end, 37):
        assert scan_tar(io.BytesIO(whole[:cut])).problems, cut
    assert not scan_tar(io.BytesIO(whole[:end])).problems


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"offset 9: line 2 is not JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"offset 9: line 2 is not UTF-8: invalid start byte at byte 7"),
        (b'{"a": 1}\n\n{"a": 2}\n', r"offset 9: line 2 is empty"),
        (b'{"a": 1}\n[1]\n', r"offset 9: line 2 is a list, not an object"),
        (b'{"a": 1}\n"' + b"x" * MAX_BYTES["json"], r"line 2 is longer than 1048576 bytes"),
        (b"[" * 100_000, r"line 1 is not JSON"),
    ],
)
def test_json_lines_damage(tmp_path: Path, lines: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines)
    with pytest.raises(DataError, match=message):
        opened(path)


# ---- reading -------------------------------------------------------------------------------------------------------


def test_bit_flip_in_a_payload_is_found_when_read(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    shards = opened(path)
    at = headers_of(path)[6] + BLOCK
    keep = os.stat(path)
    overwrite(path, at + 20, bytes([path.read_bytes()[at + 20] ^ 4]))
    os.utime(path, ns=(keep.st_atime_ns, keep.st_mtime_ns))
    assert shards.read(2)
    with pytest.raises(DataError, match=rf"{path}: sample '000003' at offset {at}: its CRC32 is not as indexed"):
        shards.read(3)


def test_shard_replaced_cut_or_deleted_after_indexing(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    before, running = opened(path), opened(path)
    running.read(0)
    write_pairs(path, 6, first=1)
    with pytest.raises(DataError, match="has changed since it was indexed"):
        before.read(0)
    for sample in range(1, 5):  # rewritten in place under an open file: never another sample's bytes
        with pytest.raises(DataError, match="CRC32 is not as indexed"):
            running.read(sample)
    os.truncate(path, 600)
    with pytest.raises(DataError, match="CRC32 is not as indexed"):
        running.read(4)
    path.unlink()
    with pytest.raises(DataError, match="cannot be opened now"):
        before.read(0)
    with pytest.raises(ConfigError, match="does not exist"):
        opened(path)


def test_transient_errors_are_retried_and_lasting_ones_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.storage.RETRY_SECONDS", (0.0, 0.0, 0.0))
    shards = opened(write_pairs(tmp_path / "a.tar", 2))
    read, failures = os.pread, iter([OSError(5, "Input/output error")] * 3)

    def flaky(descriptor: int, count: int, offset: int) -> bytes:
        if error := next(failures, None):
            raise error
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", flaky)
    assert shards.read(0)
    failures = iter([OSError(5, "Input/output error")] * 9)
    with pytest.raises(DataError, match="sample '000001' at offset .* cannot be read: .*Input/output error"):
        shards.read(1)


def test_ids_sizes_weights_and_bounds(tmp_path: Path) -> None:
    a, b, c = (str(write_pairs(tmp_path / f"{n}.tar", n, 100 * n)) for n in (3, 4, 5))
    shards = open_shards(parse_sources(f"{a}::{tmp_path}/{{4,5}}.tar@2"))
    assert shards.sizes == [3, 9] and shards.weights == [1.0, 2.0] and len(shards) == 12
    assert [shards.key(n) for n in (0, 2, 3, 7, 11)] == ["000300", "000302", "000400", "000500", "000504"]
    assert shards.locate(7) == (index_shard(c), 0) and shards.locate(6) == (index_shard(b), 3)
    for outside in (-1, 12):
        with pytest.raises(IndexError):
            shards.read(outside)


def test_how_samples_are_cut_into_shards_changes_nothing(tmp_path: Path) -> None:
    """The same samples in one, three or seven shards: the same keys at every step."""
    seen = []
    for cuts in ((100,), (30, 30, 40), (1, 9, 20, 20, 20, 20, 10)):
        folder = tmp_path / str(len(cuts))
        folder.mkdir()
        for n, count in enumerate(cuts):
            write_pairs(folder / f"{n}.tar", count, sum(cuts[:n]))
        shards = opened(*sorted(folder.glob("*.tar")))
        order = Order(shards.sizes, shards.weights, seed=5, global_batch_size=16)
        seen.append([[shards.key(int(n)) for n in order.ids(step)] for step in range(12)])
    assert seen[0] == seen[1] == seen[2]


def test_pickle_and_fork_reopen_files(tmp_path: Path) -> None:
    shards = opened(write_pairs(tmp_path / "a.tar", 40))
    expected = [shards.read(n) for n in range(40)]
    copy = pickle.loads(pickle.dumps(shards))
    assert [copy.read(n) for n in range(40)] == expected and copy.fingerprint == shards.fingerprint
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: send.send([shards.read(n) for n in range(40)]))
    child.start()
    assert receive.recv() == expected
    child.join()


def test_fingerprint_tells_content_not_place(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    a, b = write_pairs(tmp_path / "a.tar", 3), write_pairs(tmp_path / "b.tar", 3, 3)
    moved = tmp_path / "x" / "a.tar"
    moved.write_bytes(a.read_bytes())
    assert opened(a, b).fingerprint == opened(moved, b).fingerprint != opened(b, a).fingerprint
    overwrite(moved, 20 * BLOCK - 1, b"\1")  # padding after the end marker
    assert opened(a).fingerprint != index_shard(str(moved)).sha256


def test_remote_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    local = write_pairs(tmp_path / "a.tar", 8)
    fs.pipe_file("/bucket/a.tar", local.read_bytes())
    remote, here = open_shards(parse_sources("memory://bucket/*.tar")), opened(local)
    assert remote.fingerprint == here.fingerprint
    assert [remote.read(n) for n in range(8)] == [here.read(n) for n in range(8)]
    assert len(list((tmp_path / "cache" / "dyad" / "index").rglob("a.tar.json"))) == 1
    fs.pipe_file("/bucket/a.tar", local.read_bytes()[:-BLOCK])
    with pytest.raises(DataError, match="has changed"):
        open_shards(parse_sources("memory://bucket/*.tar")), pickle.loads(pickle.dumps(remote)).read(0)
    with pytest.raises(ConfigError, match=r"memory://bucket/gone\.tar does not exist"):
        open_shards(parse_sources("memory://bucket/gone.tar"))


# ---- the stored index ----------------------------------------------------------------------------------------------


def stored(path: Path) -> Path:
    return path.parent / ".index" / f"{path.name}.json"


def test_index_is_used_again_and_renewed_when_the_shard_changes(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    first = index_shard(str(path))
    written = stored(path).stat().st_mtime_ns
    assert index_shard(str(path)) == first and stored(path).stat().st_mtime_ns == written
    write_pairs(path, 4)
    assert index_shard(str(path)).samples == 4
    assert len(list(stored(path).parent.iterdir())) == 2, "the old table is gone, nothing temporary is left"
    later = os.stat(path).st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))
    assert index_shard(str(path)).mtime == str(later)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 99}', b'{"format": 1, "name": "a"}'])
def test_damaged_or_foreign_index_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    index = index_shard(str(path))
    stored(path).write_bytes(content)
    assert index_shard(str(path)) == index
    Path(index.table_file).unlink()
    assert len(opened(path).read(2)) == 2


def test_damaged_table_is_reported(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    index = index_shard(str(path))
    os.truncate(index.table_file, 150)
    with pytest.raises(DataError, match=r"the index of .*a\.tar is damaged"):
        opened(path).read(0)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    index = index_shard(str(path))
    np.save(index.table_file, np.array([print], object), allow_pickle=True)
    with pytest.raises(DataError, match="is damaged"):
        opened(path).read(0)


def test_a_folder_that_cannot_be_written_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_pairs(tmp_path / "a.tar", 3)
    (tmp_path / ".index").touch()  # a file where the folder should be: fails for root, too
    index = index_shard(str(path))
    assert index.table_file.startswith(str(tmp_path / "cache" / "dyad" / "index"))
    assert index_shard(str(path)) == index and opened(path).read(2)
    (tmp_path / "nocache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nocache"))
    with pytest.raises(DataError, match="Set XDG_CACHE_HOME"):
        opened(path)


def _index_many(folder: str, results) -> None:
    for _ in range(15):
        indexes = [index_shard(str(path)) for path in sorted(Path(folder).glob("*.tar"))]
        results.put([(index.name, index.samples, index.table().key(0)) for index in indexes])
        for path in Path(folder, ".index").glob("*.json"):
            path.unlink(missing_ok=True)


def test_processes_that_index_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    expected = [(f"{n}.tar", n + 1, "000000") for n in range(4)]
    for n in range(4):
        write_pairs(tmp_path / f"{n}.tar", n + 1)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_index_many, args=(str(tmp_path), results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=60) == expected for _ in range(60))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def test_parallel_scan_equals_the_serial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(write_pairs(tmp_path / f"{n}.tar", n + 1)) for n in range(3)]
    serial = list(index_shards(paths))
    for path in (tmp_path / ".index").glob("*.json"):
        if "1.tar" not in path.name:
            path.unlink()
    monkeypatch.setattr("data.index.BYTES_PER_PROCESS", 1)
    assert BYTES_PER_PROCESS > 1
    assert list(index_shards(paths, workers=2)) == serial


def test_the_scan_is_fast(tmp_path: Path) -> None:
    """3,000 samples of two members: below 150 µs each, where tarfile alone takes about as long on a loaded machine."""
    path = write_tar(
        tmp_path / "a.tar", [(f"{n // 2:05d}.{'jt'[n % 2]}xt".replace("jxt", "json"), bytes(2000)) for n in range(6000)]
    )
    start = time.perf_counter()
    with path.open("rb", buffering=1 << 20) as file:
        samples = scan_tar(file).samples
    assert len(samples) == 3000
    assert (time.perf_counter() - start) / 3000 < 150e-6


def test_index_json_is_plain(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 2)
    index_shard(str(path))
    described = json.loads(stored(path).read_text())
    assert described["name"] == "a.tar" and described["samples"] == 2 and described["suffixes"] == ["png", "txt"]
    assert described["size"] == path.stat().st_size and "path" not in described
