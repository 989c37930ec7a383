"""A command that cannot start says why in one line: another Python, no packages, samples that are not there."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.data.shards import sources
from dyad.start import NEWEST, OLDEST

ROOT = Path(__file__).parents[2]
COMMANDS = ["train", "data", "eval", "train.doctor", "train.export", "eval.mine", "eval.report", "eval.compare", "dyad"]


def refused(*command: str, cwd: Path = ROOT) -> str:
    """The one line that the interpreter without any package says."""
    interpreter = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    clean["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([interpreter, "-S", *command], cwd=cwd, env=clean, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout, done
    return line


@pytest.mark.parametrize("words", ["train experiment=emoji", "eval checkpoint=x", "train.doctor", "data check ."])
def test_without_the_environment(words: str, tmp_path: Path) -> None:
    line = refused("-m", *words.split())
    assert re.fullmatch(r"error: /\S+ has no package '\w+'. Type: source launch/setup.sh", line), line
    there = refused("-m", "dyad", *words.removeprefix("train.").split(), cwd=tmp_path)
    assert there.endswith(f"Type: source {os.path.relpath(ROOT / 'launch/setup.sh', tmp_path)}")


@pytest.mark.parametrize(("version", "command"), [((3, 6, 15), "train"), ((3, 10, 13), "data"), ((3, 14, 0), "dyad")])
def test_another_python(version: tuple[int, ...], command: str) -> None:
    code = f"import sys, runpy; sys.version_info = {version}; sys.argv = ['x']; "
    line = refused("-c", f"{code}runpy.run_module({command!r}, run_name='__main__')")
    assert f"Dyad needs Python 3.11 to 3.13; {sys.base_prefix}" in line
    assert f"is {'.'.join(map(str, version))}. Type: source launch/setup.sh" in line


def test_older_pythons_can_read_what_they_reach() -> None:
    files = [ROOT / "dyad/__init__.py", ROOT / "dyad/start.py"]
    places = [ROOT / name.replace(".", "/") for name in COMMANDS if name != "dyad"]
    files += [place / "__main__.py" if place.is_dir() else place.with_suffix(".py") for place in places]
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 7))
        unions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
        assert not unions, file


def test_the_range_is_that_of_pip_and_of_the_set_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    above = (NEWEST[0], NEWEST[1] + 1)
    assert project["requires-python"] == ">={}.{},<{}.{}".format(*OLDEST, *above)
    assert f"{OLDEST} <= sys.version_info[:2] < {above}" in (ROOT / "launch/setup.sh").read_text()


def test_a_package_that_is_there_but_not_whole_is_a_bug(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def main():\n    import numpy.nothing_of_that_name\n")
    code = "from dyad.start import start; start('broken')"
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "nothing_of_that_name" in done.stderr


def test_samples_are_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experiment=emoji, typed in another folder; the second time beside an installed wheel."""
    monkeypatch.chdir(tmp_path)
    shards = "data/samples/emoji/noto-trained.tar"
    with raises(ConfigError, "'data'", ROOT):
        sources.files_of(shards, "data.train", sources.SHARDS, lambda path: ())
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    with raises(ConfigError):
        sources.files_of(shards, "data.train", sources.SHARDS, lambda path: ())
    with raises(ConfigError, "'shards'"):
        sources.files_of("shards/a.tar", "data.train", sources.SHARDS, lambda path: ())
