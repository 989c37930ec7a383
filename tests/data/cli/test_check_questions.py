"""`python -m data` on questions and passages: index, check and pack as they are typed."""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers.data_cli import code_of, ended, here
from helpers.messages import raises
from helpers.rows import dpr_row, write_beir, write_lines
from helpers.shards import write_pairs, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.train.cli.compose import compose_config


def dpr_file(path: Path) -> Path:
    """Five rows, three of them good: one of these calls a passage right and wrong, one repeats a question."""
    right, wrong = {"title": "Ann", "text": "a"}, {"title": "", "text": "bcd"}
    rows = [
        {"question": "who?", "answers": ["x", "y"], "positive_ctxs": [right], "hard_negative_ctxs": [wrong, right]},
        {"question": "whose?", "answers": "x", "positive_ctxs": [right]},
        {"question": "who?", "positive_ctxs": [right, {**wrong, "score": 1}], "dataset": "nq"},
        {"question": "where?", "positive_ctxs": []},
        {"question": "when?", "positive_ctxs": [wrong], "negative_ctxs": [{"text": "e"}]},
    ]
    path.write_text(json.dumps(rows, indent=1))
    return path


def test_check_of_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dpr_file(tmp_path / "nq.json")
    done = ended(monkeypatch, "check", source)
    assert done.returncode == 3
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()[:2]] == [
        ["questions", "3 of 5 rows, 1 repeat another"],
        ["positives", "4; per row min 1, median 1, 95th percentile 2, max 2"],
    ]
    assert done.stdout.splitlines()[2:] == [
        "negatives       1; per row min 0, median 0, 95th percentile 1, max 1",
        "hard negatives  2; per row min 0, median 0, 95th percentile 2, max 2",
        "answers         2, of 1 questions",
        "passages        7, 3 with a title, 4 repeat another; bytes min 1, median 1, 95th percentile 3, max 3",
        "not read        dataset (1), score of passages (1)",
        f"warning: {source}: row 1: a negative is a positive, too: left out when drawn",
        f"bad: {source}: row 2: a text where a list belongs: answers is 'x'; write ['x'…]",
        f"bad: {source}: row 4: no positive: positive_ctxs is empty",
    ]
    assert done.stderr.startswith(
        "error: 2 problems in 5 rows. Training refuses them. Without bad rows: python -m data"
    )


def test_check_of_ids_and_their_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"docid": n, "text": "x" * n}) + "\n" for n in range(1, 4))
    )
    rows = [
        {"query_id": n, "query_text": "q", "positive_document_ids": [n], "negative_document_ids": ["3"]} for n in (1, 2)
    ]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here(monkeypatch, "check", tmp_path / "ids.jsonl", f"corpus={tmp_path}/corpus.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "questions       2 of 2 rows, 1 repeat another"
    assert (
        printed[-4]
        == "corpus          3, 0 with a title, 0 repeat another; bytes min 1, median 2, 95th percentile 3, max 3"
    )
    assert not any(line.startswith(("passages", "not in corpus")) for line in printed)
    inline = {"query": "q", "positive_passages": [{"docid": "3", "text": "xxx"}, {"docid": "3", "text": "other"}]}
    (tmp_path / "inline.jsonl").write_text(json.dumps(inline) + "\n")
    here(monkeypatch, "check", tmp_path / "inline.jsonl", f"corpus={tmp_path}/corpus.jsonl")
    assert "not in corpus   1 of the 2 positives that are in the rows" in capsys.readouterr().out.splitlines()
    (tmp_path / "corpus.jsonl").write_text('{"docid": 1, "text": "a"}\n{"docid": 3, "text": " "}\n')
    assert code_of(monkeypatch, "check", tmp_path / "ids.jsonl", f"corpus={tmp_path}/corpus.jsonl") == 3
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(("bad", "warning"))] == [
        f"warning: {tmp_path}/corpus.jsonl: line 2: empty passage",
        f"bad: {tmp_path}/ids.jsonl: line 2: id that is not in the corpus: '2'",
    ]


