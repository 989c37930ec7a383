"""What is written while training goes on: checkpoints behind it, files of lines, and both on a disk that is full."""

import errno
import hashlib
import logging
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from helpers.messages import raises

from dyad.data.base.errors import HardwareError
from dyad.data.base.files import LineFile
from dyad.data.batch import Batch
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.train.run_folder import saving
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_parts import FAILED, give_up, parts_folder
from dyad.train.run_folder.checkpoint_state import CheckpointState, capture
from dyad.train.run_folder.folder import steps
from dyad.train.run_folder.saving import CheckpointWriter, refuse_full_disk, write_checkpoint
from dyad.train.run_schedule import RunSchedule
from tests.train.run_folder.test_checkpoint import MEMORY, Run, folder, same


class Gate:
    """Stands before a checkpoint until it is opened. begun: whether anybody waits or has waited."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(60)


def writing(run_dir: Path, before_save=lambda: None, said: list[str] | None = None) -> CheckpointWriter:
    log = [].append if said is None else said.append
    schedule = RunSchedule(0, 99, 8, 1, log_every=1, evaluate_every=0, save_every=2)
    return CheckpointWriter(run_dir, 3, before_save, schedule, log)


def state(run: Run, step: int) -> CheckpointState:
    return capture(run.modules, run.optimizer, step, {}, MEMORY)


@contextmanager
def no_room(limit: int = 1000) -> Iterator[None]:
    """No file grows beyond `limit` bytes: as on a full disk, a part of what is written arrives."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_the_error_of_a_rank_is_found_whole(tmp_path: Path) -> None:
    part, error = (1, 2, "a"), OSError("x" * (1 << 26))
    parts = parts_folder(tmp_path / "step", part)
    parts.mkdir()
    writer = threading.Thread(target=give_up, args=(tmp_path / "step", part, error))
    writer.start()
    while not (parts / f"1{FAILED}").exists():
        time.sleep(0)
    assert (parts / f"1{FAILED}").stat().st_size == 1 << 26
    writer.join()
    assert [path.name for path in parts.iterdir()] == [f"1{FAILED}"]


def test_what_is_written_behind_is_what_was_there_when_it_was_asked_for(tmp_path: Path) -> None:
    run, gate = Run(0), Gate()
    run.train(0, 3)
    write_checkpoint(tmp_path / "now", state(run, 3), keep=1)
    with writing(tmp_path / "behind", gate) as writer:
        writer.save_in_background(state(run, 3))
        run.train(3, 6)
        assert not folder(tmp_path / "behind", 3).exists()
        gate.opened.set()
        writer.wait()
        files = {path.name: path.read_bytes() for path in folder(tmp_path / "behind", 3).iterdir()}
        assert files == {path.name: path.read_bytes() for path in folder(tmp_path / "now", 3).iterdir()}
        writer.save_in_background(state(run, 6))
        run.train(6, 7)
    assert writer.seconds > 0
    again = Run(0)
    again.train(0, 6)
    assert same(Checkpoint(folder(tmp_path / "behind", 6)).read().model, state(again, 6).model)


def test_the_copies_of_the_save_before_are_used_again(tmp_path: Path) -> None:
    run = Run(0)
    run.train(0, 1)
    with writing(tmp_path) as writer:
        places = []
        for step in (1, 2):
            writer.save_in_background(state(run, step))
            writer.wait()
            places.append(
                {
                    name: copy.data_ptr()
                    for name, copy in {**writer._copies["model"], **writer._copies["optimizer"]}.items()
                }
            )
    assert places[0] == places[1] and len(set(places[0].values())) == len(places[0])


