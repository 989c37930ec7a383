"""An index in a folder of a stranger: it is loaded whole, or refused in one line before it takes memory or time."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import check, raises

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.base.files import open_foreign
from dyad.eval.search.index_spec import Spec

ROWS = np.random.default_rng(0).standard_normal((40, 8), dtype=np.float32)
ITEMS: list[Any] = [f"{i}.png" for i in range(38)] + [("title", "text"), {"id": "7", "text": "words"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dyad.Index(ITEMS, ROWS, "digest").save(tmp_path / "index")
    return tmp_path / "index"


def head(shape: str, dtype: str = "<f4") -> bytes:
    """The first bytes of a .npy file, without values."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_it_is_loaded_as_it_was_saved(folder: Path) -> None:
    index = dyad.Index.load(folder)
    assert (index.items, index.model, index.spec) == (tuple(ITEMS), "digest", "Flat")
    assert np.array_equal(index.embeddings, ROWS)
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert len(dyad.Index.load(link).items) == 40


def test_a_bit_that_changed_is_found_except_in_an_index_of_an_older_version(folder: Path) -> None:
    content = bytearray((folder / "embeddings.npy").read_bytes())
    content[-4] ^= 1
    (folder / "embeddings.npy").write_bytes(content)
    with raises(dyad.DataError, "SHA-256"):
        dyad.Index.load(folder)
    saved = json.loads((folder / "items.json").read_text())
    del saved["sha256"]
    (folder / "items.json").write_text(json.dumps(saved))
    dyad.Index.load(folder)


def test_other_floats_are_saved_as_float32(tmp_path: Path) -> None:
    dyad.Index(ITEMS, np.asfortranarray(ROWS, dtype=float), "digest").save(tmp_path / "index")
    assert np.array_equal(dyad.Index.load(tmp_path / "index").embeddings, ROWS)


def test_a_folder_is_not_written_twice(folder: Path) -> None:
    with raises(ConfigError, folder):
        dyad.Index(ITEMS, ROWS, "digest").save(folder)
    with raises(dyad.DataError, "."):
        dyad.Index.load("")


SPECS = """(((((((( Flat,Flat IVF1000000000,Flat HNSW1000000000 PCA1000000,Flat PQ32x24 IVF39(HNSW2000000),Flat
    Flat;nprobe=1e999 HNSW32;efSearch=1e18 HNSW32;efConstruction=1e9 IVF16,Flat;nprobe=nan OPQ8_99999,PQ8 LSH100000000
    IVF16_HNSW9999,Flat""".split()
OTHER: dict[str, Any] = {
    "items an object": {"items": {str(i): i for i in range(40)}},
    "items a text": {"items": "x" * 40},
    "an item too few": {"items": ITEMS[:-1]},
    "an item is null": {"items": [*ITEMS[:-1], None]},
    "an item is a number": {"items": [*ITEMS[:-1], 0.5]},
    "model a number": {"model": 7},
    "spec a list": {"spec": ["Flat"]},
    "spec of a megabyte": {"spec": "(" * 1_000_000},
    "no spec": {"spec": None},
    **{spec: {"spec": spec} for spec in SPECS},
}
ARRAYS: dict[str, bytes] = {
    "shape beyond the file": head("(40, 268435456)"),
    "absurd shape": head(f"(40, {2**45})"),
    "negative shape": head("(40, -8)") + ROWS.tobytes(),
    "no width": head("(40, 0)"),
    "one axis": head("(320,)") + ROWS.tobytes(),
    "bytes behind": head("(40, 8)") + ROWS.tobytes() + b"x",
    "float64": head("(40, 8)", "<f8") + ROWS.astype(float).tobytes(),
    "other byte order": head("(40, 8)", ">f4") + ROWS.tobytes(),
    "objects": head("(40, 8)", "|O") + ROWS.tobytes(),
    "NaN": head("(40, 8)") + np.full_like(ROWS, np.nan).tobytes(),
    "other rows": head("(20, 16)") + ROWS.tobytes(),
    "no array": b"PK\x03\x04" + bytes(99),
    "empty": b"",
}
JSONS = {"deep": "[" * 200_000, "many": '{"items": [' + "[]," * 600_000 + "0]}", "no JSON": "{", "a list": "[1]"}


def refused(folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(dyad.DataError) as caught:
        dyad.Index.load(folder)
    line = str(caught.value)
    assert len(line) < 700 and "\n" not in line and time.monotonic() - start < 5
    assert re.match(re.escape(f"{folder} is no index of ours, or damaged: ") + ".{5}", line), line


def cases(folder: Path) -> Iterator[str]:
    """Makes one file after another other than it was; yields what it did."""
    vectors, items = folder / "embeddings.npy", folder / "items.json"
    sound = {path: path.read_bytes() for path in (vectors, items)}
    saved = json.loads(sound[items])

    def restored() -> None:
        for path, content in sound.items():
            path.unlink(missing_ok=True)
            path.write_bytes(content)

    for name, change in OTHER.items():
        items.write_text(json.dumps({**saved, **change}))
        yield name
    for name, text in JSONS.items():
        items.write_text(text)
        yield name
    restored()
    for name, content in ARRAYS.items():
        vectors.write_bytes(content)
        yield name
    (folder.parent / "private.json").write_bytes(sound[items])
    for path in (vectors, items):
        for target in ("/dev/zero", folder.parent / "private.json", "nowhere", path.name):
            path.unlink()
            path.symlink_to(target)
            yield f"{path.name} leads to {target}"
        path.unlink()
        os.mkfifo(path)
        yield f"{path.name} is a pipe"
        path.unlink()
        path.mkdir()
        yield f"{path.name} is a folder"
        path.rmdir()
        yield f"{path.name} is missing"
        restored()
    dyad.Index.load(folder)


def test_what_a_stranger_changed_is_refused(folder: Path) -> None:
    for case in cases(folder):
        try:
            refused(folder)
        except BaseException as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize("spec", SPECS)
def test_what_faiss_cannot_stand_never_reaches_it(spec: str) -> None:
    with raises(ConfigError, f"'{spec}'", '"IVF256,Flat;nprobe=16"'):
        Spec.parsed(spec)


def test_what_users_write_reaches_faiss() -> None:
    for spec in """Flat IVF256,Flat;nprobe=16 HNSW32;efSearch=128 PCA24,IVF32,PQ12x4;nprobe=8 OPQ56,IVF64,PQ56 PQ128x4fs
        OPQ16_64,IVF1048576_HNSW32,PQ16x4fs,RFlat IVF16,SQ8 SQfp16 HNSW32_SQ8 IVF1024,PQ32,Refine(SQ8)""".split():
        assert Spec.parsed(spec).text == spec


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError) as caught:
            open_foreign(path)
        check(str(caught.value), path)
    (tmp_path / "file").write_text("text")
    with raises(ValueError, "3 bytes"):
        open_foreign(tmp_path / "file", 3)
    (inner := tmp_path / "models--x" / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "b").write_text("weights")
    (inner / "blob").symlink_to("../../blobs/b")
    (inner / "out").symlink_to(tmp_path / "file")
    with open_foreign(inner / "blob", folder=inner) as file:
        assert file.read() == b"weights"
    with raises(OSError, inner / "out"):
        open_foreign(inner / "out", folder=inner)
