"""Configurations of auxiliary losses (also.NAME): what they take from the run, and what is refused."""

from __future__ import annotations

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.train.cli.also import auxiliary_configs, refuse_keys_of_shared_towers
from dyad.train.cli.compose import compose_config
from dyad.train.config import TargetKind

RUN = ["task=views", "model=cnn", "data=simclr", "data.train=a.tar", "steps=3"]
VIEWS = "task=views objective=vicreg"


def test_weight_target_and_classes_are_of_the_run_alone() -> None:
    own = ["objective=spectral_alternating", "target.kind=ema", "weight=3", "global_batch_size=24"]
    config = compose_config([*RUN, *own, f"also.more='{VIEWS}'"])
    config.run.classes, config.run.inputs = ["a", "b"], 42  # as runs of task=labelled and task=sequence find them
    of = auxiliary_configs(config)["more"]
    assert of.weight == 1 and of.target.kind is TargetKind.none and of.run.classes is of.run.inputs is None
    assert of.global_batch_size == 24
    config.seed = 5  # what was composed for the configuration of before counts no more
    assert auxiliary_configs(config)["more"].seed == 5


@pytest.mark.parametrize("name", ["towers", "objective", "views", "aB"])
def test_names_that_the_run_needs(name: str) -> None:
    """Weights of a loss `towers` would be read as those of the run, metrics of `views` be added to its own."""
    config = compose_config([*RUN, "objective=simclr", f"also.{name}='{VIEWS}'"])
    with raises(ConfigError, f"also.{name}"):
        auxiliary_configs(config)


def test_negatives_are_not_mined_anew_for_an_auxiliary_loss() -> None:
    more = "task=question_passage objective=dpr data.negatives.per_row=1 data.negatives.lists=[mined]"
    config = compose_config([*RUN, "objective=simclr", f"also.more='{more} data.negatives.refresh_every=2'"])
    with raises(ConfigError, "data.negatives.refresh_every"):
        auxiliary_configs(config)


def test_an_objective_beside_a_recipe_that_sets_options_of_its_own() -> None:
    """experiment=next_item sets objective.duplicates, which simclr does not have."""
    config = compose_config(["experiment=next_item", "also.more='objective=simclr weight=0.5'"])
    assert auxiliary_configs(config)["more"].objective.name == "simclr"
    kept = auxiliary_configs(compose_config(["experiment=next_item", "also.more='weight=0.5'"]))["more"]
    assert kept.objective == config.objective


TEXTS = ["task=question_passage", "model=encoder", "model.text.name=bert", "data.train=a.jsonl", "objective=dpr"]
BOTH = ["task=image_text", "model=cnn", "model.text.kind=transformers", "model.text.name=bert", "objective=clip"]


@pytest.mark.parametrize(
    ("run", "more", "named"),
    [
        ([*RUN, "objective=simclr"], f"{VIEWS} model.image.frozen=true", "model.image.frozen=true"),
        ([*RUN, "objective=simclr", "model.image.frozen=true"], f"{VIEWS} model=cnn", "model.image.frozen=false"),
        (TEXTS, f"{VIEWS} data.items=texts model.grad_checkpointing=true", "model.grad_checkpointing=true"),
        (TEXTS, f"{VIEWS} data.items=texts model.text.pooling=cls", "model.text.pooling=cls"),
        (TEXTS, f"{VIEWS} data.items=texts model.text.name=other", "model.text.name=other"),
        ([*BOTH, "data.train=a.tar"], "objective=siglip model.text.name=other", "model.text.name=other"),
        ([*BOTH, "data.train=a.tar"], "objective=siglip model.image.kind=timm", "model.image.kind=timm"),
    ],
)
def test_keys_of_the_towers_of_the_run_are_refused(run: list[str], more: str, named: str) -> None:
    """They change no shape, and the loss trains the towers of the run: nothing would come of them."""
    config = compose_config([*run, "steps=3", f"also.more='{more}'"])
    with raises(ConfigError, named):
        refuse_keys_of_shared_towers(config, auxiliary_configs(config)["more"])


@pytest.mark.parametrize(
    ("run", "more"),
    [
        ([*RUN, "objective=simclr"], f"{VIEWS} model.head=byol model.embed_dim=16 model.image.image_size=64"),
        ([*RUN, "objective=simclr", "model.image.image_size=32"], f"{VIEWS} model=cnn"),
        (TEXTS, f"{VIEWS} data.items=texts model.head=simclr model.embed_dim=16 model.text.lower_case=true"),
        (
            [*RUN, "objective=simclr"],
            "task=image_text model.text.kind=transformers model.text.name=bert",
        ),
    ],
)
def test_a_projection_inputs_and_other_towers_are_of_the_loss(run: list[str], more: str) -> None:
    config = compose_config([*run, "steps=3", f"also.more='{more}'"])
    refuse_keys_of_shared_towers(config, auxiliary_configs(config)["more"])


def test_a_loss_that_reads_the_data_of_the_run_reads_its_signed_urls() -> None:
    url = "https://me:pw123456@host.example/a.tar?sig=abc"
    run = [word for word in RUN if word != "data.train=a.tar"]
    config = compose_config([*run, f'data.train="{url}"', f"also.more='{VIEWS}'"])
    assert auxiliary_configs(config)["more"].data.train == config.data.train == url
