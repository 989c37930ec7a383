"""Folders of images as people have them: captions in .txt files, names of other systems, links of a hub's cache,
formats that are not read, no captions at all."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from helpers.data_cli import ended, here
from helpers.messages import raises
from helpers.shards import image, opened, write_tar
from helpers.tables import LABELS, class_folders, hub_images, images_in, with_texts, write_csv
from pyarrow.parquet import write_table

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import CaptionPer, DataConfig
from dyad.data.image_text.sample import ShardSample
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.process import run
from dyad.run.checks import check_arguments

TEXT = "a red bird\nsits on a branch\n\n  a bird\nin the sun.\n"
PARAGRAPHS = ["a red bird\nsits on a branch", "a bird\nin the sun."]
LINES = ["a red bird", "sits on a branch", "a bird", "in the sun."]


def shards_of(source: Path, **keys: object) -> Shards:
    tables = prepared_tables(table_options(DataConfig(**keys)))  # type: ignore[arg-type]
    return open_shards(parse_sources(str(source), tables=tables))


def samples(source: Path, **keys: object) -> list[ShardSample]:
    shards = shards_of(source, **keys)
    return [ShardSample.read(shards, i) for i in range(len(shards))]


@pytest.mark.parametrize("per, expected", [(CaptionPer.paragraph, PARAGRAPHS), (CaptionPer.line, LINES)])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_folders_and_shards_read_a_txt_alike(per: CaptionPer, expected: list[str], end: str, tmp_path: Path) -> None:
    text = TEXT.replace("\n", end).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.png").write_bytes(image())
    (tmp_path / "in/0.txt").write_bytes(b"\xef\xbb\xbf" + text)
    tar = write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.txt", text)])
    (of_folder,) = samples(tmp_path / "in", caption_per=per)
    of_shard = ShardSample.read(opened(tar), 0)
    assert of_folder.captions("txt", per) == expected
    assert [caption.replace("\r", "") for caption in of_shard.captions("txt", per)] == expected


def test_check_says_how_many_captions_an_image_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = images_in(tmp_path / "in")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(TEXT if number % 2 else ("nan", "NULL\n", "a bird")[number % 3])
    here(monkeypatch, "check", folder)
    lines = capsys.readouterr().out.splitlines()
    assert any("captions    90; of an image min 1, median 2, 95th percentile 2, max 2;" in line for line in lines)
    assert any("30 images have a caption of several lines" in line and "caption_per=line" in line for line in lines)
    assert any("warning: 20 captions are nan or null or none" in line for line in lines)
    here(monkeypatch, "check", folder, "caption_per=line")
    printed = capsys.readouterr().out
    assert "captions    150;" in printed and "data.caption_per=line" in printed and "several lines" not in printed


@pytest.mark.parametrize("step", [1, -1])
def test_names_that_unicode_holds_to_be_equal(step: int, tmp_path: Path) -> None:
    """Linux keeps the names that a Mac has written, where é is two characters. The folder around has one of its own."""
    name, other = (normalize("NFC", "caf\u00e9"), normalize("NFD", "caf\u00e9"))[::step]
    folder = tmp_path / other
    (folder / "in").mkdir(parents=True)
    (folder / f"in/{name}.png").write_bytes(image())
    (folder / f"in/{other}.txt").write_text("coffee")
    assert [sample.captions("txt") for sample in samples(folder / "in")] == [["coffee"]]
    write_csv(folder / "pairs.csv", [{"filepath": f"in/{other}.png", "title": "coffee"}])
    assert [sample.captions("txt") for sample in samples(folder / "pairs.csv")] == [["coffee"]]


def hub_cache(folder: Path, blobs: str = "blobs") -> Path:
    """A snapshot in the cache of the Hugging Face hub: links to files that are named by their hashes."""
    snapshot = folder / "datasets--a--b" / "snapshots" / "0123"
    for number, (path, data) in enumerate({"0.png": image(), "0.txt": b"zero", "deep/1.png": image(1)}.items()):
        blob = snapshot.parents[1] / blobs / f"{number:040x}"
        for file in (blob, snapshot / path):
            file.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (snapshot / path).symlink_to(blob)
    return snapshot


def test_links_of_a_hub_cache_are_read_and_no_others(tmp_path: Path) -> None:
    assert [sorted(sample.members) for sample in samples(hub_cache(tmp_path / "hub"))] == [["png", "txt"], ["png"]]
    with raises(DataError, "0.png", "cp -L"):
        samples(hub_cache(tmp_path / "other", "elsewhere"))


@pytest.mark.parametrize("target", ["../elsewhere/dog", "cat", "."])
def test_a_link_to_a_folder_is_named(target: str, tmp_path: Path) -> None:
    """Its images would be missing without a word, and the class with them."""
    for folder in (tmp_path / "pets/cat", tmp_path / "elsewhere/dog"):
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(image())
    link = tmp_path / "pets/dog"
    assert len(samples(tmp_path / "pets")) == 1  # what was converted before does not count
    link.symlink_to(target)
    with raises(DataError, link, "cp -rL", "on_error=skip"):
        samples(tmp_path / "pets")
    (tmp_path / "pets/cat/0.png").unlink()
    with raises(DataError, link, "cp -rL", "on_error=skip"):
        samples(tmp_path / "pets")


def test_an_image_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    """git-annex and DataLad leave a link to a file that is not there."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.png").write_bytes(image())
    assert len(samples(tmp_path / "in")) == 1
    (tmp_path / "in/1.png").symlink_to("../.git/annex/objects/1")
    with raises(DataError, "1.png", "on_error=skip"):
        samples(tmp_path / "in")


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    for path in ("cat/0.png", "cat/.ipynb_checkpoints/0-checkpoint.png", ".Trashes/0.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(image())
    (tmp_path / ".latest").symlink_to("cat")
    assert [sample.label("class") for sample in samples(tmp_path)] == ["cat"]


def test_formats_that_are_not_read_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_texts(tmp_path / "in")
    for name in ("a.jxl", "b.JXL", "c.heic"):
        (folder / name).write_bytes(b"")
    said = "1 heic, 2 jxl: convert them to jpg, png or webp"
    samples(folder)
    assert f"not read of {folder}: {said}" in capsys.readouterr().out
    here(monkeypatch, "check", folder)
    assert f"not read    {folder}: {said}" in capsys.readouterr().out
    here(monkeypatch, "pack", folder, f"out={tmp_path / 'out'}")
    assert f"not read: {said}" in capsys.readouterr().out
    tar = write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.txt", b"a"), ("1.gif", b""), ("1.txt", b"b")])
    assert f"{tar}: 1 gif" in ended(monkeypatch, "check", tar).stdout
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/a.jxl").write_bytes(b"")
    with raises(ConfigError, f"data.train={tmp_path / 'alone'}", "1 jxl"):
        parse_sources(str(tmp_path / "alone"), tables=checked_tables(table_options(DataConfig())))


# ---- no captions, or a class ---------------------------------------------------------------------------------------


def tar_of(folder: Path, *suffixes: str) -> Path:
    contents = {"png": lambda i: image(i, (20, 16)), "cls": lambda i: str(i % 2).encode()}
    contents["json"] = lambda i: json.dumps({"label": "ab"[i % 2]}).encode()
    members = [(f"{i:02d}.{suffix}", contents[suffix](i)) for i in range(60) for suffix in suffixes]
    return write_tar(folder / "a.tar", members)


def parquet(path: Path, labels: bool) -> Path:
    table = hub_images(labels)
    write_table(table if labels else table.drop_columns(["caption"]), path)
    return path


# what the source is, the task that takes it, and the classes that `data check` names
CAPTIONLESS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a folder": (lambda d: images_in(d / "photos"), "views", ""),
    "class folders as images": (lambda d: class_folders(d / "classes"), "views", ""),
    "a folder with captions": (lambda d: with_texts(d / "pairs"), "views", ""),
    "a tar": (lambda d: tar_of(d, "png"), "views", ""),
    "a table": (lambda d: parquet(d / "hub.parquet", labels=False), "views", ""),
    "class folders": (lambda d: class_folders(d / "classes"), "labelled", "2: blue 30, red_thing 30"),
    "a tar of numbers": (lambda d: tar_of(d, "png", "cls"), "labelled", "2: 0 30, 1 30"),
    "a tar of names": (lambda d: tar_of(d, "png", "json"), "labelled", "2: a 30, b 30"),
    "a table of classes": (lambda d: parquet(d / "hub.parquet", labels=True), "labelled", "2: red_thing 30, blue 30"),
}


