"""Every shipped configuration composes, every key is known, every mistake has one clear answer."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import Commands
from helpers.messages import raises
from omegaconf import OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.run.checks import check_arguments
from dyad.train.cli.command_line import parse_command_line
from dyad.train.cli.compose import CONFIG_DIR, compose_config, groups, keys, words_for
from dyad.train.cli.usage import COMMON, help_text
from dyad.train.config import TrainConfig
from dyad.train.config_rules import validate
from dyad.train.run_folder.folder import run_folder

ROOT = Path(__file__).parents[3]
ACTIVE = {"OMP_WAIT_POLICY": "active"}


def train(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "train", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60
    )


def together() -> list[list[str]]:
    """Every choice of every group once: of an experiment alone, because it chooses others; else one of each group."""
    choices = {group: [f"{group}={choice}" for choice in found] for group, found in groups().items()}
    alone = [[experiment] for experiment in choices.pop("experiment")]
    return alone + [[*filter(None, words)] for words in itertools.zip_longest(*choices.values())]


@pytest.mark.parametrize("words", together(), ids=" ".join)
def test_every_choice_composes(words: list[str]) -> None:
    config = compose_config([*words, "data.train=x"])
    assert isinstance(config, TrainConfig)
    assert not OmegaConf.missing_keys(OmegaConf.structured(config))


def test_a_recipe_whose_length_depends_on_the_data_warms_up_for_a_share_of_it() -> None:
    for path in (CONFIG_DIR / "experiment").glob("*.yaml"):
        recipe = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(recipe, dict)
        if recipe.get("epochs"):
            assert 0 < recipe["optim"]["warmup"] < 1, path


def test_an_empty_command_line_lacks_what_has_no_default() -> None:
    with raises(ConfigError, "data.train"):
        validate(compose_config([]), world_size=1)


def test_every_yaml_is_reachable_and_has_a_comment() -> None:
    for path in CONFIG_DIR.rglob("*.yaml"):
        assert path.parent == CONFIG_DIR or path.stem in groups()[path.parent.name]
        assert "#" in path.read_text(), path


def test_every_key_says_what_it_means() -> None:
    for key, _, meaning in keys():
        assert meaning or key in ("objective.name", "dist.name"), key


def test_the_keys_people_type_exist() -> None:
    known = {key for key, _, _ in keys()}
    typed = """run.name run.dir seed steps epochs global_batch_size chunk_size precision compile data.train data.val
        data.workers optim.lr optim.weight_decay optim.warmup optim.schedule eval.every checkpoint.every checkpoint.keep
        tracking.wandb resume.mode init_from experiment"""
    assert set(typed.split()) | set(COMMON) <= known


MISTAKES = {
    "stepz=3": "'steps'",
    "lr=3": "'optim.lr'",
    "--lr=1": "'optim.lr=1'",
    "--learning-rate": "key=value",
    "steps": "key=value",
    "experiment=emjoi": "'emoji'",
    "steps=abc": "steps",
    "objective=clp": "'clip'",
    "optim.schedule=cosin": "cosine",
    "data.train=d/{00..99}.tar": '"d/{00..99}.tar"',
    "objective.gamma=1": "objective.gamma",
    "+seed=1": "'+'",
    "data.augment.zoom=3": "zoom",
    "model.image.kind=cn": "cnn",
    "model.memo_mb=0": "'model.frozen_cache_mb'",
    "dist.name=fsdp": "fsdp2",
    "eval.every=null": "eval.every=null",
    "objective=null": "clip",
    "experiment=null": "topics",
}


@pytest.mark.parametrize("key", ["eval.suite", "eval.recall_k", "from_weights", "also", "data.columns"])
def test_a_list_is_no_number_by_an_interpolation_either(key: str) -> None:
    with raises(ConfigError, f"{key}=5"):
        compose_config(["experiment=emoji", f"{key}='${{seed}}'", "seed=5"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_have_one_clear_answer(mistake: str) -> None:
    with raises(ConfigError, MISTAKES[mistake]) as caught:
        compose_config([mistake])
    assert len(str(caught.value).splitlines()) <= 6


def test_the_answer_is_the_same_under_a_debugger() -> None:
    tracer = sys.gettrace()
    sys.settrace(lambda *_: None)  # OmegaConf then chains its raw causes
    try:
        with raises(ConfigError, "optim.schedule=cosin", "cosine"):
            compose_config(["optim.schedule=cosin"])
    finally:
        sys.settrace(tracer)


def test_braces_expanded_by_the_shell_are_noticed() -> None:
    with raises(ConfigError, "data.train"):
        compose_config(["data.train=d/0.tar", "data.train=d/1.tar"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["stepz=3"],
        ["--lr", "1"],
        ["experiment=emjoi"],
        ["data.train=nowhere/{0..9}.tar"],
        ["data.train=nowhere.tar", "steps=1"],
        ["steps=1"],
    ],
    ids=" ".join,
)
def test_mistakes_exit_with_2_and_leave_nothing(arguments: list[str], tmp_path: Path, commands: Commands) -> None:
    run = commands.run("train", *arguments, f"run.dir={tmp_path}/runs")
    assert run.code == 2
    assert len(run.out.splitlines()) <= 6
    assert "Traceback" not in run.out
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_told_by_standard_error() -> None:
    run = train("stepz=3")
    assert (run.returncode, run.stdout) == (2, "") and "'steps'" in run.stderr


def test_help_teaches_and_imports_no_torch() -> None:
    code = """import runpy, sys
