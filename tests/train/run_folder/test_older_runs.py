"""A run of an older version goes on as it was, and is evaluated so, where defaults have changed since."""

from pathlib import Path
from typing import Any

from helpers.messages import raises
from omegaconf import OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.data.config import CaptionPer
from dyad.evaluation.load_run import read_config
from dyad.train.cli.compose import compose_config
from dyad.train.losses.options.choices import Density, Noise
from dyad.train.run_folder.folder import CONFIG, check_run, open_run, recorded_caption_per, run_folder


def test_an_older_run_has_a_caption_a_line(tmp_path: Path) -> None:
    """Before data.caption_per a text was split at line breaks. The names of runs without one stay."""
    words = ["model=tiny_clip_gn", f"run.dir={tmp_path}", "run.name=old", "steps=1"]
    run = open_run(compose_config(words))
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    check_run(compose_config(words))
    with raises(ConfigError, run, "data.caption_per: paragraph", "line"):
        check_run(compose_config([*words, "data.caption_per=line"]))
    tree: Any = OmegaConf.load(run / CONFIG)
    del tree["data"]["caption_per"]
    OmegaConf.save(tree, run / CONFIG)
    assert read_config(run).data.caption_per is CaptionPer.line
    again = compose_config(words)
    check_run(again)
    assert recorded_caption_per(again) is CaptionPer.line
    assert recorded_caption_per(compose_config(["model=tiny_clip_gn", "run.name=new"])) is CaptionPer.paragraph
    unnamed = [run_folder(compose_config(["model=tiny_clip_gn", f"data.caption_per={per}"])) for per in CaptionPer]
    assert unnamed[0] == unnamed[1]


def test_the_noise_of_an_older_run_is_the_batch(tmp_path: Path) -> None:
    """What it called noise is the density. The names of runs with noise of the batch stay."""
    names = {"unigram": "8d84a796", "uniform": "39fe1506"}
    for density, digits in names.items():
        words = ["experiment=emoji", "objective=nce", f"objective.density={density}"]
        assert run_folder(compose_config(words)).name == f"emoji-{digits}"
        drawn = compose_config(["experiment=emoji", "objective=nce", f"objective.noise={density}"])
        assert run_folder(drawn).name != f"emoji-{digits}"
    words = ["model=tiny_clip_gn", f"run.dir={tmp_path}", "run.name=old", "steps=1", "objective=nce"]
    run = open_run(compose_config([*words, "objective.density=uniform"]))
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    tree: Any = OmegaConf.load(run / CONFIG)
    tree["objective"]["noise"] = tree["objective"].pop("density")
    OmegaConf.save(tree, run / CONFIG)
    found = read_config(run).objective
    assert (found.noise, found.density) == (Noise.batch, Density.uniform)
    check_run(compose_config([*words, "objective.density=uniform"]))
    with raises(ConfigError, run, "objective.noise: batch", "uniform"):
        others = ["objective.density=uniform", "objective.init_bias=0", "objective.bias_learnable=false"]
        check_run(compose_config([*words, "objective.noise=uniform", *others]))


def test_a_key_that_is_gone_is_left_out(tmp_path: Path) -> None:
    words = ["model=tiny_clip_gn", f"run.dir={tmp_path}", "run.name=old", "steps=1"]
    run = open_run(compose_config(words))
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    tree: Any = OmegaConf.load(run / CONFIG)
    tree["data"]["sequence"] = {"frames_key": "npy"}
    OmegaConf.save(tree, run / CONFIG)
    assert read_config(run).data == compose_config(words).data
    check_run(compose_config(words))


def test_texts_of_an_older_run_of_a_decoder_have_no_end_token(tmp_path: Path) -> None:
    """The group model=decoder sets it now: such a run is evaluated as it was, and goes on only if that is typed."""
    words = ["experiment=llm_embedder", f"run.dir={tmp_path}", "run.name=old", "steps=1", "epochs=null"]
    run = open_run(compose_config(words))
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    tree: Any = OmegaConf.load(run / CONFIG)
    del tree["model"]["text"]["end_token"]
    OmegaConf.save(tree, run / CONFIG)
    assert read_config(run).model.text.end_token is False
    with raises(ConfigError, run, "model.text.end_token: false", "true"):
        check_run(compose_config(words))
    check_run(compose_config([*words, "model.text.end_token=false"]))
