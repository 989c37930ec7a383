"""Kinds of data sets of questions and passages: beir, dpr and sts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dyad.eval.tasks.question_passage.pair_sets import check_pairs, equal_sides, open_pairs
from dyad.eval.tasks.question_passage.question_sets import check_beir, check_dpr, open_beir, open_dpr
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.data.config import DataConfig
    from dyad.eval.encode.encoder import Evaluator
    from dyad.eval.tasks.question_passage.question_sets import QuestionSet


def _passages(open_set: Callable[[str, DataConfig], QuestionSet], entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of passage retrieval of an entry beir:FOLDER or dpr:PATH.

    open_set: reads the questions that a target names. Entries with equal corpora share one PassageSide, which is kept
    in `inputs.sides`.
    """
    from dyad.eval.tasks.question_passage.passage_retrieval import PassageRetrieval, PassageSide

    data, options, tokenize = inputs.config.data, inputs.config.eval, inputs.model.tokenize
    questions = open_set(entry.target, data)
    side = PassageSide(questions.corpus, tokenize, data.passage, options)
    side = inputs.sides.setdefault(questions.corpus.fingerprint, side)
    by = (tokenize, data.question, options, inputs.baselines)
    return PassageRetrieval(entry.name, entry.spec, questions, side, *by)


def _scored_pairs(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry sts:ROWS, which correlates the scores of the pairs with those of the model.

    Both texts of a pair are read alike (`equal_sides`).
    """
    from dyad.eval.tasks.question_passage.pair_correlation import PairCorrelation

    data = inputs.config.data
    pairs = open_pairs(entry.target, data, entry.key)
    return PairCorrelation(entry.name, entry.spec, pairs, inputs.model.tokenize, *equal_sides(data))


BEIR = SuiteKind(
    Task.question_passage, "FOLDER[@SPLIT]", lambda entry: check_beir(entry.target), partial(_passages, open_beir)
)
DPR = SuiteKind(
    Task.question_passage,
    "PATH (questions with answers, in a folder with psgs_w100.tsv, or DPR JSON)",
    lambda entry: check_dpr(entry.target, entry.data, entry.key),
    partial(_passages, open_dpr),
)
STS = SuiteKind(
    Task.question_passage,
    "ROWS (pairs of texts with a score, such as STS)",
    lambda entry: check_pairs(entry.target, entry.data, entry.key),
    _scored_pairs,
)
