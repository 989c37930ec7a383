"""What a run takes from the run whose weights it begins with (init_from), of keys that nobody typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_bert
from helpers.foreign import of_two_towers
from omegaconf import OmegaConf

from dyad.train.cli.compose import compose_config
from dyad.train.cli.start_defaults import ARCHITECTURE
from dyad.train.config import TrainConfig
from dyad.train.run_folder.folder import CONFIG, all_keys, open_run
from dyad.train.towers.libraries.sentence_transformers import OPEN


def configured(*words: str) -> TrainConfig:
    return compose_config(["data.train=x.tar", "steps=1", *words])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a run of questions with an encoder of a folder."""
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return ["task=question_passage", "model=encoder", f"model.text.name={folder}", "objective=dpr"]


def test_init_from_brings_the_kind_of_model(encoder: list[str], tmp_path: Path) -> None:
    """Pooling, similarity, prefixes, lengths; a typed key wins, and so does what a typed preset of the model sets."""
    own = ["model.text.pooling=cls", "objective.similarity=dot", "data.question.prefix='q: '", "data.passage.length=77"]
    run = open_run(configured(*encoder, *own, f"run.dir={tmp_path}", "run.name=first"))
    config, name = configured("task=question_passage", f"init_from={run}"), encoder[2].partition("=")[2]
    assert (config.model.text.name, config.model.text.pooling.value) == (name, "cls")
    assert (config.objective.similarity.value, config.data.question.prefix) == ("dot", "q: ")
    typed = configured("experiment=mnrl", f"init_from={run}", "data.passage.length=9", "model=encoder")
    assert (typed.data.passage.length, typed.model.text.name, typed.model.text.pooling.value) == (9, name, "cls")


# Recipe, keys that decide the architecture of its model or what it reads
OWN_KEYS: dict[str, dict[str, Any]] = {
    "mnrl": {"model.text.end_token": True},
    "next_item": {"model.context.kind": "transformer", "model.context.layers": 2, "model.context.width": 64},
    "simclr_emoji": {"model.head": "byol", "model.head_width": 99},
    "classes_emoji": {"model.classes": "prompted"},
}


@pytest.mark.parametrize("recipe", OWN_KEYS)
def test_init_from_brings_what_a_preset_or_a_key_said_of_the_model(recipe: str, tmp_path: Path) -> None:
    own, words = OWN_KEYS[recipe], (f"experiment={recipe}", f"run.dir={tmp_path}")
    run = open_run(configured(*words, *(f"{key}={value}" for key, value in own.items()), "run.name=first"))
    assert all_keys(configured(*words, f"init_from={run}")).items() >= own.items()


def test_init_from_brings_no_key_that_only_another_task_reads(tmp_path: Path) -> None:
    """An unnamed run that has begun would get another name."""
    run = open_run(configured("experiment=simclr_emoji", "model.head=byol", f"run.dir={tmp_path}", "run.name=first"))
    own = configured("experiment=classes_emoji", f"init_from={run}").model
    assert (own.head.name, own.head_width) == ("none", None)


def test_init_from_brings_the_width_of_a_projection_of_its_own(tmp_path: Path) -> None:
    """Without it, both projections are those of the CLIP."""
    (tmp_path / "clip").mkdir()
    of_two_towers(tmp_path / "clip", "clip")
    clip = ["model=transformers", f"model.name={tmp_path}/clip", f"run.dir={tmp_path}"]
    for width in (24, None):
        run = open_run(configured(*clip, f"model.embed_dim={width or 'null'}", f"run.name=of_{width}"))
        assert configured(f"init_from={run}").model.embed_dim == width


def test_init_from_of_a_run_that_is_older_than_a_key(encoder: list[str], tmp_path: Path) -> None:
    """A recipe sets model.text.end_token, which did not exist when the run learnt texts without an end."""
    run = open_run(configured(*encoder, f"run.dir={tmp_path}", "run.name=old"))
    tree: Any = OmegaConf.load(run / CONFIG)
    del tree["model"]["text"]["end_token"]
    OmegaConf.save(tree, run / CONFIG)
    assert not configured("experiment=llm_embedder", f"init_from={run}").model.text.end_token


def test_each_key_of_the_model_is_taken_or_is_of_training_alone() -> None:
    of_training = """grad_checkpointing batch_norm frozen_cache_mb image.patch_dropout image.frozen
    image.unlocked_groups text.frozen text.unlocked_layers context.dropout""".split()
    left = {*all_keys(TrainConfig().model)} - {key.removeprefix("model.") for key in (*ARCHITECTURE, *OPEN)}
    assert left == {*of_training}
