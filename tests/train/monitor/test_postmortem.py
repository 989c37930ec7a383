"""Where torch's flight recorder and the CUDA memory history go."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dyad.train.monitor import postmortem
from dyad.train.monitor.postmortem import enable_flight_recorder

ROOT = Path(__file__).parents[3]
RECORD = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from dyad.train.monitor.postmortem import enable_flight_recorder
enable_flight_recorder(Path(sys.argv[1]))
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}/store")
dist.all_reduce(torch.ones(3))
torch._C._distributed_c10d._dump_fr_trace_file(0)  # what a backend does at a timeout
dist.destroy_process_group()
"""
EXHAUST = """
import sys, torch
from pathlib import Path
from dyad.train.monitor.postmortem import record_allocations
record_allocations(Path(sys.argv[1]), 5)
held = torch.ones(1 << 20, device="cuda")
torch.ones(1 << 50, device="cuda")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.flight_recorder
def test_the_flight_recorder_writes_into_the_run_folder(tmp_path: Path) -> None:
    assert run(RECORD, tmp_path).returncode == 0
    entries = pickle.loads((tmp_path / "nccl_trace_rank_0").read_bytes())["entries"]
    assert [entry["profiling_name"] for entry in entries] == ["gloo:all_reduce"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "own")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    enable_flight_recorder(tmp_path)
    assert (os.environ["TORCH_FR_DUMP_TEMP_FILE"], os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("own", "0")


def test_each_run_of_a_sweep_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postmortem, "_OURS", {})
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for run_folder in (tmp_path / "1", tmp_path / "2"):
        enable_flight_recorder(run_folder)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "2" / "nccl_trace_rank_")


@pytest.mark.gpu
def test_out_of_memory_leaves_the_allocations(tmp_path: Path) -> None:
    ended = run(EXHAUST, tmp_path)
    assert "OutOfMemoryError" in ended.stderr
    assert pickle.loads((tmp_path / "memory_rank5.pickle").read_bytes())["segments"]