def test_check_of_passages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "psgs.tsv").write_text('id\ttext\ttitle\n1\ta\tT\n2\t"b\nc"\t\n')
    here(monkeypatch, "check", tmp_path / "psgs.tsv")
    assert capsys.readouterr().out == (
        "passages        2, 1 with a title, 0 repeat another; bytes min 1, median 1, 95th percentile 3, max 3\n"
        "not read        nothing\n"
        "fine: passages alone, for data.passage.corpus\n"
    )
    lines = [{"id": 1, "text": "a"}, {"id": "1", "text": "b"}, {"text": "c"}, {"id": 2, "text": ""}, {"id": 3}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert code_of(monkeypatch, "check", tmp_path / "c.jsonl") == 3
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2:] == [
        f"warning: {tmp_path}/c.jsonl: line 4: empty passage",
        f"bad: {tmp_path}/c.jsonl: line 3: no id",
        f"bad: {tmp_path}/c.jsonl: line 5: no text: the row has the fields id",
        f"bad: {tmp_path}/c.jsonl: line 2: id '1' again, first at {tmp_path}/c.jsonl: line 1",
    ]
    assert printed.err.startswith("error: 3 problems in 5 rows. ")


def test_check_of_fields_without_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is in them; and fields of one format are none of another."""

    def unread(*rows: dict) -> str:
        (tmp_path / "x.jsonl").write_text(
            "".join(json.dumps({"query": "x", "pos": ["a"], **row}) + "\n" for row in rows)
        )
        here(monkeypatch, "check", tmp_path / "x.jsonl")
        return capsys.readouterr().out.splitlines()[-3]

    assert unread({"metadata": 5}, {"metadata": "ab"}) == "not read        metadata (2)"
    assert unread({"metadata": {"topic": 5, "a": 1}}) == "not read        metadata.a (1), metadata.topic (1)"
    assert unread({"candidates": 5, "ctxs": [1]}) == "not read        candidates (1), ctxs (1)"
    assert unread({"hard_negative_ctxs": [{"text": "lost"}]}) == "not read        hard_negative_ctxs (1)"
    assert unread({"\ud800\x1b[31m": 1}) == r"not read        '\ud800\x1b[31m' (1)"
    scores = unread({"pos_scores": [1.0], "neg_scores": []})
    assert scores.startswith("not read        neg_scores (1), pos_scores (1)") and "teacher" in scores
    many = unread(*({"metadata": {f"{n}": n}} for n in range(1_100)))
    assert many.startswith("not read        other fields (100), metadata.0 (1), ")
    assert many.endswith(" (1), 981 more fields")


def test_check_of_damaged_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = b'{"query": "x", "pos": ["a"]}'
    write_tar(tmp_path / "a.tar", [("0.json", good), ("1.json", b"{"), ("2.json", b"[]"), ("3.json", good)])
    with raises(DataError, "2 problems", "4 rows"):
        here(monkeypatch, "check", tmp_path / "a.tar")


def test_check_lists_the_first_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text('{"query": "x", "pos": []}\n' * 130 + "{\n" * 130)
    with raises(DataError, "260 problems", "260 rows"):
        here(monkeypatch, "check", tmp_path / "x.jsonl")
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad: ")]
    assert len(found) < 5 and any("100 … and 29 more like this" in line for line in found)  # not indexed: counted
    assert found[-1] == f"bad: {tmp_path}/x.jsonl: line 1: no positive: pos is empty … and 129 more like this"
    (tmp_path / "none.json").write_text("[]")
    with raises(DataError):
        here(monkeypatch, "check", tmp_path / "none.json")


def test_index_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "psgs.tsv").write_text("id\ttext\ttitle\n1\ta\tT\n2\tb\n")
    here(monkeypatch, "index", dpr_file(tmp_path / "nq.json"))
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [str(tmp_path / "nq.json"), "5"]
    with raises(DataError, "1 of 2"):
        here(monkeypatch, "index", tmp_path / "nq.json", tmp_path / "psgs.tsv")
    assert f"{tmp_path}/psgs.tsv: offset 20: line 3 has 2 columns, the first line has 3" in capsys.readouterr().out


def test_a_table_of_pairs_without_column_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain.tsv"
    path.write_text("what is red\ta stone\nwhat is blue\tthe sky\n")
    with raises(ConfigError, "plain.tsv", "what is red, a stone", "column names", "question<TAB>positive"):
        here(monkeypatch, "check", path)
    path.write_text("question\tpositive\n" + path.read_text())
    here(monkeypatch, "check", path)


def test_a_manifest_does_not_replace_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any name of the file."""
    shard, link = dpr_file(tmp_path / "nq.json"), tmp_path / "link.json"
    before = shard.read_bytes()
    link.symlink_to(shard)
    for out in (shard, link):
        with raises(ConfigError, f"out={out}", "manifest.json"):
            here(monkeypatch, "index", shard, f"out={out}")
    assert shard.read_bytes() == before


