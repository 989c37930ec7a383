"""`python -m data continuations`: prompts and answers from a corpus, to train and choose with a language model.

Each text is cut at the blank nearest its middle: the first half is a prompt, the second its right answer. Wrong answers
are second halves of other texts of the same part. All texts of a group belong to one part, by a hash of its name.
"""

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.base.progress import print_line
from dyad.data.build.sequences import PARTS, part_by_hash
from dyad.data.cli import outputs
from dyad.data.cli.options import ContinuationsOptions
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.shards.sources import local_path

Halves = tuple[str, str, str]  # id, first and second half of a text


def run(arguments: Sequence[str], options: ContinuationsOptions) -> None:
    """Write rows of the parts into the new folder options.out, and print what they hold.

    Raises DataError for an id that group_of does not match, and for a part with too few texts to draw wrong answers of.
    """
    out = outputs.checked_out(options.out)
    parts: dict[str, list[Halves]] = {part: [] for part in PARTS}
    corpus = open_corpus(local_path(arguments[0]), "INPUT")
    for i in range(len(corpus)):
        (name,), text = corpus.ids(i, i + 1), corpus[i].text.strip()
        if not (found := re.fullmatch(options.group_of, name)):
            raise DataError(f"{arguments[0]}: the id '{name:.80}' does not match group_of={options.group_of}")
        if halves := _halves(text):
            parts[part_by_hash(found[1], options.val, options.test)].append((name, *halves))
    if short := next((part for part in PARTS if len({half for *_, half in parts[part]}) <= options.wrong), None):
        raise DataError(f"{arguments[0]}: {short} has {len(parts[short])} texts, too few for wrong={options.wrong}")
    with outputs.new_folder(out) as folder, ExitStack() as stack:
        for number, (part, texts) in enumerate(parts.items()):
            file = stack.enter_context((folder / f"{part}.jsonl").open("w", encoding="utf-8"))
            generator = np.random.default_rng([options.seed, number])
            for name, first, second in texts:
                row = {"id": name, "query": first, "pos": [second], "neg": _wrong(texts, second, options, generator)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    counts = ", ".join(f"{part} {len(texts):,}" for part, texts in parts.items())
    print_line(
        f"{counts} prompts\ntrain on them:\n  python -m train task=language_model data=question_passage "
        f"model=causal_lm model.text.name=FOLDER objective=nll data.train={out}/train.jsonl "
        f"data.val={out}/val.jsonl epochs=1"
    )


def _halves(text: str) -> tuple[str, str] | None:
    """Cut a text at the blank nearest its middle, which begins the second half; None without one."""
    blanks = (found.start() for found in re.finditer(" ", text))
    cut = min(blanks, key=lambda i: abs(i - len(text) / 2), default=None)
    return None if cut is None else (text[:cut], text[cut:])


def _wrong(
    texts: Sequence[Halves], right: str, options: ContinuationsOptions, generator: np.random.Generator
) -> list[str]:
    """Draw the second halves of `wrong` other texts, all different and none the right one."""
    found: dict[str, None] = {}
    while len(found) < options.wrong:
        half = texts[int(generator.integers(len(texts)))][2]
        if half != right:
            found.setdefault(half)
    return [*found]
