"""Pairs of all kinds become shards, byte for byte; bad rows are named; nothing half-written stays."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.messages import raises
from helpers.shards import image
from hydra.core.override_parser.overrides_parser import OverridesParser

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.cli import outputs
from dyad.data.cli.options import OnError, PackOptions, Target
from dyad.data.cli.outputs import checked_new_file
from dyad.data.cli.pack import pack_pairs
from dyad.data.image_text.image_files import read_header
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources


@pytest.fixture(autouse=True)
def of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed suggests a ViT there."""
    monkeypatch.setattr(outputs, "GPU", os.devnull)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six images 0.png … 5.jpg in images/."""
    folder = tmp_path / "images"
    folder.mkdir()
    for n in range(6):
        kind = ("PNG", "JPEG", "WEBP")[n % 3]
        (folder / f"{n}.{kind.lower()}").write_bytes(image(n, kind=kind))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def write_csv(path: Path, rows: list[list[str]], separator: str = "\t") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


def packed(source: Path, out: Path, **options: object) -> Shards:
    pack_pairs(str(source), PackOptions(out=str(out), **options))  # type: ignore[arg-type]
    return open_shards(parse_sources(str(out)))


def samples(shards: Shards) -> list[dict[str, bytes]]:
    return [shards.read(n) for n in range(len(shards))]


def test_open_clip_csv(tmp_path: Path, images: Path) -> None:
    rows = [["filepath", "title"], *([f"images/{name}", f" caption of {name} "] for name in names(images))]
    shards = packed(write_csv(tmp_path / "pairs.csv", rows), tmp_path / "out")
    suffixes = ["png", "jpg", "webp"] * 2
    assert samples(shards) == [
        {suffix: (images / name).read_bytes(), "txt": f"caption of {name}".encode()}
        for name, suffix in zip(names(images), suffixes, strict=True)
    ]
    assert [shards.key(n) for n in (0, 5)] == ["000000000", "000000005"]


def test_other_csv_keeps_further_columns(tmp_path: Path, images: Path) -> None:
    rows = [["id", "img", "text"], ["7", str(images / "0.png"), "a,\nb"], ["8", str(images / "1.jpeg"), "ünï"]]
    source = write_csv(tmp_path / "pairs.csv", rows, ";")
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    shards = packed(source, tmp_path / "out", columns=["img", "text"])
    assert shards.read(0)["txt"] == b"a, b"
    assert json.loads(shards.read(1)["json"]) == {"id": "8"}


def test_folder_of_images_and_texts(tmp_path: Path, images: Path) -> None:
    deep = images / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "x.y.PNG").write_bytes(image(9))
    (deep / "x.y.txt").write_text("deep\n\n er \n")
    (deep / ".DS_Store").touch()
    for name in names(images):
        (images / name).with_suffix(".txt").write_text(name)
    shards = packed(images, tmp_path / "out")
    assert [members["txt"].decode() for members in samples(shards)] == [
        *["0.png", "1.jpeg", "2.webp", "3.png", "4.jpeg", "5.webp"],
        "deep\n\ner",
    ]


def test_parquet_with_lists_of_captions(tmp_path: Path, images: Path) -> None:
    found = names(images)
    table = {"image": [f"images/{n}" for n in found], "captions": [[n, n * 2] for n in found], "width": range(6)}
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    shards = packed(tmp_path / "pairs.parquet", tmp_path / "out")
    assert sorted(shards.read(0)) == ["json", "png", "txt"]
    assert shards.read(2)["txt"] == b"2.webp\n\n2.webp2.webp" and json.loads(shards.read(2)["json"]) == {"width": 2}


def test_parquet_with_one_caption(tmp_path: Path, images: Path) -> None:
    pq.write_table(pa.table({"p": ["images/0.png"], "c": ["x"]}), tmp_path / "pairs.parquet")
    shards = packed(tmp_path / "pairs.parquet", tmp_path / "out", columns=["p", "c"])
    assert shards.read(0)["txt"] == b"x" and "json" not in shards.read(0)


def test_json_lines_of_different_shapes(tmp_path: Path, images: Path) -> None:
    """All samples get the same members although lines differ: one or several captions, further fields in json."""
    lines = [
        {"filepath": "images/0.png", "caption": "one"},
        {"filepath": "images/1.jpeg", "caption": ["one", "two"], "when": "today"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shards = packed(tmp_path / "pairs.jsonl", tmp_path / "out")
    assert (shards.read(0)["txt"], shards.read(0)["json"]) == (b"one", b"{}")
    assert shards.read(1)["txt"] == b"one\n\ntwo" and json.loads(shards.read(1)["json"]) == {"when": "today"}


def test_same_bytes_every_time_and_limits(tmp_path: Path, images: Path) -> None:
    source = write_csv(tmp_path / "p.csv", [["filepath", "title"], *([f"images/{n}", n] for n in names(images))])
    packed(source, tmp_path / "a", maxcount=4)
    os.utime(images / "0.png", (1, 1))
    packed(source, tmp_path / "b", maxcount=4)
    digests = [[hashlib.sha256((tmp_path / x / n).read_bytes()).hexdigest() for n in names(tmp_path / x)] for x in "ab"]
    assert digests[0] == digests[1] and names(tmp_path / "a") == ["000000.tar", "000001.tar"]
    packed(source, tmp_path / "c", maxsize=1.0)
    assert len(names(tmp_path / "c")) == 6
    assert (tmp_path / "c" / ".index" / "000005.tar.json").exists(), "indexed where it lies"


@pytest.mark.parametrize("folder", ["out", "with space", 'quo"te', "it's", "100%", "back\\slash", "{brace}"])
@pytest.mark.parametrize("maxcount", [2, 10])
def test_printed_command_names_these_shards(
    tmp_path: Path, images: Path, folder: str, maxcount: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed goes through a shell, Hydra's grammar and our own, and comes out as the shards."""
    source = write_csv(tmp_path / "p.csv", [["filepath", "title"], *([f"images/{n}", n] for n in names(images))])
    out = tmp_path / folder
    packed_shards = packed(source, out, maxcount=maxcount)
    command = next(line for line in capsys.readouterr().out.splitlines() if "python -m train" in line)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "train"] and words[4:] == [
        "model.name=ViT-B-32",
        "epochs=10",
        "global_batch_size=6",
    ]
    override = OverridesParser.create().parse_override(words[3])
    assert override.key_or_group == "data.train"
    (source_of_command,) = parse_sources(str(override.value()))
    assert [Path(shard) for shard in source_of_command.shards] == [Path(index.path) for index in packed_shards.indexes]


