"""What a run is made of: rules that need a model or its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.messages import raises
from helpers.rows import tokenize, write_lines
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import ItemKind
from dyad.data.image_text.stream import OneEpoch
from dyad.data.loading.order import Order
from dyad.doctor.configuration import _sequences
from dyad.run.class_names import resolve_classes
from dyad.run.components import _objective, describe_batch_norms
from dyad.train.cli.compose import compose_config
from dyad.train.config import ResumeConfig, Task
from dyad.train.distributed.world import World
from dyad.train.run_folder.folder import run_folder
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.tower import Tower, TwoTower
from dyad.training_data import DATA, TrainingData

LABELLED = ["task=labelled", "model=small_cnn", "data.train=a.tar", "steps=1"]


def test_batch_norms_would_hide_what_is_rare() -> None:
    tower = Tower(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = compose_config([*LABELLED, "objective=partial_auc", "data.rare=a"])
    with raises(ConfigError, "model.batch_norm=global", "data.rare", "model.batch_norm=frozen"):
        describe_batch_norms(config, TwoTower(tower, tower), 1)
    assert describe_batch_norms(replace(config, data=replace(config.data, rare=None)), TwoTower(tower, tower), 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_pair_has_no_statistics(ranks: int) -> None:
    tower = Tower(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = compose_config([*LABELLED, "objective=cross_entropy", "global_batch_size=1"])
    with raises(ConfigError, "model.batch_norm=global", "global_batch_size"):
        describe_batch_norms(config, TwoTower(tower, tower), ranks)
    assert describe_batch_norms(config, TwoTower(nn.Linear(4, 4), nn.Linear(4, 4)), ranks) == ""


def test_a_uniform_density_is_over_the_classes() -> None:
    config = compose_config([*LABELLED, "objective=nce", "objective.density=uniform"])
    config.run.classes = ["a", "b", "c"]
    data = TrainingData(None, Order([100], [1.0], seed=0, global_batch_size=10), "", {})  # type: ignore[arg-type]
    assert _objective(config, data, None).options.num_samples == 3  # pyright: ignore[reportArgumentType]


def test_widths_of_an_objective_are_those_of_the_model() -> None:
    data = TrainingData(None, Order([100], [1.0], seed=0, global_batch_size=10), "", {})  # type: ignore[arg-type]
    model = SequenceModel(TwoTower(nn.Identity(), nn.Identity()), None, None, 8)

    def widths(*words: str) -> Any:
        run = compose_config(["experiment=cpc_verses", "model.context.embed_dim=6", *words])
        return _objective(run, data, model).widths

    assert widths() == widths("objective.width=8", "objective.context_width=6") == (6, 8)
    for width in ("objective.width=7", "objective.context_width=8"):
        with raises(ConfigError, width):
            widths(width)


def test_horizons_beyond_the_longest_sample_are_refused_by_training_and_the_doctor(tmp_path: Path) -> None:
    for name, steps in (("a", 9), ("b", 3)):
        np.save(tmp_path / f"{name}.npy", np.zeros((steps, 2), np.float32))
    words = ["task=sequence", "data=log", "data.items=frames", f"data.train={tmp_path}", "objective=cpc", "steps=1"]
    for length, longest in ((5, 5), (50, 9)):
        cut = [*words, "model=next_item", f"data.sequence.length={length}", "global_batch_size=2"]
        fits, broken = (compose_config([*cut, f"objective.horizons={longest - n}"]) for n in (1, 0))
        for use in (
            lambda config: DATA[Task.sequence][ItemKind.frames](config, None),
            lambda config: [*_sequences(config)],
        ):
            assert use(fits) and use(compose_config([*cut, "objective.horizons=60", "objective.shared_w=true"]))
            with raises(ConfigError, f"objective.horizons={longest}", f"{longest - 1} or less", longest, length):
                use(broken)


def test_an_older_run_with_horizons_beyond_the_longest_sample_goes_on(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    words = ["task=sequence", "data=log", "data.items=frames", f"data.train={tmp_path}", "objective=cpc", "steps=1"]
    words += ["model=next_item", "global_batch_size=1", f"run.dir={tmp_path}", "run.name=old"]
    config = compose_config([*words, "objective.horizons=3"])
    with raises(ConfigError, "matrices of 3"):
        DATA[Task.sequence][ItemKind.frames](config, None)
    (tmp_path / "old/checkpoints/step_00000001").mkdir(parents=True)
    (tmp_path / "old/config.yaml").write_text("seed: 0\n")
    assert DATA[Task.sequence][ItemKind.frames](config, None)
    with raises(ConfigError, "matrices of 3"):
        DATA[Task.sequence][ItemKind.frames](replace(config, resume=ResumeConfig("never")), None)


def test_gamma_auto_takes_the_epochs_of_the_run_and_typed_values_stay() -> None:
    data = TrainingData(None, Order([100], [1.0], seed=0, global_batch_size=30), "", {})  # type: ignore[arg-type]

    def gamma_epochs(*words: str) -> float | None:
        run = compose_config(["experiment=emoji", "objective=nuclr", "global_batch_size=30", *words])
        return _objective(run, data, None).options.gamma_epochs  # pyright: ignore[reportArgumentType]

    passes = ("steps=null", "epochs=12")
    assert gamma_epochs(*passes) == 12
    assert gamma_epochs("steps=8") == pytest.approx(8 / 3)  # 3 steps an epoch
    assert gamma_epochs(*passes, "objective.samples_per_epoch=45") == 24
    assert gamma_epochs(*passes, "objective.gamma_epochs=5") == 5
    assert gamma_epochs(*passes, "objective.gamma=0.8") is None
    assert gamma_epochs(*passes, "objective.gamma=null") is None


def test_gamma_auto_of_a_stream_counts_the_typed_samples() -> None:
    words = ["objective=sogclr", "data.mode=stream", "data.id_key=id", "objective.num_samples=320", "steps=50"]
    run = compose_config(["experiment=emoji", "data.train=a.tar", "global_batch_size=64", *words])
    assert _objective(run, TrainingData(None, OneEpoch(50), "", {}), None).options.gamma_epochs == 10  # type: ignore[arg-type]


ALIKE = {"isogclr": "8e6e29cc", "fastclip_v0": "851b675c", "fastclip_v3": "d9a7d149"}  # as sogclr
NAMES = [
    ("sogclr", "805e6545"),
    ("nuclr", "b631f384"),
    *(pytest.param(*o, marks=pytest.mark.soak) for o in ALIKE.items()),
]


@pytest.mark.parametrize(("objective", "digits"), NAMES)
def test_older_runs_of_an_estimator_keep_their_names(objective: str, digits: str) -> None:
    """Their config.yaml says gamma: null."""
    words = ["experiment=emoji", f"objective={objective}"]
    assert run_folder(compose_config([*words, "objective.gamma=null"])).name == f"emoji-{digits}"
    assert run_folder(compose_config(words)).name != f"emoji-{digits}"


def test_a_whole_gamma_has_one_name() -> None:
    words = ["experiment=emoji", "objective=sogclr"]
    whole, fraction = (compose_config([*words, f"objective.gamma={one}"]) for one in ("1", "1.0"))
    assert run_folder(whole) == run_folder(fraction)


def test_a_bad_rare_text_is_replaced_by_a_rare_one(tmp_path: Path) -> None:
    """So every batch has as many rare samples as data.rare_per_batch."""
    rows = [{"text": text, "mood": "sad"} for text in (" ", " ", "s")]
    path = write_lines(tmp_path / "a.jsonl", [*rows, *({"text": f"t{i}", "mood": "well"} for i in range(40))])
    words = ["task=labelled", "data.items=texts", "data.label=mood", "data.rare=sad", "objective=partial_auc"]
    more = ["data.rare_per_batch=2", "global_batch_size=4", f"data.train={path}"]
    config = resolve_classes(compose_config([*words, *more]), World())
    data: Any = DATA[config.task][config.data.items](config, SimpleNamespace(tokenize=tokenize))
    batches = [data.dataset.__getitems__([(0, int(i)) for i in data.order.ids(step)]) for step in range(4)]
    assert [int((batch.y == 0).sum()) for batch in batches] == [2] * 4 and any(batch.bad for batch in batches)
