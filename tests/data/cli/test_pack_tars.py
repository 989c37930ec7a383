"""`data pack` of tar shards: what training refuses is put in order or left out, by the command of the refusal."""

from __future__ import annotations

import gzip
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from helpers.data_cli import ended, here
from helpers.messages import check, raises
from helpers.shards import BLOCK, Member, headers_of, image, opened, overwrite, pairs, write_tar
from pyarrow.parquet import write_table

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.shards.rows import SUFFIXES
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import parse_sources

JSON: list[Member] = [(f"{n:06d}.json", b'{"a": 1}') for n in range(12)]
GOOD = pairs(12)


def by_suffix(*members: Member) -> list[Member]:
    return sorted(members, key=lambda member: member[0].rpartition(".")[2])


def without(*names: str) -> list[Member]:
    return [member for member in sorted([*GOOD, *JSON]) if member[0] not in names]


# members, what else becomes of the file, the samples that are packed, and those that are left out
TARS: dict[str, tuple[list[Member], Callable[[Path], object], int, str]] = {
    "in the order of suffixes": (by_suffix(*GOOD, *JSON), id, 12, ""),
    "a second file of captions": ([*GOOD, *JSON], id, 12, ""),
    "a name twice": ([*GOOD, *pairs(2, 5)], id, 14, ""),
    "cut": (GOOD, lambda path: os.truncate(path, headers_of(path)[20]), 10, "1 damaged part"),
    "a damaged header": (
        GOOD,
        lambda path: overwrite(path, headers_of(path)[6], bytes(range(256)) * 2),
        3,
        "1 damaged",
    ),
    "a caption too long": ([*GOOD[:-1], ("000011.txt", bytes(1 << 21))], id, 11, "1 damaged part, 1 no caption"),
}


def values(shards: Shards) -> list[tuple[bytes, bytes]]:
    return [(members["png"], members["txt"]) for members in map(shards.read, range(len(shards)))]


@pytest.mark.parametrize("name", TARS)
def test_the_command_of_a_refusal_packs_the_sound_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    members, change, count, skipped = TARS[name]
    monkeypatch.chdir(tmp_path)
    change(write_tar(tmp_path / "a.tar", members))
    with pytest.raises(DataError) as refused:
        opened(Path("a.tar"))
    command = shlex.split(str(refused.value).rpartition("by: python -m data ")[2])
    assert command == ["pack", "a.tar", "out=a_packed", "on_error=skip"]
    assert str(refused.value).splitlines()[-1] in ended(monkeypatch, "check", "a.tar").stderr
    here(monkeypatch, *command)
    printed = capsys.readouterr().out
    assert f"{count} samples in 1 shards" in printed and (skipped in printed if skipped else "skipped" not in printed)
    found = values(opened(Path("a_packed/000000.tar")))
    expected = [(GOOD[2 * i][1], GOOD[2 * i + 1][1]) for i in range(12)]
    assert found[: min(count, 12)] == expected[:count] and set(found) <= set(expected)
    assert ("json" in opened(Path("a_packed/000000.tar")).read(0)) == (len(members) == 36)


LACKING = {
    "no caption": [("7.png", image(7))],
    "no image": [("7.txt", b"seven")],
    "undecodable image": [("7.png", image(7)[:45]), ("7.txt", b"seven")],
}


