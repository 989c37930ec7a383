"""Digests of a checkpoint's files: computed once, never taken from memory for a file that may have changed."""

import os
import time
from pathlib import Path

import pytest
from helpers.dist import launch

from dyad.data.shards.storage import sha256_of
from dyad.train.run_folder import digests
from dyad.train.run_folder.digests import SETTLED, digest_of


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed; what was written before the test counts as long unchanged."""
    found: list[Path] = []

    def sha256(path: Path) -> str:
        found.append(path)
        return sha256_of(path)

    monkeypatch.setattr(digests, "sha256_of", sha256)
    monkeypatch.setattr(digests, "_KNOWN", {})
    return found


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(digests.time, "time", lambda: now() + seconds)


def test_a_file_is_hashed_once_and_anew_after_any_change(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    later(monkeypatch, 2 * SETTLED)
    assert digest_of(file) == digest_of(file) == sha256_of(file)
    assert len(hashed) == 1
    before = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    file.write_bytes(b"b" * 1000)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # ctime still tells
    assert digest_of(file) == sha256_of(file) and len(hashed) == 2
    other = tmp_path / "other"
    other.write_bytes(b"c" * 1000)
    other.replace(file)
    assert digest_of(file) == sha256_of(file) and len(hashed) == 3


def test_of_a_file_that_has_just_changed_no_digest_is_kept(tmp_path: Path, hashed: list[Path]) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"a", b"b", b"c"):
        file.write_bytes(content)
        assert digest_of(file) == sha256_of(file)
    assert len(hashed) == 3


def test_one_rank_of_a_machine_hashes_for_the_others() -> None:
    launch("dist_digests.py", 3)
