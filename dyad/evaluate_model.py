"""`dyad.evaluate`: evaluate a model of the Python interface, as `python -m eval` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dyad import inputs
from dyad.eval.config import EvalCommand
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.main import with_eval_options
from dyad.evaluation.suite import build_evaluators, check_suite
from dyad.model import Model


def evaluate(
    model: Model, suite: str | Sequence[str] = (), *, val: str | None = None, captions: str | Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Evaluate a model; return data set → {metric: value}, as `python -m eval` computes it.

    The data sets are those of `suite` and `val`; those that the model's run evaluated on are not used. Embeddings are
    cut to the width that `load` was given, else to eval.width of the run. suite: one or several entries of eval.suite,
    such as "zero_shot:task.json" or "beir:FOLDER@dev"; the name of its results is the last part of its path, but "val"
    becomes "val-2". val: shards or files of questions, as data.val; the name of its results is "val". captions: the
    field or fields of shards that hold the captions, as data.captions; (): those of the run. Raises ConfigError for an
    invalid entry and if there is no data set, DataError for damaged data.
    """
    entries, fields = inputs.entries_of(suite, "suite"), inputs.entries_of(captions, "captions")
    config = with_eval_options(model.config, EvalCommand(suite=entries, val=val, captions=fields or None))
    check_suite(config)
    evaluators = build_evaluators(config, model.loaded.model)
    encoder = replace(Encoder.of(config, model.loaded.model, model.encoder.world), width=config.eval.width)
    return {e.name.removeprefix("eval/"): e.report(encoder).metrics for e in evaluators}
