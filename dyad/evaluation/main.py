"""The command python -m eval checkpoint=runs/x [suite=[…]], which evaluates a model. See python -m eval --help."""

import re
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.data.base.command_line import command_options, overridden
from dyad.data.base.errors import ConfigError, raise_broken
from dyad.eval.config import Baseline, EvalCommand

if TYPE_CHECKING:
    from dyad.evaluation.find_model import FoundModel
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import TwoTowerModel

PURPOSE = """\
Evaluate a model, trained here or as it is: retrieval of images, texts and passages, zero-shot classification. One
JSON per data set, and a table. Everything is key=value. Under torchrun the ranks share the work and the numbers stay
the same."""
EXAMPLES = {
    "what the run was evaluated on while training": "python -m eval run=runs/emoji",
    "another retrieval set": "python -m eval checkpoint=runs/emoji "
    "suite=[retrieval:data/samples/emoji/twemoji-unseen.tar]",
    "folders of CLIP_benchmark, a task file of prompts": "python -m eval checkpoint=runs/x "
    "suite=[wds:cifar10,wds:flickr30k,zero_shot:task.json]",
    "questions and passages with judgements, beside BM25 and the encoder before training": "python -m eval "
    "checkpoint=runs/topics suite=[beir:data/samples/topics]",
    "another split, a folder of DPR files, an approximate index": "python -m eval checkpoint=runs/x "
    "suite=[beir:folder@dev,dpr:folder] 'index=IVF256,Flat;nprobe=16'",
    "models of other libraries, without training": "python -m eval model=open_clip:ViT-B-32@weights.safetensors "
    "suite=[wds:flickr30k]",
    "a SentenceTransformer": "python -m eval model=st:FOLDER suite=[beir:data/samples/topics]",
    "beside the same model before training": "python -m eval checkpoint=runs/x baselines=[untrained]",
    "a table with columns of other names": "python -m eval run=runs/x val=table.csv columns=[file,description]",
    "the best checkpoint, by checkpoint.best": "python -m eval checkpoint=runs/x@best",
    "an earlier checkpoint": "python -m eval checkpoint=runs/x/checkpoints/step_00001000 'val=shards/{00..09}.tar'",
}
SECTIONS = ("eval", "data", "data.passage")  # sections of the configuration whose keys this command has as options
NOTES = """\
Files of questions: .json, .trec (run), .qrels, .beir.json, .dpr.json (retriever output). A judged question that finds
nothing counts as zero; equal scores stand as trec_eval sorts them. A baseline that cannot be made is left out with a
line.
The .json also has 95 % intervals (bootstrap over queries, of one topic or image together), how scores of right and
wrong pairs are spread, what is confused, and examples= cases; .pictures/ has small copies of the images they show.
"""


def _notes() -> str:
    """Return the last part of the help text: the forms of model= and of suite entries, task files, and result files."""
    from dyad.eval.tasks.prompts import FORMAT
    from dyad.evaluation.find_model import FORMS
    from dyad.evaluation.suite import forms_help

    return f"{FORMS}\n{forms_help()}{FORMAT}\n{NOTES}"


def main() -> None:
    """Run `python -m eval`: read the command line, check it and that the data are there, then evaluate.

    Raises ConfigError unless exactly one of run=, checkpoint= and model= is given.
    """
    command = command_options(EvalCommand, "python -m eval", PURPOSE, EXAMPLES, _notes)
    if len(given := [*filter(None, (command.run, command.checkpoint, command.model))]) != 1:
        raise ConfigError("give one of run=, such as runs/NAME, checkpoint= and model=. See: python -m eval --help")

    from dyad.evaluation.find_model import find_model, find_trained
    from dyad.evaluation.suite import check_suite

    found = find_model(command.model) if command.model else find_trained(given[0])
    config = with_eval_options(found.config, command)
    check_suite(config)
    evaluate(command, config, found)


def with_eval_options(config: "TrainConfig", command: EvalCommand) -> "TrainConfig":
    """Return `config`, the configuration of a run, changed by the options of the command line of python -m eval.

    With suite= or val= on the command line, both data.val and eval.suite of the run are dropped; with captions=, its
    data.caption_weights. If data.sequence.earlier is unset, it becomes the data.val of the run. Raises ConfigError for
    an option or a baseline that models of this task do not have, and if there is no data set to evaluate on.
    """
    from dyad.train.cli.unread_keys import unmet
    from dyad.train.run_folder.folder import all_keys

    known, given = all_keys(config), [name for name, value in vars(command).items() if value is not None]
    raise_broken(
        f"{name}=: the model of task={config.task.name} is evaluated without it. Leave it out"
        for section, name in product(SECTIONS, given)
        if (key := f"{section}.{name}") in known and unmet(key, [config])
    )
    baselines_of(command, config)
    weights = None if command.captions else config.data.caption_weights  # these weights are those of the run's captions
    data = overridden(replace(config.data, caption_weights=weights), command)
    evaluation = overridden(config.eval, command)
    data = replace(data, passage=overridden(data.passage, command))
    if data.sequence.earlier is None:  # events of the run's data.val precede those of a new val
        data = replace(data, sequence=replace(data.sequence, earlier=config.data.val))
    if command.suite is not None or command.val is not None:  # these replace all data sets of the run
        data, evaluation = replace(data, val=command.val), replace(evaluation, suite=command.suite or [])
    if not evaluation.suite and data.val is None:
        raise ConfigError("nothing to evaluate: the run has no data.val and no eval.suite. Give val= or suite=[…]")
    return replace(config, data=data, eval=evaluation)


