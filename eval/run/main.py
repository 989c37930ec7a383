"""python -m eval checkpoint=runs/x [suite=[…]]: evaluate a trained model. See python -m eval --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyad.data.base.command_line import help_text, overridden, parse_options
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


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        from dyad.eval.run.suite import forms_help

        print(help_text(PURPOSE, EXAMPLES, EvalCommand, forms_help() + NOTES))
        return
    command = parse_options(EvalCommand, sys.argv[1:], "python -m eval")

    from dyad.eval.run.load_run import find_run, read_config

    run, checkpoint = find_run(command.checkpoint)
    config = read_config(run)
    own = command.suite is None and command.val is None
    specs = config.eval.suite if own else command.suite or []
    val = config.data.val if own else command.val
    if not specs and val is None:
        raise ConfigError("nothing to evaluate: the run has no data.val and no eval.suite. Give val= or suite=[…]")

    check(command, config, specs, val)
    evaluate(command, run, checkpoint, specs, val)


def check(command: EvalCommand, config: TrainConfig, specs: Sequence[str], val: Any) -> None:
    """Raise ConfigError, before the model is loaded, for options that do not fit the run's task and for wrong specs."""
    from dyad.eval.run.suite import check_index, check_specs

    task = config.task.name
    for other in (t for t in OF_TASK if t != task):
        foreign = [key for key in OF_TASK[other] if getattr(command, key) is not None]
        if foreign:
            raise ConfigError(f"{foreign[0]}= is of task={other}, and this run is task={task}: leave it out")
    check_specs(specs, val, config.task)
    check_index(config.eval.index if command.index is None else command.index, config.task)


def evaluate(command: EvalCommand, run: Path, checkpoint: Path, specs: Sequence[str], val: Any) -> None:
    """Load the model, encode, score. Rank 0 writes the files and prints the tables."""
    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.results.write import facts, print_tables, result, write
    from dyad.eval.run.load_run import load_run
    from dyad.eval.run.suite import build_evaluators
    from dyad.train.distributed.agreement import rank_0_first, rank_0_only
    from dyad.train.distributed.failures import process_group
    from dyad.train.run.evaluation import written_report

    trained = load_run(run, checkpoint)
    own = trained.config
    config = replace(own, eval=overridden(own.eval, command), data=overridden(own.data, command))
    with process_group(config.dist.timeout) as world:
        encode = Encoder.of(config, trained.model, world)
        evaluators = rank_0_first(  # it indexes new shards, the others find them indexed
            world,
            lambda: build_evaluators(
                specs,
                val,
                task=config.task,
                model=trained.model,
                data_config=config.data,
                eval_config=config.eval,
                baselines=list(Baseline) if command.baselines is None else command.baselines,
                untrained=cache(lambda: Encoder.of(config, untrained(config), world)),
            ),
        )
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


def untrained(config: TrainConfig) -> TwoTowerModel:
    """The model with its first weights: as model.* and seed make it, before training and before init_from."""
    import torch

    from dyad.train.towers.build import build_model

    torch.manual_seed(config.seed)
    return build_model(config.model, config.task)
