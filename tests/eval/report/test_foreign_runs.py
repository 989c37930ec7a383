"""A run folder of somebody else: no link in it leads out of it, and JSON, YAML and logs may hold anything."""

import base64
import errno
import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from helpers.messages import raises
from helpers.report import passages, records, retrieval, seen, write_run, zero_shot

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import open_foreign
from dyad.eval.report import run_folder
from dyad.eval.report.main import write_report
from dyad.eval.report.run_folder import read_run
from dyad.eval.results.panels import panels
from dyad.eval.results.write import saved_results
from dyad.evaluation.load_run import read_config
from dyad.train.run_folder.checkpoint import FORMAT, Checkpoint
from dyad.train.towers.libraries.published import read_json
from dyad.train.tracking.panel_types import Thumbnail

SECRET = b"PRIVATE KEY"
SEEN = base64.b64encode(SECRET)[:12].decode()
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n"  # 9 to the power of 9
BOMB += "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))


def replaced_by_link(path: Path, target: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


def sent(run: Path) -> Iterator[bytes]:
    """The images that a tracker sends."""
    for result in saved_results(run):
        for table in panels(result, run).galleries.values():
            yield from (c.path.read_bytes() for row in table.rows for c in row if isinstance(c, Thumbnail))


@pytest.mark.parametrize("linked", ["eval/val.pictures/3.webp", "eval/val.pictures", "eval"])
def test_images_that_are_links_to_private_files_are_neither_shown_nor_sent(tmp_path: Path, linked: str) -> None:
    run, private = write_run(tmp_path / "run"), write_run(tmp_path / "private")
    assert len(list(sent(run))) >= 15 and "data:image/webp" in write_report(run).read_text()
    for image in (private / "eval/val.pictures").iterdir():
        image.write_bytes(SECRET)
    replaced_by_link(run / linked, private / linked)
    assert SEEN not in write_report(run).read_text() and SECRET not in sent(run)


@pytest.mark.parametrize("linked", "eval eval/val.json metrics.jsonl run_state.json log.txt restarts.jsonl".split())
def test_texts_that_are_links_to_private_files_are_not_shown(tmp_path: Path, linked: str) -> None:
    run = write_run(tmp_path / "run", results=[retrieval()])
    private = write_run(
        tmp_path / "private",
        lines=[{"step": step, "train/KEY": step % 7} for step in range(9)],
        results=[{**retrieval(), "source": "KEY"}],
        state={"status": "failed", "error": "KEY"},
        log="going on at step 777 from x\n",
    )
    (run / "restarts.jsonl").touch()
    (private / "restarts.jsonl").write_text('{"cause": "KEY"}\n')
    replaced_by_link(run / linked, private / linked)
    page = seen(write_report(run)).text
    assert "KEY" not in page and "777" not in page and f"{linked} is not read: it lies outside this folder" in page


def test_a_configuration_that_is_a_link_out_of_the_folder_is_none(tmp_path: Path) -> None:
    run, private = write_run(tmp_path / "run", results=[]), tmp_path / "private.yaml"
    private.write_text("token: KEY")
    replaced_by_link(run / "config.yaml", private)
    with raises(ConfigError, run):
        write_report(run)


def test_links_that_stay_in_the_folder_and_a_link_to_it_are_followed(tmp_path: Path) -> None:
    disk = write_run(tmp_path / "disk")
    whole = seen(write_report(disk)).text
    (disk / "eval").rename(disk / "older")
    (disk / "eval").symlink_to("older")
    (tmp_path / "run").symlink_to("disk")
    assert seen(write_report(tmp_path / "run")).text == whole.replace("/disk'", "/run'")


def test_a_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    run, precious = write_run(tmp_path / "run", results=[]), tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", ".report.html.partial"):
        (run / name).symlink_to(precious)
    write_report(run)
    assert precious.read_text() == "mine" and "<!doctype html>" in (run / "report.html").read_text()


def with_part(result: dict[str, Any], **part: Any) -> tuple[str, str, str]:
    return f"eval/{result['dataset']}.json", json.dumps(result | part), f"{next(iter(part))} is left out"


# what is in a file, and the line on the page
OTHERS: dict[str, tuple[str, str, str]] = {
    "gallery": with_part(retrieval(), gallery=[3]),
    "cases": with_part(retrieval(), gallery={"x": [{"systems": 7}]}),
    "mistakes": with_part(zero_shot(), confused=[{"true": 1}]),
    "confusion": with_part(zero_shot(), confusion={"classes": ["a", "b"], "counts": [[1]]}),
    "histogram": with_part(retrieval(), scores={"edges": [1]}),
    "baselines": with_part(passages(), baselines={"bm25": 3}),
    "infinite step": with_part(retrieval(), step=float("inf")),
    "list": ("eval/val.json", "[]", "val.json is none of ours"),
    "nested result": ("eval/val.json", "[" * 100_000, "val.json cannot be read: nested more than 100 times"),
    "crowded result": (
        "eval/val.json",
        "[" + "1," * (1 << 19) + "1]",
        "val.json cannot be read: more than 524,288 commas",
    ),
    "total steps": ("run_state.json", '{"total_steps": "many"}', "total_steps is left out"),
    "nested state": ("run_state.json", '{"a":' * 100_000, "run_state.json cannot be read: nested more than 100 times"),
    "records": ("metrics.jsonl", f"\udcff{{}}\n[1]\n7\n{'[' * 100_000}\n", "metrics.jsonl: 4 of its lines"),
    "digits": ("metrics.jsonl", f'{{"step": 1{"0" * 400}}}\n{{"step": {"9" * 5000}}}\n', "1 of its lines"),
    "digits of a log": ("log.txt", f"going on at step {'9' * 5000} from x\n", "What was trained"),
    "batch": ("config.yaml", "global_batch_size: [1]\nchunk_size: x", "steps of 0 pairs"),
    "objective": ("config.yaml", "objective: {name: [clip]}\noptim: 3", "with the objective clip"),
    "tower": ("config.yaml", "model: {image: {kind: cnn, widths: 8}}", "images: cnn, widths 8"),
}


@pytest.mark.parametrize("part", OTHERS)
def test_what_is_of_another_shape_is_a_line_on_the_page(tmp_path: Path, part: str) -> None:
    name, content, line = OTHERS[part]
    run = write_run(tmp_path / "run", lines=records()[:1], results=[])
    (run / name).write_bytes(content.encode(errors="surrogateescape"))
    assert line in seen(write_report(run)).text


def test_endless_lines_of_metrics_and_log_need_little_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lines=records()[:1], results=[])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"0" * (3 << 20) + b'{"step": 5}\n{"step": 7}\n')
    for name in ("metrics.jsonl", "log.txt"):
        with (run / name).open("ab") as file:
            file.truncate(300 << 20)
    tracemalloc.start()
    found = read_run(run)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert list(found.history["step"]) == [7, 10]
    told = [f"{name}: only its first 67,108,864 bytes are read" for name in ("metrics.jsonl", "log.txt")]
    assert found.unread == [*reversed(told), "metrics.jsonl: 2 of its lines cannot be read"]


