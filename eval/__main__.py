"""python -m eval checkpoint=runs/x [suite=[…]]: evaluate a trained model. See python -m eval --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import errors
from data.command_line import help_text, parse_options
from data.errors import ConfigError
from eval.config import EvalCommand

if TYPE_CHECKING:
    from train.config import TrainConfig

PURPOSE = """\
Evaluate a trained model: retrieval in both directions, zero-shot classification. One JSON per data set, and a table.
Everything is key=value. Under torchrun the ranks share the work and the numbers stay the same."""
EXAMPLES = {
    "what the run was evaluated on while training": "python -m eval checkpoint=runs/emoji",
    "another retrieval set": "python -m eval checkpoint=runs/emoji "
    "suite=[retrieval:data/samples/emoji/twemoji-unseen.tar]",
    "folders of CLIP_benchmark, a task file of prompts": "python -m eval checkpoint=runs/x "
    "suite=[wds:cifar10,wds:flickr30k,zero_shot:task.json]",
    "an earlier checkpoint": "python -m eval checkpoint=runs/x/checkpoints/step_00001000 'val=shards/{00..09}.tar'",
}
NOTES = """\
suite entries: retrieval:SHARDS  zero_shot:TASK.json  wds:FOLDER (a CLIP_benchmark data set)
"""


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(PURPOSE, EXAMPLES, EvalCommand, NOTES))
        return
    command = parse_options(EvalCommand, sys.argv[1:], "python -m eval")

    own_packages()
    from eval.trained import find_run, read_config

    run, checkpoint = find_run(command.checkpoint, _note)
    config = read_config(run)
    own = command.suite is None and command.val is None
    specs = config.eval.suite if own else command.suite or []
    val = config.data.val if own else command.val
    if not specs and val is None:
        raise ConfigError("nothing to evaluate: the run has no data.val and no eval.suite. Give val= or suite=[…]")

    from eval.suite import check_specs

    check_specs(specs)
    evaluate(command, run, checkpoint, specs, val)


def evaluate(command: EvalCommand, run: Path, checkpoint: Path, specs: Sequence[str], val: Any) -> None:
    """Load, encode, score; rank 0 writes the JSON files and prints the tables."""
    from eval.encode import build_encode
    from eval.results import facts, print_tables, result, write
    from eval.suite import build_evaluators
    from eval.trained import load_trained
    from train.distributed import barrier, init_world, shutdown

    trained = load_trained(run, checkpoint)
    config = with_command(trained.config, command)
    world = init_world(config.dist.timeout)
    try:
        towers = trained.model.towers.to(world.device)
        encode = build_encode(
            towers.x_tower,
            towers.y_tower,
            world,
            block=config.eval.block,
            workers=config.data.workers,
            precision=config.precision.value,
            cosine=config.objective.similarity.value == "cosine",
        )
        if world.rank > 0:
            barrier(world)  # rank 0 indexes new shards, the others find them indexed
        evaluators = build_evaluators(
            specs,
            val,
            image_spec=trained.model.image,
            tokenize=trained.model.tokenize,
            data_config=config.data,
            eval_config=config.eval,
        )
        if world.rank == 0:
            barrier(world)
        examples = command.examples if world.rank == 0 else 0
        about = facts(config, checkpoint, trained.step)
        results = [result(e.report(encode, examples), e, about) for e in evaluators]
        if world.rank == 0:
            folder = Path(command.out) if command.out else run / "eval"
            written = [write(folder, r) for r in results]
            print_tables(results)
            print(f"step {trained.step} of {run}. Written: {', '.join(str(path) for path in written)}")
    finally:
        shutdown()


def with_command(config: TrainConfig, command: EvalCommand) -> TrainConfig:
    """The run's configuration with what the command line says differently."""
    given = {key: getattr(command, key) for key in ("truth", "block", "recall_k")}
    changed = replace(config.eval, **{key: value for key, value in given.items() if value is not None})
    workers = config.data.workers if command.workers is None else command.workers
    return replace(config, eval=changed, data=replace(config.data, workers=workers))


def own_packages() -> None:
    """A stranger's data/ or train/ in the working folder would win silently: refuse it by name."""
    from train.__main__ import own_packages as check

    check()


def _note(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


if __name__ == "__main__":
    errors.run(main)