def test_the_printed_command_reads_the_columns_that_were_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "st.csv"
    table.write_text("ask,its reply\nq,a\nr,b\n")
    here(monkeypatch, "check", table, "columns=[ask,its reply]")
    *_, line = capsys.readouterr().out.splitlines()
    config = compose_config(shlex.split(line)[3:])
    assert config.data.columns == ["ask", "its reply"] and config.data.train == str(table)
    with raises(ConfigError, table, "'repl'"):
        here(monkeypatch, "check", table, "columns=[ask,repl]")
    with raises(ConfigError, "val=nowhere"):
        here(monkeypatch, "check", table, "columns=[ask,its reply]", "val=nowhere")


@pytest.mark.parametrize(("counts", "per_row"), [([3, 2, 3], 3), ([1, 2, 1], 1), ([30, 30, 30], 1)])
def test_the_printed_command_draws_all_negatives_of_a_row_that_has_some(
    counts: list[int], per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": f"q{n}", "pos": ["p"], "neg": [f"n{i}" for i in range(count)]} for n, count in enumerate(counts)]
    here(monkeypatch, "check", write_lines(tmp_path / "x.jsonl", rows))
    *_, line = capsys.readouterr().out.splitlines()
    assert compose_config(shlex.split(line)[3:]).data.negatives.per_row == per_row


def test_scores_of_pairs_are_no_training_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sts.csv").write_text("sentence1,sentence2,score\na,b,0.05\n")
    assert code_of(monkeypatch, "check", tmp_path / "sts.csv") == 3
    said = capsys.readouterr().out
    assert "rows of low score" in said and "no negative" in said and "data.columns=[sentence1,sentence2]" in said


def test_a_manifest_among_shards_is_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path / "x.tar", 2)
    here(monkeypatch, "index", tmp_path, f"out={tmp_path}/a.json")
    here(monkeypatch, "index", tmp_path)
    here(monkeypatch, "check", tmp_path)


def test_pack_of_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"query": f"q{n}", "pos": [f"p{n}"], "neg": []} for n in range(3)]
    packed = tmp_path / "flag.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    done = ended(monkeypatch, "pack", packed, f"out={tmp_path}/out", "to=beir")
    assert done.returncode == 2 and f"gunzip -k {packed}" in done.stderr
    subprocess.run(["gunzip", "-k", packed], check=True)
    done = ended(monkeypatch, "pack", tmp_path / "flag.jsonl", f"out={tmp_path}/out", "to=beir", "split=dev")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == [
        f"3 questions, 3 positives, 3 passages in {tmp_path}/out (beir), indexed",
        "train on them:",
        "  python -m train experiment=mnrl model.text.name=bert-base-uncased "
        f"'data.train=\"{tmp_path}/out\"' data.question.split=dev global_batch_size=3",
    ]
    refused = ended(monkeypatch, "pack", tmp_path / "flag.jsonl", f"out={tmp_path}/out", "to=bier")
    assert refused.returncode == 2 and "Did you mean 'beir'?" in refused.stderr
    images = ended(monkeypatch, "pack", write_pairs(tmp_path / "a.tar", 1), f"out={tmp_path}/b", "to=beir")
    assert images.returncode == 2 and "to=beir: images and captions become shards" in images.stderr


@pytest.mark.parametrize("joined", ["{beir}::{rows}", "{rows}::{beir}"])
def test_a_beir_folder_among_other_sources_is_not_taken_for_passages(
    joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beir, rows = write_beir(tmp_path / "beir"), write_lines(tmp_path / "q.jsonl", [dpr_row(1)])
    done = ended(monkeypatch, "check", joined.format(beir=beir, rows=rows))
    assert done.returncode == 2 and f"{beir} is a BEIR folder, which goes alone here" in done.stderr


def test_check_of_columns_that_the_user_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "x.jsonl", [{"premise": "a", "hypothesis": "b", "label": "contradiction"}] * 2)
    here(monkeypatch, "check", source, "columns=[premise,hypothesis]")
    assert "not read        label (2)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("laion.csv", "URL,caption2\nhttps://example.org/0.jpg,one\n"),
        ("cc3m.tsv", "a frog\thttp://example.org/0.jpg\n"),
    ],
)
def test_a_table_of_urls_names_img2dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text * 2)
    with raises(ConfigError, name, "URLs of images are not downloaded: img2dataset makes shards of such a table"):
        here(monkeypatch, "check", tmp_path / name)
