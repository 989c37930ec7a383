"""Compressed files come out whole or not at all, in bounded memory; bombs, cut and damaged ones are refused."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data.errors import ConfigError, DataError
from data.verbs import unpack as module
from data.verbs.options import UnpackOptions
from data.verbs.unpack import unpack

TEXT = np.random.default_rng(0).integers(97, 123, 300_000).astype(np.uint8).tobytes()
ZEROS = bytes(20 << 20)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
SKIPPABLE = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a zstd frame without content, as pzstd writes them

each = pytest.mark.parametrize("suffix", COMPRESS)


def write(folder: Path, suffix: str, packed: bytes) -> Path:
    path = folder / f"rows.jsonl{suffix}"
    path.write_bytes(packed)
    return path


def refused(error: type[Exception], match: str, path: Path, **options: object) -> None:
    """Also: nothing is left behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(error, match=match):
        unpack(str(path), UnpackOptions(**options))  # type: ignore[arg-type]
    assert sorted(path.parent.iterdir()) == before


@each
def test_content_comes_out_whole(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, suffix, COMPRESS[suffix](TEXT))
    assert unpack(str(path), UnpackOptions()) == tmp_path / "rows.jsonl"
    assert (tmp_path / "rows.jsonl").read_bytes() == TEXT
    assert f"{tmp_path / 'rows.jsonl'}: 300,000 bytes, 1." in capsys.readouterr().out
    other = tmp_path / "other"
    assert unpack(str(path), UnpackOptions(out=str(other))) == other
    assert other.read_bytes() == TEXT and len(list(tmp_path.iterdir())) == 3


def test_a_packed_tar_gets_the_name_of_a_shard(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(COMPRESS[".gz"](TEXT))
    assert unpack(str(tmp_path / "a.tgz"), UnpackOptions()) == tmp_path / "a.tar"
    assert (tmp_path / "a.tar").read_bytes() == TEXT


@each
def test_several_parts_in_one_file(tmp_path: Path, suffix: str) -> None:
    parts = [COMPRESS[suffix](part) for part in (TEXT[:5], b"", TEXT[5:])]
    joint = SKIPPABLE if suffix == ".zst" else b""
    unpack(str(write(tmp_path, suffix, joint.join([b"", *parts, b""]))), UnpackOptions())
    assert (tmp_path / "rows.jsonl").read_bytes() == TEXT


@each
def test_cut_files(tmp_path: Path, suffix: str) -> None:
    packed = COMPRESS[suffix](TEXT)
    for size in (len(packed) - 1, len(packed) // 2, 7):
        refused(
            DataError,
            r"rows.jsonl\.\w+: the file ends .* cut, after [\d,]+ unpacked",
            write(tmp_path, suffix, packed[:size]),
        )
    refused(DataError, "is empty", write(tmp_path, suffix, b""))


@each
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    packed = COMPRESS[suffix](TEXT)
    for at in (0, len(packed) // 2, len(packed) - 5 if suffix == ".gz" else len(packed) - 1):
        damaged = bytearray(packed)
        damaged[at] ^= 0x55
        refused(DataError, "no sound (gzip|zstd) file", write(tmp_path, suffix, bytes(damaged)))
    refused(DataError, "no sound (gzip|zstd) file", write(tmp_path, suffix, b"plain text, only named so"))
    refused(DataError, "no sound (gzip|zstd) file", write(tmp_path, suffix, packed + b"more after it"))


@each
def test_bombs_are_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, COMPRESS[suffix](ZEROS))
    refused(DataError, "holds more than 100 times its .* raise max_ratio=", path)
    refused(DataError, "holds more than max_size=1e\\+06 bytes", path, max_size=1e6, max_ratio=1e6)
    assert unpack(str(path), UnpackOptions(max_ratio=1e6)).stat().st_size == len(ZEROS)


@each
def test_small_files_may_shrink_by_any_ratio(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, COMPRESS[suffix](bytes(1 << 20)))
    assert path.stat().st_size < (1 << 20) / 500
    assert unpack(str(path), UnpackOptions()).stat().st_size == 1 << 20


@each
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    """200 MB of zeros in a process that may not have more than it needs to start, and 100 MB."""
    path = write(tmp_path, suffix, COMPRESS[suffix](bytes(200 << 20)))
    program = (
        "import resource, sys, zlib, gzip, zstandard; from data.verbs.options import UnpackOptions;"
        "from data.verbs.unpack import unpack;"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (100 << 20);"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used)); unpack(sys.argv[1], UnpackOptions(max_ratio=1e6))"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True)
    assert (tmp_path / "rows.jsonl").stat().st_size == 200 << 20


def test_a_frame_that_wants_too_much_memory(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, hash_log=10, chain_log=10)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(TEXT) + compressor.flush()
    refused(DataError, "no sound zstd file .*memory", write(tmp_path, ".zst", packed))


@each
def test_full_disk(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, and on the way when it only then shows."""
    path = write(tmp_path, suffix, COMPRESS[suffix](TEXT))
    monkeypatch.setattr(module, "SPARE", 1 << 60)
    refused(ConfigError, r"only [\d,]+ MB are free in .*out=", path)
    calls = []
    monkeypatch.setattr(module, "CHECK_EVERY", 100)
    monkeypatch.setattr(module, "SPARE", 0)
    checked = module._refuse_full_disk
    monkeypatch.setattr(module, "_refuse_full_disk", lambda out, coming: (calls.append(coming), checked(out, coming)))
    unpack(str(path), UnpackOptions())
    assert calls[0] == path.stat().st_size and calls[1:] and set(calls[1:]) == {100}


def test_a_write_that_fails(tmp_path: Path) -> None:
    """The system refuses the 100,001st byte."""
    path = write(tmp_path, ".gz", COMPRESS[".gz"](TEXT))
    program = (
        "import resource, signal, sys; from data.errors import run; from data.verbs.options import UnpackOptions;"
        "from data.verbs.unpack import unpack; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "run(lambda: unpack(sys.argv[1], UnpackOptions()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be written: [Errno 27]" in done.stderr
    assert list(tmp_path.iterdir()) == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_commands_that_cannot_work(tmp_path: Path) -> None:
    path = write(tmp_path, ".gz", COMPRESS[".gz"](TEXT))
    refused(ConfigError, r"does not exist\. Did you mean 'rows.jsonl.gz'", tmp_path / "rows.json.gz")
    (tmp_path / "x.zip").touch()
    refused(ConfigError, r"only .gz, .tgz, .zst files", tmp_path / "x.zip")
    refused(ConfigError, "must be positive", path, max_ratio=0)
    refused(ConfigError, "must be positive", path, max_size=-1)
    refused(ConfigError, "is there already; choose a new name", path, out=str(tmp_path / "x.zip"))
    refused(ConfigError, "cannot be written", path, out=str(tmp_path / "x.zip" / "y"))