sys.argv[1:] = ["--help"]
runpy.run_module("train", run_name="__main__", alter_sys=True)
assert "torch" not in sys.modules"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.rstrip() == help_text().rstrip()
    for word in itertools.chain(groups(), COMMON):
        assert word in run.stdout


def test_a_reader_that_stops_early_is_no_fault() -> None:
    command = f"{sys.executable} -m train --help | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_preview_of_several_runs_is_one_document_each() -> None:
    run = train("experiment=emoji", "-m", "optim.lr=1e-3,2e-3", "--cfg", "job")
    assert run.returncode == 0, run.stderr
    shown = [OmegaConf.create(part) for part in run.stdout.split("---\n")]
    assert [(config.experiment, config.optim.lr) for config in shown] == [("emoji", 1e-3), ("emoji", 2e-3)]


@pytest.mark.parametrize("mistake", ["precision=amp", "stepz=3", "data.captions=5", "eval.cooldown=1", "steps"])
def test_a_mistake_has_the_same_answer_under_every_flag(mistake: str) -> None:
    said = []
    for flags in ("", "--cfg job", "-m --cfg job", "-m"):
        with raises(ConfigError, mistake.partition("=")[0]) as caught:
            check_arguments(["experiment=emoji", mistake, *flags.split()])
        said.append(str(caught.value))
    assert said == [said[0]] * 4 and len(said[0].splitlines()) == 1


def test_a_sweep_runs_every_combination_and_refuses_a_shared_folder(tmp_path: Path) -> None:
    words = ["experiment=emoji", "-m", "optim.lr=1e-3,2e-3", "seed=range(0,2)"]
    assert [run[1:] for run in parse_command_line(words).runs()] == [
        [f"optim.lr={lr}", f"seed={seed}"] for lr in ("1e-3", "2e-3") for seed in (0, 1)
    ]
    assert check_arguments(words) is None
    with raises(ConfigError, "4 runs", tmp_path / "one", "run.name"):
        check_arguments([*words, f"run.dir={tmp_path}", "run.name=one"])
    fixed = "python -m train -m experiment=emoji optim.lr=1e-3,2e-3 'seed=range(0,2)'"
    with raises(ConfigError, "optim.lr=1e-3,2e-3", fixed):
        check_arguments([word for word in words if word != "-m"])


def test_the_preview_of_a_sweep_is_refused_when_one_of_its_runs_is() -> None:
    with raises(ConfigError, "seed"):
        check_arguments(["experiment=emoji", "-m", "seed=1,x", "--cfg", "job"])


