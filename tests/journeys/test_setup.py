"""launch/setup.sh, as far as it goes without a registry: what is installed is on the path of this checkout."""

import os
import shutil
import subprocess
import sys
import venv
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
# who runs the tests may have a DYAD_VENV of their own
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("DYAD_")}


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
    environment = {**OUTSIDE, "DYAD_VENV": str(shared), "DYAD_PYTHON": sys.executable, "DYAD_FAISS": "cpu"}
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


def test_of_several_pythons_that_of_the_tests_is_taken(tmp_path: Path) -> None:
    for name in ("python", "python3.11", "python3.12", "python3.13"):
        (tmp_path / name).write_text(f'#!/bin/sh\ncase "$2" in *executable*) echo {name} ;; esac\n')
        (tmp_path / name).chmod(0o755)
    functions = (ROOT / "launch" / "setup.sh").read_text().partition("\ndyad_root=")[0]
    command = ["/bin/bash", "-c", f"{functions}\ndyad_python"]
    chosen = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert chosen.stdout == "python3.11\n"


def test_the_caller_stays_in_its_folder(checkout: Path, tmp_path: Path) -> None:
    """And has the environment all the same. Each script goes to the root of the repository itself."""
    shared = tmp_path / "shared"
    venv.create(shared)
    installed(shared, "cpu", "tool")
    environment = {**OUTSIDE, "DYAD_VENV": str(shared), "DYAD_PYTHON": sys.executable, "DYAD_FAISS": "cpu"}
    script = f"CDPATH={tmp_path}; source ../checkout/launch/setup.sh; pwd; type -p tool python; echo $VIRTUAL_ENV"
    (tmp_path / "own").mkdir()
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path / "own", env=environment, capture_output=True, text=True, check=True
    )
    here = [checkout / ".venv" / name for name in ("bin/tool", "bin/python", "")]
    assert list(map(Path, ended.stdout.splitlines())) == [tmp_path / "own", *here]
    for sourcing in (path for path in (ROOT / "launch").iterdir() if "source launch/setup.sh" in path.read_text()):
        before = sourcing.read_text().partition("source launch/setup.sh ")[0]
        assert sourcing.name == "setup.sh" or "\ncd " in before, sourcing


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A package of one module that says its version."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    fields = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        file.writestr(f"{info}/METADATA", "\n".join([*fields, ""]))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def container(checkout: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of a machine without network: an environment with a torch of its own, and the rest in a folder.

    The lock has a newer torch, whose wheel is there, too; the environment has an older `rest`, and pins it.
    """
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    wheels.mkdir()
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for name, version in (("torch", "2.8.0a0"), ("torchvision", "0.23.0"), ("rest", "1.0")):
        with ZipFile(wheel(tmp_path, name, version)) as file:
            file.extractall(site)
    for pip in Path(str(metadata.distribution("pip").locate_file(""))).glob("pip*"):  # as new as the one that is locked
        (site / pip.name).symlink_to(pip)
    needed = {"torch": "2.15.0", "torchvision": "0.29.2", "rest": "2.0", "faiss_cpu": "1.0"}
    made = {name: wheel(wheels, name, version, *["torch>=2"] * (name == "rest")) for name, version in needed.items()}
    lines = [f"{n}=={v} \\\n    --hash=sha256:{sha256(made[n].read_bytes()).hexdigest()}\n" for n, v in needed.items()]
    (checkout / "requirements.hashes").write_text("".join(lines))
    (checkout / "requirements.lock").write_text("\n".join(f"{n}=={v}" for n, v in needed.items()))
    requirements = '["rest>=2", "torch>=2.8,<3", "torchvision>=0.23"]'
    extras = "[project.optional-dependencies]\ncpu = ['faiss_cpu']\n"
    (checkout / "pyproject.toml").write_text(f"[project]\ndependencies = {requirements}\n{extras}")
    (tmp_path / "pins.txt").write_text("rest==1.0\n")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONSTRAINT": str(tmp_path / "pins.txt")}
    path = f"{environment}/bin:{os.environ['PATH']}"
    return {**OUTSIDE, **offline, "PATH": path, "DYAD_TORCH": "installed", "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_torch_that_is_there_is_kept(checkout: Path, tmp_path: Path, container: dict[str, str]) -> None:
    """Set up twice: the second time .venv is first on the path, and its Python is not taken for the machine's."""
    modules = "torch, torchvision, rest, faiss_cpu"
    code = f"import {modules}; print(*(m.__version__ for m in ({modules})))"
    script = f"source launch/setup.sh && source launch/setup.sh && python -c '{code}; print(torch.__file__)'"
    ended = subprocess.run(["bash", "-c", script], cwd=checkout, env=container, capture_output=True, text=True)
    versions, torch = ended.stdout.splitlines() or [ended.stderr, ""]
    assert versions == "2.8.0a0 0.23.0 2.0 1.0" and torch.startswith(str(tmp_path / "environment")), ended.stderr
    assert ended.stderr.count("Installing the dependencies") == 1
    (shared,) = (tmp_path / "cache/dyad").iterdir()
    assert not list(shared.glob("lib/python*/site-packages/torch*"))


@pytest.mark.parametrize(
    ("without", "changed", "words"),
    [
        ("torchvision", {}, "has no torchvision. Set DYAD_PYTHON to one that has both"),
        ("", {"DYAD_TORCH": "mine"}, "DYAD_TORCH=mine: installed is the only value"),
        ("", {"DYAD_PYTHON": "/nowhere"}, "dyad needs Python 3.11, 3.12 or 3.13"),
    ],
)
def test_a_torch_that_is_not_there_is_named(
    checkout: Path, tmp_path: Path, container: dict[str, str], without: str, changed: dict[str, str], words: str
) -> None:
    for path in tmp_path.glob(f"environment/lib/python*/site-packages/{without or 'nothing'}*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    ended = subprocess.run(
        ["bash", "-c", "source launch/setup.sh"],
        cwd=checkout,
        env={**container, **changed},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0 and words in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert not (checkout / ".venv").exists()
