"""Which indexes are believed, and what becomes of those that others made or damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers.shards import index_shard, opened, stored, write_pairs

from dyad.data.base.errors import DataError, SampleError
from dyad.data.shards.index import stored_index


def as_user(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_an_index_that_came_with_the_data_is_not_believed(tmp_path: Path) -> None:
    """Whoever made it knew size, time stamp and content, but not where it would lie."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    opened(write_pairs(theirs / "a.tar", 2))
    shutil.copytree(theirs, ours)  # with time stamps
    honest = index_shard(str(write_pairs(tmp_path / "b.tar", 3)))
    shutil.copy(tmp_path / ".index" / "b.tar.json", ours / ".index" / "a.tar.json")
    found = index_shard(str(ours / "a.tar"))
    assert (found.name, found.samples) == ("a.tar", 2) and found.sha256 != honest.sha256
    described = json.loads(stored(ours / "a.tar").read_text())
    for fact, value in {"samples": 0, "sha256": "0" * 64, "name": "b.tar"}.items():
        stored(ours / "a.tar").write_text(json.dumps({**described, fact: value}))
        assert index_shard(str(ours / "a.tar")) == found


def test_a_copy_of_ones_own_index_is_believed_and_that_of_another_user_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    as_user(monkeypatch, tmp_path / "me")
    index = index_shard(str(write_pairs(tmp_path / "data" / "a.tar", 3)))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    as_user(monkeypatch, tmp_path / "another")
    assert stored_index(index.path) == index, "whoever made it in this folder"
    assert stored_index(str(tmp_path / "copy" / "a.tar")) is None
    as_user(monkeypatch, tmp_path / "me")
    found = stored_index(str(tmp_path / "copy" / "a.tar"))
    assert found and found.sha256 == index.sha256
    Path(found.table_file).write_bytes(b"of somebody to whom it was given")
    assert stored_index(found.path) is None and stored_index(index.path) == index


def test_nodes_that_number_folders_differently_agree_on_one_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy stands for the folder as a second node sees it; neither user has a key."""
    (tmp_path / "node1").mkdir()
    (tmp_path / "no").touch()
    as_user(monkeypatch, tmp_path / "no")
    monkeypatch.setattr("dyad.data.shards.index_cache.cache_folders", lambda path: [Path(path).parent / ".index"])
    first = index_shard(str(write_pairs(tmp_path / "node1" / "a.tar", 3)))
    shutil.copytree(tmp_path / "node1", tmp_path / "node2")
    second = str(tmp_path / "node2" / "a.tar")
    (table,) = (tmp_path / "node2" / ".index").glob("*.npy")
    before = table.stat()
    assert stored_index(second) is None and index_shard(second).samples == 3
    assert table.stat().st_ino == before.st_ino, "its array is in use"
    shutil.copy(stored(Path(second)), stored(Path(first.path)))
    assert stored_index(first.path) == first and stored_index(second)


def test_a_link_in_the_place_of_the_index_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch, tmp_path / "me")
    for folder in ("data", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / ".index").symlink_to(tmp_path / "elsewhere")
    index = index_shard(str(write_pairs(tmp_path / "data" / "a.tar", 3)))
    assert index.table_file.startswith(str(tmp_path / "me")) and not list((tmp_path / "elsewhere").iterdir())


def test_a_link_in_the_place_of_a_table_of_an_index_is_replaced(tmp_path: Path) -> None:
    """It leads to equal bytes, which somebody else may change later."""
    path = write_pairs(tmp_path / "a.tar", 3)
    table = Path(index_shard(str(path)).table_file)
    theirs = shutil.move(table, tmp_path / "theirs.npy")
    table.symlink_to(theirs)
    assert Path(index_shard(str(path)).table_file) == table and not table.is_symlink()


def test_a_stranger_cannot_send_a_seal_for_every_folder(tmp_path: Path) -> None:
    index = index_shard(str(write_pairs(tmp_path / "a.tar", 3)))
    described = json.loads(stored(Path(index.path)).read_text())
    seals = ["0" * 64] * 8 + described["seals"]
    stored(Path(index.path)).write_text(json.dumps({**described, "seals": seals}))
    assert stored_index(index.path) is None


def read_all(path: Path) -> list[dict[str, bytes]]:
    shards = opened(path)
    return [shards.read(n) for n in range(len(shards))]


def test_offsets_that_cannot_be_are_refused_and_never_another_pair_read(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    right = read_all(path)
    (table,) = (tmp_path / ".index").glob("*.npy")
    sound, dice, refused = table.read_bytes(), random.Random(0), 0
    for _ in range(100):
        damaged = bytearray(sound)
        for _ in range(dice.choice((1, 3, 20))):
            damaged[dice.randrange(128, len(damaged))] = dice.randrange(256)
        table.write_bytes(damaged)
        try:
            assert [set(s.values()) for s in read_all(path)] == [set(s.values()) for s in right]
        except (DataError, SampleError):
            refused += 1
    assert refused > 60


@pytest.mark.parametrize("value", [None, "x", -1, 1.5, 10**30, [], {}, [1], True, {"a": "b"}], ids=repr)
def test_facts_of_the_wrong_kind_are_no_index(tmp_path: Path, value: object) -> None:
    path = write_pairs(tmp_path / "a.tar", 5)
    right = read_all(path)
    described = tmp_path / ".index" / "a.tar.json"
    sound = described.read_text()
    for fact in json.loads(sound):
        described.write_text(json.dumps({**json.loads(sound), fact: value}))
        try:
            assert read_all(path) == right  # indexed anew, or of no consequence
        except DataError as error:
            assert "damaged" in str(error) or fact in ("problem_count", "problems"), (fact, error)
