"""The command python -m eval.mine run=runs/x, which mines hard negatives with a trained model.

See python -m eval.mine --help.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyad.data.base.command_line import command_options, overridden
from dyad.data.base.errors import ConfigError, printable
from dyad.data.base.files import whole_file, write_errors
from dyad.data.base.secrets import without_credentials, without_secrets
from dyad.data.config import MiningConfig, NegativeList
from dyad.eval.config import MineCommand, MinedItems

if TYPE_CHECKING:
    from dyad.eval.mine.mining import MiningData
    from dyad.train.config import TrainConfig

    Opened = tuple[MiningData, str | None]

PURPOSE = """\
Mine hard negatives with a trained model: for each training question the passages, for each training image the
captions, or for each caption the images, that it ranks high although they are not right. Training then draws from
them. What is right and its copies are never among them.
Everything is key=value. Under torchrun the ranks share the work and the result stays the same."""
EXAMPLES = {
    "for the questions and the corpus that the run was trained on": "python -m eval.mine run=runs/topics",
    "then train on them": "python -m train experiment=topics init_from=runs/topics 'data.negatives.lists=[mined]' "
    "data.negatives.file=runs/topics/mined/mined.jsonl data.negatives.per_row=1",
    "other data; all that scores 5 % less than the right passage": "python -m eval.mine run=runs/x "
    "corpus=nq/corpus.jsonl queries=nq out=mined/nq first_rank=1 relative_margin=0.05",
    "images: the five best captions of others, that score 5 % less than its own": "python -m eval.mine "
    "run=runs/emoji first_rank=1 keep=5 relative_margin=0.05",
    "the five best images of others for each caption": "python -m eval.mine run=runs/emoji mine=pictures "
    "first_rank=1 keep=5",
    "judged by a cross-encoder's scores of question and passage": "python -m eval.mine run=runs/x scores=scores.tsv "
    "margin=2",
}
NOTES = """\
out gets mined.jsonl, a line {"query_id", "negatives", "scores"} for each query; mined.json, which says
how many were left out and why; and embeddings/, so that the same command goes on wherever it was stopped, or mines
again by other rules without encoding; delete it when you are done.
Questions: negatives are ids of passages. Without a corpus, all passages in the rows of questions are searched, and out
gets them as corpus.jsonl.
Images: negatives are texts; query_id is the content key of the image, and equal images are one. All captions
that training may draw (data.captions) are searched, and out gets them as captions.jsonl, with whose they are in
pictures.npy. Right are the captions of the image, and those with the same data.text_key.
mine=pictures: the same with sides exchanged, for data.negatives.picture_file; query_id and negatives are content keys.
"""
CORPUS = "corpus.jsonl"  # the passages in the rows of questions, with ids
REASONS = {
    "rank": "ranked before first_rank",
    "right": "right, or a copy of what is right",
    "unreadable": "images that cannot be decoded",
    "unscored": "without a score in the file",
    "unknown": "of questions whose right passage is not in the corpus, or has no score: no margin can be kept",
    "margin": "too close to what is right",
    "max_score": "above max_score",
    "repeated": "copies of another",
    "answer": "with an answer in the text",
    "beyond_keep": "more than keep",
}


def main() -> None:
    """Run `python -m eval.mine`: read the command line and the configuration of the run, check both, then mine."""
    command = command_options(MineCommand, "python -m eval.mine", PURPOSE, EXAMPLES, lambda: NOTES)

    from dyad.eval.search.index_spec import check_spec
    from dyad.evaluation.load_run import read_config, run_folder_of

    run = run_folder_of(command.run)
    config = with_mine_options(read_config(run), command)
    refuse_other_tasks(command, config, run)
    check_spec(config.data.negatives.mining.index)
    mine_negatives(command, config, run)


def refuse_other_tasks(command: MineCommand, config: TrainConfig, run: Path) -> None:
    """Raise ConfigError if the task of the run has no hard negatives, or an option is for data of the other task.

    The options for images alone are OF_IMAGES, those for questions and passages OF_QUESTIONS. run: the run folder, for
    messages.
    """
    if config.task.name not in OPEN:
        raise ConfigError(f"{run} is of task={config.task.name}: only {' and '.join(OPEN)} have hard negatives")
    of_questions = config.task.name == "question_passage"
    kinds = ("images", "questions and passages") if of_questions else ("questions and passages", "images")
    options = OF_IMAGES if of_questions else OF_QUESTIONS
    if given := [name for name in options if getattr(command, name) is not None]:
        raise ConfigError(f"{given[0]}= is for {kinds[0]}, and {run} is of {kinds[1]}. Leave it out")


def with_mine_options(config: TrainConfig, command: MineCommand) -> TrainConfig:
    """Return `config`, the configuration of a run, changed by the options of the command line of python -m eval.mine.

    command: these options; None stands for the value of the run. queries= replaces data.train.
    """
    data = overridden(config.data, command)
    negatives = replace(data.negatives, mining=overridden(data.negatives.mining, command))
    passage, train = overridden(data.passage, command), command.queries or data.train
    return replace(config, data=replace(data, train=train, passage=passage, negatives=negatives))


def mine_negatives(command: MineCommand, config: TrainConfig, run: Path) -> None:
    """Mine hard negatives with a run's checkpoint: encode queries and items, search, and choose among the items found.

    All processes of the job must call it together; it forms their process group and ends it. Process 0 writes
    mined.jsonl, mined.json, embeddings/ and the searched passages or captions (see NOTES) into out=, or else into
    mined/ or mined_pictures/ of the run, and prints a report and the command that trains on the result. config: from
    `with_mine_options`. run: the run folder. Raises ConfigError or DataError, on all processes, for a checkpoint or
    data that cannot be used.
    """
    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.mine.mining import MINED, embed_all, mine
    from dyad.eval.mine.pair_scores import read_pair_scores
    from dyad.evaluation.load_run import load_on_all, own_output
    from dyad.train.distributed.agreement import raise_on_all, rank_0_first
    from dyad.train.distributed.failures import process_group
    from dyad.train.distributed.world import set_timeout

    folder = "mined_pictures" if command.mine is MinedItems.pictures else "mined"
    out = Path(command.out).expanduser() if command.out else own_output(run, folder)
    with process_group(config.dist.seconds_to_start) as world:
        trained = load_on_all(command.run, world)
        opened = partial(OPEN[config.task.name], config, trained.model, out, command.mine, write=world.rank == 0)
        data, corpus = rank_0_first(world, opened)
        set_timeout(config.dist.timeout)
        scores = raise_on_all(world, lambda: None if command.scores is None else read_pair_scores(command.scores))
        source = embed_all(Encoder.of(config, trained.model, world), data, out / "embeddings")
        identity = {
            "checkpoint": str(trained.checkpoint),
            "step": trained.step,
            **{name: side.fingerprint for name, side in zip(data.names, data.sides(), strict=True)},
            "scores": without_secrets(command.scores),
        }
        summary = mine(replace(source, scores=scores), config.data.negatives.mining, out, world, identity)
        if world.rank == 0:
            print(printable("\n".join(report_lines(summary, data))))
            training = training_command(config, run, out / MINED, corpus, command.mine)
            print(printable(f"\nWritten: {out / MINED}. To train on it:\n  {training}"))


# ---- what is mined, by task ------------------------------------------------------------------------------------------


def open_questions_and_passages(
    config: TrainConfig, model: Any, out: Path, _: MinedItems | None, write: bool
) -> Opened:
    """Open the questions of data.train and the passages to search; return them, and the file of passages or None.

    The passages are the corpus of the run (None is returned), or else all passages in the rows of questions. These are
    written to the file CORPUS in the folder `out`, whose path is returned; write: whether this process writes it, else
    it must be there. model: has the attribute `tokenize`. The fourth argument is not used. Raises ConfigError if the
    sources of questions have several corpora, HardwareError if the file cannot be written.
    """
    from dyad.data.question_passage.corpus import open_corpus
    from dyad.data.question_passage.questions import open_questions
    from dyad.eval.mine.passages import QuestionsAndPassages
    from dyad.eval.tasks.question_passage.question_sets import RowPassages

    questions = open_questions(config.data.train, config.data, "queries")
    if questions.corpus is not None:
        return QuestionsAndPassages(questions, questions.corpus, model.tokenize, config.data), None
    if any(source.corpus is not None for source in questions.sources):
        raise ConfigError(
            f"queries={config.data.train}: nothing says which passages to search, those of several corpora. Give "
            "corpus=, passages by id: .jsonl or .tsv with the fields id, text, title, or a BEIR folder"
        )
    file = out / CORPUS
    if write:
        passages = RowPassages(questions)
        with write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as lines:
                for passage in map(passages.__getitem__, range(len(passages))):
                    row = {"_id": passage.id, "title": passage.title, "text": passage.text}
                    lines.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    corpus = open_corpus(str(file), "corpus")
    return QuestionsAndPassages(questions, corpus, model.tokenize, config.data), corpus.rows.files[0]


def open_images_and_captions(
    config: TrainConfig, model: Any, out: Path, what: MinedItems | None, write: bool
) -> Opened:
    """Open the images of data.train and all captions that training may draw for them; return the data and None.

    The captions are read from files in the folder `out`; write: whether this process writes them there, else they must
    be there. model: has the attributes `image` (an ImageSpec) and `tokenize`. what: whether captions or images become
    negatives; None: captions. Raises HardwareError if the files cannot be written.
    """
    from dyad.data.image_text.items import Images
    from dyad.data.shards.shards import open_shards
    from dyad.data.shards.sources import parse_sources
    from dyad.data.tables.prepare import prepared_tables, table_options
    from dyad.eval.mine.images import CaptionsAndImages, ImagesAndCaptions, write_captions

    tables = prepared_tables(table_options(config.data))
    shards = open_shards(parse_sources(config.data.train, "queries", tables=tables))
    if write:
        with write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            write_captions(shards, config.data, out)
    kind = CaptionsAndImages if what is MinedItems.pictures else ImagesAndCaptions
    return kind(Images(shards, model.image, config.data), model.tokenize, out), None


OPEN = {"question_passage": open_questions_and_passages, "image_text": open_images_and_captions}
OF_QUESTIONS = ("corpus", "drop_answers", "regex_answers", "scores")
OF_IMAGES = ("mine", "captions", "caption_per", "image_key", "text_key")


# ---- what is printed -------------------------------------------------------------------------------------------------


def report_lines(summary: dict[str, Any], data: MiningData) -> Iterator[str]:
    """Yield lines of text that say how many of the items found became negatives, and why the others did not.

    summary: the counts that `mine` (eval/mine/mining.py) returned. data: the data that were mined, for the names of
    queries and items.
    """
    queries, items = data.names
    yield (
        f"{summary['negatives']:,} negatives for {summary[queries]:,} {queries}, of {summary['found']:,} {items} "
        f"found; {summary['without']:,} {queries} have none. Left out:"
    )
    left_out = summary["left_out"]
    yield from (f"  {left_out[name]:>10,}  {meaning}" for name, meaning in REASONS.items() if name in left_out)


def training_command(config: TrainConfig, run: Path, mined: Path, corpus: str | None, what: MinedItems | None) -> str:
    """Return the shell command of a new training from the run's weights, on the mined negatives in the file `mined`.

    run: the run folder. corpus: the file of the passages searched; None: the run's own corpus. what: whether
    captions or images were mined as negatives; None: captions, or passages. If the run's objective takes no such
    negatives, the command sets objective=info_nce, or clip for images as negatives.
    """
    from dyad.train.cli.compose import words_for
    from dyad.train.config import ResumeConfig
    from dyad.train.losses import OBJECTIVES

    own = config.data.negatives
    if what is MinedItems.pictures:
        takes, other = not config.objective.no_x_negatives_because, "clip"
        lists = [NegativeList.mined, *(each for each in own.lists if own.per_row and each is not NegativeList.mined)]
        negatives = replace(own, lists=lists, picture_file=str(mined), pictures=1)
    else:
        options = OBJECTIVES[config.objective.name]
        takes, other = "negatives" in options.takes and options.inputs == "pairs", "info_nce"  # no teacher scored them
        negatives = replace(own, lists=[NegativeList.mined], file=str(mined), per_row=1)
    if not negatives.refresh_every:
        negatives = replace(negatives, mining=MiningConfig())
    passage = replace(config.data.passage, corpus=corpus) if corpus else config.data.passage
    next_config = replace(
        config,
        init_from=str(run),
        objective=config.objective if takes else OBJECTIVES[other](),
        data=replace(config.data, negatives=negatives, passage=passage, teacher=None),
        run=replace(config.run, name=None),
        resume=ResumeConfig(),
    )
    return shlex.join(["python", "-m", "train", *map(without_credentials, words_for(next_config))])