BAD = {
    "missing file": ({"image": "images/none.png", "caption": "x"}, "images/none.png"),
    "image URL": ({"image": "https://example.org/a.jpg", "caption": "x"}, "img2dataset"),
    "undecodable image": ({"image": "images/text.png", "caption": "x"}, "images/text.png"),
    "too many pixels": ({"image": "images/big.png", "caption": "x"}, "110 x 100"),
    "unreadable file": ({"image": "images", "caption": "x"}, "images"),
    "empty caption": ({"image": "images/0.png", "caption": " \n"}, ""),
    "one of the captions": ({"image": "images/0.png", "caption": ["x", ""]}, ""),
    "no caption": ({"image": "images/0.png"}, ""),
    "no captions": ({"image": "images/0.png", "caption": []}, ""),
    "no text": ({"image": "images/0.png", "caption": 3}, "3"),
    "long text": ({"image": "images/0.png", "caption": "x" * 1_100_000}, ""),
    "no image": ({"caption": "x"}, ""),
    "image of a wrong type": ({"image": 3, "caption": "x"}, "image = 3"),
    "half a surrogate pair": ({"image": "images/0.png", "caption": "x", "by": "\ud83d"}, ""),
    "no JSON": ("{", ""),
    "no object": ("[]", ""),
}


