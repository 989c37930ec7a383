"""What torchrun's agent prints. That it waits for other machines: tests/faults/test_starts.py."""

import socket
import subprocess
import sys

import pytest
from helpers.cli import ROOT


@pytest.mark.linux
@pytest.mark.parametrize(
    ("trainer", "how"), [("os.kill(os.getpid(), 9)", "was killed by SIGKILL"), ("sys.exit(3)", "ended with code 3")]
)
def test_the_end_of_a_rank_is_one_line(trainer: str, how: str) -> None:
    command = [sys.executable, "-m", "train.distributed.agent", "--standalone", "--no-python"]
    command += [sys.executable, "-c", f"import os, sys; {trainer}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, f"{socket.gethostname()}: rank 0 {how}\n")
