"""`python -m data`: what it prints, its exit codes, its speed, and what it says to those who mistype."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.data_cli import code_of, command, ended, here
from helpers.messages import raises
from helpers.rows import dpr_row, write_beir, write_lines
from helpers.shards import Member, image, index_shard, pairs, write_pairs, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.parallel import parallel_map
from dyad.data.cli import outputs
from dyad.data.cli.check import ImageFindings, examine
from dyad.data.cli.main import VERBS, parse_verb
from dyad.data.cli.options import CheckOptions, OnError
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.shards.storage import sha256_of
from dyad.train.cli.compose import compose_config

# ---- index ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed suggests a ViT there."""
    monkeypatch.setattr(outputs, "GPU", os.devnull)


def test_index_prints_shards_and_writes_the_manifest(tmp_path: Path) -> None:
    a, b = write_pairs(tmp_path / "a.tar", 3), write_tar(tmp_path / "b.tar", [*pairs(2, 3), ("x.npy", b"1")])
    done = command("index", f"{a}@2::{b}", f"out={tmp_path / 'manifest.json'}")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["shard", "samples", "MB", "problems"]
    assert lines[1].split() == [str(a), "3", "0.0", "0"]
    assert lines[3] == "2 shards, 5 samples, 0.0 MB, 0 problems"
    assert lines[5] == "ignored members: 1 npy"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    shards = open_shards(parse_sources(f"{a}@2::{b}"))
    assert manifest["fingerprint"] == shards.fingerprint == lines[4].split()[1]
    assert manifest["samples"] == 5 and [source["weight"] for source in manifest["sources"]] == [2, 1]
    assert manifest["sources"][1]["shards"][0]["first_id"] == 3


def test_index_lists_every_problem_and_exits_3(tmp_path: Path) -> None:
    whole, cut = write_pairs(tmp_path / "a.tar", 3), write_pairs(tmp_path / "b.tar", 3)
    os.truncate(cut, 2048)
    double = write_tar(tmp_path / "c.tar", [*pairs(150), *pairs(150)])
    done = command("index", tmp_path)
    assert done.returncode == 3
    assert f"{cut}: offset 2048: the file ends here without an end-of-archive marker: it was cut" in done.stdout
    assert done.stdout.count(f"{double}: offset") == 100 and f"{double}: … and 50 more" in done.stdout
    assert str(whole) in done.stdout
    first, mend = done.stderr.splitlines()
    assert first == "error: 2 of 3 shards are broken, 151 problems. Training refuses them."
    assert mend.endswith(f": python -m data pack {cut}::{double} out=b_packed on_error=skip")


def test_index_of_many_shards_shows_the_broken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(45):
        (tmp_path / f"{n:02d}.jsonl").write_text("{}\n" if n != 7 else "{\n")
    with raises(DataError, "1 of 45"):
        here(monkeypatch, "index", tmp_path)
    table = capsys.readouterr().out.splitlines()
    assert "07.jsonl" in table[1] and table[2].startswith("45 shards, 44 samples")
    (tmp_path / "07.jsonl").write_text("{}\n")
    here(monkeypatch, "index", tmp_path)
    assert capsys.readouterr().out.startswith("45 shards, 45 samples")


def test_manifest_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path / "a.tar", 1)
    with raises(ConfigError, f"{tmp_path}/no/such/folder.json"):
        here(monkeypatch, "index", tmp_path, f"out={tmp_path}/no/such/folder.json")


# ---- check ---------------------------------------------------------------------------------------------------------


def test_check_summarises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    members: list[Member] = [
        ("0.png", image(1, (10, 20))),
        ("0.json", b'{"caption": ["one two", "three"]}'),
        ("1.jpg", image(2, (30, 60), "JPEG", "L")),
        ("1.json", b'{"caption": "one two"}'),
        ("2.png", image(1, (10, 20))),
        ("2.json", b'{"caption": "three"}'),
    ]
    here(monkeypatch, "check", write_tar(tmp_path / "a.tar", members))
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["samples", "3 in 1 shards, 0.0 MB"],
        ["images", "png 2, jpg 1; modes RGB 2, L 1"],
        ["width", "min 10, median 10, 95th percentile 30, max 30"],
        ["height", "min 20, median 20, 95th percentile 60, max 60"],
        [
            "captions",
            "4; of an image min 1, median 1, 95th percentile 2, max 2; words min 1, median 2, 95th percentile 2, max 2",
        ],
        ["duplicates", "1 images, 2 texts"],
        ["damage", "0"],
        ["fine:", "train with"],
        [
            "python",
            f"-m train 'data.train=\"{tmp_path}/a.tar\"' 'data.captions=[caption]' model.name=ViT-B-32 epochs=10 "
            "global_batch_size=3",
        ],
    ]