@pytest.fixture
def odd_images(images: Path) -> Path:
    (images / "text.png").write_text("GIF89a is no PNG")
    (images / "big.png").write_bytes(image(size=(110, 100)))
    return images


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_stop_with_their_number_or_are_counted(
    tmp_path: Path, odd_images: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, named = BAD[kind]
    good = json.dumps({"image": "images/1.jpeg", "caption": "fine"})
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join([good, line if isinstance(line, str) else json.dumps(line), good]))
    before = sorted(tmp_path.iterdir())
    with raises(DataError, source, "line 2", named, "on_error=skip"):
        packed(source, tmp_path / "out", max_image_pixels=10_000)
    assert sorted(tmp_path.iterdir()) == before, "nothing half-written stays"
    shards = packed(source, tmp_path / "out", on_error=OnError.skip, max_image_pixels=10_000)
    assert [shards.key(n) for n in range(len(shards))] == ["000000000", "000000002"]
    printed = capsys.readouterr()
    assert f"skipped {source}: line 2" in printed.err
    assert "skipped 1 of 3 rows: 1 " in printed.out


def test_bad_files_of_a_folder(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(3):
        (images / f"{n}.txt").write_text("x")
    (images / "3.txt").write_bytes(b"\xff\xfe\xfa")
    (images / "alone.txt").write_text("x")
    assert len(packed(images, tmp_path / "out", on_error=OnError.skip)) == 3
    out = capsys.readouterr().out
    assert "skipped 4 of 7 rows" in out
    assert "2 no caption" in out and "1 caption is no text" in out and "1 no image beside the text" in out


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("filepath\ttitle\na.png\tx\ty\n", "row 1 (line 2)"),
        ("filepath\ttitle\n1.png\n", "row 1 (line 2)"),
        ('filepath\ttitle\n1.png\tfine\n2.png\t"open quote\n', "line 3"),
        # the second line is part of a caption, and no pair
        ('filepath\ttitle\n1.png\t"he said "no" and\n1.png\tthe rest"\n', "line 2"),
        ("filepath\ttitle\n", ""),
    ],
)
def test_damaged_csv(tmp_path: Path, images: Path, content: str, named: str) -> None:
    (images / "p.csv").write_text(content)
    (images / "1.png").write_bytes(image())
    with raises(DataError, "p.csv", named):
        packed(images / "p.csv", tmp_path / "out")


def test_csv_that_is_not_utf8(tmp_path: Path, images: Path) -> None:
    (images / "p.csv").write_bytes(b"filepath\ttitle\n" + b"\n" + b"0.png\ty\n" * 3 + b"0.png\t\xc3\xa9\xff\n")
    with raises(DataError, "row 4 (line 6)"):
        packed(images / "p.csv", tmp_path / "out")
    (images / "p.csv").write_bytes(b'"x"filepath\ttitle\n0.png\ty\n')
    with raises(DataError, "p.csv"):
        packed(images / "p.csv", tmp_path / "out")