class Digests:
    """Batches for which a loader process takes what a save takes: files, digests, pools, memory, the log."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        logging.getLogger("loader").info("reading")
        with tempfile.TemporaryFile() as file, ThreadPoolExecutor(1) as pool:
            file.write(pool.submit(lambda: hashlib.sha256(bytes(1 << 16)).digest()).result())
        ids = torch.tensor([sample_id for _, sample_id in positions])
        return Batch(ids, ids, ids, ids, ids)

    def where(self, sample_id: int) -> str:
        return f"sample {sample_id}"


def first_batch_seconds() -> float:
    """From the start of two loader processes to their first batch; the second one is awaited, too."""
    order = Order([64], [1.0], seed=0, global_batch_size=4)
    start = time.perf_counter()
    loader = build_loader(Digests(), order, rank=0, world_size=1, first_step=0, last_step=3, workers=2, timeout=30)
    next(loader)
    seconds = time.perf_counter() - start
    assert len(list(loader)) == 2
    return seconds


def test_loaders_start_while_a_slow_disk_takes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, begun = first_batch_seconds(), threading.Event()

    def slow(path: Path) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(5)

    monkeypatch.setattr(saving, "sync", slow)
    with writing(tmp_path) as writer:
        writer.save_in_background(state(Run(0), 1))
        assert begun.wait(60)
        assert first_batch_seconds() < alone + 1
        assert not folder(tmp_path, 1).exists()
    assert folder(tmp_path, 1).exists()


def test_loaders_that_start_at_any_moment_of_a_save_do_not_hang(tmp_path: Path) -> None:
    """Two loader processes at each of many moments, while a checkpoint follows the other."""
    run, done = Run(0), threading.Event()
    saves = 0

    def save_again_and_again(writer: CheckpointWriter) -> None:
        nonlocal saves
        while not done.is_set():
            writer.save(state(run, saves))
            saves += 1

    with writing(tmp_path) as writer:
        saving = threading.Thread(target=save_again_and_again, args=(writer,))
        saving.start()
        try:
            for _ in range(8):
                first_batch_seconds()
        finally:
            done.set()
            saving.join()
    assert saves > 4


def test_a_checkpoint_that_takes_longer_than_slurm_waits_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for lead in ("60", "0.2"):
        monkeypatch.setenv("DYAD_LEAD_SECONDS", lead)
        with writing(tmp_path, lambda: time.sleep(0.6), said) as writer:
            writer.save_in_background(state(Run(0), 1))
    (line,) = said
    assert line.startswith("this checkpoint took 1 s, longer than SLURM waits") and "SBATCH_SIGNAL=B:USR1@" in line


def test_a_checkpoint_that_finds_no_room(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(0)
    with writing(tmp_path, said=said) as writer:
        writer.save(state(run, 2))
        with no_room():
            writer.save_in_background(state(run, 4))
            writer.wait()
            (line,) = said
            assert "cannot write checkpoint" in line and "step_00000004" in line and "it needs " in line
            assert line.endswith("The run goes on; the next is due at step 6")
            with raises(HardwareError, "step_00000005"):
                writer.save(state(run, 5))
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
        writer.save_in_background(state(run, 6))
    assert steps(tmp_path) == [6, 2] and len(said) == 1


def crowded(monkeypatch: pytest.MonkeyPatch, run_dir: Path, room: int) -> None:
    """As on a disk with room for `room` checkpoints: a write raises ENOSPC while that many are there."""
    unpatched = saving._write

    def write(*arguments: Any) -> Any:
        if len(steps(run_dir)) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return unpatched(*arguments)

    monkeypatch.setattr(saving, "_write", write)


def test_on_a_full_disk_older_checkpoints_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run, best = Run(0), {"metric": "m", "value": 1.0, "step": 2}
    with writing(tmp_path, said=said) as writer:
        for step in (1, 2, 4):
            writer.save(capture(run.modules, run.optimizer, step, {"best": best if step > 1 else None}))
        crowded(monkeypatch, tmp_path, 3)
        writer.save_in_background(state(run, 6))  # its own entry names no best, that of step 4 does
        writer.wait()
        assert steps(tmp_path) == [6, 4, 2] and len(said) == 1
        assert said[0].startswith("no room for the checkpoint of step 6: deleted those of steps 1.")
        crowded(monkeypatch, tmp_path, 1)
        (folder(tmp_path, 6) / "state.json").unlink()
        (folder(tmp_path, 4) / "state.json").unlink()
        with raises(HardwareError, "step_00000008", "the newest is of step 2", "checkpoint.keep=1"):
            writer.save(state(run, 8))
        assert steps(tmp_path) == [2] and said[1].startswith("no room for the checkpoint of step 8: deleted those of")
        (folder(tmp_path, 2) / "state.json").unlink()
        with raises(HardwareError, "step_00000009"):
            writer.save(state(run, 9))
        assert steps(tmp_path) == [2] and len(said) == 2


def test_a_rank_without_room_for_its_part_lets_rank_0_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run = Run(0)
    for step in (1, 2):
        write_checkpoint(tmp_path, state(run, step), keep=3)
    crowded(monkeypatch, tmp_path, 2)
    with writing(tmp_path, said=said) as writer:
        for rank, left in ((1, [2, 1]), (0, [2])):
            with raises(HardwareError, "step_00000003", "checkpoint.keep=1"):
                writer.save(replace(state(run, 3), part=(rank, 2, "once")))
            assert steps(tmp_path) == left
    assert len(said) == 1 and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_checkpoint_never_knows_more_than_the_lines(tmp_path: Path) -> None:
    said: list[str] = []
    lines = LineFile(tmp_path / "lines", said.append)
    with writing(tmp_path, lines.sync, said) as writer:
        with no_room(0):
            lines.write("1")
            writer.save_in_background(state(Run(0), 1))
            writer.wait()
        assert len(said) == 2 and "takes no more lines" in said[0] and "cannot write checkpoint" in said[1]
        assert steps(tmp_path) == []
        writer.save_in_background(state(Run(0), 2))
    assert steps(tmp_path) == [2] and (tmp_path / "lines").read_text() == "1\n"
    lines.close()


def test_lines_that_find_no_room_come_later_and_whole(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "lines"
    lines = LineFile(path, said.append)
    lines.write("first")
    with no_room(10):
        for line in ("longer than there is room for", "and another"):
            lines.write(line)
        assert path.read_text() == "first\n"
        assert said == [f"{path} takes no more lines (File too large): they wait in memory"]
        with raises(OSError, "File too large"):
            lines.sync()
    lines.write("last")
    whole = "first\nlonger than there is room for\nand another\nlast\n"
    assert path.read_text() == whole and said[1:] == [f"{path} has all its lines again"]
    with no_room(len(whole)):
        lines.write("lost")
        lines.close()
    assert path.read_text() == whole and said[-1] == f"{path} lacks its last 1 lines (File too large)"


def test_a_deleted_file_of_lines_comes_again_with_all_its_lines(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    lines = LineFile(path, said.append)
    lines.write("first")
    rmtree(path.parent)
    lines.write("second")
    assert said == [f"{path} takes no more lines (No such file or directory): they wait in memory"]
    path.parent.mkdir()
    lines.sync()
    lines.write("third")
    lines.close()
    assert path.read_text() == "first\nsecond\nthird\n"


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("target", [False, True])
def test_a_disk_is_refused_that_has_no_room_for_all_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: bool, target: bool
) -> None:
    run = Run(0)
    run.train(0, 1)
    weights = {p: p.detach() for group in run.optimizer.param_groups for p in group["params"]}
    samples = {"log_u": torch.zeros(1000)}
    copies = weights if average else None, weights if target else None
    saved = capture(run.modules, run.optimizer, 1, {}, samples, *copies)
    tensors = [t for part in saved.tensors.values() for name, t in part.items() if not name.endswith("/step")]
    needed = sum(t.nbytes for t in tensors)  # a moment's count of steps is four bytes

    def check(free: int) -> list[str]:
        monkeypatch.setattr(saving, "free_bytes", lambda _: free)
        target = (copies[1] or {}).values()
        return refuse_full_disk(tmp_path, run.modules, run.optimizer, average, target, 4000, keep=3)

    assert check(4 * needed) == []
    (line,) = check(4 * needed - 1)
    assert "room for 3 checkpoints" in line and line.endswith("set checkpoint.keep=2")
    (line,) = check(needed)
    assert line.endswith("set checkpoint.keep=1")
    for step in (1, 2, 3):
        folder(tmp_path, step).mkdir(parents=True)
    assert check(needed) == []
    with raises(HardwareError, f"{needed:,}", f"{needed - 1:,}", "run.dir"):
        check(needed - 1)
