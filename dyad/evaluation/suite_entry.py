"""What an evaluator is built from: the entry of the suite, its kind, the run's configuration and its model."""

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
    from dyad.eval.tasks.passage_retrieval import PassageSide
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import TwoTowerModel


@dataclass(frozen=True)
class Inputs:
    """Everything that evaluators are built from, except the suite entry: the run's configuration, its model, and more.

    baselines: systems that are scored beside the model. sides: search corpora that are open already, by fingerprint, so
    that several entries share one.
    """

    config: TrainConfig
    model: TwoTowerModel
    baselines: Sequence[Baseline]
    sides: dict[str, PassageSide] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteKind:
    """A kind of data set that can be evaluated, for example beir.

    task: the task of the models that it can evaluate; None: every task. form: how a target (the part of an entry after
    KIND:) is written, for help texts. check: raises ConfigError for a missing target. build: makes the evaluator of an
    entry.
    """

    task: Task | None
    form: str
    check: Callable[[SuiteEntry], Any]
    build: Callable[[SuiteEntry, Inputs], Evaluator]


@dataclass(frozen=True)
class SuiteEntry:
    """One data set to evaluate on: data.val or an entry KIND:TARGET of eval.suite.

    name: the name of its evaluator. key: how messages about its target name the entry. spec: the entry as the user
    wrote it. target: the part after KIND:, or the value of data.val. data: the data options of the run.
    """

    kind: SuiteKind
    name: str
    key: str
    spec: str
    target: Any
    data: DataConfig

    @property
    def path(self) -> Path:
        """The target as a path."""
        return Path(self.target).expanduser()