@pytest.mark.linux
@pytest.mark.parametrize(("typed", "rounds"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), (ACTIVE, "30000000000")])
def test_threads_that_wait_leave_the_cores_soon_unless_it_is_typed(typed: dict[str, str], rounds: str) -> None:
    """As the OpenMP of torch says itself, loaded by a command; without the rest of torch, for time."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    (openmp,) = (path for path in loaded if "/torch" in path)
    load = f"from dyad.process import run; import ctypes; run(lambda: ctypes.CDLL('{openmp}'))"
    command = [sys.executable, "-c", load]
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", *ACTIVE)}
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment, **typed, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True
    )
    assert f"GOMP_SPINCOUNT = '{rounds}'" in ended.stderr


@pytest.mark.parametrize("task", ["views", "labelled"])
def test_ids_and_frames_are_of_sequences_alone(task: str) -> None:
    with raises(ConfigError, "data.items=ids", "task=sequence"):
        validate(compose_config([f"task={task}", "data.items=ids", "data.train=x.jsonl", "steps=1"]), 1)


PASSAGES = ["task=question_passage", "model=minilm", "data=question_passage"]
TRAINS_WITH_ONE = [
    [*PASSAGES, "objective=dpr", "data.negatives.per_row=1"],
    ["task=labelled", "model=small_cnn", "objective=cross_entropy"],
    ["task=sequence", "data=log", "model=next_item", "objective=gcl"],
    ["objective=nce", "objective.noise=unigram"],
    [*PASSAGES, "objective=cosine_mse", "data.teacher=score", "data.passage.positives=one"],
]


@pytest.mark.parametrize("words", TRAINS_WITH_ONE, ids=" ".join)
def test_a_batch_of_one_pair_trains_where_it_is_compared_with_more(words: list[str]) -> None:
    validate(compose_config([*words, "data.train=x", "steps=1", "global_batch_size=1"]), world_size=1)


@pytest.mark.parametrize("name", ["clip", "simclr", "siglip", "sogclr", "coce", "spectral", "cpc", "cosent"])
def test_a_batch_of_one_pair_alone_is_refused(name: str) -> None:
    words = {"cpc": ["task=sequence", "data=log", "model=next_item"], "cosent": [*PASSAGES, "data.teacher=score"]}
    typed = [*words.get(name, []), f"objective={name}", "data.train=x", "steps=1"]
    with raises(ConfigError, f"objective={name}", "global_batch_size=1"):
        validate(compose_config([*typed, "global_batch_size=1"]), world_size=1)
    validate(compose_config([*typed, "global_batch_size=2"]), world_size=1)


def test_a_quoted_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands it; the answer to one without quotes asks for them."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["experiment=emoji", 'run.dir="~/runs"', "run.name=a", 'resume="~/old@best"', 'init_from="~/b"']
    config = compose_config(words)
    assert run_folder(config) == Path("/home/me/runs/a")
    assert (config.resume.mode, config.init_from) == ("/home/me/old@best", "/home/me/b")


@pytest.mark.parametrize("text", ["2024_01_01", "1e3", "1.50", "nan"])
def test_a_text_that_looks_like_a_number_stays_as_it_is_typed(text: str) -> None:
    config = compose_config(
        ["experiment=emoji", f"run.name={text}", f"data.captions=['{text}','null']", "optim.lr=1e-4"]
    )
    assert run_folder(config).name == text and config.data.captions == [text, "null"] and config.optim.lr == 1e-4
    assert compose_config(words_for(config)) == config
    sweep = parse_command_line(["experiment=emoji", "-m", f"run.name={text}, b", "data.captions=[a,b],[b,a]"])
    composed = [compose_config(run) for run in sweep.runs()]
    assert [(c.run.name, c.data.captions) for c in composed] == [
        (name, captions) for name in (text, "b") for captions in (["a", "b"], ["b", "a"])
    ]


def test_a_section_of_any_keys_may_be_one_mapping() -> None:
    words = ["optim.options={betas:[0.9,0.99]}", "data.augment_y={flip:0.5}", "also={more:{objective:dpr}}"]
    config = compose_config(["experiment=simclr_emoji", *words])
    assert config.optim.options == {"betas": [0.9, 0.99]} and config.also == {"more": {"objective": "dpr"}}
    assert config.data.augment_y == {"flip": 0.5}


def test_the_sweep_for_wandb_is_of_runs_that_compose() -> None:
    """W&B puts key=value for each parameter in the place of ${args_no_hyphens}."""
    sweep: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "launch/wandb_sweep.yaml"), resolve=False)
    command, parameters = sweep["command"], sweep["parameters"]
    assert command[:4] == ["${env}", "${interpreter}", "-m", "train"] and command[-1] == "${args_no_hyphens}"
    for value in ("min", "max"):
        own = [f"{key}={of.get(value, of.get('values', [0])[0])}" for key, of in parameters.items()]
        config = compose_config([*command[4:-1], *own])
        assert config.optim.lr == parameters["optim.lr"][value]
    assert re.fullmatch(r"val/(image_to_text|text_to_image)_R@\d+", sweep["metric"]["name"])
