"""The wheel, built from the sdist, in its own environment, used from a stranger's folder with train.py and data/."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.shadow import imported, write_large_shards, write_shadows

ROOT = Path(__file__).parents[2]
EMOJI = ROOT / "data/samples/emoji"


# where the package is, and behind a form feed each command and its help
HELP = """
import sys
import dyad.train.losses, dyad.data.config, dyad.eval.config
from dyad.__main__ import COMMANDS, main
print(dyad.__file__, end="")
for command in COMMANDS:
    print(f"\\f{command}")
    sys.argv = ["dyad", command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its dependencies are those of the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
    for name in ("data", "train", "eval", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("samples", "__pycache__", ".index"))
    shutil.copytree(ROOT / "dyad", source / "dyad", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    build(source, "sdist", wheels)
    with tarfile.open(next(wheels.glob("dyad-*.tar.gz"))) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    build(unpacked, "wheel", wheels)
    venv.create(environment, symlinks=True)
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({str(Path(torch.origin).parents[1])!r})\n")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", environment / "bin/python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", *wheels.glob("*.whl")], check=True, capture_output=True)
    return environment


def build(source: Path, kind: str, folder: Path) -> None:
    """What pip and `python -m build` call."""
    backend = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", backend, str(folder)], check=True, capture_output=True, cwd=source)


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Path]:
    """A folder of modules with the names of ours, of dependencies and of Python's own; none of them is imported."""
    write_shadows(folder := tmp_path / "own")
    yield folder
    assert imported(folder) == []


def run(environment: Path, folder: Path, *command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    arguments: Sequence[str | Path] = [environment / "bin" / command[0], *command[1:]]
    done = subprocess.run(arguments, cwd=folder, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_is_imported_beside_modules_of_the_same_names(environment: Path, strangers: Path) -> None:
    """And so is every command; below, most of them run in an interpreter of their own."""
    found, *helps = run(environment, strangers, "python", "-P", "-c", HELP).split("\f")
    assert found.startswith(str(environment)) and Path(found).with_name("py.typed").exists()
    commands = ("train", "data", "eval", "mine", "report", "export", "doctor")
    listed = run(environment, strangers, "dyad")
    assert all(f"  {command} " in listed for command in commands)
    told = dict(text.split("\n", 1) for text in helps)
    assert all(len(told[command].splitlines()) > 3 for command in commands)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_run_is_trained_examined_and_reported(environment: Path, strangers: Path, processes: int) -> None:
    """By every command in an interpreter of its own, with a pool, loaders, the doctor's processes and torchrun."""
    write_large_shards(strangers)
    run(environment, strangers, "dyad", "data", "index", ".")
    shards = {"data.train": strangers, "data.val": EMOJI / "twemoji-unseen.tar", "eval.suite": "[]"}
    preset = ["experiment=emoji_scratch", "debug=smoke", "steps=2", "global_batch_size=32", "run.name=preset"]
    preset += [f"{key}={value}" for key, value in shards.items()] + ["data.workers=1"]
    if processes == 2:  # from the checkout and with one process: test_working_folder.py
        assert "steps of 32 pairs" in run(environment, strangers, "dyad", "doctor", *preset)
    torchrun = ("python", "-P", "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--no-python")
    run(environment, strangers, *torchrun, str(environment / "bin/dyad"), "train", *preset)
    (folder,) = (path.parent for path in strangers.rglob("metrics.jsonl"))
    page = (folder / "report.html").read_text()
    run(environment, strangers, "dyad", "report", f"run={folder}")
    assert "<html" in page and (folder / "report.html").read_text().count("<h2") == page.count("<h2")


def test_a_recipe_and_a_plugin_of_the_strangers_folder(environment: Path, strangers: Path) -> None:
    (strangers / "recipe.yaml").write_text("defaults: [emoji, override /model: small]\nsteps: 3\n")
    (strangers / "model").mkdir()
    (strangers / "model/small.yaml").write_text("defaults: [cnn_minilm]\nembed_dim: 32\n")
    (strangers / "own.py").write_text(
        "from dyad.plugins import register_objective\n"
        "from dyad.train.losses.options.spectral import SpectralOptions\n"
        "register_objective('own_spectral', SpectralOptions)\n"
    )
    words = ["experiment=recipe.yaml", "plugins=[own]", "objective=own_spectral", "--cfg", "job"]
    shown = run(environment, strangers, "dyad", "train", *words)
    assert "steps: 3\n" in shown and "embed_dim: 32\n" in shown and "name: own_spectral\n" in shown
