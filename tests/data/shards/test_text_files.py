"""Files of text as other tools write them: byte-order marks, blank lines, other encodings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.data.shards.rows import open_rows
from dyad.data.shards.text_files import open_text
from dyad.data.tables.readers import open_table

MARK = b"\xef\xbb\xbf"
ROWS = [{"anchor": "Größe?", "positive": "a b"}, {"anchor": "q", "positive": "c d"}]
FILES = {  # of ROWS, with a mark and blank lines
    "a.jsonl": MARK + b"".join(json.dumps(row).encode() + b"\n\n" for row in ROWS) + b" \r\n",
    "a.json": MARK + b"\n" + json.dumps(ROWS).encode() + b"\n\n",
    "lines.json": MARK + b"".join(json.dumps(row).encode() + b"\n" for row in ROWS) + b"\n",
    "a.csv": MARK + "anchor,positive\nGröße?,a b\n\nq,c d\n\n".encode(),
    "a.tsv": MARK + "anchor\tpositive\r\nGröße?\ta b\r\n\r\nq\tc d\r\n\r\n".encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_marks_and_blank_lines_say_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    if name != "lines.json":  # JSON-lines of this name are read by offset alone
        assert [fields for _, fields in open_table(str(path)).rows()] == ROWS
    if not name.endswith(".csv"):
        rows = open_rows([str(path)])
        assert [rows.fields(i) for i in range(len(rows))] == ROWS


def test_a_table_without_names_begins_behind_the_mark(tmp_path: Path) -> None:
    (tmp_path / "collection.tsv").write_bytes(MARK + b"7\ta passage\n8\tanother\n\n")
    rows = open_rows([str(tmp_path / "collection.tsv")])
    assert [rows.fields(i)["id"] for i in range(len(rows))] == ["7", "8"]


TEXT = "anchor,positive\nschön,größer\nfünf,süß\n"
OTHERS = {  # content → how iconv names its encoding; None: UTF-8
    "western": (TEXT.encode("cp1252"), "CP1252"),
    "marked UTF-16": (TEXT.encode("utf-16"), "UTF-16"),
    "UTF-16": (TEXT.encode("utf-16-le"), "UTF-16LE"),
    "big-endian UTF-16": (TEXT.encode("utf-16-be"), "UTF-16BE"),
    "UTF-32": (TEXT.encode("utf-32"), "UTF-32"),
    "one damaged byte": (TEXT.encode() + b"\xff", None),
    "U+FFFD in the text": ("it\ufffds fine,a,b\n".encode(), None),
    "ASCII": (b"a,b\n", None),
    "nothing": (b"", None),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json"])
def test_another_encoding_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    path, (content, encoding) = tmp_path / f"a.{suffix}", OTHERS[name]
    path.write_bytes(content)
    if encoding is None:
        open_text(str(path)).close()
        return
    for read in (open_text, open_table, *([lambda p: open_rows([p])] if suffix != "csv" else [])):
        with raises(DataError, f"iconv -f {encoding} -t utf-8 {path} > utf8_a.{suffix}"):
            read(str(path))


def test_of_a_packed_file_the_encoding_alone_is_named(tmp_path: Path) -> None:
    """The command that converts a file would convert the packed bytes."""
    (tmp_path / "q.csv.gz").write_bytes(gzip.compress(TEXT.encode("cp1252")))
    with raises(DataError, tmp_path / "q.csv.gz", "CP1252") as raised:
        open_text(str(tmp_path / "q.csv.gz"))
    assert "iconv" not in str(raised.value)
