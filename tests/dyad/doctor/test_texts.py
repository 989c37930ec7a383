"""What the doctor says of texts of data.train that are longer than the tower takes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_bert
from helpers.rows import write_beir, write_lines
from helpers.shards import image, write_tar

from dyad.data.base.findings import Finding, Level
from dyad.doctor import configuration
from dyad.train.cli.compose import compose_config

LONG = "a b c d e f g h"  # a tiny tokenizer takes a letter as a token, and adds two: 10 tokens
SHORT = "a b"


def told(folder: Path, *words: str) -> dict[str, Finding]:
    """The findings on texts, by the kind of text."""
    tiny_bert.write(folder / "bert")
    config = compose_config(["tracking.wandb=disabled", f"model.text.name={folder / 'bert'}", *words])
    found = [finding for finding in configuration.model(config) if finding.topic == "texts"]
    return {finding.text.partition(":")[0]: finding for finding in found}


def questions(folder: Path, data: Path, *words: str) -> dict[str, Finding]:
    return told(folder, "experiment=mnrl", f"data.train={data}", "data.question.length=8", *words)


def row(question: str, right: str, *wrong: str) -> dict[str, Any]:
    return {"query": question, "pos": [right], "neg": [*wrong]}


def test_questions_and_passages_are_counted(tmp_path: Path) -> None:
    """The drawn negatives count; with none drawn, they do not."""
    rows = [row(LONG, SHORT, LONG), row(SHORT, f"{LONG} i", SHORT), row(SHORT, SHORT), row(f"{SHORT} c d e f", SHORT)]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    found = questions(tmp_path, data, "data.passage.length=10")
    text = "questions: 1 of 4 is longer than data.question.length=8 tokens and is cut; the longest has 10"
    assert found["questions"].text == text and found["questions"].level is Level.warn
    text = "passages: 1 of 6 is longer than data.passage.length=10 tokens and is cut; the longest has 11"
    assert found["passages"].text == text
    assert found["passages"].fix == "data.passage.length=N, at most 512 for this model; or split or shorten them"
    found = questions(tmp_path, data, "data.passage.length=11", "data.negatives.per_row=0")
    text = "passages: none of 4 is longer than data.passage.length=11 tokens; the longest has 11"
    assert found["passages"].text == text and found["passages"].level is Level.ok


@pytest.mark.parametrize(("title", "tokens"), [("join", 12), ("pair", 13), ("drop", 10)])
def test_titles_and_prefixes_count(title: str, tokens: int, tmp_path: Path) -> None:
    passage = {"title": "x y", "text": LONG}
    rows = [{"question": LONG, "positive_ctxs": [passage], "hard_negative_ctxs": [passage]}]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    words = [f"data.passage.title={title}", "data.question.prefix='q r '"]
    found = questions(tmp_path, data, *words)
    assert found["passages"].text.endswith(f"the longest has {tokens}")
    assert found["questions"].text.endswith("the longest has 12")
    given = f"data.train=[{{path: {data}, passage_prefix: 'p ', question_prefix: 'q '}}]"
    found = told(tmp_path, "experiment=mnrl", given, *words)
    assert found["passages"].text.endswith(f"the longest has {tokens + 1}")
    assert found["questions"].text.endswith("the longest has 11")


def test_passages_of_a_corpus_and_of_a_folder(tmp_path: Path) -> None:
    """Texts of the folder: "what 3" has 6 tokens, "title 3 text 3" 14, as a number is unknown: one token."""
    folder = write_beir(tmp_path / "beir")
    found = questions(tmp_path, folder, "data.negatives.per_row=0", "data.passage.length=8")
    assert (
        found["questions"].text
        == "questions: none of 8 is longer than data.question.length=8 tokens; the longest has 7"
    )
    text = "passages: 10 of 20 are longer than data.passage.length=8 tokens and are cut; the longest has 13"
    assert found["passages"].text == text


def captions(folder: Path, texts: Iterable[str]) -> Path:
    members = [
        (f"{n}.{suffix}", c)
        for n, text in enumerate(texts)
        for suffix, c in (("png", image(n)), ("txt", text.encode()))
    ]
    return write_tar(folder / "a.tar", members)


IMAGES = ["model=tiny_clip_gn", "model.text.context_length=9", "epochs=1", "global_batch_size=2"]


@pytest.mark.parametrize("mode", ["indexed", "stream"])
def test_captions_of_shards(mode: str, tmp_path: Path) -> None:
    data = captions(tmp_path, [LONG, SHORT, LONG, f"{SHORT} c d e f g"])
    words = ["task=image_text", *IMAGES[:2], "steps=2", "global_batch_size=2", f"data.mode={mode}"]
    found = told(tmp_path, *words, "model.text.kind=transformers", f"data.train={data}")["captions"]
    text = "captions: 2 of 4 are longer than the 9 tokens of the text tower and are cut; the longest has 10"
    assert found.text == text and found.level is Level.warn and "model.text.context_length" in found.fix


def test_captions_of_a_table_by_open_clip(tmp_path: Path) -> None:
    texts = ["frog " * count for count in (75, 76, 100)]
    table = {"image": [image(n) for n in range(3)], "caption": texts}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    words = ["tracking.wandb=disabled", "model.name=ViT-B-32", "epochs=1", f"data.train={tmp_path / 'a.parquet'}"]
    (found,) = [each for each in configuration.model(compose_config(words)) if each.topic == "texts"]
    assert (
        found.text
        == "captions: 2 of 3 are longer than the 77 tokens of the text tower and are cut; the longest has 102"
    )


def test_labelled_texts(tmp_path: Path) -> None:
    rows = [{"text": LONG, "label": "1"}, {"text": SHORT, "label": "0"}, {"label": "2"}]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    words = ["model=encoder", "task=labelled", "data.items=texts", "data.label=label", "objective=cross_entropy"]
    words += ["data.passage.length=9", f"data.train={data}", "steps=2", "global_batch_size=2"]
    assert told(tmp_path, *words)["texts"].text.startswith("texts: 1 of 2 is longer than data.passage.length=9 tokens")


def test_a_table_of_texts_and_rows_that_are_many(tmp_path: Path) -> None:
    texts = [LONG if n >= 900 else SHORT for n in range(5000)]
    pq.write_table(pa.table({"anchor": texts, "positive": texts}), tmp_path / "a.parquet")
    found = questions(tmp_path, tmp_path / "a.parquet", "data.negatives.per_row=0")
    assert found["questions"].text.startswith("questions: 100 of 1,000 are longer")
    data = write_lines(tmp_path / "rows.jsonl", ({"anchor": text, "positive": text} for text in texts))
    found = questions(tmp_path, data, "data.negatives.per_row=0")
    assert found["questions"].text.startswith("questions: 820 of 1,000 are longer")


def test_data_that_cannot_be_read_are_told_by_their_own_check(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[1,\n")
    assert questions(tmp_path, tmp_path / "rows.jsonl") == {}
    assert questions(tmp_path, tmp_path / "none.jsonl") == {}


def test_prompts_have_one_token_more_and_answers_none(tmp_path: Path) -> None:
    """The tokenizer of model=byte_lm takes a byte as a token."""
    rows = [{"query": "x" * n, "pos": ["y" * n], "neg": ["z" * (n + 1)]} for n in (7, 8, 9)]
    words = ["experiment=lm_nll", f"data.train={write_lines(tmp_path / 'rows.jsonl', rows)}"]
    lengths = ["data.question.length=9", "data.passage.length=9", "data.negatives.per_row=1"]
    found = [each.text for each in configuration.model(compose_config([*words, *lengths])) if each.topic == "texts"]
    assert found == [
        "prompts: 1 of 3 is longer than data.question.length=9 tokens and is cut; the longest has 10",
        "answers: 1 of 6 is longer than data.passage.length=9 tokens and is cut; the longest has 10",
    ]
