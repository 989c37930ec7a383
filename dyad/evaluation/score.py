"""The command python -m eval.score model=lm:NAME, which scores prompts by a language model, for objective=epr.

Each row of questions and answers is a candidate prompt for the other rows. The score of a candidate for a row is the
log-likelihood of the row's answer after the candidate and the row's question, as the mean over the answer's tokens
(Rubin et al. 2022, section 3.1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyad.data.base.command_line import command_options
from dyad.data.base.errors import ConfigError
from dyad.data.base.files import open_foreign, write_errors, write_json
from dyad.data.base.json_text import read_json
from dyad.data.base.progress import print_line, tracked
from dyad.data.cli import outputs
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.questions import named_files
from dyad.data.shards.content_keys import json_digest
from dyad.eval.config import ScoreCommand
from dyad.eval.tasks.prompts import check_row_template

if TYPE_CHECKING:
    from dyad.data.question_passage.prompts import AnswerLists
    from dyad.data.shards.content_keys import Int64s
    from dyad.eval.encode.encoder import Encoder

CONTENT = "sha256 of the rows"  # entry of OUT.json beside the options
Find = Callable[[int, int], "Int64s"]  # (row, count) → the numbers of `count` other rows, or of fewer
PURPOSE = """\
Score prompts by a language model: how likely it makes the answer of each row after each of its candidate prompts, which
are other rows. experiment=epr trains on the result: which examples help as a prompt (Rubin et al. 2022).
Everything is key=value."""
EXAMPLES = {
    "candidates by BM25": "python -m eval.score model=lm:FOLDER rows=train.jsonl out=scored.jsonl",
    "by a model of questions and passages": "python -m eval.score model=runs/lm_nll rows=train.jsonl out=scored.jsonl "
    "by=runs/topics depth=20",
    "2,000 of the rows": "python -m eval.score model=lm:FOLDER rows=train.jsonl out=scored.jsonl sample=2000",
    "then train on them": "python -m train experiment=epr data.train=scored.jsonl",
}
NOTES = """\
out has a line {"id", "question", "answers", "ctxs": [{"id", "text", "score"}, …]} for each row, best prompt first.
While it is written it is OUT.part, and OUT.json holds the options; the same command goes on with it.
"""


def main() -> None:
    """Run `python -m eval.score`: read the command line, load the language model, and score the rows by `score`.

    It runs in one process. Raises ConfigError if the file out= exists, or the model scores no answers.
    """
    command = command_options(ScoreCommand, "python -m eval.score", PURPOSE, EXAMPLES, lambda: NOTES)
    check_row_template(command.template, "template")
    if Path(command.out).expanduser().exists():
        raise ConfigError(f"out={command.out} exists, so these rows are scored. Choose another, or remove it")

    import torch

    from dyad.data.question_passage.prompts import answer_lists, with_prompt_length
    from dyad.eval.encode.encoder import Encoder
    from dyad.evaluation.find_model import find_model
    from dyad.train.distributed.devices import cuda_usable
    from dyad.train.distributed.world import World
    from dyad.train.towers.models import LanguageModel

    found = find_model(command.model)
    named_files(command.rows, found.config.data, "rows")
    model = found.load().model
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"model={command.model} scores no answers: give lm:NAME, or a run of task=language_model")
    data = with_prompt_length(found.config.data, command.length)
    world = World(device=torch.device("cuda" if cuda_usable() else "cpu"))
    encoder = Encoder.of(found.config, model, world)
    encoder = replace(encoder, block=command.batch, workers=0, cosine=False)  # a call encodes the prompts of one row
    score(command, encoder, answer_lists(command.rows, data, model.tokenize, "rows"))


def score(command: ScoreCommand, encoder: Encoder, rows: AnswerLists) -> None:
    """Score the candidate prompts of all rows, or of command.sample of them, and write these rows to command.out.

    Until all rows are done the file is OUT.part, with the options in OUT.json; a later call with the same options goes
    on with it. encoder: has the language model as its tower "y", with cosine=False. rows: questions with their answers,
    of which the first right one is scored. Raises ConfigError if OUT.part was begun with other options or rows, or
    without OUT.json, and for a single row; HardwareError if a file cannot be written.
    """
    from dyad.data.question_passage.prompts import rows_as_prompts

    if len(rows.prompts) < 2:
        raise ConfigError(f"rows={command.rows}: has one row, and its candidates are other rows. Give two rows or more")
    out = Path(command.out).expanduser()
    part, about = out.with_name(f"{out.name}.part"), out.with_name(f"{out.name}.json")
    answers = rows_as_prompts(rows, "{answer}")
    content = json_digest([[question.id, question.text] for question in rows.prompts] + answers)
    with write_errors(part):
        done = _begin_or_continue(part, about, asdict(command), content)
    prompts = rows_as_prompts(rows, command.template.replace("\\n", "\n"))
    find = FINDERS.get(command.by, _by_model)(command, prompts, [question.text for question in rows.prompts])
    scored = _rows_to_score(command, len(prompts))[done:]
    with write_errors(part), part.open("a", encoding="utf-8") as file:
        for row in tracked(scored, "rows scored", len(scored)):
            candidates = _filled(find(row, command.depth), command, row, len(prompts))
            scores = _scores(encoder, rows, [prompts[i] for i in candidates.tolist()], row, answers[row])
            order = np.argsort(-scores, kind="stable").tolist()
            ctxs = [
                {"id": str(candidates[i]), "title": "", "text": prompts[candidates[i]], "score": float(scores[i])}
                for i in order
            ]
            question = rows.prompts[row]
            line = {"id": question.id, "question": question.text, "answers": [answers[row]], "ctxs": ctxs}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    part.rename(out)
    train = outputs.command("python -m train experiment=epr", {"data.train": out})
    print_line(f"{out}: {done + len(scored):,} rows. Train on them:  {train}")


def _rows_to_score(command: ScoreCommand, n: int) -> list[int]:
    """Return the numbers of the rows to score, ascending: all n, or command.sample of them, drawn by command.seed."""
    if command.sample is None or command.sample >= n:
        return [*range(n)]
    return sorted(np.random.default_rng(command.seed).choice(n, command.sample, replace=False).tolist())


def _begin_or_continue(part: Path, about: Path, options: dict[str, Any], content: str) -> int:
    """Prepare the unfinished output file `part` for appending; return how many rows it already holds.

    about: the JSON file with the options with which `part` was begun, and the digest `content` of the rows. If `part`
    does not exist, its folder is made, `about` is written, and 0 is returned; `part` is not made. Otherwise an
    incomplete last line is removed from it. Raises ConfigError if `options` or `content` differ from those in `about`,
    or `about` cannot be read. Files of earlier versions have no digest; it counts as equal.
    """
    if not part.exists():
        part.parent.mkdir(parents=True, exist_ok=True)
        write_json(about, options | {CONTENT: content})
        return 0
    try:
        begun = dict(read_json(about))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{about}, the options of {part}, cannot be read. Restore it, or remove both") from None
    if other := next((key for key, value in options.items() if begun.get(key) != value), None):
        raise ConfigError(
            f"{part} was begun with {other}={begun.get(other)}, not {options[other]}. Give that again, or remove it"
        )
    if begun.get(CONTENT, content) != content:
        raise ConfigError(f"rows={options['rows']} has changed since {part} was begun. Restore it, or remove {part}")
    with open_foreign(part, part.stat().st_size) as file:
        whole = [line for line in file if line.endswith(b"\n")]
    with part.open("r+b") as file:
        file.truncate(sum(map(len, whole)))
    return len(whole)


def _filled(found: Int64s, command: ScoreCommand, row: int, n: int) -> Int64s:
    """Return the candidates of a row, int64 (at most command.depth,): `found`, then random other rows.

    Equal arguments give equal random rows, so a run that goes on draws the same. n: number of rows; with n ≤
    command.depth there are fewer candidates, all other rows.
    """
    missing = command.depth - len(found)
    drawn = np.random.default_rng([command.seed, row]).choice(n, min(n, command.depth + 1), replace=False)
    return np.concatenate([found, drawn[(drawn != row) & ~np.isin(drawn, found)][:missing]])


def _scores(encoder: Encoder, rows: AnswerLists, prompts: Sequence[str], row: int, answer: str) -> np.ndarray:
    """Return the mean log-likelihood per token of `answer` after each of n prompts and the question of the row.

    The result is float64 (n,). rows: all questions, of which number `row` is asked.
    """
    question, n = rows.prompts[row], len(prompts)
    asked = [replace(question, text=prompt + question.text) for prompt in prompts]
    pairs = {"prompts": asked, "answers": [Passage(answer)] * n, "row_N": np.arange(n), "right_N": np.ones(n, bool)}
    return encoder("y", replace(rows, **pairs))[:, 0].astype(np.float64)


def _by_bm25(command: ScoreCommand, prompts: Sequence[str], questions: Sequence[str]) -> Find:
    """Return a function (row, count) → at most `count` other rows, the first of BM25 for the row's question."""
    from dyad.data.question_passage.bm25 import build_bm25

    index = build_bm25(prompts)

    def find(row: int, count: int) -> Int64s:
        ((_, found),) = index.search([questions[row]], count + 1)
        return found[found != row][:count]

    return find


