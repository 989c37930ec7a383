"""What lies beside data is found, once each, and nothing that speaks of something else."""

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from helpers.eval import ROOT

from dyad.data.shards.licences import LARGEST, notices

EMOJI, TOPICS = ROOT / "data" / "samples" / "emoji", ROOT / "data" / "samples" / "topics"


def names(*values: str | Path) -> list[str]:
    return [str(Path(notice.file).relative_to(ROOT)) for notice in notices(values)]


def test_the_shipped_data_say_whose_they_are() -> None:
    found = notices([f"{EMOJI}/{{noto,fluent-flat}}-trained.tar@2::{EMOJI}/fxemoji-*.tar", f"beir:{TOPICS}@dev"])
    assert [Path(notice.file) for notice in found] == [EMOJI / "NOTICE.md", TOPICS / "NOTICE.md"]
    assert "CC-BY-4.0" in found[0].text and "public domain" in found[1].text
    assert found[1].source == f"beir:{TOPICS}@dev"


def test_values_are_read_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert names("data/samples/emoji", f"file://{EMOJI}/noto-trained.tar") == ["data/samples/emoji/NOTICE.md"]
    assert names(TOPICS / "corpus.jsonl", f"zero_shot:{EMOJI}/groups.json") == [
        "data/samples/topics/NOTICE.md",
        "data/samples/emoji/NOTICE.md",
    ]


def test_a_path_with_a_colon_is_no_kind_of_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("corpus:v2", "v2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "NOTICE").write_text(f"of {folder}")
        (tmp_path / folder / "a.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert [notice.text for notice in notices(["corpus:v2/a.jsonl", "beir:v2"])] == ["of corpus:v2", "of v2"]


def test_what_is_elsewhere_or_gone_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices([tmp_path / "a.tar", str(tmp_path / "a" / "b" / "c" / "d.tar")]) == []
    (tmp_path / "README").write_text("of the folder of today")
    monkeypatch.chdir(tmp_path)
    assert notices(["https://a.tar", "s3://bucket/{0..9}.tar", "memory://x.tar"]) == []


def test_the_nearest_folder_counts_at_most_two_above(tmp_path: Path) -> None:
    deep = tmp_path / "one" / "two" / "three"
    deep.mkdir(parents=True)
    for folder, name in ((tmp_path, "NOTICE"), (tmp_path / "one", "README.md"), (tmp_path / "one", "licence.txt")):
        (folder / name).write_text(f"of {folder.name}")
    (tmp_path / "one" / "LICENSE.pdf").write_bytes(b"%PDF")
    (tmp_path / "one" / "README.d").mkdir()
    found = [Path(notice.file) for notice in notices([deep / "a.tar"])]
    assert found == [tmp_path / "one" / "licence.txt", tmp_path / "one" / "README.md"]
    for file in found:
        file.unlink()
    assert notices([deep / "a.tar"]) == []  # three above
    assert [notice.text for notice in notices([deep.parent / "a.tar"])] == [f"of {tmp_path.name}"]


def test_a_program_around_the_data_does_not_speak_for_them(tmp_path: Path) -> None:
    """As a folder of shards in a checkout: its LICENSE is the program's."""
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        (tmp_path / name).write_text("of the program")
    (tmp_path / "shards").mkdir()
    assert notices([tmp_path / "shards" / "a.tar", tmp_path / "a.tar"]) == []
    (tmp_path / "shards" / "README").write_text("of the shards")
    assert [notice.text for notice in notices([tmp_path / "shards" / "a.tar"])] == ["of the shards"]


def test_texts_are_bounded_and_links_are_not_followed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret").write_text("key")
    (data / "README.md").symlink_to(tmp_path / "secret")
    (data / "NOTICE").write_bytes(b"\xff" + b"a" * (LARGEST + 10))
    (notice,) = notices([data])
    assert Path(notice.file).name == "NOTICE" and notice.text.startswith("\N{REPLACEMENT CHARACTER}aaa")
    assert len(notice.text.encode()) < LARGEST + 100 and notice.text.endswith(f"(cut: {LARGEST + 11:,} bytes)")


def _texts_for_nobody(folder: Path, send: Connection) -> None:
    if os.getuid() == 0:  # for whom no file is closed
        os.setuid(65534)
    send.send([notice.text for notice in notices([folder])])


def test_a_file_that_this_user_may_not_read_is_named_without_its_text() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, mode in {"LICENSE": 0, "README": 0o644}.items():
            (folder / file).write_text("of the data")
            (folder / file).chmod(mode)
        receive, send = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_texts_for_nobody, args=(folder, send))
        child.start()
        send.close()
        assert receive.recv() == ["(cannot be read: Permission denied)", "of the data"]
        child.join()
