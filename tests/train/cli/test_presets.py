"""Recipe files of the user, with presets beside them: what they choose, and what they must not."""

from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.run.checks import check_arguments
from dyad.train.cli.command_line import parse_command_line
from dyad.train.cli.compose import compose_config, preview, words_for
from dyad.train.cli.presets import CONFIG_DIR
from dyad.train.config import TrainConfig
from dyad.train.run_folder.folder import all_keys, open_run, read_yaml, run_folder

RECIPE = """
defaults:
  - override /model: tiny
  - override /objective: siglip
steps: 5
data: {train: data/samples/emoji/fxemoji-trained.tar}
optim: {lr: 2e-4}
"""
TINY = "defaults: [cnn_minilm]\nimage: {widths: [8]}\nembed_dim: 32\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tiny.yaml").write_text(TINY)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path / "mine.yaml"


def composed(text: str, path: Path, *words: str) -> TrainConfig:
    path.write_text(text)
    return compose_config([f"experiment={path}", *words])


def test_a_recipe_file_is_read_as_one_of_ours(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config([f"experiment={recipe}", "steps=7"])
    assert (config.steps, config.optim.lr, config.objective.name) == (7, 2e-4, "siglip")
    assert (config.model.image.widths, config.model.image.kind, config.model.embed_dim) == ([8], "cnn", 32)
    assert config.data.train == "data/samples/emoji/fxemoji-trained.tar"  # relative to the working folder
    assert run_folder(config).name.startswith("mine-")
    assert "lr: 0.0002" in preview([f"experiment={recipe}"])
    assert compose_config([f"experiment={recipe}", "model=minilm"]).model.text.name is not None
    monkeypatch.chdir(recipe.parent)
    assert run_folder(compose_config(["experiment=mine.yaml", "steps=7"])) == run_folder(config)


def test_the_words_for_it_compose_to_it_with_the_file_and_without(recipe: Path) -> None:
    config = compose_config([f"experiment={recipe}", "seed=3"])
    assert words_for(config) == [f"experiment={recipe}", "seed=3"]
    recipe.unlink()
    again = all_keys(compose_config(words_for(config)))
    assert {key for key, value in all_keys(config).items() if again[key] != value} <= {"experiment"}


def test_a_run_goes_on_wherever_its_recipe_lies_now(recipe: Path, tmp_path: Path) -> None:
    config = compose_config([f"experiment={recipe}", f"run.dir={tmp_path}"])
    (open_run(config) / "checkpoints" / "step_00000001").mkdir(parents=True)
    moved = recipe.with_name("moved.yaml")
    moved.write_text(RECIPE)
    same = [f"experiment={moved}", f"run.dir={tmp_path}", f"run.name={run_folder(config).name}"]
    open_run(compose_config(same))
    with raises(ConfigError, "objective.name: siglip there, clip now"):
        open_run(compose_config([*same, "objective=clip"]))


def test_recipes_are_swept(recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text("experiment: x\nsteps: 3\ndata: {train: data/samples/emoji/fxemoji-trained.tar}\n")
    line = parse_command_line(["-m", f"experiment={recipe},{other}", "model=tiny"])
    assert [compose_config(words).steps for words in line.runs()] == [5, 3]
    assert check_arguments(["-m", f"experiment={recipe},{other}", "--cfg", "runs"]) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("plugins: [os]", "plugins=['os']"),
        ("seed: ${oc.env:HOME}", "seed="),
        ("defaults: [override /model: '${oc.env:HOME}']", "${oc.env:HOME}"),
        ("defaults: [override /hydra/job_logging: none]", "defaults"),
        ("hydra: {searchpath: ['pkg://os']}", "hydra.searchpath"),
        ("_target_: os.system", "'_target_'"),
        ("optim: {_target_: os.system}", "'optim._target_'"),
        ("optim: {lrr: 1}", "'optim.lr'"),
        ("optim: {patience: 5}", "'optim.max_skipped'"),
        ("steps: abc", "steps=abc"),
        ("precision: amp", "precision=amp"),
        ("defaults: [override /model: tiny_clp]", "'tiny_clip'"),
        ("a: &x [1]\nb: *x", "mine.yaml"),
        ("steps: [1", "mine.yaml"),
        ("- 1", "mine.yaml"),
        ("5", "mine.yaml"),
        ("true", "mine.yaml"),
    ],
)
def test_a_recipe_chooses_keys_and_nothing_else(recipe: Path, text: str, named: str) -> None:
    with raises(ConfigError, named) as caught:
        composed(text, recipe)
    assert len(str(caught.value).splitlines()) == 1


