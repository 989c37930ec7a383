"""launch/setup.sh, as far as it goes without installing anything: what is installed is on the path of this checkout."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "checkout" / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "setup.sh", tmp_path / "checkout" / "launch")
    shutil.copy(ROOT / "requirements.lock", tmp_path / "checkout")
    return tmp_path / "checkout"


def installed(shared: Path, extra: str, script: str) -> None:
    """As the set-up leaves it: a script of the extra, and the stamp that says it is there."""
    path = shared / "bin" / script
    path.write_text(f"#!/bin/sh\necho {script} of $0\n")
    path.chmod(0o755)
    (shared / f".has-{extra}").touch()


def set_up(checkout: Path, shared: Path, extras: str, command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DYAD_VENV": str(shared), "DYAD_PYTHON": sys.executable, "DYAD_FAISS": "cpu"}
    script = f"source launch/setup.sh {extras} && {command}"
    return subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)


def test_what_a_later_set_up_brings_is_on_the_path_of_every_checkout(checkout: Path, tmp_path: Path) -> None:
    """First the demo, then the tests: their tools come with the second set-up, here or of another checkout."""
    shared = tmp_path / "shared"
    venv.create(shared)
    installed(shared, "cpu", "first")
    installed(shared, "demo", "second")
    assert set_up(checkout, shared, "demo", "second").stdout == f"second of {checkout}/.venv/bin/second\n"
    installed(shared, "dev", "tool")
    for extras in ("demo dev", "demo"):
        ended = set_up(checkout, shared, extras, "tool")
        assert ended.stdout == f"tool of {checkout}/.venv/bin/tool\n", ended.stderr


@pytest.mark.parametrize("first_line", ["#!{python}\n", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"])
def test_scripts_of_the_dependencies_run_the_python_of_the_checkout(
    checkout: Path, tmp_path: Path, first_line: str
) -> None:
    """So `pytest` and `torchrun` find the package dyad. The second line: what pip writes if the path is long."""
    shared = tmp_path / "shared"
    venv.create(shared)
    installed(shared, "cpu", "tool")
    python = shared / "bin" / "python"
    (shared / "bin/tool").write_text(first_line.format(python=python) + "import sys\nprint(sys.prefix, sys.path)\n")
    ended = set_up(checkout, shared, "", "tool")
    assert ended.stdout.startswith(f"{checkout}/.venv ") and f"'{checkout}'" in ended.stdout, ended.stderr
