"""Samples by id and the stored index: every byte checked when read, every process and every change survived."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.messages import raises
from helpers.shards import BLOCK, headers_of, index_shard, opened, overwrite, stored, write_pairs

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.loading.order import Order
from dyad.data.shards.index import BYTES_PER_PROCESS, index_shards
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.shards.storage import shard_sha256

# ---- reading -------------------------------------------------------------------------------------------------------


def test_bit_flip_in_a_payload_is_found_when_read(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    shards = opened(path)
    at = headers_of(path)[6] + BLOCK
    keep = os.stat(path)
    overwrite(path, at + 20, bytes([path.read_bytes()[at + 20] ^ 4]))
    os.utime(path, ns=(keep.st_atime_ns, keep.st_mtime_ns))
    assert shards.read(2)
    with raises(SampleError, path, "'000003'", f"offset {at}", "CRC32"):
        shards.read(3)


def test_shard_replaced_cut_or_deleted_after_indexing(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    before, running = opened(path), opened(path)
    running.read(0)
    write_pairs(path, 6, first=1)
    for sample, shards in ((0, before), *((n, running) for n in range(1, 5))):  # under an open file, too
        with raises(DataError, path):
            shards.read(sample)
    os.truncate(path, 600)
    with raises(DataError, path):
        running.read(4)
    path.unlink()
    for shards in (before, running):
        with raises(DataError, path):
            shards.read(0)
    with raises(ConfigError, path):
        opened(path)


def test_a_touched_shard_is_the_same_one_until_its_content_is_another(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    running, fresh = opened(path), opened(path)
    expected = [running.read(n) for n in range(5)]
    os.utime(path, ns=(1, 1))
    assert [shards.read(n) for shards in (running, fresh) for n in range(5)] == expected * 2
    at = headers_of(path)[4] + BLOCK + 20
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))
    os.utime(path, ns=(2, 2))
    assert running.read(1) == expected[1]
    for shards in (running, pickle.loads(pickle.dumps(fresh))):
        with raises(DataError, path) as caught:
            shards.read(2)
        assert not isinstance(caught.value, SampleError)


def test_transient_errors_are_retried_and_others_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyad.data.shards.storage.RETRY_SECONDS", (0.0, 0.0, 0.0))
    shards = opened(write_pairs(tmp_path / "a.tar", 2))
    read, failures = os.pread, iter([OSError(5, "Input/output error")] * 3)

    def flaky(descriptor: int, count: int, offset: int) -> bytes:
        if error := next(failures, None):
            raise error
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", flaky)
    assert shards.read(0)
    failures = iter([OSError(5, "Input/output error")] * 9)
    with raises(DataError, "'000001'", "Input/output error") as caught:
        shards.read(1)
    assert not isinstance(caught.value, SampleError), "a substitute would make another run of it"


def test_a_shard_that_cannot_be_opened_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyad.data.shards.storage.RETRY_SECONDS", (0.0, 0.0, 0.0))
    path = write_pairs(tmp_path / "a.tar", 2)
    shards = opened(path)
    for name, failing in (("stat", 3), ("open", 3), ("open", 4)):
        real, failures = getattr(os, name), iter([OSError(116, "Stale file handle")] * failing)

        def flaky(place: str, *more: int) -> object:
            if str(place) == str(path) and (error := next(failures, None)):  # noqa: B023
                raise error
            return real(place, *more)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(os, name, flaky)
            fresh = pickle.loads(pickle.dumps(shards))
            if failing == 3:
                assert fresh.read(0)
            else:
                with raises(DataError, "Stale file handle"):
                    fresh.read(0)


def _read_as_nobody(shards: Shards, send: Connection) -> None:
    if os.getuid() == 0:  # for whom no file is closed
        os.setuid(65534)
    try:
        shards.read(0)
    except DataError as error:
        send.send((type(error).__name__, str(error)))


def test_permission_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyad.data.shards.storage.RETRY_SECONDS", (0.0, 0.0, 0.0))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = write_pairs(Path(folder) / "a.tar", 2)
        shards = opened(path)
        path.chmod(0)
        receive, send = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_read_as_nobody, args=(shards, send))
        child.start()
        kind, told = receive.recv()
        child.join()
    assert kind == "DataError" and "cannot be opened now: [Errno 13] Permission denied" in told


def test_damage_that_is_only_in_the_reading_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = opened(write_pairs(tmp_path / "a.tar", 2))
    read, spoilt = os.pread, iter([True])

    def once_wrong(descriptor: int, count: int, offset: int) -> bytes:
        return bytes(count) if next(spoilt, False) else read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", once_wrong)
    assert shards.read(0)["txt"] == b"caption 0"


def test_one_key_in_two_shards_is_two_samples(tmp_path: Path) -> None:
    shards = opened(write_pairs(tmp_path / "a.tar", 3), write_pairs(tmp_path / "b.tar", 3))
    assert len(shards) == 6 and [shards.origin(i)[1] for i in (1, 4)] == ["000001"] * 2
    assert shards.origin(1)[0] != shards.origin(4)[0]


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
    with raises(DataError, "a.tar"):
        pickle.loads(pickle.dumps(remote)).read(0)
    monkeypatch.setattr("dyad.data.shards.storage.RETRY_SECONDS", ())
    monkeypatch.setattr(type(fs), "cat_file", lambda *_, **__: {}["credentials"])
    with raises(DataError, "'credentials'"):
        remote.read(0)
    with raises(ConfigError, "memory://bucket/gone.tar"):
        open_shards(parse_sources("memory://bucket/gone.tar"))


# ---- the stored index ----------------------------------------------------------------------------------------------


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
    with raises(DataError, "a.tar"):
        opened(path).read(0)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 3)
    index = index_shard(str(path))
    np.save(index.table_file, np.array([print], object), allow_pickle=True)
    with raises(DataError, path):
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
    with raises(DataError, "XDG_CACHE_HOME"):
        opened(path)


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_pairs(tmp_path / "a.tar", 3)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(DataError, path):
        opened(path)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def _index_many(folder: str, results) -> None:
    for _ in range(15):
        indexes = [index_shard(str(path)) for path in sorted(Path(folder).glob("*.tar"))]
        results.put([(index.name, index.samples, index.table().key(0)) for index in indexes])
        for path in Path(folder, ".index").glob("*.json"):
            path.unlink(missing_ok=True)


def test_processes_that_index_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    (key,) = (tmp_path / "cache" / "dyad").iterdir()  # the one of all of them
    assert key.stat().st_size == 32 and key.stat().st_mode & 0o777 == 0o600


def test_parallel_scan_equals_the_serial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(write_pairs(tmp_path / f"{n}.tar", n + 1)) for n in range(3)]
    serial = list(index_shards(paths))
    for path in (tmp_path / ".index").glob("*.json"):
        if "1.tar" not in path.name:
            path.unlink()
    monkeypatch.setattr("dyad.data.shards.index.BYTES_PER_PROCESS", 1)
    assert BYTES_PER_PROCESS > 1
    assert list(index_shards(paths, workers=2)) == serial


@pytest.mark.parametrize("name", ["a.tar", "a.jsonl"])
def test_a_read_that_fails_in_a_scan_names_the_shard(name: str, tmp_path: Path) -> None:
    (path := tmp_path / name).symlink_to("/proc/self/mem")  # opens, and its first read is an Input/output error
    for read in (lambda path: [*index_shards([path])], shard_sha256):
        with raises(DataError, path, "Input/output error"):
            read(str(path))


def test_index_json_is_plain(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 2)
    index_shard(str(path))
    described = json.loads(stored(path).read_text())
    assert described["name"] == "a.tar" and described["samples"] == 2 and described["suffixes"] == ["png", "txt"]
    assert described["size"] == path.stat().st_size and "path" not in described
