"""Files and folders are written completely or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.messages import raises

from dyad.data.base.files import remove_dead, whole_file, whole_folder, write_bytes
from dyad.data.cli.outputs import new_folder
from dyad.data.shards.index_cache import write_cached


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_bytes(path, b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("temporary", [None, ".other"])
def test_a_block_that_raises_leaves_the_old_file(temporary: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with (
        pytest.raises(KeyboardInterrupt),
        whole_file(path, temporary and tmp_path / temporary) as file,  # type: ignore[arg-type]
    ):
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.json"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    (tmp_path / ".a.json.partial").symlink_to(tmp_path / "secret")
    write_bytes(tmp_path / "a.json", b"new")
    assert (tmp_path / "secret").read_bytes() == b"key" and names(tmp_path) == ["a.json", "secret"]


def test_an_error_names_the_file_that_the_user_knows(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        write_bytes(tmp_path / "none" / "a.json", b"")
    assert error.value.filename == str(tmp_path / "none" / "a.json")
    with raises(OSError), whole_file(tmp_path / "a.json"):
        raise OSError("of a driver")


def test_a_folder_is_there_when_the_block_ends(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()  # left by a killed process
    (tmp_path / ".out.partial" / "left").touch()
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"1")
        assert names(tmp_path) == [".out.partial"]
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]
    with raises(OSError), whole_folder(tmp_path / "out") as folder:
        (folder / "b").touch()
    with raises(ValueError), whole_folder(tmp_path / "other"):
        raise ValueError("bad")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]


def test_a_folder_makes_room_for_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with raises(ValueError), whole_folder(tmp_path / "out", replace=True):
        raise ValueError("bad")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["old"]
    with whole_folder(tmp_path / "out", replace=True) as folder:
        (folder / "new").touch()
        assert names(tmp_path / "out") == ["old"]
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["new"]
    with raises(OSError), whole_folder(tmp_path / "out", replace=True) as folder:
        folder.rmdir()  # so that it cannot be renamed
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["new"]


# ---- what dead writers leave -----------------------------------------------------------------------------------------

WRITER = """import sys; from pathlib import Path; from dyad.data.base.files import whole_file, whole_folder
write, out, beside = sys.argv[1:]
with {"file": whole_file, "folder": whole_folder}[write](Path(out), Path(beside)):
    print("ready", flush=True); sys.stdin.read()
"""


def age(path: Path) -> None:
    os.utime(path, (0, 0), follow_symlinks=False)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_has_is_not(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, kind, str(tmp_path / "out"), str(tmp_path / ".out.7.partial")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        age(tmp_path / ".out.7.partial")
        remove_dead(tmp_path, ".out.*.partial")
        if kind == "folder":
            with raises(OSError, tmp_path / "out"), whole_folder(tmp_path / "out", tmp_path / ".out.7.partial"):
                pass
        assert names(tmp_path) == [".out.7.partial"]
        writer.send_signal(signal.SIGKILL)
    remove_dead(tmp_path, ".out.*.partial")
    assert names(tmp_path) == []


def test_what_may_be_of_a_living_writer_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.1.partial").mkdir()
    (tmp_path / "mine").write_text("text")
    (tmp_path / ".out.2.partial").symlink_to(tmp_path / "mine")
    age(tmp_path / ".out.2.partial")
    remove_dead(tmp_path, ".out.*.partial")
    assert names(tmp_path) == [".out.1.partial", ".out.2.partial", "mine"]


def test_the_next_writer_of_an_index_or_a_folder_removes_them(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    left = [tmp_path / ".index" / f".{'0' * 16}", tmp_path / ".index" / "kept", tmp_path / ".packed.7.partial"]
    (tmp_path / ".index").mkdir()
    for path in left:
        path.touch()
        age(path)
    write_cached(str(tmp_path / "a.tar"), "a.tar", {"name": "a.tar"}, np.zeros(1))
    with new_folder(tmp_path / "packed"):
        pass
    assert [path.exists() for path in left] == [False, True, False]
