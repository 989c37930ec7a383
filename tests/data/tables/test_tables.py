"""Tables of every format give the rows that they hold, in training and packed; they are converted once; nothing that a
stranger left in the cache is believed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.canary import Canary
from helpers.data_cli import here
from helpers.messages import raises
from helpers.rows import write_lines
from helpers.shards import image
from helpers.tables import (
    IMAGE_FORMATS,
    IMAGES,
    LABEL_FORMATS,
    LABELS,
    TEMPLATE,
    TEXT_FORMATS,
    TEXT_TABLE,
    TEXTS,
    hub_clone,
    hub_images,
    imagefolder,
    save_to_disk,
    write_arrow,
    write_csv,
)

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig
from dyad.data.image_text.sample import ShardSample
from dyad.data.question_passage.questions import named_files, open_questions
from dyad.data.shards.index import index_shards
from dyad.data.shards.rows import open_rows
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.tables import folders, prepare
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.data.tables.readers import open_table

ROWS = [(row["anchor"], (row["positive"],), (row["negative"], row["negative_1"])) for row in TEXTS]
BY_FOLDER = [(data, f"a photo of a {LABELS[i % 2].replace('_', ' ')}") for i, (data, _) in enumerate(IMAGES)]


def texts(source: Path, **keys: Any) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Question, positives and hard negatives of each row, as training reads them."""
    config = DataConfig(train=str(source), **keys)
    named_files(str(source), config)
    rows = open_questions(str(source), config)
    found = map(rows.row, range(len(rows)))
    listed = [(r.question.text, [p.text for p in r.positives], [p.text for p in r.hard_negatives]) for r in found]
    return [(question, tuple(right), tuple(wrong)) for question, right, wrong in listed]


def shards_of(source: Path | str, **keys: Any) -> Shards:
    options = table_options(DataConfig(**keys))
    parse_sources(str(source), tables=checked_tables(replace(options, captioned=True)))
    return open_shards(parse_sources(str(source), tables=prepared_tables(options)))


def pairs(source: Path, **keys: Any) -> list[tuple[bytes, str]]:
    """Image and caption of each sample, as training reads them."""
    shards = shards_of(source, **keys)
    samples = [ShardSample.read(shards, i) for i in range(len(shards))]
    return [(sample.image("png"), "|".join(sample.captions("txt"))) for sample in samples]