def test_check_finds_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, an image cut before it was packed, an image under a foreign name, a broken and a sound shard."""
    flipped = write_pairs(tmp_path / "a.tar", 3)
    cut, text = image(5, (60, 60), "JPEG")[:-200], ("1.txt", b"x")
    bad = write_tar(tmp_path / "b.tar", [*pairs(1), ("1.jpg", cut), text, ("2.webp", b"GIF"), ("2.txt", b"x")])
    write_pairs(tmp_path / "c.tar", 2)
    broken = write_pairs(tmp_path / "d.tar", 3)
    os.truncate(broken, 1024)
    here(monkeypatch, "index", flipped)
    keep, content = flipped.stat(), bytearray(flipped.read_bytes())
    content[512 + 30] ^= 1
    flipped.write_bytes(content)
    os.utime(flipped, ns=(keep.st_atime_ns, keep.st_mtime_ns))
    assert code_of(monkeypatch, "check", tmp_path) == 3
    printed = capsys.readouterr()
    found = [line for line in printed.out.splitlines() if line.startswith("bad: ")]
    assert f"bad: {flipped}: its SHA-256 is not as indexed" in found[0]
    assert f"bad: {flipped}: sample '000000'" in found[1] and "CRC32" in found[1]
    assert f"bad: {bad}: sample '1': no sound JPEG" in found[2]
    assert f"bad: {bad}: sample '2': no sound JPEG" in found[3]
    assert len(found) == 4 and f"{broken}: offset" in printed.out
    assert "error: 1 of 4 shards are broken" in printed.err


def test_check_says_no_to_what_training_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never "damage 0", exit 0."""
    (tmp_path / "x.jsonl").write_text('{"left": "a", "right": "b", "wrong": "c"}\n' * 3)
    assert code_of(monkeypatch, "check", tmp_path / "x.jsonl") == 2
    error = capsys.readouterr().err
    assert "its fields are left, right, wrong. Name those of question and positive: data.columns=" in error
    (tmp_path / "none.jsonl").touch()
    write_tar(tmp_path / "none.tar", [])
    for empty in ("none.jsonl", "none.tar"):
        with raises(DataError):
            here(monkeypatch, "check", tmp_path / empty)
    odd: list[Member] = [
        *(("0.png", image()), ("0.json", b'{"caption": " "}'), ("1.png", image()), ("1.json", b'{"caption": 3}')),
        *(
            ("2.png", image()),
            ("2.json", b'{"words": "x"}'),
            ("3.png", image()),
            ("3.cls", b"7"),
            ("3.json", b"{}"),
        ),
    ]
    with raises(DataError, "3 findings", "4 samples"):
        here(monkeypatch, "check", write_tar(tmp_path / "odd.tar", odd))
    texts = write_tar(tmp_path / "texts.tar", [("0.txt", b"no image")])
    with raises(DataError, "1 findings"):
        here(monkeypatch, "check", texts, write_tar(tmp_path / "none.tar", []))


