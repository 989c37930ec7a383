"""task=views in this process: a step of every objective, and runs that would learn nothing."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import tiny_bert
from helpers.messages import raises
from helpers.rows import write_beir

from dyad.data.base.errors import ConfigError
from dyad.data.batch import with_auxiliary
from dyad.data.loading.loader import build_loader
from dyad.run.components import Components, build_components
from dyad.train.cli.compose import compose_config
from dyad.train.cli.unread_keys import refuse_unread
from dyad.train.config import TargetKind, Task, TrainConfig
from dyad.train.config_rules import validate
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES

SHARD = Path(__file__).parents[3] / "data/samples/emoji/fxemoji-trained.tar"
SMALL = "model.image.image_size=16 model.image.widths=[8,8] model.embed_dim=8 model.head_width=8".split()
IMAGES = ["task=views", "model=cnn", *SMALL, "global_batch_size=8", "steps=2", f"data.train={SHARD}"]


@cache
def simclr() -> TrainConfig:
    return compose_config([*IMAGES, "data=simclr", "objective=simclr"])


def stepped(config: TrainConfig) -> Components:
    validate(config, 1)
    components = build_components(config, World())
    batch = components.data.dataset.__getitems__([(0, i) for i in components.data.order.ids(0).tolist()])  # type: ignore[union-attr]
    for of in components.auxiliary.values():
        auxiliary = of.data.dataset.__getitems__([(0, i) for i in range(8)])  # type: ignore[union-attr]
        batch.auxiliary = (of.data.dataset.completed(auxiliary, 0, 1),)  # type: ignore[union-attr]
    scalars = components.step(batch, 0)
    assert math.isfinite(scalars["loss"]) and scalars["grad_norm"] > 0 and not components.step.skip_reason
    return components


@pytest.mark.parametrize("name", [name for name, of in OBJECTIVES.items() if of.inputs == "pairs" and name != "epr"])
def test_a_step_of_every_objective(name: str) -> None:
    """tests/train/cli/test_compose.py composes each of them."""
    config = replace(deepcopy(simclr()), objective=OBJECTIVES[name]())
    if "targets" in OBJECTIVES[name].takes:
        config.target.kind = TargetKind.ema
    stepped(config)


def test_a_target_beside_an_auxiliary_loss() -> None:
    also = "also.groups='task=labelled objective=cross_entropy data.label=group model.head=none'"
    run = ["data=simclr", "objective=spectral_alternating", "target.kind=ema", "weight=3", also]
    components = stepped(compose_config([*IMAGES, *run]))
    assert components.step.target.towers and components.auxiliary["groups"].config.weight == 1


def test_errors_in_building_an_auxiliary_loss_name_it() -> None:
    captions = "also.captions='task=image_text objective=clip model.text.kind=transformers'"
    with raises(ConfigError, "also.captions: model.text.name"):
        build_components(compose_config([*IMAGES, "data=simclr", "objective=simclr", captions]), World())


def test_recomputed_activations_change_no_bit_with_batch_norms_per_chunk() -> None:
    """Batch norms see each chunk a second time in the backward pass, and their statistics must not count it."""
    tower = ["model.image.kind=timm", "model.image.name=test_resnet", "model.head=none", "model.batch_norm=per_chunk"]
    words = [*IMAGES, "data=simclr", "objective=simclr", "chunk_size=4", "keep_graphs=1", *tower]
    plain, again = (
        stepped(compose_config([*words, f"model.grad_checkpointing={on}"])).model.towers for on in (False, True)
    )
    assert cast(Any, again.x_tower).trunk.grad_checkpointing
    for before, after in zip(plain.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(before, after)


def test_noise_is_added_by_the_step_where_the_loader_leaves_it_to_the_device() -> None:
    """Of the run's own loss, images and captions, and of an auxiliary one, two views; both come without noise."""
    views = "also.views='task=views objective=simclr data.augment.flip=0.5 model.head=simclr'"
    words = ["experiment=emoji_scratch", "global_batch_size=8", "steps=2", f"data.train={SHARD}", views]
    losses = []
    for later in (False, True):
        components = build_components(compose_config(words), World())
        how = {"rank": 0, "world_size": 1, "first_step": 0, "last_step": 1, "workers": 0, "noise_later": later}
        every = [components.data, *(of.data for of in components.auxiliary.values())]
        batch, auxiliary = (next(build_loader(of.dataset, of.order, **how)) for of in every)  # type: ignore[arg-type]
        assert [b is not None for b in (batch.x_noise, auxiliary.x_noise, auxiliary.y_noise)] == [later] * 3
        losses.append(components.step(with_auxiliary(batch, auxiliary), 0)["loss"])
        assert {"loss", "views/loss"} <= {*components.step.scalars}
    assert losses[0] == losses[1]


def test_equal_views_of_images_are_refused() -> None:
    with raises(ConfigError, "data.augment"):
        validate(compose_config([*IMAGES, "objective=simclr"]), 1)


def of_texts(folder: Path) -> TrainConfig:
    tiny_bert.write(folder)
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}", "mood": str(i % 2)}) + "\n" for i in range(16)))
    words = ["task=views", "data.items=texts", "model=encoder", f"model.text.name={folder}", f"data.train={path}"]
    return compose_config([*words, "objective=simclr", "global_batch_size=8", "steps=2"])


def test_texts_need_dropout(tmp_path: Path) -> None:
    config = of_texts(tmp_path)
    build_components(config, World())
    config.model.text.frozen = True
    with raises(ConfigError, "model.text.frozen=false"):
        build_components(config, World())
    with raises(ConfigError, "data.augment_y.flip=1"):
        config.data.augment_y = {"flip": 1}
        refuse_unread(["data.augment_y.flip=1"], [config])


def test_a_probe_prepares_texts_as_the_training(tmp_path: Path) -> None:
    config = of_texts(tmp_path)
    components = {"train": config.data.train, "test": config.data.train, "label": "mood"}
    (tmp_path / "probe.json").write_text(json.dumps(components))
    config.eval.suite = [f"probe:{tmp_path / 'probe.json'}"]
    (probe,) = build_components(config, World()).evaluators
    assert any(argument is config.data.passage for argument in probe.data.items.tokenize.args)  # type: ignore[attr-defined]


def test_views_of_texts_are_evaluated_by_questions_and_passages(tmp_path: Path) -> None:
    config, folder = of_texts(tmp_path), write_beir(tmp_path / "beir", split="test")
    config.data.val, config.eval.suite = str(folder), [f"beir:{folder}"]
    assert [evaluator.name for evaluator in build_components(config, World()).evaluators] == ["val", "eval/beir"]


def test_a_length_of_texts_with_a_class_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    config = of_texts(tmp_path)
    config.task, config.run.classes, config.data.passage.length = Task.labelled, ["0", "1"], 600
    with raises(ConfigError, "600", "data.passage.length"):
        build_components(config, World())
