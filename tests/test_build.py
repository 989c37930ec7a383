"""The shipped emoji shards are what they promise; packages are checked; making a set again gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.errors import ConfigError, DataError
from data.recipes import emoji as build_emoji
from data.recipes.emoji import HELD_OUT, VENDORS, WORDS, write_emoji
from data.recipes.emoji_names import Concept, IconSet, match
from data.recipes.hamexam import HAMEXAM
from data.recipes.packages import DebianPackage, NpmPackage, Package, fetch, unpack, write_tar
from data.recipes.sets import BUILDERS, SAMPLES, SUMS, build, verify

EMOJI = SAMPLES / "emoji"
TRAINING = [vendor for vendor in VENDORS if vendor != HELD_OUT]


@pytest.fixture(scope="module")
def samples() -> dict[str, list[tuple[str, bytes, dict[str, Any]]]]:
    """shard → (key, picture, record) of every sample."""
    return {path.stem: list(read_tar(path)) for path in sorted(EMOJI.glob("*.tar"))}


def read_tar(path: Path):
    with tarfile.open(path) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    for name, data in members.items():
        if name.endswith(".webp"):
            yield name[:-5], data, json.loads(members[f"{name[:-5]}.json"])


# What is shipped


def test_the_shipped_files_have_their_checksums() -> None:
    sums = (EMOJI / SUMS).read_text()
    verify(EMOJI, sums)
    there = {path.name for path in EMOJI.iterdir() if path.is_file() and path.name != SUMS}
    assert {line.split("  ")[1] for line in sums.splitlines()} == there


def test_counts_of_pairs_and_concepts(samples) -> None:
    assert sum(map(len, samples.values())) == 8084
    assert {vendor: len(samples[f"{vendor}-trained"]) for vendor in VENDORS} == {
        "noto": 1496,
        "twemoji": 1590,
        "fluent-flat": 1441,
        "noto-v1": 1104,
        "emojione": 1097,
        "fxemoji": 436,
    }
    assert len(samples["twemoji-unseen"]) == 181 and len(samples["twemoji-undrawn"]) == 143
    assert sum(len(samples[f"{vendor}-trained"]) for vendor in TRAINING) == 5574


def test_every_sample_is_a_small_square_picture_with_its_words(samples) -> None:
    for shard, members in samples.items():
        vendor, _, part = shard.rpartition("-")
        keys = [key for key, _, _ in members]
        assert len(set(keys)) == len(keys)
        for key, picture, record in members:
            assert key == f"{record['concept']}-{vendor}" and record["vendor"] == vendor
            assert set(record) == {"caption", "tagged", "tags", "concept", "vendor", "group", "subgroup"}
            assert len(record["tagged"]) == 3
            for text in record["tagged"]:
                chosen = [tag for tag in record["tags"] if f", {tag}," in f"{text.removeprefix(record['caption'])},"]
                assert text.startswith(record["caption"]) and len(chosen) >= min(3, len(record["tags"]))
            held_out = int(hashlib.sha1(record["concept"].encode()).hexdigest(), 16) % 10 == 4
            assert held_out == (part == "unseen")
            header = Image.open(io.BytesIO(picture))
            assert (header.format, header.size, header.mode) == ("WEBP", (64, 64), "RGB")


def test_the_splits_do_not_overlap(samples) -> None:
    concepts = defaultdict(set)
    for shard, members in samples.items():
        vendor, _, part = shard.rpartition("-")
        concepts[part].update(record["concept"] for _, _, record in members)
        if vendor == HELD_OUT:
            concepts[f"{HELD_OUT} {part}"].update(record["concept"] for _, _, record in members)
    assert len(concepts["trained"] | concepts["unseen"] | concepts["undrawn"]) == 1914
    assert not concepts["trained"] & concepts["unseen"] and not concepts["trained"] & concepts["undrawn"]
    assert concepts["trained"] == concepts[f"{HELD_OUT} trained"]  # Twemoji drew whatever somebody drew
    labels = {record["concept"]: record["caption"] for members in samples.values() for _, _, record in members}
    assert len(set(labels.values())) == len(labels) == 1914


def test_pictures_show_something_on_white(samples) -> None:
    corners = Counter()
    for _, picture, _ in samples["twemoji-trained"]:
        pixels = np.asarray(Image.open(io.BytesIO(picture)))
        assert pixels.std() > 1
        corners[tuple(pixels[0, 0].tolist())] += 1
    assert corners[255, 255, 255] > 1500


@pytest.mark.parametrize(("file", "label", "count"), [("groups.json", "group", 9), ("subgroups.json", "subgroup", 98)])
def test_zero_shot_tasks_name_every_class_and_use_trained_labels_only(samples, file, label, count) -> None:
    task = json.loads((EMOJI / file).read_text())
    expected = defaultdict(list)
    for part in ("trained", "unseen", "undrawn"):
        for _, _, record in samples[f"twemoji-{part}"]:
            expected[record[label]] += [record["caption"]] if part == "trained" else []
    assert {c: sorted(labels) for c, labels in task["classes"].items()} == {c: sorted(v) for c, v in expected.items()}
    assert len(expected) == count and task["label"] == label and task["templates"] == ["{c}"]
    assert task["source"] == "twemoji-{trained,unseen,undrawn}.tar"


def test_the_notice_names_every_work() -> None:
    notice = (EMOJI / "NOTICE.md").read_text()
    for work in (WORDS, *VENDORS.values()):
        assert all(
            part in notice for part in (work.author, work.licence, work.package.pin, work.package.sha256, work.url)
        )
        assert "SA" not in work.licence and len(work.package.sha256) == 64


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    sums = f"{hashlib.sha256(b'1').hexdigest()}  a\n{hashlib.sha256(b'2').hexdigest()}  b\n"
    with pytest.raises(DataError, match="promises: b\\. "):
        verify(tmp_path, sums)
    (tmp_path / "b").write_bytes(b"2")
    verify(tmp_path, sums)
    (tmp_path / "a").write_bytes(b"3")
    with pytest.raises(DataError, match="promises: a\\. "):
        verify(tmp_path, sums)


# Making it


def concept(hexcode: str, label: str) -> Concept:
    return Concept(hexcode, label, (), "g", "s")


def icon_set(names: dict[str, str], aliases: dict[str, dict[str, Any]] | None = None, **chars: str) -> IconSet:
    icons = {name: {"body": body} for name, body in names.items()}
    return IconSet(icons, aliases or {}, {"width": 8, "height": 8}, chars)


def test_drawings_are_matched_by_code_point_then_by_today_and_former_names() -> None:
    grin, hit, bat, insect = (
        concept("1F600", "grinning face"),
        concept("1F3AF", "bullseye"),
        concept("1F3CF", "cricket game"),
        concept("1F997", "cricket"),
    )
    key, man = concept("0023-FE0F-20E3", "keycap: #"), concept("1F468-200D-1F33E", "man farmer")
    coded = icon_set(
        {"grin": "", "bullseye": "", "game": "", "bug": "", "hash": "", "man-farmer": ""},
        {"direct-hit": {"parent": "bullseye"}},
        **{
            "1f600": "grin",
            "1f3af": "bullseye",
            "1f3cf": "game",
            "1f997": "bug",
            "0023-20e3": "hash",
            "1f468-1f33e": "man-farmer",
        },
    )
    named = icon_set(
        {"grinningface": "", "direct-hit": "", "cricket-game": "", "keycap": "", "keycap-pound": ""},
        {"cricket": {"parent": "cricket-game"}},
    )
    drawn = match([grin, hit, bat, insect, key, man], {"coded": coded, "named": named})
    assert drawn["coded"] == {
        grin: "grin",
        hit: "bullseye",
        bat: "game",
        insect: "bug",
        key: "hash",
        man: "man-farmer",
    }
    assert drawn["named"] == {
        grin: "grinningface",
        hit: "direct-hit",  # the former name, known from the other set
        bat: "cricket-game",  # its own name goes before the alias that the insect could use
        key: "keycap-pound",
    }


def test_an_svg_is_a_centred_square_and_flips_where_its_alias_says() -> None:
    wide = IconSet(
        {"left": {"body": '<rect x="0" y="0" width="8" height="4" fill="#f00"/>', "width": 16, "height": 4}},
        {"right": {"parent": "left", "hFlip": True}, "same": {"parent": "left"}},
        {"width": 8, "height": 8},
        {},
    )
    assert wide.drawing("same") == "left" and wide.drawing("right") == "right"
    for name, columns in (("left", slice(0, 32)), ("right", slice(32, 64))):
        pixels = np.asarray(Image.open(io.BytesIO(build_emoji.render(wide.svg(name)))).convert("RGB"))
        expected = np.full((64, 64, 3), 255, np.uint8)
        expected[24:40, columns] = (255, 0, 0)
        np.testing.assert_array_equal(pixels, expected)


def package(path: Path, members: dict[str, Any]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, value in members.items():
            data = json.dumps(value).encode()
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def packages(tmp_path: Path) -> dict[Package, Path]:
    """The packages of the emoji set, with a handful of concepts in each."""
    hexcodes = [f"1F6{n:02X}" for n in range(24)]
    rows = [
        {"hexcode": h, "label": f"thing {n}", "tags": ["a", "b", "c", "d"], "group": 0, "subgroup": n % 2}
        for n, h in enumerate(hexcodes)
    ]
    words = {
        "en/data.json": [
            *rows,
            {"hexcode": "1F3FB", "label": "light skin", "group": 2, "tags": []},
            {"hexcode": "1F1E6"},
        ],
        "meta/groups.json": {"groups": {"0": "things"}, "subgroups": {"0": "even", "1": "odd"}},
    }
    made = {WORDS.package: package(tmp_path / "words.tgz", words)}
    for number, (vendor, work) in enumerate(VENDORS.items()):
        drawn = range(24) if vendor == HELD_OUT else range(20)
        names = {f"thing-{n}": {"body": f'<circle cx="{n % 8}" cy="{number}" r="2"/>'} for n in drawn}
        chars = {hexcodes[n].lower(): f"thing-{n}" for n in drawn} if number < 3 else {}
        icons = {"icons": names, "width": 8, "height": 8}
        made[work.package] = package(tmp_path / f"{vendor}.tgz", {"icons.json": icons, "chars.json": chars})
    return made


def test_making_a_set_twice_gives_the_same_bytes(packages: dict[Package, Path], tmp_path: Path) -> None:
    folders = [tmp_path / "once", tmp_path / "twice"]
    for folder in folders:
        folder.mkdir()
        write_emoji(folder, packages)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert set(files[0]) >= {
        "noto-trained.tar",
        "fxemoji-trained.tar",
        "twemoji-undrawn.tar",
        "groups.json",
        "NOTICE.md",
    }
    undrawn = [record["concept"] for _, _, record in read_tar(folders[0] / "twemoji-undrawn.tar")]
    assert undrawn and set(undrawn) <= {f"1F6{n:02X}" for n in range(20, 24)}


def test_a_tar_holds_no_time_owner_or_machine(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"hello"), ("k.json", b"{}")])
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert [(m.name, m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar] == [
            ("k.txt", 0, 0, 0, "", "", 0o644),
            ("k.json", 0, 0, 0, "", "", 0o644),
        ]
    assert (tmp_path / "a.tar").read_bytes().endswith(b"\0" * 1024)


def test_build_writes_sums_and_check_compares(packages, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build_emoji, "fetch", lambda wanted, folder: {p: packages[p] for p in wanted})
    out = tmp_path / "out"
    build("emoji", out)
    assert "17 files" in capsys.readouterr().out
    verify(out, (out / SUMS).read_text())
    build("emoji", out, check=True)
    assert "the same bytes" in capsys.readouterr().out
    (out / "groups.json").write_text("{}")
    with pytest.raises(DataError, match=r"groups\.json"):
        build("emoji", out, check=True)


def test_an_unknown_set_a_missing_npm_and_a_missing_rasteriser_have_one_clear_line(tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'emojis'. Did you mean 'emoji'"):
        build("emojis", tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="npm is not on the PATH"):
            fetch([WORDS.package], tmp_path)
        with pytest.raises(ConfigError, match="apt-get is not on the PATH"):
            fetch([DebianPackage("a", "1", "0")], tmp_path)
        with pytest.raises(ConfigError, match="dpkg-deb is not on the PATH"):
            unpack([tmp_path / "a.deb"], tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "resvg_py", None)
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[build\]'"):
            build("emoji", tmp_path)


def test_folders_are_copied_summed_and_verified(tmp_path: Path, monkeypatch, capsys) -> None:
    def nested(out: Path, scratch: Path) -> None:
        (out / "qrels").mkdir()
        (out / "qrels" / "test.tsv").write_text("a")
        (out / "corpus.jsonl").write_text("b")

    monkeypatch.setitem(BUILDERS, "nested", nested)
    build("nested", tmp_path / "out")
    assert "3 files, 0.0 MB" in capsys.readouterr().out
    sums = (tmp_path / "out" / SUMS).read_text()
    assert [line.split("  ")[1] for line in sums.splitlines()] == ["corpus.jsonl", "qrels/test.tsv"]
    build("nested", tmp_path / "out")  # over what is there
    (tmp_path / "out" / "qrels" / "test.tsv").write_text("c")
    with pytest.raises(DataError, match=r"promises: qrels/test\.tsv\. "):
        build("nested", tmp_path / "out", check=True)


@pytest.mark.npm
def test_npm_packages_are_checked_against_their_pin(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "package.json").write_text('{"name": "tiny", "version": "1.0.0"}')
    subprocess.run(["npm", "pack", "--silent", "."], cwd=source, check=True, capture_output=True)
    packed = source / "tiny-1.0.0.tgz"
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    right, wrong, absent = (
        NpmPackage("tiny", f"file:{packed}", digest),
        NpmPackage("tiny", f"file:{packed}", "0" * 64),
        NpmPackage("tiny", f"file:{tmp_path}/none.tgz", digest),
    )
    assert fetch([right], tmp_path)[right].read_bytes() == packed.read_bytes()
    with pytest.raises(DataError, match=rf"has SHA-256 {digest}, pinned is 0000"):
        fetch([wrong], tmp_path)
    with pytest.raises(ConfigError, match="failed: "):
        fetch([absent], tmp_path)


@pytest.mark.debian
def test_debian_archives_are_unpacked_and_never_run(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "DEBIAN").mkdir(parents=True)
    (source / "DEBIAN" / "control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: b\n"
    )
    script = source / "DEBIAN" / "postinst"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    (source / "usr").mkdir()
    (source / "usr" / "file").write_text("content")
    subprocess.run(["dpkg-deb", "-b", str(source), str(tmp_path / "tiny.deb")], check=True, capture_output=True)
    assert (unpack([tmp_path / "tiny.deb"], out) / "usr" / "file").read_text() == "content"
    assert not (tmp_path / "ran").exists()
    (tmp_path / "broken.deb").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"`dpkg-deb -x .*` failed: "):
        unpack([tmp_path / "broken.deb"], out)
    with pytest.raises(ConfigError, match=r"`apt-get download … dyad-no-such-package=1` failed: "):
        fetch([DebianPackage("dyad-no-such-package", "1", "0")], tmp_path)


@pytest.mark.debian
def test_debian_packages_are_checked_against_their_pin(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"hamexam={HAMEXAM.version} has SHA-256 {HAMEXAM.sha256}, pinned is 0000"):
        fetch([replace(HAMEXAM, sha256="0" * 64)], tmp_path)


@pytest.mark.debian
def test_the_shipped_topics_are_made_again_to_the_byte(capsys) -> None:
    build("topics", check=True)
    assert "the same bytes as a fresh build" in capsys.readouterr().out