def words(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={value}".replace(", ", ",").replace("'", "") for key, value in keys.items()]


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_texts_in_place_and_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source, keys = TEXT_FORMATS[name](tmp_path)
    assert texts(source, **keys) == ROWS
    here(monkeypatch, "pack", source, f"out={tmp_path / 'out'}", *words(keys))
    assert texts(tmp_path / "out") == ROWS
    capsys.readouterr()
    here(monkeypatch, "check", source, *words(keys))
    printed = capsys.readouterr().out
    assert "questions       60 of 60 rows" in printed and "hard negatives  120;" in printed


@pytest.mark.parametrize("name", [*IMAGE_FORMATS, *LABEL_FORMATS])
def test_images_in_place_and_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source, keys = (IMAGE_FORMATS | LABEL_FORMATS)[name](tmp_path)
    expected = IMAGES if name in IMAGE_FORMATS else BY_FOLDER
    if name == "class folders":
        expected = sorted(BY_FOLDER, key=lambda pair: pair[1])  # blue comes first
    found = pairs(source, **keys)
    assert found == expected
    capsys.readouterr()
    here(monkeypatch, "check", source, *words(keys))
    assert "samples     60 in" in capsys.readouterr().out
    if name != "img2dataset":  # shards already
        here(monkeypatch, "pack", source, f"out={tmp_path / 'out'}", *words(keys))
        assert pairs(tmp_path / "out") == expected


@pytest.mark.parametrize("name", ["cache-0123456789abcdef.arrow", "cache-0123_00000_of_00002.arrow", "._data.arrow"])
def test_results_that_datasets_keeps_beside_its_data_are_not_read(name: str, tmp_path: Path) -> None:
    """`datasets` writes those of map, filter and shuffle there."""
    folder = save_to_disk(tmp_path / "saved", TEXT_TABLE)
    write_arrow(folder / name, TEXT_TABLE)
    assert texts(folder) == ROWS


def test_a_table_is_converted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = imagefolder(tmp_path / "folder", write_csv, "metadata.csv")
    first = shards_of(source)
    assert "metadata.csv was converted once" in capsys.readouterr().out
    again = shards_of(source)
    assert (again.fingerprint, again.indexes[0].path) == (first.fingerprint, first.indexes[0].path)
    assert capsys.readouterr().out == ""
    os.utime(source / "metadata.csv", (1, 1))
    assert shards_of(source).fingerprint == first.fingerprint, "the same bytes, whatever their age"
    (source / "07.png").write_bytes(image(200, size=(20, 16)))
    changed = shards_of(source)
    assert changed.fingerprint != first.fingerprint and ShardSample.read(changed, 7).image("png") == image(
        200, size=(20, 16)
    )
    name = Path(first.indexes[0].path).name
    assert not [*(source / ".index").glob(f"{name}*")], "the earlier one goes, and its index"


def test_a_shard_of_a_stranger_is_not_believed(tmp_path: Path) -> None:
    """A table comes with a prepared shard of another content, as a copy of somebody's folder has it."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    pq.write_table(hub_images(), theirs / "hub.parquet")
    made = Path(shards_of(theirs / "hub.parquet").indexes[0].path)
    made.write_bytes(made.read_bytes().replace(b"colour", b"poison"))
    shutil.copytree(theirs, tmp_path / "mine")
    os.utime(tmp_path / "mine/hub.parquet", ns=(0, (theirs / "hub.parquet").stat().st_mtime_ns))
    assert pairs(tmp_path / "mine/hub.parquet") == IMAGES


def test_a_private_table_stays_private(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "st.csv", TEXTS)
    source.chmod(0o600)
    texts(source)
    kept = [path for path in (tmp_path / ".index").iterdir() if path.suffix == ".jsonl"]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]


def test_an_index_tells_nothing_of_a_private_file(tmp_path: Path) -> None:
    """It quotes what is wrong with a line."""
    (source := tmp_path / "a.tsv").write_text("a private text\twithout columns\n")
    source.chmod(0o600)
    (index,) = index_shards([str(source)])
    assert "a private text" in str(index.problems)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / ".index").iterdir()} == {0o600}


def test_arrays_of_strangers_are_validated_and_nothing_is_unpickled(tmp_path: Path, canary: Path) -> None:
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    extension[b"ARROW:extension:metadata"] = pickle.dumps(Canary(canary))
    schema = pa.schema([pa.field("anchor", pa.string(), metadata=extension), pa.field("positive", pa.string())])
    table = pa.table([["a b", "e f"], ["c d", "g h"]], schema=schema)
    pq.write_table(table, tmp_path / "p.parquet")
    letters = table.column(0).chunk(0).buffers()[2]
    beyond = pa.StringArray.from_buffers(2, pa.py_buffer(struct.pack("<iii", 0, 10**8, 6)), letters)
    for name, anchor in {"sound": table.column(0), "beyond": beyond}.items():
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(pa.table([anchor, table.column(1)], schema=schema))
    rows = [("a b", ("c d",), ()), ("e f", ("g h",), ())]
    assert texts(tmp_path / "p.parquet") == texts(tmp_path / "sound.arrow") == rows
    with raises(DataError, tmp_path / "beyond.arrow"):
        texts(tmp_path / "beyond.arrow")


def test_a_table_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "st.csv", TEXTS)
    (tmp_path / ".index").write_text("no folder")
    assert texts(source) == ROWS


def test_large_tables_are_packed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "hub table.parquet"
    pq.write_table(hub_images(), source)
    monkeypatch.setattr(prepare, "LARGEST", 100)
    command = f"python -m data pack '{source}' 'out=hub table_shards'"
    with raises(ConfigError, command):
        parse_sources(str(source), tables=checked_tables(table_options(DataConfig())))
    with raises(ConfigError, command):
        parse_sources(str(source), tables=prepared_tables(table_options(DataConfig())))
    assert not [path for path in (tmp_path / ".index").iterdir() if path.suffix == ".tar"]


def test_a_bad_row_is_named_with_the_command_that_leaves_it_out(tmp_path: Path) -> None:
    rows = [dict(row) for row in TEXTS]
    rows[7]["positive"] = " "
    source = write_csv(tmp_path / "st.csv", rows)
    with raises(DataError, source, "row 8 (line 9)", "on_error=skip"):
        texts(source)
    table = imagefolder(tmp_path / "f", write_csv, "metadata.csv")
    (table / "05.png").write_text("no image")
    with raises(DataError, "metadata.csv", "row 6 (line 7)", "on_error=skip"):
        pairs(table)


def write_scored(folder: Path) -> Path:
    rows = [{"sentence1": "a b", "sentence2": "c d", "score": 0.5}]
    return write_csv(folder / "sts.csv", rows)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    unknown = write_csv(tmp_path / "odd.csv", [{"left": "a", "right": "b"}])
    nested = write_lines(tmp_path / "nested.jsonl", [{"meta": {"question": "a"}, "answer": "b"}])
    saved = tmp_path / "dict"
    save_to_disk(saved / "train", TEXT_TABLE)
    save_to_disk(saved / "test", TEXT_TABLE)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    clone = hub_clone(tmp_path / "clone", TEXT_TABLE, ("train", "validation"))
    broken = tmp_path / "broken.arrow"
    broken.write_text("no")
    (tmp_path / "ids.tsv").write_text("1\t2\t3\n")
    wanted: list[tuple[Path, dict[str, Any], list[str]]] = [
        (unknown, {}, ["odd.csv", "left, right", "data.columns="]),
        (unknown, {"columns": ["left", "rigth"]}, ["odd.csv", "'right'"]),
        (nested, {"columns": ["meta.question", "answer"]}, ["nested.jsonl", "'meta.question'", "'meta'"]),
        (write_scored(tmp_path), {}, ["sts.csv", "columns=[sentence1,sentence2]"]),
        (saved, {}, ["dict/test", "dict/train"]),
        (clone, {}, ["data/train-*.parquet", "data/validation-*.parquet"]),
        (broken, {}, ["broken.arrow"]),
        (tmp_path / "ids.tsv", {}, ["ids.tsv", "queries.train.tsv"]),
        (tmp_path / "none.parquet", {}, ["'none.parquet'"]),
    ]
    for source, keys, named in wanted:
        with raises((ConfigError, DataError), *named):
            named_files(str(source), DataConfig(**keys))
    assert texts(write_scored(tmp_path), columns=["sentence1", "sentence2"]) == [("a b", ("c d",), ())]
    assert texts(Path(f"{clone}/data/train-*.parquet")) == ROWS
    labels, keys = LABEL_FORMATS["class folders"](tmp_path)
    with raises(ConfigError, "data.template='a photo of a {}'"):
        shards_of(labels)
    with raises(ConfigError, "data.template=a dog"):
        DataConfig(template="a dog")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_files_that_are_named_after_splits_are_not_mixed(suffix: str, tmp_path: Path) -> None:
    """It would be trained on the test data, without a word."""
    for name in ("train", "test"):
        table = write_csv(tmp_path / f"{name}.csv", TEXTS)
        if suffix == ".parquet":
            pq.write_table(TEXT_TABLE, table.with_suffix(suffix))
            table.unlink()
    with raises(ConfigError, tmp_path, f"{tmp_path}/test{suffix}", f"{tmp_path}/train{suffix}"):
        texts(tmp_path)
    assert texts(tmp_path / f"train{suffix}") == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".tsv"])
def test_files_of_rows_that_are_named_after_splits_are_not_mixed(suffix: str, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}{suffix}").write_text("")
    with raises(ConfigError, tmp_path, f"{tmp_path}/test{suffix}", f"{tmp_path}/train{suffix}"):
        folders.tables_of(str(tmp_path), [])


@pytest.mark.parametrize("url", ["hf://datasets/a/b", "hf://datasets/Cohere/msmarco-v2.1-embed-english-v3"])
def test_folders_of_splits_on_the_hub_are_not_mixed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [f"{url}/train/0000.parquet", f"{url}/train/0001.parquet", f"{url}/validation/0000.parquet"]
    monkeypatch.setattr(folders, "list_remote", lambda pattern: there if "**" in pattern else there[:2])
    monkeypatch.setattr(folders, "open_table", lambda path: path)
    with raises(ConfigError, url, f"{url}/train/*.parquet", f"{url}/validation/*.parquet"):
        folders.tables_of(url, [])
    assert folders.tables_of(f"{url}/train/*.parquet", []) == there[:2]
    assert folders.tables_of(f"{url}/a.tar", []) == folders.tables_of(f"{url}/a.jsonl", []) == []


def test_a_remote_table_names_no_image_of_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = MemoryFileSystem()
    for name, table in {
        "hub.parquet": hub_images(),
        "paths.parquet": pa.table({"image": ["/etc/x.png"], "text": ["x"]}),
    }.items():
        pq.write_table(table, tmp_path / name)
        files.pipe(f"/tables/{name}", (tmp_path / name).read_bytes())
    shards = shards_of("memory://tables/hub.parquet")
    assert [ShardSample.read(shards, i).captions("txt")[0] for i in (0, 59)] == ["colour 0", "colour 59"]
    with raises(DataError, "row 1", "/etc/x.png"):
        shards_of("memory://tables/paths.parquet")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with raises(ConfigError, "http://127.0.0.1:9"):
        named_files("hf://datasets/sentence-transformers/all-nli", DataConfig())


# ---- MS MARCO --------------------------------------------------------------------------------------------------------


@pytest.fixture
def marco(tmp_path: Path) -> Path:
    """Tables without column names; a quote begins some passages, which are not quoted."""
    folder = tmp_path / "msmarco"
    folder.mkdir()
    passages = [f'"Passage" {i} says that it is number {i}' for i in range(20)]
    (folder / "collection.tsv").write_text("".join(f"{i}\t{text}\n" for i, text in enumerate(passages)))
    (folder / "queries.train.tsv").write_text("".join(f"{100 + i}\twhat is {i}\n" for i in range(12)))
    (folder / "qrels.train.tsv").write_text("".join(f"{100 + i}\t0\t{i}\t1\n" for i in range(10)))
    (folder / "qidpidtriples.tsv").write_text("".join(f"{100 + i}\t{i}\t{i + 5}\n" for i in range(10)))
    triples = "".join(f"what is {i}\t{passages[i]}\t{passages[i + 5]}\n" for i in range(10))
    (tmp_path / "triples.tsv").write_text(triples)
    return folder


def test_a_question_without_text_is_named_with_its_line(marco: Path) -> None:
    (marco / "queries.train.tsv").write_text("100\twhat is 0\n\n102\n")
    with raises(DataError, marco / "queries.train.tsv", "line 3", "'102'"):
        texts(marco / "qidpidtriples.tsv")


def test_a_line_that_is_not_utf_8_is_named(marco: Path) -> None:
    """Otherwise � would stand in the text, without a word."""
    sound = (marco / "queries.train.tsv").read_bytes() + "200\tñandú\n".encode()
    (marco / "queries.train.tsv").write_bytes(sound + b"201\twh\xe9t\n")
    with raises(DataError, marco / "queries.train.tsv", "line 14", "wh"):
        texts(marco / "qidpidtriples.tsv")
    (marco / "queries.train.tsv").write_bytes(sound)
    with (marco / "qidpidtriples.tsv").open("ab") as file:
        file.write(b"101\t1\xe9\t2\n" + "102\tñandú\t3\n".encode())
    with raises(DataError, marco / "qidpidtriples.tsv", "line 11"):
        texts(marco / "qidpidtriples.tsv")


def test_ms_marco(marco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    judged = texts(marco)
    assert judged[3] == ("what is 3", ('"Passage" 3 says that it is number 3',), ()) and len(judged) == 10
    triples = [
        (question, right, (f'"Passage" {i + 5} says that it is number {i + 5}',))
        for i, (question, right, _) in enumerate(judged)
    ]
    assert texts(tmp_path / "triples.tsv") == triples
    corpus = DataConfig().passage
    corpus.corpus = str(marco / "collection.tsv")
    assert texts(marco / "qidpidtriples.tsv", passage=corpus) == triples
    here(monkeypatch, "pack", marco, f"out={tmp_path / 'dpr'}", "to=dpr")
    assert texts(tmp_path / "dpr/train.json") == judged
    here(monkeypatch, "check", marco)
    assert "questions       10 of 10 rows" in capsys.readouterr().out


def test_coco_captions_of_one_image_stay_together(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(image(1))
    said = [{"image_id": 5, "caption": text} for text in ("a\nb", "c")]
    content = {"images": [{"id": 5, "file_name": "1.png"}], "annotations": said}
    (tmp_path / "captions.json").write_text(json.dumps(content))
    assert pairs(tmp_path / "captions.json") == [(image(1), "a b|c")]


def test_quoted_column_names(tmp_path: Path) -> None:
    source = tmp_path / "quoted.csv"
    source.write_text('"anchor","positive"\n"a, b","c d"\n')
    assert texts(source) == [("a, b", ("c d",), ())]


def test_json_lines_of_texts_are_read_in_place(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "st.jsonl", TEXTS)
    rows = open_questions(str(source), DataConfig())
    assert rows.origin(3) == (str(source), "4")


def test_templates_take_the_names_of_classes() -> None:
    assert BY_FOLDER[0][1] == "a photo of a red thing" and TEMPLATE == "a photo of a {}"


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Otherwise the last one would win, without a word."""
    (tmp_path / "two.csv").write_text("image,caption,caption\na.png,one,two\n")
    twice = pa.table([pa.array(["a.png"]), pa.array(["one"]), pa.array(["two"])], names=["image", "caption", "caption"])
    pq.write_table(twice, tmp_path / "two.parquet")
    for path in tmp_path.iterdir():
        with raises(DataError, path, "'caption'"):
            open_table(str(path))
    (tmp_path / "two.tsv").write_text("id\tanchor\tanchor\n1\tone\ttwo\n")
    with raises(DataError, tmp_path / "two.tsv", "line 1"):
        open_rows([str(tmp_path / "two.tsv")])
    (tmp_path / "unnamed.csv").write_text("image,caption,,\na.png,one,,\n")  # commas at the end of each line
    assert open_table(str(tmp_path / "unnamed.csv")).head()[0]["caption"] == "one"
