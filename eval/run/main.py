"""The command python -m eval checkpoint=runs/x [suite=[…]]: evaluates a trained model. See python -m eval --help."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.data.base.command_line import command_options, help_text, overridden
from dyad.data.base.errors import ConfigError
from dyad.eval.config import Baseline, EvalCommand

if TYPE_CHECKING:
    from dyad.train.config import TrainConfig
    from dyad.train.towers.build import TwoTowerModel

PURPOSE = """\
Evaluate a trained model: retrieval of pictures, texts and passages, zero-shot classification. One JSON per data set,
and a table. Everything is key=value. Under torchrun the ranks share the work and the numbers stay the same."""
EXAMPLES = {
    "what the run was evaluated on while training": "python -m eval checkpoint=runs/emoji",
    "another retrieval set": "python -m eval checkpoint=runs/emoji "
    "suite=[retrieval:data/samples/emoji/twemoji-unseen.tar]",
    "folders of CLIP_benchmark, a task file of prompts": "python -m eval checkpoint=runs/x "
    "suite=[wds:cifar10,wds:flickr30k,zero_shot:task.json]",
    "questions and passages with judgements, beside BM25 and the encoder before training": "python -m eval "
    "checkpoint=runs/topics suite=[beir:data/samples/topics]",
    "another split, a folder of DPR files, an approximate index": "python -m eval checkpoint=runs/x "
    "suite=[beir:folder@dev,dpr:folder] 'index=IVF256,Flat;nprobe=16'",
    "an earlier checkpoint": "python -m eval checkpoint=runs/x/checkpoints/step_00001000 'val=shards/{00..09}.tar'",
}
OF_TASK = {
    "image_text": ("truth", "recall_k"),
    "question_passage": ("depth", "answers", "embeddings", "embedding_type", "baselines"),
}
NOTES = """\
Their files: .json, .trec (run), .qrels, .beir.json, .dpr.json (retriever output). A judged question that finds nothing
counts as zero; equal scores stand as trec_eval sorts them. A baseline that cannot be made is left out with a line.
The .json also has 95 % intervals (bootstrap over queries, of one topic or picture together), how scores of right and
wrong pairs are spread, what is confused, and examples= cases; .pictures/ has small copies of the pictures they show.
"""


def _help() -> str:
    from dyad.eval.run.suite import forms_help

    return help_text(PURPOSE, EXAMPLES, EvalCommand, forms_help() + NOTES)


def main() -> None:
    command = command_options(EvalCommand, "python -m eval", _help)

    from dyad.eval.run.load_run import find_run, read_config
    from dyad.eval.run.suite import check_suite

    run, checkpoint = find_run(command.checkpoint)
    config = with_command(read_config(run), command)
    check_suite(config)
    evaluate(command, config, run, checkpoint)


def with_command(config: "TrainConfig", command: EvalCommand) -> "TrainConfig":
    """Return the run's configuration, in which the options given on the command line of python -m eval replace those of
    the run.

    With suite= or val= on the command line, both data.val and eval.suite of the run are dropped. Raises ConfigError for
    an option that belongs to another task (image_text, question_passage) than that of the run, and if there is no data
    set to evaluate on.
    """
    for task in (task for task in OF_TASK if task != config.task.name):
        foreign = [key for key in OF_TASK[task] if getattr(command, key) is not None]
        if foreign:
            raise ConfigError(f"{foreign[0]}= is of task={task}, and this run is task={config.task.name}: leave it out")
    data, evaluation = overridden(config.data, command), overridden(config.eval, command)
    if command.suite is not None or command.val is not None:  # then nothing of what the run was evaluated on
        data, evaluation = replace(data, val=command.val), replace(evaluation, suite=command.suite or [])
    if not evaluation.suite and data.val is None:
        raise ConfigError("nothing to evaluate: the run has no data.val and no eval.suite. Give val= or suite=[…]")
    return replace(config, data=data, eval=evaluation)


def evaluate(command: EvalCommand, config: "TrainConfig", run: Path, checkpoint: Path) -> None:
    """Load a run's checkpoint and evaluate it on all data sets of the configuration.

    All processes must call it together. Process 0 writes the result files and prints the tables.
    """
    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.results.write import facts, print_tables, result, write
    from dyad.eval.run.load_run import load_run
    from dyad.eval.run.suite import build_evaluators
    from dyad.train.distributed.agreement import rank_0_first, rank_0_only
    from dyad.train.distributed.failures import process_group
    from dyad.train.run.evaluation import written_report

    trained = load_run(run, checkpoint)
    baselines = list(Baseline) if command.baselines is None else command.baselines
    with process_group(config.dist.timeout, config.dist.start_timeout) as world:
        encode = Encoder.of(config, trained.model, world)
        before = cache(lambda: Encoder.of(config, untrained(config), world))
        # rank 0 indexes new shards, the others find them indexed
        evaluators = rank_0_first(world, lambda: build_evaluators(config, trained.model, baselines, before))
        about = facts(config, checkpoint, trained.step)
        folder = Path(command.out) if command.out else run / "eval"
        results, written = [], []
        for evaluator in evaluators:
            report = evaluator.report(encode, config.eval.examples)
            results.append(result(report, evaluator, about))
            written.append(rank_0_only(world, partial(write, folder, results[-1], report.files)))
        if world.rank == 0:
            print_tables(results)
            print(f"step {trained.step} of {run}. Written: {', '.join(str(p) for paths in written for p in paths)}")
            if folder.resolve() == (run / "eval").resolve():
                written_report(run, print)


def untrained(config: "TrainConfig") -> "TwoTowerModel":
    """Build the model with its initial weights, before training: from model.* and seed, without init_from."""
    import torch

    from dyad.train.towers.build import build_model

    torch.manual_seed(config.seed)
    return build_model(config.model, config.task)