def baselines_of(command: EvalCommand, config: "TrainConfig") -> list[Baseline]:
    """Return the systems to score beside the model: those of baselines=, else all that models of this task have.

    If `untrained`, the model before training, is the only one, the default is [], since it doubles the time. A model of
    model= has no `untrained`. Raises ConfigError for a baseline that this model does not have.
    """
    from dyad.train.config import Task

    legal = [] if command.model else [Baseline.untrained]
    if config.task is Task.sequence:
        legal += [Baseline.popularity, Baseline.successors, Baseline.item_knn] + [Baseline.bm25] * config.has_texts
    elif config.task is Task.question_passage:
        legal += [Baseline.bm25, Baseline.fusion]
    if wrong := set(command.baselines or ()) - set(legal):
        of_model = "a model as it is" if command.model else f"task={config.task.name}"
        raise ConfigError(f"baselines=[{min(wrong)}]: {of_model} has {', '.join(legal) or 'no baselines'}")
    has_others = legal != [Baseline.untrained]  # other baselines than untrained cost little
    return command.baselines if command.baselines is not None else legal if has_others else []


def evaluate(command: EvalCommand, config: "TrainConfig", found: "FoundModel") -> None:
    """Load a model and evaluate it on all data sets of the configuration.

    All processes of the job must call it together; it forms their process group and ends it. Process 0 writes the
    result files and prints the tables. The folder is out=, else eval/ of a run, else runs/eval-MODEL. If it is eval/ of
    the run, process 0 also writes the run's report.html anew. config: from `with_eval_options`. Raises ConfigError or
    DataError for a model or data that cannot be used, on all processes.
    """
    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.results.write import model_facts, print_tables, result, write
    from dyad.evaluation.load_run import LoadedRun, own_output, read_config
    from dyad.evaluation.suite import build_evaluators
    from dyad.run.evaluation import try_write_report
    from dyad.train.distributed.agreement import rank_0_first, rank_0_only
    from dyad.train.distributed.failures import process_group
    from dyad.train.distributed.world import set_timeout

    with process_group(config.dist.seconds_to_start) as world:
        loaded = found.load_on_all(world)
        trained = loaded if isinstance(loaded, LoadedRun) else None
        encode = replace(Encoder.of(config, loaded.model, world), width=config.eval.width)
        typed = replace(config, model=read_config(trained.run, copies=False).model) if trained else config
        before = cache(lambda: replace(encode, towers=Encoder.of(config, build_untrained(typed), world).towers))
        baselines = baselines_of(command, config)
        # rank 0 indexes new shards, the others find them indexed
        evaluators = rank_0_first(world, lambda: build_evaluators(config, loaded.model, baselines, before))
        set_timeout(config.dist.timeout)
        about = model_facts(config, loaded.source, trained and trained.step)
        own = trained.run / "eval" if trained else Path("runs") / re.sub(r"[^\w.-]+", "_", f"eval-{loaded.source}")
        folder = Path(command.out).expanduser() if command.out else own_output(trained.run, "eval") if trained else own
        results, written = [], []
        for evaluator in evaluators:
            report = evaluator.report(encode, config.eval.examples)
            results.append(result(report, evaluator, about))
            written.append(rank_0_only(world, partial(write, folder, results[-1], report.files)))
        if world.rank == 0:
            print_tables(results)
            what = f"step {trained.step} of {trained.run}" if trained else loaded.source
            print(f"{what}. Written: {', '.join(str(p) for paths in written for p in paths)}")
            if config.also and command.suite is None and command.val is None:
                print(f"left out: {', '.join(f'also.{name}' for name in config.also)}, evaluated while training alone")
            if trained and folder.resolve() == own.resolve():
                try_write_report(trained.run, print)


def build_untrained(config: "TrainConfig") -> "TwoTowerModel":
    """Build the model with its weights before training: from model.* and seed, without init_from.

    Published weights that model.* names are loaded. Seeds torch's global random generator.
    """
    import torch

    from dyad.train.towers.build import build_model

    torch.manual_seed(config.seed)
    return build_model(config)
