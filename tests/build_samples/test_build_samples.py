"""The shipped data sets have the bytes of their SHA256SUMS, and the builders make the same bytes again."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from tests.build_samples import emoji
from tests.build_samples.__main__ import SAMPLES, SUMS, build, main, verify
from tests.build_samples.emoji import HELD_OUT, VENDORS, WORDS, notice
from tests.build_samples.emoji_names import Concept
from tests.build_samples.packages import DebianPackage, NpmPackage, Package, fetch, unpack

EMOJI = SAMPLES / "emoji"


def read_tar(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


# ---- what is shipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["emoji", "topics"])
def test_the_shipped_files_have_their_checksums(name: str) -> None:
    sums = (SAMPLES / name / SUMS).read_text()
    verify(SAMPLES / name, sums)
    there = {path.relative_to(SAMPLES / name) for path in (SAMPLES / name).rglob("*") if path.is_file()}
    listed = {Path(line.split("  ")[1]) for line in sums.splitlines()}
    assert {path for path in there if ".index" not in path.parts} == {*listed, Path(SUMS)}


def test_the_emoji_shards_are_made_again_of_their_images_and_words(tmp_path: Path) -> None:
    """Everything but the drawing and its name, which need the packages."""
    split_of: dict[Concept, str] = {}
    images: dict[str, dict[Concept, bytes]] = {vendor: {} for vendor in VENDORS}
    for path in sorted(EMOJI.glob("*.tar")):
        members = read_tar(path)
        for record in (json.loads(content) for name, content in members.items() if name.endswith(".json")):
            concept = Concept(
                record["concept"], record["caption"], tuple(record["tags"]), record["group"], record["subgroup"]
            )
            split_of[concept] = path.stem.rpartition("-")[2]
            images[record["vendor"]][concept] = members[f"{record['concept']}-{record['vendor']}.webp"]
    for vendor, drawn in images.items():
        emoji.write_shards(
            tmp_path, vendor, dict(sorted(drawn.items(), key=lambda pair: pair[0].code_points)), split_of
        )
    emoji.write_tasks(tmp_path, sorted(split_of, key=lambda concept: concept.code_points), split_of)
    (tmp_path / "NOTICE.md").write_text(notice())
    verify(tmp_path, (EMOJI / SUMS).read_text())


@pytest.mark.soak
@pytest.mark.debian
def test_the_shipped_topics_are_made_again_to_the_byte(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["build_samples", "topics", "check=true"])
    main()
    assert "the same bytes as a fresh build" in capsys.readouterr().out


# ---- the builders --------------------------------------------------------------------------------------------------


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    sums = f"{hashlib.sha256(b'1').hexdigest()}  a\n{hashlib.sha256(b'2').hexdigest()}  b\n"
    with raises(DataError, tmp_path, "b"):
        verify(tmp_path, sums)
    (tmp_path / "b").write_bytes(b"2")
    verify(tmp_path, sums)
    (tmp_path / "a").write_bytes(b"3")
    with raises(DataError, tmp_path, "a"):
        verify(tmp_path, sums)


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


def test_build_writes_sums_and_check_compares(packages, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(emoji, "fetch", lambda wanted, folder: {p: packages[p] for p in wanted})
    out = tmp_path / "out"
    build("emoji", out)
    assert "16 files" in capsys.readouterr().out
    verify(out, (out / SUMS).read_text())
    build("emoji", out, check=True)
    assert "the same bytes" in capsys.readouterr().out
    undrawn = [
        json.loads(data)["concept"] for name, data in read_tar(out / "twemoji-undrawn.tar").items() if "json" in name
    ]
    assert undrawn and set(undrawn) <= {f"1F6{n:02X}" for n in range(20, 24)}
    (out / "groups.json").write_text("{}")
    with raises(DataError, "groups.json"):
        build("emoji", out, check=True)


def test_an_unknown_set_and_missing_tools_have_one_clear_line(tmp_path, monkeypatch) -> None:
    with raises(ConfigError, "'emojis'", "'emoji'"):
        build("emojis", tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        for package, tool in ((WORDS.package, "npm"), (DebianPackage("a", "1", "0"), "apt-get")):
            with raises(ConfigError, tool):
                fetch([package], tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "resvg_py", None)
        with raises(ConfigError, ".[build]"):
            build("emoji", tmp_path)


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
    with raises(DataError, digest):
        fetch([wrong], tmp_path)
    with raises(ConfigError, "npm"):
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
    with raises(ConfigError, "dpkg-deb", tmp_path / "broken.deb"):
        unpack([tmp_path / "broken.deb"], out)
    with raises(ConfigError, "dyad-no-such-package=1"):
        fetch([DebianPackage("dyad-no-such-package", "1", "0")], tmp_path)