@pytest.mark.parametrize("reason", LACKING)
def test_samples_that_training_would_replace_are_left_out(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = write_tar(tmp_path / "a.tar", [*GOOD, *LACKING[reason]])
    with raises(DataError, tar, "'7'", "on_error=skip"):
        here(monkeypatch, "pack", tar, f"out={tmp_path / 'stopped'}")
    here(monkeypatch, "pack", tar, f"out={tmp_path / 'out'}", "on_error=skip")
    assert f"skipped 1 of 13 rows: 1 {reason}" in capsys.readouterr().out
    assert len(opened(tmp_path / "out" / "000000.tar")) == 12


@pytest.mark.parametrize("val", [[], ["val=0.5", "by=picture"]])
def test_captions_in_a_field_of_another_name(
    val: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first sample is refused before any is written, and captions= names the field."""
    fields = [(f"{n:06d}.json", b'{"prompt": "caption %d"}' % n) for n in range(12)]
    tar = write_tar(tmp_path / "a.tar", sorted([*fields, *(member for member in GOOD if member[0].endswith("png"))]))
    out = [f"out={tmp_path / 'out'}", *val]
    with raises(DataError, tar, "'000000'", "captions", "prompt", "task=views") as caught:
        here(monkeypatch, "pack", tar, *out)
    assert "on_error" not in str(caught.value), "it would leave out all samples"
    with raises(DataError, tar, "12"):
        here(monkeypatch, "pack", tar, *out, "on_error=skip")
    assert not (tmp_path / "out").exists()
    here(monkeypatch, "pack", tar, *out, "captions=prompt")
    printed = capsys.readouterr().out
    assert f"12 samples in {2 if val else 1} shards" in printed and "'data.captions=[prompt]'" in printed


def test_a_damaged_first_json_is_no_matter_of_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [("000000.json", b"{"), *(member for member in GOOD if member[0] == "000000.png")]
    tar = write_tar(tmp_path / "a.tar", members)
    with raises(DataError, "json") as refused:
        here(monkeypatch, "pack", tar, f"out={tmp_path / 'out'}")
    assert "captions=" not in str(refused.value)


def test_tars_of_images_alone_keep_all_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = write_tar(tmp_path / "a.tar", [member for member in GOOD if member[0].endswith("png")])
    here(monkeypatch, "pack", tar, f"out={tmp_path / 'out'}")
    assert len(opened(tmp_path / "out" / "000000.tar")) == 12


@pytest.mark.parametrize("source", ["{}", "{}/*"])
def test_a_folder_of_img2dataset_is_its_tars(source: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """A table and statistics lie beside each shard. All verbs and training take the same files of the folder."""
    (folder := tmp_path / "raw").mkdir()
    for shard in range(2):
        members = [*pairs(4, shard * 4), *((f"{n:06d}.json", b"{}") for n in range(shard * 4, shard * 4 + 4))]
        write_tar(folder / f"{shard:05d}.tar", sorted(members))
        write_table(pyarrow.table({"url": ["u"] * 4, "caption": ["c"] * 4}), folder / f"{shard:05d}.parquet")
        (folder / f"{shard:05d}_stats.json").write_text('{\n    "count": 4,\n    "status_dict": {}\n}')
    named = source.format(folder)
    tars = tuple(str(folder / f"{shard:05d}.tar") for shard in range(2))
    assert parse_sources(named)[0].shards == parse_sources(named, suffixes=SUFFIXES)[0].shards == tars
    for verb in (["check"], ["index"], ["pack", f"out={tmp_path}/a", "val=0.5"], ["split", f"out={tmp_path}/b"]):
        here(monkeypatch, verb[0], named, *verb[1:])
    assert "8 samples in 2 shards" in capsys.readouterr().out
    for out in "ab":
        assert sum(len(opened(tmp_path / out / side / "000000.tar")) for side in ("train", "val")) == 8


def test_more_broken_shards_are_named_by_their_folder(tmp_path: Path) -> None:
    tars = [write_tar(tmp_path / f"{i}.tar", by_suffix(*GOOD)) for i in range(5)]
    with pytest.raises(DataError) as refused:
        opened(*tars[:2])
    assert f"data pack {tars[0]}::{tars[1]} out=0_packed" in str(refused.value)
    with pytest.raises(DataError) as refused:
        opened(*tars)
    assert f"data pack {tmp_path} out=0_packed" in str(refused.value)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_a_compressed_tar_is_to_be_unpacked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all commands, as one in a folder is. It does not count as a file of questions."""
    tar = write_tar(tmp_path / "b.tar", GOOD)
    (tmp_path / name).write_bytes(gzip.compress(tar.read_bytes()))
    for verb in (["check"], ["pack", f"out={tmp_path / 'out'}"]):
        done = ended(monkeypatch, verb[0], tmp_path / name, *verb[1:])
        assert done.returncode == 2
        check(done.stderr.strip(), tmp_path / name)
    with raises(ConfigError, f"data.train={tmp_path / name}"):
        parse_sources(str(tmp_path / name))


def test_a_block_of_zeros_does_not_hide_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    tar = write_tar(tmp_path / "a.tar", GOOD)
    overwrite(tar, headers_of(tar)[8], bytes(BLOCK))
    here(monkeypatch, "pack", tar, f"out={tmp_path / 'out'}", "on_error=skip")
    assert "skipped 1 of 5 rows: 1 damaged part" in capsys.readouterr().out
