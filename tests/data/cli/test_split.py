"""`python -m data split`, `pack … val=` and `check … val=`: no content on both sides, and the share asked for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.data_cli import code_of, ended, here
from helpers.messages import raises
from helpers.rows import dpr_row, write_beir, write_lines
from helpers.shards import Member, image, write_tar
from hypothesis import given, settings, strategies as st

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.cli.contents import contents
from dyad.data.cli.options import CheckOptions, SplitOptions
from dyad.data.cli.split import validation_rows
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.run.checks import check_config
from dyad.train.cli.compose import compose_config


def held(path: Path, split: str = "train") -> list[set[int]]:
    """The content keys of each row."""
    rows = contents([str(path)], CheckOptions(split=split), "SOURCE")
    return [{key for keys in kinds.values() for key in keys} for _, kinds in rows]


def no_leak(out: Path, rows: int, share: float, largest: int, names: tuple[str, str] = ("train", "val")) -> None:
    """Nothing on both sides, no row lost, and a share that is off by less than a group."""
    train, val = (held(out / name) for name in names)
    assert len(train) + len(val) == rows and val and train
    assert not set().union(*train) & set().union(*val)
    assert abs(len(val) - share * rows) <= largest


def copies(count: int, same: int = 3) -> list[Member]:
    """Samples of which `same` in a row share an image, and the last of them shares its caption with the next."""
    members: list[Member] = []
    for n in range(count):
        caption = f"caption {n + 1 if n % same == same - 1 and n % (2 * same) < same else n}"
        fields = json.dumps({"author": n // 10, "caption": caption}).encode()
        members += [(f"k{n}.png", image(n // same)), (f"k{n}.json", fields)]
    return members


def printed_command(out: str) -> list[str]:
    """The arguments of the training command at the end."""
    *_, line = out.splitlines()
    program, *arguments = shlex.split(line)
    assert [program, *arguments[:2]] == ["python", "-m", "train"]
    return arguments[2:]


def starts(arguments: list[str], *others: str) -> None:
    """Training accepts the command: keys, values, and files that are there."""
    check_config(compose_config([*arguments, *others]))


# ---- which rows ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=3), min_size=2, max_size=40), st.floats(0.05, 0.95))
def test_rows_with_a_key_in_common_stay_together(rows: list[set[int]], share: float) -> None:
    """Against a search by hand; the share is off by less than the smallest group that was left out."""
    pairs = np.array([[n, key] for n, keys in enumerate(rows) for key in keys], np.int64).T
    groups: list[set[int]] = []
    for keys in rows:
        joined = [group for group in groups if group & keys]
        groups = [group for group in groups if not group & keys] + [keys.union(*joined)]
    sizes = [sum(keys <= group for keys in rows) for group in groups]
    try:
        in_val = validation_rows(pairs, len(rows), SplitOptions(val=share))
    except ConfigError:
        assert min(sizes) > min(round(share * len(rows)), len(rows) - 1)
        return
    val = set().union(*(keys for keys, chosen in zip(rows, in_val, strict=True) if chosen))
    train = set().union(*(keys for keys, chosen in zip(rows, in_val, strict=True) if not chosen))
    assert val and train and not val & train
    left = [size for size, group in zip(sizes, groups, strict=True) if not group & val]
    assert 0 <= min(round(share * len(rows)), len(rows) - 1) - in_val.sum() < min(left)


def test_more_rows_leave_most_where_they_were() -> None:
    """The order is that of a hash of contents: with 10 % more rows nearly all old ones for validation stay so."""
    before, after = (
        validation_rows(np.stack([np.arange(n), np.arange(n) ** 2 % 7919]), n, SplitOptions(val=0.2))
        for n in (2000, 2200)
    )
    assert before[:2000][after[:2000]].mean() > 0.9


def test_a_chain_of_rows_is_one_group() -> None:
    """Row n shares a key with row n + 1, as windows of a text do. A pass over all rows per link would take hours."""
    n = np.arange(300_000)
    pairs = np.stack([np.concatenate([n, n]), np.concatenate([n, n + 1])])
    with pytest.raises(ConfigError):
        validation_rows(pairs, len(n), SplitOptions(val=0.5))
    alone = np.stack([[len(n)], [-1]])
    in_val = validation_rows(np.concatenate([pairs, alone], 1), len(n) + 1, SplitOptions(val=0.5))
    assert in_val.nonzero()[0].tolist() == [len(n)]


# ---- images ------------------------------------------------------------------------------------------------------


def test_split_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Members keep their bytes and samples their keys; equal runs give equal bytes; the printed command is accepted."""
    members = copies(200)
    source = write_tar(tmp_path / "a.tar", members[: len(members) // 2])
    more = write_tar(tmp_path / "b.tar", members[len(members) // 2 :])
    for name in ("out", "again"):
        here(monkeypatch, "split", source, more, f"out={tmp_path}/{name}")
    printed = capsys.readouterr().out
    assert "in both parts: 0 pictures\nin both parts: 0 captions\n" in printed
    no_leak(tmp_path / "out", 200, 0.1, largest=6)
    starts(printed_command(printed))
    found = {}
    for side in ("train", "val"):
        shards = open_shards(parse_sources(f"{tmp_path}/out/{side}"))
        found |= {shards.key(i): shards.read(i) for i in range(len(shards))}
        (a, b) = (tmp_path / name / side / "000000.tar" for name in ("out", "again"))
        assert a.read_bytes() == b.read_bytes()
    assert {f"{key}.{suffix}": content for key, kinds in found.items() for suffix, content in kinds.items()} == dict(
        members
    )


@pytest.mark.parametrize(("by", "apart"), [("picture", "picture"), ("caption", "caption"), ("author", "author")])
def test_split_by_one_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str, apart: str
) -> None:
    """What is then on both sides is counted."""
    source = write_tar(tmp_path / "a.tar", copies(200))
    here(monkeypatch, "split", source, f"out={tmp_path}/out", f"by={by}", "val=0.3", "maxcount=50")
    lines = capsys.readouterr().out.splitlines()
    assert f"in both parts: 0 {apart}s" in lines and len(list((tmp_path / "out/train").glob("*.tar"))) == 3
    other = next(line for line in lines if line.startswith("in both") and apart not in line)
    sides = [
        [kinds for _, kinds in contents([f"{tmp_path}/out/{side}"], CheckOptions(), "x")] for side in ("train", "val")
    ]
    kind = "caption" if by == "picture" else "picture"
    train, val = ({key for kinds in rows for key in kinds[kind]} for rows in sides)
    assert other == f"in both parts: {len(train & val)} {kind}{'s' * (len(train & val) != 1)}"


def test_splits_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = write_tar(
        tmp_path / "a.tar", [(f"{n}.{s}", image() if s == "png" else b"x") for n in range(9) for s in ("png", "txt")]
    )
    wrong = [
        ([same], "9 rows"),
        ([write_tar(tmp_path / "b.tar", copies(60)), "val=1"], "val=1"),
        ([tmp_path / "b.tar", "by=autor"], "by=autor", "author"),
        ([same, "by=pictures"], "by=pictures"),
        ([same, "by=caption", "task=labelled"], "by=caption", "picture"),
        ([tmp_path / "b.tar", "val=0"], "val=0"),
        ([tmp_path / "b.tar", "val=0.001"], "val=0.001"),
        ([write_lines(tmp_path / "c.jsonl", [dpr_row(1)]), tmp_path / "b.tar"], ".jsonl"),
        ([write_lines(tmp_path / "p.jsonl", [{"id": 1, "text": "a"}])], "p.jsonl"),
    ]
    for arguments, *named in wrong:
        with raises(ConfigError, *named):
            here(monkeypatch, "split", *arguments, f"out={tmp_path}/out")
        assert not (tmp_path / "out").exists()
    with raises(ConfigError, "out=FOLDER"):
        here(monkeypatch, "split", same)
    write_lines(tmp_path / "bad.jsonl", [dpr_row(1), {**dpr_row(2), "positive_ctxs": []}])
    with raises(DataError, "bad.jsonl", "line 2"):
        here(monkeypatch, "split", tmp_path / "bad.jsonl", f"out={tmp_path}/out")


# ---- questions -----------------------------------------------------------------------------------------------------


def questions(count: int) -> Iterator[dict]:
    """Every second question has the passage of the one before; every tenth is asked twice."""
    for i in range(count):
        yield {**dpr_row(i), "positive_ctxs": dpr_row(i - i % 2)["positive_ctxs"], "extra": i}
        if i % 10 == 0:
            yield {**dpr_row(i), "positive_ctxs": [{"title": "", "text": f"again {i}"}]}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".tar"])
def test_split_of_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """Rows stay as they are, in files of the same kind."""
    rows, source = list(questions(100)), tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write_lines(source, rows)
    elif suffix == ".json":
        source.write_text(json.dumps(rows, indent=1))
    else:
        write_tar(source, [(f"{n}.json", json.dumps(row).encode()) for n, row in enumerate(rows)])
    here(monkeypatch, "split", source, f"out={tmp_path}/out", "val=0.2")
    no_leak(tmp_path / "out", 110, 0.2, largest=3)
    starts(printed_command(capsys.readouterr().out))
    shards = [open_shards(parse_sources(f"{tmp_path}/out/{side}", suffixes=(suffix,))) for side in ("train", "val")]
    written = [json.loads(part.read(i)["json"]) for part in shards for i in range(len(part))]
    assert sorted(map(json.dumps, written)) == sorted(map(json.dumps, rows))


def test_split_of_a_table_before_a_file_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are told apart in the order in which they are written, that of the source."""
    table, source = tmp_path / "a.csv", tmp_path / "b.jsonl"
    table.write_text("question,positive\n" + "".join(f"alone {n},passage {n}\n" for n in range(10)))
    write_lines(source, [row for n in range(10) for row in [{"question": f"q {n}", "positive": f"p {n}"}] * 3])
    here(monkeypatch, "split", table, source, f"out={tmp_path}/out", "val=0.3")
    train, val = (
        {json.loads(line)["question"] for line in (tmp_path / "out" / side / f"{side}.jsonl").read_text().splitlines()}
        for side in ("train", "val")
    )
    assert train and val and not train & val, capsys.readouterr().out


@pytest.mark.parametrize("named", ["beir", "./beir", "beir//"])
def test_split_of_a_beir_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judgements of every grade go with their question, whatever the order; both parts have the whole corpus."""
    beir = write_beir(tmp_path / "beir", passages=90, queries=62)
    (beir / "queries.jsonl").write_text("".join((beir / "queries.jsonl").read_text().splitlines(True)[::-1]))
    monkeypatch.chdir(tmp_path)
    here(monkeypatch, "split", named, f"out={tmp_path}/out", "val=0.2", "by=content")
    train, val = (held(tmp_path / "out" / name, split=split) for name, split in (("train", "train"), ("val", "test")))
    assert len(train) + len(val) == 60 and abs(len(val) - 12) <= 4 and not set().union(*train) & set().union(*val)
    starts(printed_command(capsys.readouterr().out))
    lines = [
        (tmp_path / "out" / part).read_text().splitlines() for part in ("train/qrels/train.tsv", "val/qrels/test.tsv")
    ]
    assert lines[0][0] == lines[1][0] == "query-id\tcorpus-id\tscore"
    whole = (beir / "qrels/train.tsv").read_text().splitlines()
    assert sorted([*lines[0][1:], *lines[1][1:]]) == sorted(whole[1:])
    for side in ("train", "val"):
        assert (tmp_path / "out" / side / "corpus.jsonl").read_text() == (beir / "corpus.jsonl").read_text()


def test_other_folders_are_split_as_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the command: of MS MARCO's folder, and of a folder with another corpus."""
    other = write_lines(tmp_path / "other.jsonl", ({"_id": f"d{i}", "text": f"t {i}"} for i in range(20)))
    marco = tmp_path / "ms marco"
    marco.mkdir()
    for name, line in (
        ("collection", "{0}\ttext {0}"),
        ("queries.train", "{0}\twhat {0}"),
        ("qrels.train", "{0} 0 {0} 1"),
    ):
        (marco / f"{name}.tsv").write_text("".join(line.format(i) + "\n" for i in range(20)))
    for number, words in enumerate(([marco], [write_beir(tmp_path / "beir"), f"corpus={other}", "by=passage"])):
        out = tmp_path / f"out {number}"
        done = ended(monkeypatch, "split", *words, f"out={out}", "val=0.4")
        _, _, command = done.stderr.strip().rpartition("python -m data ")
        assert done.returncode == 2 and not done.stdout and not out.exists()
        here(monkeypatch, *shlex.split(command))
        starts(printed_command(capsys.readouterr().out))


# ---- pack ----------------------------------------------------------------------------------------------------------


def test_pack_of_images_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"image": f"{n}.png", "captions": [f"caption {n}", "an image of nothing"[: n % 9 + 3]]} for n in range(60)]
    for n in range(60):
        (tmp_path / f"in/{n}.png").write_bytes(image(n // 2))
    table = write_lines(tmp_path / "in/table.jsonl", rows)
    here(monkeypatch, "pack", table, f"out={tmp_path}/out", "val=0.1", "by=picture")
    printed = capsys.readouterr().out
    assert (
        "60 samples in 2 shards" in printed
        and "val   6 of 60 rows (10.0%)" in printed
        and "in both parts: 0 pictures" in printed
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]
    arguments = printed_command(printed)
    assert not any("captions" in word for word in arguments) and "global_batch_size=54" in arguments
    starts(arguments)


@pytest.mark.parametrize("to", ["shards", "dpr", "tevatron", "tevatron_ids", "flag", "beir"])
def test_pack_of_questions_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    rows = (
        {**row, "query_id": n, "negative_ctxs": [], "hard_negative_ctxs": []} for n, row in enumerate(questions(100))
    )
    source = write_lines(tmp_path / "a.jsonl", rows)
    here(monkeypatch, "pack", source, f"out={tmp_path}/out", f"to={to}", "val=0.2")
    printed = capsys.readouterr().out
    assert "in both parts: 0 questions\nin both parts: 0 passages\n" in printed
    starts(printed_command(printed))
    whole = [f"{tmp_path}/out/train", f"val={tmp_path}/out/val"]
    here(monkeypatch, "check", *(whole if to in ("shards", "beir") else _files(tmp_path / "out", to)))
    printed = capsys.readouterr().out
    assert "questions   0 of" in printed and "warning" not in printed and "fine: train with" in printed


@pytest.mark.parametrize(("to", "corpus"), [("dpr", ["corpus.tsv"]), ("tevatron", ["corpus.jsonl"]), ("beir", [])])
def test_pack_in_two_parts_keeps_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, corpus: list[str]
) -> None:
    """Also where training does not need it. In beir each part has its own."""
    beir = write_beir(tmp_path / "beir", passages=60, queries=22)
    here(monkeypatch, "pack", beir, f"out={tmp_path}/out", f"to={to}", "val=0.2")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*corpus, "train", "val"]


