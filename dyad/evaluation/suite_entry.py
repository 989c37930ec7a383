"""Classes of the evaluation suite: an entry, its kind, and the inputs from which evaluators are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyad.eval.config import Baseline
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.data.config import DataConfig
    from dyad.eval.encode.encoder import Evaluator
    from dyad.eval.tasks.question_passage.passage_retrieval import PassageSide
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import TwoTowerModel


@dataclass(frozen=True)
class Inputs:
    """What evaluators are built from, besides the suite entry.

    config: the configuration of the run, with the options of the command. model: the model to evaluate. baselines:
    systems that are scored beside the model. sides: fingerprint of a corpus → the opened corpus; filled by evaluators
    of passages, so that several entries on the same corpus encode it once.
    """

    config: TrainConfig
    model: TwoTowerModel
    baselines: Sequence[Baseline]
    sides: dict[str, PassageSide] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteKind:
    """A kind of data set that can be evaluated, for example beir.

    task: the task whose models can be evaluated on it, views of texts as question_passage; None: every task whose
    models embed images or texts. form: how a target (the part of an entry after KIND:) is written, for help texts.
    check: raises ConfigError for an invalid target, DataError for a table or log that cannot be read; it should not
    import torch, as it runs before the model is loaded; its result is not used. build: opens the data and returns the
    evaluator of an entry; called in every process. prefix: put before the names of its data sets in results, unless
    they begin with it.
    """

    task: Task | None
    form: str
    check: Callable[[SuiteEntry], Any]
    build: Callable[[SuiteEntry, Inputs], Evaluator]
    prefix: str = ""


@dataclass(frozen=True)
class SuiteEntry:
    """One data set to evaluate on: data.val or an entry KIND:TARGET of eval.suite.

    name: the name of its evaluator, "val" or "eval/NAME". key: the name of the entry in error messages, such as
    "eval.suite: beir". spec: the entry as the user wrote it. target: the part after KIND:, or the value of data.val,
    which from Python need not be a text. data: the data options of the run. has_texts: whether the model takes texts.
    """

    kind: SuiteKind
    name: str
    key: str
    spec: str
    target: Any
    data: DataConfig
    has_texts: bool = True

    @property
    def path(self) -> Path:
        """`target` as a Path, with ~ expanded."""
        return Path(self.target).expanduser()