def test_check_of_captions_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [(f"{n}.{s}", image() if s == "png" else b"{") for n in range(30) for s in ("png", "json")]
    path = write_tar(tmp_path / "a.tar", members)
    with raises(DataError, "30 findings", "30 samples"):
        here(monkeypatch, "check", path)
    (found,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bad: "))
    assert "sample '0': its json member" in found and found.endswith(" … and 29 more like this")
    mixed = write_tar(tmp_path / "b.tar", [*pairs(1), ("1.jpg", image(kind="JPEG")), ("1.txt", b"x")])
    with raises(DataError, "1 findings"):
        here(monkeypatch, "check", mixed, "image_key=png")
    assert "has no image: data.image_key=png, its members are jpg, txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kinds", "name", "refused"),
    [("txt json txt", "txt", 1), ("json txt both", "caption", 1), ("bad txt json", "txt", 0), ("both json", "txt", 1)],
)
def test_captions_are_read_where_the_command_reads_them(
    kinds: str, name: str, refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first sound sample has them. A sample without them is bad in training, and here too."""
    txt, json = ("txt", b"a"), ("json", b'{"caption": "b"}')
    texts = {"txt": [txt], "json": [json], "both": [txt, json], "bad": [("json", b'{"caption": 3}')]}
    samples = [[("png", image(n)), *texts[kind]] for n, kind in enumerate(kinds.split())]
    tar = write_tar(tmp_path / "a.tar", [(f"{n}.{s}", data) for n, sample in enumerate(samples) for s, data in sample])
    done = ended(monkeypatch, "check", tar)
    assert done.returncode == 3 and f"sample '{refused}' has no caption: captions={name}, it has" in done.stdout
    done = ended(monkeypatch, "check", tar, "captions=caption")
    assert (done.returncode == 0) == ("'data.captions=[caption]'" in done.stdout) == (kinds == "both json")


def test_findings_of_parts_add_up_to_those_of_the_whole(tmp_path: Path) -> None:
    index = index_shard(str(write_pairs(tmp_path / "a.tar", 30)))
    parts = ImageFindings()
    for rows in (range(7), range(7, 8), range(8, 30)):
        parts += examine((index, rows, CheckOptions()))
    assert parts == examine((index, range(30), CheckOptions())) and parts.samples == 30


def test_work_is_spread_over_processes_when_there_is_enough(tmp_path: Path) -> None:
    paths = [str(write_pairs(tmp_path / f"{n}.tar", n)) for n in range(3)]
    with parallel_map(2, 2) as spread:
        assert spread is not map
        assert list(spread(sha256_of, paths)) == [index_shard(path).sha256 for path in paths]
    with parallel_map(None, 1) as spread:
        assert spread is map


# ---- pack ------------------------------------------------------------------------------------------------


def test_pack_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(image(n))
    rows = "".join(f"{n}.png,{n}\n" for n in (0, 1, 2, 9))
    (tmp_path / "p.csv").write_text("file,words\n" + rows)
    keys = ["columns=[file,words]", "maxcount=2"]
    with raises(DataError, "p.csv", "row 4 (line 5)"):
        here(monkeypatch, "pack", tmp_path / "p.csv", f"out={tmp_path / 'out'}", *keys)
    assert not (tmp_path / "out").exists()
    done = ended(monkeypatch, "pack", tmp_path / "p.csv", f"out={tmp_path / 'out'}", *keys, "on_error=skip")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("3 samples in 2 shards") and lines[1] == "skipped 1 of 4 rows: 1 missing file"
    shards = f"{tmp_path}/out/{{000000..000001}}.tar"
    how = "model.name=ViT-B-32 epochs=10 global_batch_size=3"
    assert lines[-1].strip() == f"python -m train 'data.train=\"{shards}\"' {how}"


# ---- first contact -------------------------------------------------------------------------------------------------


def test_help_is_light() -> None:
    """Without torch and numpy: that is what makes it quick."""
    assert command("--help").returncode == 0
    watch = (
        "import runpy, sys; sys.argv = ['data', 'pack', '--help']; runpy.run_module('data', run_name='__main__');"
        "print([m for m in ('torch', 'numpy', 'PIL', 'pyarrow') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_overview(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here(monkeypatch, *arguments)
    printed = capsys.readouterr().out
    for verb in VERBS:
        assert f"python -m data {verb.examples[0]}" in printed and verb.purpose in printed
    assert "Exit codes" in printed and all(len(line) <= 120 for line in printed.splitlines())


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_of_a_verb_names_every_key(
    verb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here(monkeypatch, verb.name, "--help")
    printed = capsys.readouterr().out
    for example in verb.examples:
        assert f"  python -m data {example}\n" in printed
        words = shlex.split(example)[1:]
        parse_verb(verb, words)  # what the help shows can be typed
    for key in vars(verb.options()):
        assert f"\n  {key} " in printed


OF_MAXCOUNT = "Meaning of maxcount: samples per shard, at most"
OF_MAXSIZE = "Meaning of maxsize: bytes of samples after which a shard is closed"
OF_ERROR = "Meaning of on_error: a bad row: stop, or skip it and count"
MISSING = f"SOURCE=nowhere.tar matches nothing: no 'nowhere.tar' in {Path.cwd()}, the working folder."
VERBS_ARE = "There is: index, check, pack, split, continuations, negatives, sequences, weights."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["indx", "x"],
            f"unknown verb 'indx'. Did you mean 'index'? {VERBS_ARE}",
        ),
        (["zzz"], f"unknown verb 'zzz'. {VERBS_ARE}"),
        (["index"], "SOURCE is missing. For example: python -m data index shards/"),
        (["pack", "a", "b"], "INPUT is one, not 2: a b. For example: python -m data pack pairs.csv out=shards"),
        (
            ["index", "x", "worker=3"],
            "unknown key 'worker'. Did you mean 'workers'? Keys: columns, template, max_image_pixels, "
            "caption_per, relevance, teacher, task, out, workers",
        ),
        (
            ["pack", "a", "--out", "b"],
            "'--out': options are written key=value here. Did you mean 'out'? See: python -m data pack --help",
        ),
        (
            ["pack", "a", "--out=b"],
            "'--out=b': options are written key=value here. Did you mean 'out'? See: python -m data pack --help",
        ),
        (["pack", "a", "out=b", "maxcount=many"], f"maxcount=many is not a whole number. {OF_MAXCOUNT}"),
        (["pack", "a", "out=b", "maxcount=1.5"], f"maxcount=1.5 is not a whole number. {OF_MAXCOUNT}"),
        (["pack", "a", "out=b", "maxcount=0"], "maxcount=0: must be 1 or more"),
        (["pack", "a", "out=b", "maxsize=0"], "maxsize=0.0: must be above 0"),
        (["pack", "a", "out=b", "maxsize=big"], f"maxsize=big is not a number. {OF_MAXSIZE}"),
        (
            ["pack", "a", "out=${oc.env:HOME}"],
            "out=${oc.env:HOME}: nothing is read inside ${…} here. Write the value itself.",
        ),
        (["pack", "a", "out=???"], "out= is missing. See: python -m data pack --help"),
        (
            ["pack", "a", "out=b", "on_error=skp"],
            f"on_error=skp is not one of stop, skip. Did you mean 'skip'? {OF_ERROR}",
        ),
        (["check", "nowhere.tar"], MISSING),
    ],
)
def test_mistakes_get_one_line_and_exit_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_values_of_keys() -> None:
    pack = next(verb for verb in VERBS if verb.name == "pack")
    plain, options = parse_verb(
        pack, ["in.csv", "out=o", "maxcount=1e4", "maxsize=5e8", "on_error=skip", "columns=[a,b]"]
    )
    assert plain == ["in.csv"] and options.maxcount == 10_000 and isinstance(options.maxcount, int)
    assert (options.maxsize, options.on_error, options.columns) == (5e8, OnError.skip, ["a", "b"])
    assert parse_verb(pack, ["in.csv", "out=o", "data.columns=[a,b]"])[1].columns == ["a", "b"]  # as messages say it


def test_what_to_do_with_sound_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split of a folder is in the command; class numbers alone train nothing."""
    beir = write_beir(tmp_path / "beir", split="dev")
    here(monkeypatch, "check", beir, "split=dev", f"val={beir}@dev")
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"'data.val=\"{beir}@dev\"' data.question.split=dev global_batch_size=6" in last
    here(monkeypatch, "check", write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.cls", b"7")]))
    assert "nothing: class numbers alone" in capsys.readouterr().out.splitlines()[-1]


def test_all_bad_rows_of_a_table_of_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stops at the first."""
    (tmp_path / "0.png").write_bytes(image())
    (tmp_path / "1.png").write_text("no image")
    (tmp_path / "t.csv").write_text("image,caption\n" + "".join(f"{n}.png,thing {n}\n" for n in range(5)))
    done = ended(monkeypatch, "check", tmp_path / "t.csv")
    assert done.returncode == 3 and "row 3 (line 4): missing file: " in done.stdout
    assert "2.png … and 2 more like this" in done.stdout and "row 2 (line 3): undecodable image" in done.stdout
    assert done.stderr.startswith("error: 4 problems in 5 rows.") and "on_error=skip" in done.stderr


def test_a_table_without_known_columns_is_named_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("file,description\n0.jpg,one\n")
    (tmp_path / "0.jpg").write_bytes(image(0))
    with raises(ConfigError, "t.csv", "file, description", "columns=[…]"):
        here(monkeypatch, "check", tmp_path / "t.csv")


def test_the_relevance_of_pairs_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members: list[Member] = []
    for n, similarity in enumerate((0.3, 2)):
        fields = {"caption": f"thing {n}", "similarity": similarity, "one": 1}
        members += [(f"{n}.png", image(n)), (f"{n}.json", json.dumps(fields).encode())]
    shard = write_tar(tmp_path / "a.tar", members)
    done = ended(monkeypatch, "check", shard, "relevance=similarity")
    assert done.returncode == 3 and "sample '1': no relevance: 'similarity' is 2" in done.stdout
    done = ended(monkeypatch, "check", shard, "relevance=one")
    assert done.returncode == 0 and 'data.relevance="one"' in done.stdout


def test_the_command_reads_data_as_the_check_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, rows = write_pairs(tmp_path / "a.tar", 3), write_lines(tmp_path / "q.jsonl", [dpr_row(1), dpr_row(2)])
    of_images = ["image_key=jpg;png", "max_image_pixels=90000"]
    for source, options in ((images, of_images), (rows, ["pos_pool=2", "neg_pool=7"])):
        printed = ended(monkeypatch, "check", source, *options).stdout.splitlines()[-1]
        data = compose_config(shlex.split(printed)[3:]).data
        found = data if source == images else data.passage
        for option in options:
            name, _, value = option.partition("=")
            assert str(getattr(found, name)) == value