def test_an_option_of_a_recipe_that_another_objective_lacks(recipe: Path) -> None:
    with raises(ConfigError, "objective.alpha", str(recipe), "objective/NAME.yaml"):
        composed(RECIPE + "objective: {alpha: 0.05}\n", recipe)
    assert compose_config(["experiment=next_item", "objective=simclr"]).objective.name == "simclr"
    assert compose_config(["experiment=classes_emoji", "objective=coce"]).objective.name == "coce"


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")))
def test_a_recipe_of_ours_leaves_the_options_of_its_objective_to_a_preset(name: str) -> None:
    """So that another objective can be chosen beside it."""
    assert "objective" not in read_yaml(CONFIG_DIR / f"experiment/{name}.yaml")


def test_a_preset_beside_it_chooses_keys_too(recipe: Path) -> None:
    for text, named in ((TINY + "name: ${oc.env:HOME}", "name="), ("nam: x", "'model.nam'")):
        (recipe.parent / "model/tiny.yaml").write_text(text)
        with raises(ConfigError, "model/tiny", named):
            compose_config([f"experiment={recipe}"])
    (recipe.parent / "model/minilm.yaml").write_text(TINY)
    (recipe.parent / "model/tiny.yaml").write_text("# @package _global_\nmodel: {embed_dim: 9}\nseed: 9\n")
    with raises(ConfigError, "model=minilm"):
        compose_config([f"experiment={recipe}", "model=minilm"])
    (recipe.parent / "model/notes.yaml").write_bytes(b"\xff[1")  # nothing names it
    assert composed("steps: 5", recipe, "model=tiny").seed == 9


def test_a_recipe_that_is_not_there_is_named_with_the_folder(tmp_path: Path) -> None:
    with raises(ConfigError, "experiment=nowhere.yaml"):
        compose_config(["experiment=nowhere.yaml"])
    with raises(ConfigError, "experiment=mine", "experiment=PATH.yaml"):
        compose_config(["experiment=mine"])


def test_launchers_of_hydra_are_answered_with_a_command(recipe: Path) -> None:
    line = ["hydra/launcher=submitit_slurm", f"experiment={recipe}", "optim.lr=1e-3,1e-4", "-m"]
    with raises(ConfigError, "optim.lr=1e-3,1e-4", "launch/slurm.sbatch"):
        parse_command_line(line)
    assert parse_command_line(["hydra/launcher=basic", *line[1:]]).sweep


def test_a_recipe_that_leads_elsewhere_shows_nothing_of_it(
    recipe: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    private = tmp_path_factory.mktemp("private")
    (private / "file").write_text("secret_key: 'canary'\ndefaults: []\n")
    for path in (recipe, recipe.parent / "model/tiny.yaml"):
        kept = path.read_text()
        path.unlink()
        path.symlink_to(private / "file")
        with raises(ConfigError, path) as caught:
            compose_config([f"experiment={recipe}"])
        assert "canary" not in str(caught.value) and "secret_key" not in str(caught.value)
        path.unlink()
        path.write_text(kept)
    linked = tmp_path / "linked.yaml"
    linked.symlink_to("mine.yaml")
    assert compose_config([f"experiment={linked}"]).steps == 5


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\n", "a\u2028b"])
def test_a_run_is_shown_on_one_line_or_not(value: str) -> None:
    words = ["-m", "experiment=emoji_scratch", "seed=1,2", f'tracking.project="{value}"', "--cfg", "runs"]
    with raises(ConfigError, "tracking.project"):
        check_arguments(words)
