"""Compiled kernels lie in a folder of this user alone, on a disk of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
CODE = f"""
import os
from dyad.train.distributed.compile_caches import use_local_caches
use_local_caches()
print(os.environ["{INDUCTOR}"], os.environ["{TRITON}"], sep="\\n")
"""


def used(tmp: Path, **environment: str) -> list[str]:
    """The folders of torch.compile and of Triton."""
    own = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    own |= {"TMPDIR": str(tmp), "XDG_CACHE_HOME": str(tmp.parent / "home"), **environment}
    run = subprocess.run([sys.executable, "-c", CODE], env=own, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def folders(parent: Path) -> list[str]:
    return [f"{parent}/inductor", f"{parent}/triton"]


def test_a_folder_that_others_cannot_enter(tmp: Path) -> None:
    own = tmp / f"dyad-{os.getuid()}"
    assert used(tmp) == folders(own)
    assert S_IMODE(own.stat().st_mode) == 0o700
    assert used(tmp) == folders(own)  # also of the next start


def test_the_user_chooses(tmp: Path) -> None:
    assert used(tmp, **{TRITON: "/elsewhere"}) == [f"{tmp}/dyad-{os.getuid()}/inductor", "/elsewhere"]


def open_to_all(own: Path, elsewhere: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


def a_link(own: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    own.symlink_to(elsewhere)


def a_file(own: Path, elsewhere: Path) -> None:
    own.touch(mode=0o600)


def of_another_user(own: Path, elsewhere: Path) -> None:
    own.mkdir(mode=0o700)
    try:
        os.chown(own, os.getuid() + 1000, -1)
    except PermissionError:
        pytest.skip("only root gives folders away")


def in_a_folder_of_all(own: Path, elsewhere: Path) -> None:
    """Without the sticky bit others can put a folder of theirs in its place."""
    own.parent.chmod(0o777)


@pytest.mark.parametrize("planted", [open_to_all, a_link, a_file, of_another_user, in_a_folder_of_all])
def test_what_others_may_have_planted_is_not_taken(tmp: Path, planted: Callable[[Path, Path], None]) -> None:
    planted(tmp / f"dyad-{os.getuid()}", tmp.parent / "elsewhere")
    assert used(tmp) == folders(tmp.parent / "home/dyad/compiled")


@pytest.mark.compiler
@pytest.mark.soak  # g++ reads the headers of torch for each kernel: a minute
def test_a_run_compiles_there(tiny: Callable[[dict[str, Any]], list[str]], tmp: Path) -> None:
    own, keys = tmp / f"dyad-{os.getuid()}", {"steps": 1, "compile": "true"}
    words = [sys.executable, "-m", *tiny(keys)]
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    run = subprocess.run(words, env={**environment, "TMPDIR": str(tmp)}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"compiled kernels are kept in {INDUCTOR}={own}/inductor, {TRITON}={own}/triton" in run.stdout
    assert list((own / "inductor").rglob("*.so"))
    assert not list(tmp.glob("torchinductor_*"))
