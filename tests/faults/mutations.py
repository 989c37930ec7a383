"""Random damage to files of strangers: each kind of file is changed by chance and given to what reads it.

PYTHONPATH=tests python -m faults.mutations [--kind tar …] [--count 2000] [--seed 0] [--command]

Readers run in forks with 4 GB, 20 files in each, with --command each command in one of its own; each has 20 s. A file
is read, or refused by an error of ours. All else is printed, with what repeats it: the kind and its seed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from faults.damage import mutate
from faults.foreign_files import KINDS, SAMPLES, Kind, in_parts, seal
from helpers.cli import become, warm
from helpers.rows import write_beir
from helpers.tiny_runs import QUIET, tiny_arguments

from dyad.data.base.errors import UserError

MEMORY, SECONDS = 4 << 30, 20
SHARED = 20  # damaged files that one process reads
CODES = (0, 2, 3, 4, 75)  # exit codes that a command may end with


def forked(act: Callable[[], int], out: Path, seconds: int = SECONDS) -> tuple[int, float]:
    """Run `act` in a fork under the limits; return its exit code, or minus its signal, and the seconds it took."""
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            with out.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(seconds)
            os._exit(act())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(97)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # processes that it started
    return code, time.monotonic() - begun


def reading(kind: Kind, folder: Path) -> str | None:
    """Read a damaged file; return what must not happen."""
    try:
        kind.read(folder)
    except UserError as error:
        # below a line may stand a list, a fix or the next key: no output of a library
        listed = all(re.match(r"  |Their sound|[\w.]+=", line) for line in str(error).splitlines()[1:])
        return None if listed else str(error)
    except BaseException:
        return traceback.format_exc()
    return None


def damaged(name: str, seed: int, work: Path) -> tuple[Path, str]:
    """Make a folder of a kind with a file that is damaged by this seed; return it, and how."""
    chance, folder = random.Random(f"{name} {seed}"), work / f"{name}-{seed}"  # a new one: readers may remember paths
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SAMPLES[name], folder)
    file = chance.choice(sorted(path for path in folder.rglob(KINDS[name].files) if path.is_file()))
    how = mutate(file, chance)
    if name == "checkpoint" and file.name != "manifest.json" and chance.random() < 0.8:
        seal(folder)
    return folder, how


def read_each(name: str, seeds: Sequence[int], work: Path) -> int:
    """Read damaged files one after the other; say in work/each.txt at which it is, and what must not happen."""
    os.setsid()
    with (work / "each.txt").open("w", buffering=1, errors="replace") as each:
        for seed in seeds:
            signal.alarm(SECONDS)
            folder, how = damaged(name, seed, work)
            each.write(f"\0{name} seed={seed} {how}")
            if wrong := reading(KINDS[name], folder):
                each.write(f"\n{wrong[-900:].strip()}")
            shutil.rmtree(folder)
    return 0


def read_all(name: str, seeds: Sequence[int], work: Path) -> Iterator[str]:
    """Damage a file of a kind by each of these seeds and read it, several in one fork; yield what must not happen, with
    what repeats it."""
    while seeds:
        code, took = forked(lambda: read_each(name, seeds[:SHARED], work), work / "out.txt")  # noqa: B023
        told = (work / "each.txt").read_text().split("\0")[1:]
        if code:
            told[-1] += f"\ncode {code}, {took:.1f} s\n{(work / 'out.txt').read_text(errors='replace')[-900:].strip()}"
        yield from (each for each in told if "\n" in each)
        seeds = seeds[len(told) :]


def command_all(name: str, seeds: Sequence[int], work: Path) -> Iterator[str]:
    """As `read_all`, by the command of the kind, each in a fork of its own."""
    given, out = KINDS[name].command, work / "out.txt"
    for seed in seeds if given else ():
        folder, how = damaged(name, seed, work)
        words = given(folder) if given else ()
        code, took = forked(lambda: become(words, str(out), {}), out)  # noqa: B023
        said = out.read_text(errors="replace").strip()
        if code not in CODES or "Traceback" in said:
            yield f"{name} seed={seed} {how}\ncode {code}, {took:.1f} s\n{said[-900:]}"
        shutil.rmtree(folder)


def prepare(work: Path, kinds: Sequence[str]) -> None:
    """Make a sound sample of each kind in `work`."""
    warm()
    _prepare_run(work)
    SAMPLES["beir"] = write_beir(work / "beir")
    for name in {*kinds, "tar"}:
        SAMPLES[name] = work / "samples" / name
        SAMPLES[name].mkdir(parents=True)
        KINDS[name].make(SAMPLES[name])
    gc.collect()
    gc.freeze()


def _prepare_run(work: Path) -> None:
    models = SAMPLES["models"] = work / "models"
    models.mkdir()
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}
    (models / "open_clip.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    keys = {**QUIET, "steps": 2, "global_batch_size": 8, "eval.suite": "[]", "run.name": "a"}
    words = tiny_arguments(models, work / "runs", keys)
    code, _ = forked(lambda: become(words, str(work / "train.txt"), {}), work / "train.txt", 120)
    assert code == 0, (work / "train.txt").read_text()
    for name in ("trained", "parts"):
        SAMPLES[name] = work / name
        shutil.copytree(work / "runs" / "a", work / name)
    in_parts(work / "parts")


def main() -> int:
    """Return how many kinds had something wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", nargs="*", default=[*KINDS])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--command", action="store_true", help="by the command instead of the reader")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp())  # TemporaryDirectory would be removed at the end of a fork
    failed = 0
    try:
        prepare(work, given.kind)
        for name in given.kind:
            begun, found = time.monotonic(), 0
            act = command_all if given.command else read_all
            for wrong in act(name, range(given.seed, given.seed + given.count), work):
                found += 1
                print(wrong, flush=True)
            failed += found > 0
            took = time.monotonic() - begun
            print(f"{name}: {given.count} from seed {given.seed}, {found} wrong, {took:.0f} s", flush=True)
    finally:
        shutil.rmtree(work)
    return failed


if __name__ == "__main__":
    sys.exit(main())