@pytest.mark.parametrize(
    "text",
    [BOMB, "a: " + "[" * 500_000, "a: 0x" + "f" * 9000, "[1]"],
    ids=["aliases", "nested", "digits", "list"],
)
def test_a_configuration_that_unfolds_or_overflows_is_refused(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run", results=[])
    (run / "config.yaml").write_text(text)
    for read in (write_report, read_config):
        with raises(ConfigError, "config.yaml"):
            read(run)


@pytest.mark.parametrize("number", ["1e999", "[]", "9" * 5000])
def test_a_manifest_whose_numbers_are_none_is_damaged(tmp_path: Path, number: str) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"format": {number}, "files": {{}}}}')
    with raises(DataError, "manifest.json"):
        _ = Checkpoint(tmp_path).step


@pytest.mark.parametrize("number", ["1e999", "[]", "9" * 5000])
def test_a_state_whose_numbers_are_none_is_damaged(tmp_path: Path, number: str) -> None:
    state = f'{{"step": {number}, "optimizer_scalars": {{}}}}'.encode()
    (tmp_path / "state.json").write_bytes(state)
    sealed = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": {"state.json": sealed}}))
    with raises(DataError, tmp_path):
        _ = Checkpoint(tmp_path).step


def test_settings_may_be_as_large_as_a_tokenizer_and_no_larger(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"merges": [["a", "b"]] * 500_000}}))
    assert len(read_json(file)["model"]["merges"]) == 500_000
    file.write_text("[" + "1," * 8_388_608 + "1]")
    with raises(ConfigError, "tokenizer.json"):
        read_json(file)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "restarts.jsonl"])
def test_a_file_that_this_user_may_not_read_is_a_line_on_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    (run / "restarts.jsonl").touch()

    def open_some(path: Path) -> BinaryIO:
        if path.name == name:  # chmod keeps root from nothing
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_foreign(path)

    monkeypatch.setattr(run_folder, "open_foreign", open_some)
    assert f"{name} cannot be read: Permission denied" in seen(write_report(run)).text
