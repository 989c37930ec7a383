"""Conversion: bad rows are named or counted, nothing half-written stays, the same input makes the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import DPR, GOOD, IDS, ROWS, TARGETS, converted, read, write_beir, write_dpr, write_lines
from helpers.data_cli import here
from helpers.messages import raises
from helpers.shards import image, write_tar
from hydra.core.override_parser.overrides_parser import OverridesParser

from dyad.data.base.command_line import parse_options
from dyad.data.base.errors import BadFormat, ConfigError, DataError
from dyad.data.cli.convert import convert_passages
from dyad.data.cli.inputs import InputKind, kind_of, require_images
from dyad.data.cli.options import CheckOptions, OnError, PackOptions, Target
from dyad.data.config import DataConfig, PassageConfig, QuestionConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.formats import record_of
from dyad.data.question_passage.questions import open_questions
from dyad.data.shards.scan_tar import MAX_BYTES

# ---- bad rows ------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str, str]] = {
    "text for list": ({**GOOD, "pos": "abc"}, "a text where a list belongs", "'abc'"),
    "no positive": ({**DPR, "positive_ctxs": []}, "no positive", "positive_ctxs"),
    "no JSON": ("{\n", "unreadable row", "offset 43"),
    "no object": ("[1]\n", "unreadable row", "offset 43"),
    "no UTF-8": ('{"query": "é\udcff"}\n', "unreadable row", "byte 13"),
    "unknown id": ({**IDS, "negative_document_ids": ["c9"]}, "id that is not in the corpus", "'c9'"),
    "no id": ({**IDS, "positive_document_ids": [1.5]}, "no id", "positive_document_ids[0]"),
    "empty question": ({**GOOD, "query": " "}, "empty question", "' '"),
    "empty passage": ({**GOOD, "neg": [""]}, "empty passage", "neg[0]"),
    "no text": ({**DPR, "positive_ctxs": [{"title": "a"}]}, "no text", "positive_ctxs[0]"),
    "surrogate": ({**GOOD, "query": "\ud800"}, "no Unicode text", "query"),
    "unknown format": ({"q": "x"}, "unknown format", "q"),
    "two texts": (
        {"query": "y", "positive_passages": [{"docid": "1", "text": "a"}, {"docid": "1", "text": "b"}]},
        "passage id with two texts",
        "'1'",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_stop_with_their_line_or_are_counted(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row, reason, named = BAD[kind]
    corpus = str(write_lines(tmp_path / "corpus.jsonl", [{"docid": "c1", "text": "c"}]))
    source = tmp_path / "train.jsonl"
    lines = [json.dumps(GOOD) + "\n", row if isinstance(row, str) else json.dumps(row) + "\n", json.dumps(GOOD) + "\n"]
    source.write_bytes("".join(lines).encode("utf-8", "surrogateescape"))
    before = {path for path in tmp_path.iterdir() if path.name != ".index"}
    with raises(DataError, source, "line 2", named, "on_error=skip"):
        converted(source, tmp_path / "out", Target.beir, corpus=corpus)
    assert {path for path in tmp_path.iterdir() if path.name != ".index"} == before, "nothing half-written stays"
    made = converted(source, tmp_path / "out", Target.beir, corpus=corpus, on_error=OnError.skip)
    assert [(question.text, len(right)) for question, right, *_ in read(made)] == [("fine", 1)]
    assert [p.text for p in open_corpus(str(made.folder), "x")] == ["c", "a"], "nothing of the bad row"
    printed = capsys.readouterr()
    assert f"skipped {source}: " in printed.err and f"skipped 1 of 3 rows: 1 {reason}" in printed.out


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_chat_is_told_in_one_line_what_to_become(tmp_path: Path, name: str) -> None:
    source = write_lines(tmp_path / "chat.jsonl", [{name: [{"role": "user", "content": "hi"}]}])
    with raises(ConfigError, source, name, "task=language_model"):
        require_images([str(source)], PackOptions(out="x"), "INPUT")
    with raises(BadFormat, name, "task=language_model"):
        record_of({name: [{"role": "user", "content": "hi"}]}, PassageConfig())


def test_the_task_of_texts_is_refused_with_what_to_do() -> None:
    with raises(ConfigError, "task=language_model", "leave it out for texts"):
        parse_options(CheckOptions, ["task=language_model"], "python -m data check")


def test_a_first_row_of_another_format_is_not_one_to_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are like it."""
    scored = write_lines(tmp_path / "a.jsonl", [{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 2)
    named = write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.json", b'{"prompt": "a"}')])
    (tmp_path / "a.csv").write_text("left,right\na,b\n")
    for source, *parts in (
        (scored, "line 1", "score"),
        (named, "'0'", "prompt", "task=views"),
        (tmp_path / "a.csv", "left, right", "columns=[question,positive,negative]"),
    ):
        with raises((ConfigError, DataError), source, *parts) as caught:
            here(monkeypatch, "pack", str(source), f"out={tmp_path}/out")
        assert "on_error" not in str(caught.value) and str(caught.value).count("left, right") <= 1


def test_rows_that_a_format_cannot_hold(tmp_path: Path) -> None:
    odd = {"query_id": "a\tb", "query": "x", "positive_passages": [{"docid": "1", "text": "a"}]}
    source = write_lines(tmp_path / "t.jsonl", [odd])
    with raises(DataError, "line 1", r"'a\tb'"):
        converted(source, tmp_path / "out", Target.beir)
    assert read(converted(source, tmp_path / "ids", Target.tevatron_ids))[0][0].id == "a\tb"
    twice = [{"query_id": "1", "query": q, "positive_passages": [{"text": "a"}]} for q in "xy"]
    with raises(DataError, "line 2", "'1'"):
        converted(write_lines(tmp_path / "u.jsonl", twice), tmp_path / "out", Target.beir)
    (tmp_path / "psgs.tsv").write_text("id\ttext\ttitle\n1\ta\t\n1\tb\t\n")
    with raises(DataError, "psgs.tsv", "line 3", "'1'"):
        convert_passages(str(tmp_path / "psgs.tsv"), PackOptions(out=str(tmp_path / "out"), to=Target.beir))


def test_a_row_too_long_for_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are short, what they stand for is not."""
    monkeypatch.setitem(MAX_BYTES, "json", 2_000)
    corpus = write_lines(tmp_path / "c.jsonl", [{"docid": n, "text": "x" * 1_500} for n in ("c1", "c2")])
    source = write_lines(tmp_path / "i.jsonl", [IDS, {**IDS, "negative_document_ids": ["c2"]}])
    with raises(DataError, "i.jsonl", "line 2"):
        converted(source, tmp_path / "out", Target.shards, corpus=str(corpus))
    made = converted(source, tmp_path / "out", Target.shards, corpus=str(corpus), on_error=OnError.skip)
    assert len(read(made)) == 1


@pytest.mark.parametrize("target", [target for target in Target if target not in (Target.shards, Target.flag)])
def test_a_row_too_long_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """What is written is read again; a bad row leaves the others as they are."""
    monkeypatch.setitem(MAX_BYTES, "json", 2_000)
    lists = [[{"docid": "1", "text": '"' * 500}, {"docid": "2", "text": '"' * 980}], [{"docid": "3", "text": "c"}]]
    rows = [{"query_id": f"{i}", "query": f"q{i}", "positive_passages": right} for i, right in enumerate(lists)]
    source = write_lines(tmp_path / "t.jsonl", rows)
    if target in (Target.beir, Target.tevatron_ids):  # each passage is a line of its own
        rows[0]["positive_passages"][1]["text"] = '"' * 1_200
        write_lines(source, rows)
    with raises(DataError, "t.jsonl", "line 1"):
        converted(source, tmp_path / "out", target)
    assert [q.text for q, *_ in read(converted(source, tmp_path / "out", target, on_error=OnError.skip))] == ["q1"]
    if target in (Target.beir, Target.tevatron_ids):
        assert [p.id for p in open_corpus(str(tmp_path / "out" / "corpus.jsonl"), "x")] == ["3"], "all or none"


def test_what_follows_a_break_is_said_to_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, source = json.dumps(GOOD), tmp_path / "t.json"
    source.write_text(f"[{row}, {row} {row}, {row}]")
    assert len(read(converted(source, tmp_path / "out", Target.dpr, on_error=OnError.skip))) == 2
    assert "skipped 1 of 3 rows: 1 unreadable rest of a file" in capsys.readouterr().out


def test_bad_samples_of_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(GOOD).encode()
    source = write_tar(tmp_path / "a.tar", [("0.json", b"{"), ("1.json", good), ("2.json", b"[]")])
    assert len(read(converted(source, tmp_path / "out", Target.dpr, on_error=OnError.skip))) == 1
    assert "skipped 2 of 3 rows: 2 unreadable row" in capsys.readouterr().out


def test_bad_passages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"id": 1, "text": "a"}, "{\n", {"id": 2}, {"id": 3, "text": "b"}])
    with raises(DataError, "c.jsonl", "line 2", "on_error=skip"):
        convert_passages(str(source), PackOptions(out=str(tmp_path / "out"), to=Target.beir))
    convert_passages(str(source), PackOptions(out=str(tmp_path / "out"), to=Target.beir, on_error=OnError.skip))
    assert "skipped 2 of 4 rows: 1 unreadable row, 1 no text" in capsys.readouterr().out
    assert [p.id for p in open_corpus(str(tmp_path / "out"), "x")] == ["1", "3"]


@pytest.mark.parametrize(("line", "side"), [("q9\ta\t1\n", "question"), ("q1\tz\t1\n", "passage")])
def test_judgements_of_unknown_ids(tmp_path: Path, line: str, side: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in training, they are left out and counted, unless they are most of all."""
    folder = write_beir(tmp_path / "in", line + "q1\ta\t1\n", "train")
    assert len(read(converted(folder, tmp_path / "out", Target.flag))) == 1
    assert f"not read: judgements of an unknown {side} (1)" in capsys.readouterr().out
    (folder / "qrels" / "train.tsv").write_text(line)
    with raises(DataError, "train.tsv", "line 1", side):
        converted(folder, tmp_path / "out2", Target.flag)


def test_damaged_judgements_and_splits(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "in", "q1\ta\n", "train")
    with raises(DataError, "train.tsv", "line 2"):
        converted(folder, tmp_path / "out", Target.flag)
    with raises(ConfigError, "split=trian", "'train'"):
        converted(folder, tmp_path / "out", Target.flag, split="trian")
    bare = tmp_path / "bare"
    bare.mkdir()
    write_lines(bare / "queries.jsonl", [{"_id": "1", "text": "x"}])
    with raises(ConfigError, "bare/qrels/train.tsv"):
        converted(bare, tmp_path / "out", Target.flag)
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with raises(DataError, folder):
        converted(folder, tmp_path / "out", Target.flag)
    assert not (tmp_path / "out").exists()


def test_commands_that_cannot_work(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", [IDS])
    good = write_lines(tmp_path / "f.jsonl", [GOOD])
    beir = write_beir(tmp_path / "beir")
    refused: list[tuple[Path | str, dict[str, Any], str]] = [
        (source, {}, "corpus="),
        (good, {"corpus": str(tmp_path / "none.jsonl")}, f"corpus={tmp_path / 'none.jsonl'}"),
        (f"{good}@2", {}, f"{good}@2"),
        (f"{good}::{beir}", {}, str(beir)),
        (good, {"split": "../evil"}, "split=../evil"),
    ]
    for path, options, named in refused:
        with raises(ConfigError, named):
            converted(path, tmp_path / "out", Target.flag, **options)
    with raises(ConfigError, beir):
        converted(good, beir, Target.flag)
    for target in set(TARGETS) - {Target.shards, Target.beir}:  # corpus.jsonl would be both files, or the wrong one
        for split in ("corpus", "corpus.v2"):
            with raises(ConfigError, f"split={split}"):
                converted(good, tmp_path / "out", target, split=split)
    assert len(read(converted(good, tmp_path / "as_beir", Target.beir, split="corpus"))) == 1
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    with raises(ConfigError, "x.jsonl.gz"):
        converted(packed, tmp_path / "out", Target.flag)


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_same_bytes_every_time(tmp_path: Path, target: Target) -> None:
    source = write_dpr(tmp_path / "x.json", ROWS * 3 + [DPR])

    def digests(out: Path) -> dict[str, str]:
        files = (path for path in out.rglob("*") if path.is_file() and ".index" not in path.parts)
        return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    first, second = (digests(converted(source, tmp_path / name, target, maxcount=4).folder) for name in "ab")
    assert first == second and len(first) == {"shards": 2, "tevatron_ids": 2, "beir": 3}.get(target.name, 1)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    source = write_dpr(tmp_path / "x.json", ROWS)
    program = (
        "import sys; from dyad.data.cli import convert, options;"
        "def stop(*_): raise KeyboardInterrupt\n"
        "convert.index_new = stop\n"
        "from dyad.process import run\n"
        "run(lambda: convert.convert(sys.argv[1], options.PackOptions(out=sys.argv[2], to=options.Target.beir)))"
    ).replace(";def", "\ndef")
    done = subprocess.run([sys.executable, "-c", program, str(source), str(tmp_path / "out")], capture_output=True)
    assert done.returncode == 130, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", ".index"}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_printed_command_names_what_was_written(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a shell and Hydra's grammar, as it is typed."""
    made = converted(write_dpr(tmp_path / "x.json", ROWS), tmp_path / 'it\'s "here" {1,2}', target, split="dev")
    command = next(line for line in capsys.readouterr().out.splitlines() if "python -m train" in line)
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "train", "experiment=mnrl"]
    overrides = map(OverridesParser.create().parse_override, words[4:])
    values: dict[str, Any] = {override.key_or_group: override.value() for override in overrides}
    config = DataConfig(
        passage=PassageConfig(corpus=values.get("data.passage.corpus")),
        question=QuestionConfig(split=values.get("data.question.split", "train")),
    )
    assert len(open_questions(str(values["data.train"]), config)) == 2 and str(made.folder) in str(values["data.train"])


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    """What a conversion adds to the process: less than a tenth of the 60 MB of text that go through."""
    row = {"query": "q", "pos": ["x" * 9_000], "neg": ["y" * 9_000]}
    with (tmp_path / "x.jsonl").open("w") as file:
        for n in range(3_300):
            row["query"], row["pos"] = f"question {n}", [f"{n}" + "x" * 9_000]
            file.write(json.dumps(row) + "\n")
    program = (
        "import resource, sys; from dyad.data.cli.convert import convert;"
        "from dyad.data.cli.options import PackOptions, Target;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "convert(sys.argv[1], PackOptions(out=sys.argv[2] + '/1', to=Target.beir)); before = peak();"
        "convert(sys.argv[3], PackOptions(out=sys.argv[2] + '/2', to=Target.beir)); print(peak() - before)"
    )
    write_lines(tmp_path / "small.jsonl", [GOOD])
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "small.jsonl", tmp_path, tmp_path / "x.jsonl"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.splitlines()[-1]) < 8_000, "KiB"


# ---- images, questions or passages? ------------------------------------------------------------------------------


def test_kind_of_an_input(tmp_path: Path) -> None:
    def lines(name: str, *rows: Any) -> str:
        return str(write_lines(tmp_path / name, list(rows)))

    found: list[tuple[str, InputKind]] = [
        (lines("a.jsonl", GOOD), InputKind.questions),
        (lines("b.jsonl", "{\n", GOOD), InputKind.questions),
        (lines("c.jsonl", {"docid": "1", "text": "x"}), InputKind.passages),
        (lines("d.jsonl", {"image": "x.png", "text": "x"}), InputKind.images),
        (lines("e.jsonl", {"filepath": "x.png", "title": "x", "id": 1}), InputKind.images),
        (lines("f.tsv", "id\ttext\ttitle\n"), InputKind.passages),
        (lines("g.tsv", "filepath\ttitle\n"), InputKind.images),
        (str(write_dpr(tmp_path / "h.json", ROWS)), InputKind.questions),
        (str(write_dpr(tmp_path / "i.json", [{"id": 1, "text": "x"}])), InputKind.passages),
        (str(write_dpr(tmp_path / "j.json", [{"x": 1}])), InputKind.questions),
        (str(write_tar(tmp_path / "k.tar", [("0.json", b"{}")])), InputKind.questions),
        (str(write_tar(tmp_path / "l.tar", [("0.json", b"{}"), ("0.png", b"x")])), InputKind.images),
        (str(write_beir(tmp_path / "m")), InputKind.questions),
        (str(tmp_path / "none.csv"), InputKind.images),
        ("http://127.0.0.1:9/none.jsonl?signature=x", InputKind.images),
        (str(tmp_path), InputKind.questions),
    ]
    for source, kind in found:
        assert kind_of([source], CheckOptions()) is kind, source


def test_a_long_line_is_not_read_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{**GOOD, "query": "x" * (1 << 20)}])
    reads = []

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            reads.append(len(buffer))
            return super().readinto(buffer)

    monkeypatch.setattr("dyad.data.shards.storage.open_stream", Counted)
    assert kind_of([str(source)], CheckOptions()) is InputKind.questions
    assert 0 < len(reads) < 1000