@pytest.mark.parametrize("name", CAPTIONLESS)
def test_images_without_captions_are_for_other_tasks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` and `pack` know the task, and the commands that they print can work."""
    make, task, classes = CAPTIONLESS[name]
    source = make(tmp_path)
    here(monkeypatch, "check", source, f"task={task}")
    checked = capsys.readouterr().out
    assert "samples     60 in" in checked and "captions  " not in checked
    assert (f"classes     {classes}" in checked) if classes else ("classes     " not in checked)
    here(monkeypatch, "pack", source, f"out={tmp_path / 'out'}", f"task={task}")
    packed = capsys.readouterr().out
    here(monkeypatch, "check", tmp_path / "out", f"task={task}")
    assert "samples     60 in" in capsys.readouterr().out
    for command in (checked.splitlines()[-1], packed.splitlines()[-1]):
        assert f" task={task} " in command
        check_arguments(shlex.split(command)[3:])


def test_a_task_without_captions_takes_blank_ones_and_notes(tmp_path: Path, monkeypatch, capsys) -> None:
    """A README.txt beside images without texts is no caption. Texts of other images may lack one."""
    table = write_csv(
        images_in(tmp_path / "in") / "metadata.csv", [{"file_name": f"{i:02d}.png", "text": " "} for i in (0, 1)]
    )
    classes = class_folders(tmp_path / "classes")
    (classes / LABELS[0] / "README.txt").write_text("of a camera")
    for source, task, number in ((table, "views", 2), (classes, "labelled", 60)):
        assert [sample.members.get("txt") for sample in samples(source)] == [None] * number
        here(monkeypatch, "check", source, f"task={task}")
        assert f"samples     {number} in" in capsys.readouterr().out
    with raises(DataError, table, "row 1", "on_error=skip"):
        samples(table, template="a {}")
    (classes / LABELS[0] / "00.txt").write_text("a red thing")
    with raises(DataError, classes, "README.txt", "on_error=skip"):
        samples(classes)


def test_a_sample_is_named_by_the_file_of_the_user(tmp_path: Path) -> None:
    """Not by its number in a hidden tar. Names may have dots, differ in their suffix alone, or be no UTF-8."""
    folder = tmp_path / "in"
    names = ["a.b.png", "a.jpg", "a.png", f"c d/{'e' * 120}é.png", os.fsdecode(b"f\xff.png")]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(image(number))
    found = samples(folder)
    assert [sample.key for sample in found] == [*names[:4], "f\\udcff.png"]
    assert [sample.image("png") for sample in found] == [image(number) for number in range(5)]
    assert {sample.shard for sample in found} == {str(folder)}
    table = write_csv(tmp_path / "t.csv", [{"image": f"in/{name}"} for name in names[:2]])
    assert samples(table)[1].where == f"{table}: sample 'row 2 (line 3)'"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.index").write_text("no folder")
    write_csv(tmp_path / "other/t.csv", [{"image": "../in/a.png"}])
    assert samples(tmp_path / "other/t.csv")[0].where == "t.csv: sample 'row 1 (line 2)'", "read from the user's cache"
    own = write_tar(tmp_path / "own.0123abcd.0123456789abcdef.tar", [("a/0.png", image())])
    assert ShardSample.read(opened(own), 0).where == f"{own}: sample 'a/0'"


@pytest.mark.parametrize("place", ["", "annotations"])
@pytest.mark.parametrize("beside", [True, False])
def test_the_file_of_the_captions_of_coco_is_named(place: str, beside: bool, tmp_path: Path) -> None:
    """A folder of images, or one with folders of images, does not say which captions are meant."""
    images_in(tmp_path / "in" if beside else tmp_path / "in/val2017")
    (tmp_path / "in" / place).mkdir(exist_ok=True)
    for name in ("instances", "captions"):
        (tmp_path / "in" / place / f"{name}_val2017.json").write_text('{"info": {}, "images": [], "annotations": []}')
    options = table_options(DataConfig(), captioned=True)
    with raises(ConfigError, tmp_path / "in", tmp_path / "in" / place / "captions_val2017.json"):
        parse_sources(str(tmp_path / "in"), tables=checked_tables(options))


def test_an_earlier_shard_that_cannot_be_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = images_in(tmp_path / "in")
    first = Path(shards_of(folder).indexes[0].path)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(first.name):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    (folder / "new.png").write_bytes(image(200))
    assert len(shards_of(folder)) == 61 and first.exists()


def test_images_without_captions_are_refused_where_captions_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, classes = images_in(tmp_path / "photos"), class_folders(tmp_path / "classes")
    options = table_options(DataConfig(), captioned=True)
    with raises(ConfigError, photos, "task=views"):
        parse_sources(str(photos), tables=checked_tables(options))
    with raises(ConfigError, classes, "'class'", "data.template=", "task=labelled"):
        parse_sources(str(classes), tables=checked_tables(options))
    for verb in (["check"], ["pack", f"out={tmp_path / 'out'}"]):
        assert ended(monkeypatch, verb[0], photos, *verb[1:]).returncode == 2


@pytest.mark.parametrize("keys", [{}, {"template": "a photo of a {}"}])
def test_a_class_is_a_field_with_and_without_a_template(keys: dict[str, str], tmp_path: Path) -> None:
    """A template is for captions, and for prompts of task=labelled, which has the class itself."""
    found = samples(class_folders(tmp_path / "classes"), **keys)
    assert {sample.label("cls") for sample in found} == {sample.label("class") for sample in found} == {*LABELS}
    assert [("txt" in sample.members) for sample in found] == [bool(keys)] * 60


def test_an_inner_folder_without_the_right_to_it_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    """Its images would be missing without a word. Root may list all, so the system's answer is put in."""
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "a.png").write_bytes(image(0))
    scan = os.scandir

    def denied(folder: str) -> Any:
        if Path(folder).name == "inner":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(sys, "argv", ["data"])
    with pytest.raises(SystemExit) as ended:
        run(lambda: print(samples(tmp_path)))
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path}/inner: this user has no right to it (Permission denied)\n"