def _files(out: Path, to: str) -> list[str]:
    (train,), (val,) = (sorted((out / side).glob("*.json*")) for side in ("train", "val"))
    corpus = [f"corpus={out}/corpus.jsonl"] if to == "tevatron_ids" else []
    return [str(train), f"val={val}", *corpus]


def test_passages_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "p.jsonl", [{"id": 1, "text": "a"}])
    assert code_of(monkeypatch, "pack", source, f"out={tmp_path}/out", "to=beir", "val=0.1") == 2


# ---- leaks ---------------------------------------------------------------------------------------------------------


def test_leaks_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted with examples; a warning, exit code 0."""
    members = copies(60)
    train, val = write_tar(tmp_path / "a.tar", members[:80]), write_tar(tmp_path / "b.tar", members[76:])
    done = ended(monkeypatch, "check", train, f"val={val}")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    for kind, names in (
        ("pictures", [members[2 * n][1] for n in range(60)]),
        ("captions", [members[2 * n + 1][1] for n in range(60)]),
    ):
        shared = [json.loads(name)["caption"] if kind == "captions" else name for name in names]
        both = {*shared[:40]} & {*shared[38:]}
        assert f"{kind}    {len(both)} of {len({*shared[38:]})} of val stand in the training data too" in lines and both
    assert any(line.startswith(f"  {val}: sample 'k38'  caption 3") for line in lines)
    assert "warning: val is not unseen" in done.stdout and lines[-2] == "fine: train with"
    other = ended(monkeypatch, "check", train, f"val={write_lines(tmp_path / 'q.jsonl', [dpr_row(1)])}")
    assert other.returncode == 2 and "holds question, passage; SOURCE picture, caption" in other.stderr
    (tmp_path / "none.jsonl").touch()
    empty = ended(monkeypatch, "check", train, f"val={tmp_path}/none.jsonl")
    assert empty.returncode == 2 and "holds nothing" in empty.stderr


def test_leaks_of_questions_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a BEIR folder the split test, as data.val, or FOLDER@SPLIT."""
    beir = write_beir(tmp_path / "beir", passages=60, queries=20)
    (beir / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq18\td0\t1\nq19\td1\t1\n")
    here(monkeypatch, "check", beir, f"val={beir}")
    printed = capsys.readouterr().out
    assert "questions   0 of 2 of val" in printed and "passages    1 of 2 of val" in printed
    assert f"  {beir}/queries.jsonl: line 20" in printed and "warning" in printed
    here(monkeypatch, "check", beir, f"val={beir}@train")
    assert "questions   18 of 18 of val" in capsys.readouterr().out
    row = {"query": "what 3", "pos": ["text 58"], "neg": []}
    here(monkeypatch, "check", beir, f"val={write_lines(tmp_path / 'v.jsonl', [row])}")
    printed = capsys.readouterr().out
    assert "questions   1 of 1 of val" in printed and f"  {tmp_path}/v.jsonl: line 1  what 3" in printed


def test_leaks_of_a_file_inside_a_folder_of_judgements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path without @ is no split of the working folder."""
    monkeypatch.chdir(write_beir(tmp_path / "beir"))
    for name in ("train", "dev"):
        write_lines(Path(f"{name}.jsonl"), [dpr_row(1)])
    here(monkeypatch, "check", "train.jsonl", "val=dev.jsonl")
    assert "questions   1 of 1 of val" in capsys.readouterr().out
