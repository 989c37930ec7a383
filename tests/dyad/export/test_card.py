"""The model card: what the hub reads, what is said of numbers, data and program, and names that try to break it."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from helpers.eval import ROOT
from helpers.messages import raises
from huggingface_hub import ModelCard

from dyad.data.base.errors import ConfigError
from dyad.data.base.json_text import LARGEST
from dyad.data.config import DataConfig
from dyad.eval.results.panels import scored
from dyad.export.card import CARD, ROOT as CHECKOUT, card, code, commit, digest, escaped, licence_of_earlier_export
from dyad.export.library import ExportSource, Library
from dyad.train.config import Task, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.towers.libraries.calibration import SETTINGS, Calibration

FRONT = {"library_name": "open_clip", "pipeline_tag": "feature-extraction", "tags": ["clip"]}
LIBRARY = Library("open_clip", FRONT, "CLIP model", print, lambda _: [], lambda folder, _: f"    load('{folder}')")
RESULT = {
    "dataset": "topics: dev | 'x'",
    "task": "passage_retrieval",
    "metrics": {"nDCG@10": 0.25, "MAP@100": 0.5, "num_questions": 8.0, "MRR@10": float("nan")},
    "chance": {"nDCG@10": 0.00123, "MRR@10": 0.1},
    "intervals": {"nDCG@10": [0.2, 0.3]},
}
SCORED = (scored(RESULT),)
HOSTILE = "a: b\n---\n# <script>alert(\"`x`\")</script> | '{y}' &amp; [l](javascript:z)"


def written(
    name: str = "run",
    train: Any = "data/samples/topics",
    results: Any = SCORED,
    **config: Any,
) -> str:
    given = {
        "task": Task.question_passage,
        "objective": OBJECTIVES["clip"](),
        "global_batch_size": 128,
        **config,
    }
    source = ExportSource(
        name, TrainConfig(data=DataConfig(train=train), **given), cast(Any, None), Calibration("", 2.0), 50, results
    )
    return card(LIBRARY, source, 2e-7)


def front(text: str) -> Any:
    _, block, _ = text.split("---\n", 2)
    return yaml.safe_load(block)


@pytest.mark.parametrize("name", ["run-1", HOSTILE])
def test_the_hub_reads_its_metadata(name: str) -> None:
    text = written(name)
    data = cast(Any, ModelCard(text).data)
    assert data.library_name == "open_clip" and data.license == "unknown" and data.tags == ["clip"]
    assert data.model_name == " ".join(name.split()) == front(text)["model-index"][0]["name"]
    (found,) = data.eval_results
    assert (found.dataset_name, found.metric_type, found.metric_value) == (RESULT["dataset"], "nDCG@10", 0.25)


def test_names_and_paths_stay_text(tmp_path: Path) -> None:
    folder = tmp_path / "a|b`<u>"
    folder.mkdir()
    (folder / "NOTICE.md").write_text("````\n# not a title\n</details><b>")
    text = written(HOSTILE, train=str(folder / "<i>.jsonl"), experiment=HOSTILE)
    _, _, body = text.split("---\n", 2)
    titles = [line for line in body.splitlines() if line.startswith("#") and line != "# not a title"]
    assert len(titles) == 6 and titles[0].startswith("# a: b --- \\# \\<script\\>")
    assert "`````text\n````\n# not a title\n</details><b>\n`````" in body
    outside = body.replace("<details><summary>", "").replace("</summary>", "").split("`````text")[0]
    assert "<summary>…/a|b`&lt;u&gt;/NOTICE.md</summary>" in body
    plain = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)  # without what is code
    assert "alert" in plain and not re.search(r"(?<!\\)[<\[]", plain)
    rows = [line.replace(r"\|", "") for line in body.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {3, 6} and any("topics: dev" in row for row in rows)


def test_no_folder_password_or_signature_of_ours_is_told(tmp_path: Path) -> None:
    text = written(train=[str(tmp_path / "mine" / "a.jsonl"), "https://me:word@host.org/b/c.jsonl?key=secret"])
    assert "`…/mine/a.jsonl`, `https://[redacted]@host.org/b/c.jsonl?[redacted]`" in text
    assert str(tmp_path) not in text and "word" not in text.replace("passwords", "") and "secret" not in text


def test_numbers_stand_beside_interval_and_chance() -> None:
    text = written()
    assert "| topics: dev \\| 'x' | nDCG@10 | 0.250 | 0.200 – 0.300 | 0.0012 |" in text
    assert "MAP@100" not in text and "num_questions" not in text and "MRR@10" not in text  # no level, or no number
    assert "Nothing was measured" in written(results=()) and "model-index" not in written(results=())


def test_batches_of_sequences_are_not_said_to_be_pairs() -> None:
    text = written(task=Task.sequence)
    assert "50 steps of 128 sequences" in text and "6,400 sequences" in text


def test_what_was_trained_and_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = written(seed=3)
    for told in (
        "50 steps of 128 pairs",
        "6,400 pairs",
        "objective `clip`",
        "lr=0.0005",
        "seed=3",
        "torch 2",
        "Python 3",
    ):
        assert told in text, told
    assert "0.1353" in text and "topics/NOTICE.md" in text and "public domain" in text
    assert "image.kind" not in text and "lora" not in text  # of the other task, and off
    assert "Nothing beside the data" in written(train="nowhere/x.jsonl")
    also = "task=question_passage objective=dpr data.train=data/samples/topics"
    of_two = written(train="nowhere/x.jsonl", also={"more": also})
    assert "`nowhere/x.jsonl`, `data/samples/topics`" in of_two and "topics/NOTICE.md" in of_two


def test_the_commit_is_that_of_the_checkout_of_the_code() -> None:
    assert (CHECKOUT / "pyproject.toml").is_file()


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    assert commit(tmp_path) == "unknown"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setenv("GIT_DIR", str(inside))  # as in a hook of another repository
    found = commit(tmp_path)
    assert len(found) == 40 and commit(inside) == "unknown"
    (tmp_path / "other").touch()
    assert commit(tmp_path) == found
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{found} with changes"
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == "unknown"


def earlier_export(folder: Path, licence: str = "unknown") -> Path:
    """Write the card of an export, and then the licence of a person into it."""
    text = "---\nlicense: unknown\n---\n# A model\n"
    (folder / SETTINGS).write_text(json.dumps({"card": digest(text)}))
    (folder / CARD).write_text(text.replace("unknown", licence))
    return folder / CARD


def test_a_licence_that_is_no_name_is_refused(tmp_path: Path) -> None:
    for licence in ("a: b", "[mit", "[mit, apache-2.0]", "2.0", "2020-13-45", "{a: b}"):
        path = earlier_export(tmp_path, licence)
        with raises(ConfigError, path, "license: mit"):
            licence_of_earlier_export(tmp_path)
        assert licence in path.read_text()
    for licence in ("mit", "'mit'", "unknown"):
        earlier_export(tmp_path, licence)
        assert licence_of_earlier_export(tmp_path) == licence.strip("'")


def test_files_of_an_earlier_export_that_are_something_else_are_refused(tmp_path: Path) -> None:
    with earlier_export(tmp_path).open("r+b") as file:
        file.truncate(LARGEST + 1)
    with raises(ConfigError, tmp_path / CARD, "license:"):
        licence_of_earlier_export(tmp_path)
    earlier_export(tmp_path)
    (tmp_path / SETTINGS).write_text("[1]")
    with raises(ConfigError, tmp_path / SETTINGS):
        licence_of_earlier_export(tmp_path)


def test_inline_code_and_plain_words() -> None:
    assert code("a|b\nc") == r"`a\|b c`" and code("`x") == "`` `x ``" and code("a``b") == "```a``b```"
    assert escaped("a_b *c* <d>\ne") == r"a\_b \*c\* \<d\> e"
