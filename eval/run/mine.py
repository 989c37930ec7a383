"""The command python -m eval.mine run=runs/x: mines hard negatives with a trained model.

See python -m eval.mine --help.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyad.data.base.command_line import command_options, overridden
from dyad.data.base.errors import ConfigError, printable
from dyad.data.base.files import whole_file
from dyad.data.base.secrets import without_secrets
from dyad.data.config import MiningConfig, NegativeList
from dyad.eval.config import MineCommand

if TYPE_CHECKING:
    from dyad.data.question_passage.corpus import Corpus
    from dyad.data.question_passage.questions import QuestionRows
    from dyad.train.config import TrainConfig

PURPOSE = """\
Mine hard negatives with a trained model: for each training question the passages that it ranks high although they are
not right. Training then draws from them. Right passages and their copies are never among them.
Everything is key=value. Under torchrun the ranks share the work and the result stays the same."""
EXAMPLES = {
    "for the questions and the corpus that the run was trained on": "python -m eval.mine run=runs/topics",
    "then train on them": "python -m train experiment=topics init_from=runs/topics 'data.negatives.lists=[mined]' "
    "data.negatives.file=runs/topics/mined/mined.jsonl data.negatives.per_row=1",
    "other data; all that scores 5 % less than the right passage": "python -m eval.mine run=runs/x "
    "corpus=nq/corpus.jsonl queries=nq out=mined/nq first_rank=1 relative_margin=0.05",
    "judged by a cross-encoder's scores of question and passage": "python -m eval.mine run=runs/x scores=scores.tsv "
    "margin=2",
}
NOTES = """\
out gets mined.jsonl, a line {"query_id", "negatives", "scores"} for each question; mined.json, which says how many
passages were left out and why; and embeddings/, so that the same command goes on wherever it was stopped, or mines
again by other rules without encoding; delete it when you are done. Without a corpus, all passages in the rows of
questions are searched, and out gets them as corpus.jsonl. null: as the run has it.
"""
CORPUS = "corpus.jsonl"  # the passages in the rows of questions, with ids
REASONS = {
    "rank": "ranked before first_rank",
    "right": "right, or a copy of what is right",
    "unscored": "without a score in the file",
    "unknown": "of questions whose right passage is not in the corpus, or has no score: no margin can be kept",
    "margin": "too close to the right passage",
    "max_score": "above max_score",
    "repeated": "copies of another",
    "answer": "with an answer in the text",
    "beyond_keep": "more than keep",
}


def main() -> None:
    command = command_options(MineCommand, "python -m eval.mine", PURPOSE, EXAMPLES, lambda: NOTES)

    from dyad.eval.run.load_run import read_config, run_folder_of
    from dyad.eval.search.index_spec import check_spec

    run = run_folder_of(command.run)
    config = with_command(read_config(run), command)
    if config.task.name != "question_passage":
        raise ConfigError(f"{run} is of task={config.task.name}: only question_passage has passages to mine")
    check_spec(config.data.negatives.mining.index)
    negatives(command, config, run)


def with_command(config: TrainConfig, command: MineCommand) -> TrainConfig:
    """Return the run's configuration, in which the options given on the command line of python -m eval.mine replace
    those of the run.
    """
    data = overridden(config.data, command)
    negatives = replace(data.negatives, mining=overridden(data.negatives.mining, command))
    passage, train = overridden(data.passage, command), command.queries or data.train
    return replace(config, data=replace(data, train=train, passage=passage, negatives=negatives))


def negatives(command: MineCommand, config: TrainConfig, run: Path) -> None:
    """Mine hard negatives with a run's checkpoint: encode questions and passages, search, choose.

    All processes must call it together. Process 0 writes the files and prints a report.
    """
    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.mine.mining import MINED, embedded, mine
    from dyad.eval.mine.pair_scores import read_pair_scores
    from dyad.eval.run.load_run import load_on_all, own_output
    from dyad.train.distributed.agreement import raise_on_all, rank_0_first
    from dyad.train.distributed.failures import process_group
    from dyad.train.distributed.world import set_timeout

    out = Path(command.out).expanduser() if command.out else own_output(run, "mined")
    with process_group(config.dist.seconds_to_start) as world:
        trained = load_on_all(command.run, world)
        model = trained.model
        questions, corpus = rank_0_first(world, lambda: open_inputs(config, out, write=world.rank == 0))
        set_timeout(config.dist.timeout)
        scores = raise_on_all(world, lambda: None if command.scores is None else read_pair_scores(command.scores))
        encode = Encoder.of(config, model, world)
        source = embedded(encode, questions, corpus, model.tokenize, config.data, out / "embeddings")  # type: ignore[arg-type]
        identity = {
            "checkpoint": str(trained.checkpoint),
            "step": trained.step,
            "questions": questions.fingerprint,
            "corpus": corpus.fingerprint,
            "scores": without_secrets(command.scores),
        }
        summary = mine(replace(source, scores=scores), config.data.negatives.mining, out, world, identity)
        if world.rank == 0:
            print(printable("\n".join(report(summary))))
            training = training_command(config, run, out / MINED, corpus if questions.corpus is None else None)
            print(printable(f"\nWritten: {out / MINED}. To train on it:\n  {training}"))


def open_inputs(config: TrainConfig, out: Path, write: bool = True) -> tuple[QuestionRows, Corpus]:
    """Open the questions of data.train and the corpus of passages to search: the run's, or all passages in the rows of
    questions, in the file CORPUS of the folder `out`.

    write: whether this process writes that file. Raises ConfigError if several corpora belong to the questions.
    """
    from dyad.data.question_passage.corpus import open_corpus
    from dyad.data.question_passage.questions import open_questions
    from dyad.eval.tasks.question_sets import RowPassages

    questions = open_questions(config.data.train, config.data, "queries")
    if questions.corpus is not None:
        return questions, questions.corpus
    if any(source.corpus is not None for source in questions.sources):
        raise ConfigError(
            f"queries={config.data.train}: nothing says which passages to search, those of several corpora. Give "
            "corpus=, passages by id: .jsonl or .tsv with the fields id, text, title, or a BEIR folder"
        )
    file = out / CORPUS
    if write:
        passages = RowPassages(questions)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as lines:
            for passage in map(passages.__getitem__, range(len(passages))):
                row = {"_id": passage.id, "title": passage.title, "text": passage.text}
                lines.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return questions, open_corpus(str(file), "corpus")


# ---- what is printed -------------------------------------------------------------------------------------------------


def report(summary: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text that say how many of the passages found became negatives, and why the others did not.

    summary: the summary that `mine` in eval/mine/mining.py returned.
    """
    yield (
        f"{summary['negatives']:,} negatives for {summary['questions']:,} questions, of {summary['found']:,} passages "
        f"found; {summary['without']:,} questions have none. Left out:"
    )
    left_out = summary["left_out"]
    yield from (f"  {left_out[name]:>10,}  {meaning}" for name, meaning in REASONS.items() if name in left_out)


def training_command(config: TrainConfig, run: Path, mined: Path, corpus: Corpus | None = None) -> str:
    """Compose the command that continues training from the run's weights, on the mined negatives in the file `mined`.

    corpus: what was searched, if it is not the run's. If the run's objective takes no extra negatives, the command has
    objective=info_nce.
    """
    from dyad.train.cli.compose import words_for
    from dyad.train.config import ResumeConfig
    from dyad.train.losses import OBJECTIVES

    takes = "negatives" in OBJECTIVES[config.objective.name].takes
    negatives = replace(config.data.negatives, lists=[NegativeList.mined], file=str(mined), per_row=1)
    if not negatives.refresh_every:
        negatives = replace(negatives, mining=MiningConfig())
    passage = replace(config.data.passage, corpus=corpus.rows.files[0]) if corpus else config.data.passage
    next_config = replace(
        config,
        init_from=str(run),
        objective=config.objective if takes else OBJECTIVES["info_nce"](),
        data=replace(config.data, negatives=negatives, passage=passage),
        run=replace(config.run, name=None),
        resume=ResumeConfig(),
    )
    return shlex.join(["python", "-m", "train", *words_for(next_config)])
