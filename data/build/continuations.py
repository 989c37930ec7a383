"""`python -m data continuations`: prompts with right and wrong answers, made from a corpus, for language models.

Each text is cut at the blank nearest its middle: the first half is a prompt, the second its right answer. Wrong answers
are second halves of other texts of the same part (train, val or test). All texts of a group are in one part, which a
hash of the group's name determines.

A language model uses an example in its prompt only if it was trained on such prompts. Therefore examples=N writes
examples.jsonl, with N prompts for each row of train. Each of them begins with another row of train, of another group,
as an example: in three of four cases the next row that BM25 finds for the prompt, else a random row.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.base.progress import print_line, tracked
from dyad.data.build.sequences import PARTS, part_by_hash
from dyad.data.cli import outputs
from dyad.data.cli.options import ContinuationsOptions, group_of
from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.shards.sources import local_path

TRAIN = "python -m train task=language_model data=question_passage model=causal_lm model.text.name=FOLDER objective=nll"
BY_BM25 = 0.75  # probability that an example is one that BM25 finds
DEPTH = 100  # the most rows that BM25 finds for a prompt


@dataclass(frozen=True)
class Row:
    """The halves of a text, as a prompt and its right answer.

    id: id of the text in the corpus. group: name of its group; all rows of a group are in one part.
    """

    id: str
    group: str
    prompt: str
    answer: str


def run(arguments: Sequence[str], options: ContinuationsOptions) -> None:
    """Write train.jsonl, val.jsonl and test.jsonl, with options.examples also examples.jsonl, into options.out.

    The folder options.out is new. Prints the number of rows of each part and a command that trains on them. arguments:
    the path of the corpus. Raises ConfigError if options.out is missing or not empty; DataError if an id does not match
    options.group_of, if a part has too few different answers for options.wrong, or if examples are wanted and train has
    only one group; other errors as of `open_corpus`.
    """
    out, (path, *_) = outputs.checked_new_folder(options.out), arguments
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for row in _halves(path, options.group_of):
        parts[part_by_hash(row.group, options.val, options.test)].append(row)
    for part, rows in parts.items():
        if (found := len({row.answer for row in rows})) <= options.wrong:
            raise DataError(f"{path}: {part} has {found} different answers, too few for wrong={options.wrong}")
    if options.examples and len({row.group for row in parts["train"]}) < 2:
        raise DataError(f"{path}: train has one group, and examples={options.examples} are of other groups")
    with outputs.new_folder(out) as folder:
        for number, (part, rows) in enumerate(parts.items()):
            generator = np.random.default_rng([options.seed, number])
            lines = [_line(row, row.prompt, rows, options, generator) for row in rows]
            _write(folder / f"{part}.jsonl", lines)
        if options.examples:
            generator = np.random.default_rng([options.seed, len(parts)])
            _write(folder / "examples.jsonl", _after_examples(parts["train"], options, generator))
    counts = ", ".join(f"{part} {len(rows):,}" for part, rows in parts.items())
    paths = {f"data.{part}": out / f"{part}.jsonl" for part in PARTS[:2]}
    print_line(f"{counts} prompts\ntrain on them:\n  {outputs.command(TRAIN, paths, 'epochs=1')}")


def _halves(path: str, pattern: str) -> Iterator[Row]:
    """Yield a Row for each text of the corpus `path` that has a blank, cut at the blank nearest its middle.

    The answer begins with this blank. Titles are not used; texts without a blank are left out. pattern: the option
    group_of.
    """
    corpus = open_corpus(local_path(path), "INPUT")
    for i in range(len(corpus)):
        (name,), text = corpus.ids(i, i + 1), corpus[i].text.strip()
        group = group_of(name, pattern, "group_of", path)
        blanks = [found.start() for found in re.finditer(" ", text)]
        if blanks:
            cut = min(blanks, key=lambda i: abs(i - len(text) / 2))
            yield Row(name, group, text[:cut], text[cut:])


def _write(path: Path, lines: Iterable[dict[str, object]]) -> None:
    """Write each of `lines` as a line of JSON to the new file `path`."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _line(
    row: Row, prompt: str, rows: Sequence[Row], options: ContinuationsOptions, generator: np.random.Generator
) -> dict[str, object]:
    """Return the fields of a line to write: id, prompt, the right answer of `row`, and options.wrong wrong answers.

    The latter are answers of other rows of `rows`, all different; there must be so many.
    """
    wrong: dict[str, None] = {}
    while len(wrong) < options.wrong:
        answer = rows[int(generator.integers(len(rows)))].answer
        if answer != row.answer:
            wrong.setdefault(answer)
    return {"id": row.id, "query": prompt, "pos": [row.answer], "neg": [*wrong]}


def _after_examples(
    rows: Sequence[Row], options: ContinuationsOptions, generator: np.random.Generator
) -> Iterator[dict[str, object]]:
    """Yield the fields of options.examples lines for each row, each with an example before its prompt.

    The example is a row of another group: with probability BY_BM25 the next that BM25 finds, if there is one, else a
    random one.
    """
    index = build_bm25(row.prompt + row.answer for row in rows)
    for row in tracked(rows, "rows with examples", len(rows)):
        ((_, found),) = index.search([row.prompt], DEPTH)
        similar = iter([rows[i] for i in found.tolist() if rows[i].group != row.group])
        for _ in range(options.examples):
            example = next(similar, None) if generator.random() < BY_BM25 else None
            while example is None or example.group == row.group:
                example = rows[int(generator.integers(len(rows)))]
            yield _line(row, f"{example.prompt}{example.answer}\n{row.prompt}", rows, options, generator)
