"""The door: a pipe, a device or a folder in place of a file is refused in one line by every reader, and never waits."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.messages import raises

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import UserError
from dyad.data.log_weights import read_log_weights
from dyad.data.question_passage.judgements import judgements
from dyad.data.shards.index import index_shards
from dyad.data.shards.storage import open_ranges, open_sequential, sha256_of
from dyad.data.tables.readers import open_table
from dyad.eval.mine.pair_scores import read_pair_scores
from dyad.eval.report.run_folder import read_run
from dyad.eval.tasks.prompts import read_probe
from dyad.train.losses.gathered.importance import SampleTable
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.folder import read_yaml, recorded_state
from dyad.train.run_folder.run_state import locked

READERS: dict[str, Callable[[str], object]] = {
    **{f"t{suffix}": lambda path: [*open_table(path).rows()] for suffix in (".csv", ".tsv", ".parquet", ".arrow")},
    "t.json": lambda path: [*open_table(path).rows()],
    "t.jsonl": lambda path: [*open_table(path).rows()],
    "s.tar": lambda path: [*index_shards([path])],
    "s.jsonl": lambda path: [*index_shards([path])],
    "qrels.tsv": lambda path: [*judgements(path)],
    "scores.tsv": read_pair_scores,
    "config.yaml": lambda path: read_yaml(Path(path)),
    "probe.json": lambda path: read_probe(Path(path)),
    "table.npy": SampleTable,
    "table.safetensors": read_log_weights,
    "manifest.json": lambda path: Checkpoint(Path(path).parent).verify(),
}
PLAIN: dict[str, Callable[[str], object]] = {  # whose callers make one line of the OSError
    "a.tar": lambda path: open_sequential(path).read(),
    "b.tar": open_ranges,
    "c.tar": sha256_of,
    "d.npy": map_array,
}


def put(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    """A reader that waits for a writer of the pipe, or that reads a device to its end, fails."""

    def late(*args: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [*READERS, *PLAIN])
def test_what_is_no_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    put(tmp_path / name, kind)
    with pytest.raises(UserError if name in READERS else OSError) as error:
        (READERS | PLAIN)[name](str(tmp_path / name))
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_run_folder_of_pipes_is_read_without_them(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    for name in ("metrics.jsonl", "log.txt", "run_state.json"):
        put(tmp_path / name, kind)
    assert read_run(tmp_path).history == {} and recorded_state(tmp_path) == {}


def test_a_lock_that_is_a_link_empties_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with raises(UserError, tmp_path / ".lock"), locked(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "text"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_lock_that_is_no_file_is_one_line(kind: str, tmp_path: Path) -> None:
    put(tmp_path / ".lock", kind)
    with pytest.raises(UserError) as error, locked(tmp_path):
        pass
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_arrays_are_npy_of_plain_numbers_inside_their_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", np.arange(6.0).reshape(2, 3))
    assert map_array(tmp_path / "good.npy", tmp_path).sum() == 15
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "zip.npy", a=np.zeros(2))
    os.rename(tmp_path / "zip.npy.npz", tmp_path / "zip.npy")
    for name, shape in (
        ("long", "(9,)"),
        ("huge", f"({1 << 62}, {1 << 62})"),
        ("negative", "(-3,)"),
        ("text", "'a'"),
        ("cut", "(("),
    ):
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        (tmp_path / f"{name}.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    for path in sorted(tmp_path.glob("*.npy")):
        if path.name != "good.npy":
            with pytest.raises(ValueError):
                map_array(path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.npy").symlink_to(tmp_path / "good.npy")
    with pytest.raises(OSError):
        map_array(tmp_path / "in" / "link.npy", tmp_path / "in")
