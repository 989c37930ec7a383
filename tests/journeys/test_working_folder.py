"""No module and no settings of the working folder take effect, from the checkout; of the wheel: test_wheel.py.

Commands run in forks of a process that has the modules. Each interpreter that they start is a fresh one.
"""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
from helpers.cli import ROOT, Commands
from helpers.shadow import imported, write_large_shards, write_shadows

from dyad import start
from dyad.train.tracking.wandb_mode import CLOUD

KEYS = ["experiment=emoji_scratch", "debug=smoke", "steps=1", "global_batch_size=32", "run.name=r", "eval.suite=[]"]
UNSEEN = ROOT / "data/samples/emoji/twemoji-unseen.tar"


def test_no_interpreter_of_a_command_imports_from_it(commands: Commands, tmp_path: Path) -> None:
    write_shadows(tmp_path)
    write_large_shards(tmp_path)
    keys = [*KEYS, f"data.train={tmp_path}", f"data.val={UNSEEN}", "data.workers=1"]
    for line in (
        ["data", "index", "."],
        ["data", "check", "0.tar", "workers=1"],
        ["doctor", *keys],
        ["train", *keys],
        ["eval", "checkpoint=runs/r", f"suite=[retrieval:{UNSEEN}]"],
        ["export", "run=runs/r", "format=open_clip"],
        ["report", "run=runs/r"],
        ["mine", "--help"],
    ):
        ended = commands.run("dyad", *line, cwd=str(tmp_path))
        assert ended.code == 0 and imported(tmp_path) == [], ended


def test_the_script_and_what_it_starts_leave_it(tmp_path: Path) -> None:
    """Also with an empty entry of PYTHONPATH, as PYTHONPATH=$PYTHONPATH:/x makes one."""
    (tmp_path / "heavy.py").write_text("raise SystemExit('a module of the stranger')\n")
    script = tmp_path / "bin" / "dyad"
    script.parent.mkdir()
    show = "import subprocess, sys; find = 'try: import heavy\\nexcept ImportError: print(7)'; exec(find)\n"
    again = "subprocess.run([sys.executable, '-c', find], check=True)\n"
    script.write_text(f"from dyad.start import leave_working_folder\nleave_working_folder()\n{show}{again}")
    for path in (f"{ROOT}:", f":{ROOT}", f"{ROOT}:.", f"{ROOT}:{tmp_path}"):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["7", "7"], done


def test_it_was_deleted(tmp_path: Path) -> None:
    code = (
        f"import os, sys; os.rmdir(os.getcwd()); sys.path.append({str(ROOT)!r}); import dyad.start as s; s.start('x')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: the working folder was deleted"), done
    assert done.stderr.count("\n") == 1


def test_the_checkout_stays_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", str(ROOT), str(ROOT / "tests")])
    monkeypatch.setenv("PYTHONPATH", f":{ROOT}")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    start.leave_working_folder()
    assert sys.path == ["", str(ROOT), str(ROOT / "tests")] and os.environ["PYTHONSAFEPATH"] == "1"


def test_settings_of_libraries_in_it_are_not_read(tmp_path: Path) -> None:
    """W&B would send the API key to the server that they name."""
    write_shadows(tmp_path)
    code = "from dyad.train.tracking.wandb_mode import server; import dyad.eval.report.plots, matplotlib as m; "
    code += "print(server(), m.rcParams['font.size'])"
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_BASE_URL"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    server, size = done.stdout.split()
    assert urlparse(server).netloc in CLOUD and size == "10.0"