def _by_random(*_: object) -> Find:
    """Return a function that finds no row, so that `_filled` draws all candidates at random."""
    return lambda row, count: np.empty(0, np.int64)


def _by_model(command: ScoreCommand, prompts: Sequence[str], questions: Sequence[str]) -> Find:
    """Return a function (row, count) → at most `count` other rows, with the prompts nearest to its question.

    Loads the model that command.by names. Embeds all rows as questions, and `prompts` as passages. Searches for
    command.depth prompts of each row at once, so a larger `count` finds no more. Raises ConfigError for a model that
    does not embed questions and passages.
    """
    import dyad
    from dyad.train.towers.models import TextPairModel

    model = dyad.load(command.by)
    if not isinstance(model.loaded.model, TextPairModel):
        choices = f"{', '.join(FINDERS)}, or a model of questions and passages, such as st:FOLDER"
        raise ConfigError(f"by={command.by} embeds no questions and passages. Choices: {choices}")
    index, asked = model.index(list(prompts)), model.encode_question(list(questions))
    found_nk = index.faiss.search(asked, min(command.depth + 1, len(prompts))).positions

    def find(row: int, count: int) -> Int64s:
        return found_nk[row][found_nk[row] != row][:count]

    return find


FINDERS: dict[str, Callable[[ScoreCommand, Sequence[str], Sequence[str]], Find]] = {
    "bm25": _by_bm25,
    "random": _by_random,
}