def test_one_bad_row_costs_no_other(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is in it: of each kind of file the first and the last row are sound."""
    os.mkfifo(tmp_path / "pipe.png")
    deep, paths = "[" * 50_000, ["\0", "x" * 5_000, "\ud800", "pipe.png"]
    odd = [{"filepath": path, "title": "x"} for path in paths] + [{"filepath": "images/0.png", "title": "\ud800"}]
    good = {"filepath": "images/0.png", "title": "é" * 9}
    lines = [*map(json.dumps, [good, *odd]), f'{{"title": {deep}', f'{{"x": {"9" * 5_000}}}', json.dumps(good)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rows = ["filepath\ttitle", *("\t".join(row.values()) for row in [good, *odd]), 'ab\t"c"d', "images/0.png\tx"]
    (tmp_path / "pairs.csv").write_bytes("\n".join(rows).encode(errors="surrogatepass"))
    for name, bad in (("pairs.jsonl", 7), ("pairs.csv", 6)):
        shards = packed(tmp_path / name, tmp_path / f"{name}.out", on_error=OnError.skip)
        assert [shards.key(n) for n in range(len(shards))] == ["000000000", f"{bad + 1:09d}"], name
        assert f"skipped {bad} of {bad + 2} rows" in capsys.readouterr().out


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, images: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.png").write_bytes(image(77))
    for name in names(images):
        (images / name).with_suffix(".txt").write_text(name)
    (images / "0.txt").unlink()
    (images / "0.txt").symlink_to(tmp_path / "secret.txt")
    (images / "1.jpeg").unlink()
    (images / "1.jpeg").symlink_to("../secret.png")
    (images / "2.txt").unlink()
    (images / "2.txt").symlink_to("3.txt")
    (images / "outside").symlink_to(tmp_path)
    with raises(DataError, "0.png"):
        packed(images, tmp_path / "out")
    found = samples(packed(images, tmp_path / "out", on_error=OnError.skip))
    assert [members["txt"] for members in found] == [b"3.png", b"3.png", b"4.jpeg", b"5.webp"]


def test_all_rows_bad(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "p.csv", [["filepath", "title"], ["none.png", "x"]])
    with raises(DataError, source):
        packed(source, tmp_path / "out", on_error=OnError.skip)
    assert not (tmp_path / "out").exists()


def test_commands_that_cannot_work(tmp_path: Path, images: Path) -> None:
    source = write_csv(tmp_path / "p.csv", [["filepath", "titel"], ["x", "y"]])
    (tmp_path / "pairs.jsonl").write_text('{"picture": "x", "caption": "y"}')
    (tmp_path / "broken.parquet").write_text("no")
    refused: list[tuple[Path, dict[str, object], str]] = [
        (source, {}, "'filepath'"),
        (source, {"columns": ["filepath", "title"]}, "'titel'"),
        (tmp_path / "pairs.jsonl", {}, "columns=[picture,caption]"),
        (tmp_path / "p.cvs", {}, "'p.csv'"),
        (images / "0.png", {}, "0.png"),
    ]
    for path, options, named in refused:
        with raises(ConfigError, named):
            packed(path, tmp_path / "out", **options)
    with raises(ConfigError, images):
        packed(source, images)
    with raises(ConfigError, "out=FOLDER"):
        pack_pairs(str(source), PackOptions())
    with raises(DataError, "broken.parquet"):
        packed(tmp_path / "broken.parquet", tmp_path / "out")
    (tmp_path / "file").touch()
    (tmp_path / "commas.csv").write_text("filepath\ttitle\nimages/0.png\ty\n")
    with raises(ConfigError, tmp_path / "file"):
        packed(tmp_path / "commas.csv", tmp_path / "file" / "out")
    with raises(ConfigError, "out="):
        packed(tmp_path / "commas.csv", tmp_path / ("n" * 300))
    (tmp_path / "empty.csv").touch()
    (tmp_path / "empty.jsonl").touch()
    with raises(DataError, "empty.csv"):
        packed(tmp_path / "empty.csv", tmp_path / "out")
    with raises(ConfigError, "empty.jsonl"):
        packed(tmp_path / "empty.jsonl", tmp_path / "out")
    (tmp_path / "st.csv").write_text("ask,reply\nq,a\n")
    with raises(ConfigError, tmp_path / "st.csv", "ask, reply", "columns="):
        packed(tmp_path / "st.csv", tmp_path / "out", to=Target.dpr)


def test_a_new_folder_may_be_in_the_home_folder(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every shell replaces the ~ of out=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = write_csv(tmp_path / "p.csv", [["filepath", "title"], [str(images / "0.png"), "y"]])
    pack_pairs(str(source), PackOptions(out="~/new"))
    assert (tmp_path / "new/000000.tar").is_file()
    assert checked_new_file("~/a.jsonl", [".jsonl"]) == tmp_path / "a.jsonl"


def test_headers_of_images() -> None:
    assert read_header(image(kind="JPEG", mode="L"), 100) == ("jpg", "L", 8, 6)
    with raises(DataError, "max_image_pixels=47"):
        read_header(image(), 47)
    with raises(DataError, "GIF89a"):
        read_header(b"GIF89a..............", 100)
    bomb = image(size=(1, 1)).replace(b"\0\0\0\1\0\0\0\1", b"\0\1\0\0\0\1\0\0")
    with raises(DataError):
        read_header(bomb, 25_000_000)
