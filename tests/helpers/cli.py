"""`python -m train …` without the seconds of imports: a process that has them starts each command in a fork of itself.

python tests/helpers/cli.py reads JSON lines, {"start": [module, argument, …], "cwd": path, "out": path, "env": {…}} or
{"wait": pid}, and answers each with a number: the process id, the exit code (minus the signal); {} ends it. A fork runs
the real `__main__` of the module in a session of its own; its standard output and error go to `out`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# _dynamo: the first step of an optimiser would import it
HEAVY = """torch._dynamo open_clip transformers.models.auto transformers.models.bert.modeling_bert accelerate rich.table
PIL.WebPImagePlugin PIL.GifImagePlugin PIL.PpmImagePlugin PIL.JpegImagePlugin rich.console faiss hydra._internal.hydra
dyad.train.cli.compose dyad.run.train_run dyad.train.losses.objectives.softmax dyad.export.main dyad.evaluation.main
dyad.evaluation.mine dyad.eval.report.main dyad.evaluation.load_run dyad.eval.tasks.image_text_retrieval""".split()

GLOO = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (minus the signal), and what it said."""

    code: int
    out: str


class Commands:
    """A process with the imports of commands, which starts each command in a fork of itself.

    Outputs lie in `folder`. `close` must be called at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            # output to a file is buffered, as it mostly is
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}, "OMP_NUM_THREADS": "1"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, *arguments: str, cwd: str = str(ROOT), **environment: str) -> Running:
        """Start `python -m` with these arguments (module first), and do not wait. environment: variables to set."""
        self._count += 1
        out = self._folder / f"out-{self._count}.txt"
        out.touch()  # the process makes it only when it has begun
        return Running(self, self.ask(start=arguments, cwd=cwd, out=str(out), env=environment), out)

    def run(self, *arguments: str, cwd: str = str(ROOT), **environment: str) -> Ended:
        """Run a command as `start` does, and wait for its end."""
        return self.start(*arguments, cwd=cwd, **environment).wait()

    def world(self, size: int, *arguments: str, **environment: str) -> list[Ended]:
        """Run a command in `size` processes, as torchrun does on one machine; return how each rank ended."""
        return [r.wait() for r in self.started(size, *arguments, coming=None, **environment)]

    def started(self, size: int, *arguments: str, coming: Sequence[int] | None, **environment: str) -> list[Running]:
        """Start the ranks of a job as torchrun does, and do not wait. coming: the ranks that do start; None: all."""
        port = str(free_port())
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
        ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "MASTER_PORT": port, **common} for r in range(size)]
        return [self.start(*arguments, **{**ranks[r], **environment}) for r in coming or range(size)]

    def ask(self, **question: object) -> int:
        """Send one JSON line to the process (see the module), and return the number that it answers."""
        assert self._server.stdin and self._server.stdout
        print(json.dumps(question), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the process that starts commands. Commands that still run are not ended."""
        # not by the end of its input: forks of this process, such as loader workers, may hold that open
        self._server.communicate("{}\n")
        assert self._server.returncode == 0


_tried = count(61 * os.getpid())


def free_port() -> int:
    """Return a free port below those that the kernel hands out.

    One of the kernel's may be another process's before rank 0 listens.
    """
    while True:
        port = 10_000 + next(_tried) % 20_000
        with suppress(OSError), socket.socket() as free:
            free.bind(("localhost", port))
            return port


@cache
def server() -> Commands:
    """Return the Commands of all tests of this process, started at the first call. Call its `close` at the end."""
    return Commands(Path(tempfile.mkdtemp()))


@dataclass(frozen=True)
class Running:
    """A command that was started. pid: its process. path: the file with its output."""

    commands: Commands
    pid: int
    path: Path

    @property
    def out(self) -> str:
        """What the command has printed so far, without the lines of gloo of torch 2.8 on its connections."""
        return GLOO.sub("", self.path.read_text())

    def wait(self) -> Ended:
        """Wait for the end of the command. Call it once."""
        return Ended(self.commands.ask(wait=self.pid), self.out)


def warm() -> None:
    """Import what commands need, and fill the caches that each command would fill: Hydra, open_clip, Matplotlib."""
    for module in HEAVY:
        import_module(module)
    compose = sys.modules["dyad.train.cli.compose"]
    compose.register_schemas(tuple(compose.OBJECTIVES))
    compose.compose_config(["experiment=emoji_scratch"])  # the first takes twice as long as the next: Hydra's grammar
    sys.modules["hydra.core.plugins"].Plugins.instance()  # looks for its plugins once
    share_tables(sys.modules["open_clip.tokenizer"].SimpleTokenizer)
    curves, plots = (sys.modules[f"dyad.eval.report.{name}"] for name in ("curves", "plots"))
    plots.line_chart("", curves.Chart("", [curves.Series("", [1, 2], [1, 2])]))  # Matplotlib looks for its font once


def share_tables(tokenizer: Any) -> None:
    """Make all tokenizers of open_clip share the tables of one, as reading 49,000 merges is a tenth of a short run."""
    read, tables = tokenizer.__init__, vars(tokenizer())

    def shared(self: Any, context_length: int | None = tables["context_length"], **options: Any) -> None:
        if options:
            read(self, context_length=context_length, **options)
        else:
            vars(self).update(tables, context_length=context_length, cache={**tables["cache"]})

    tokenizer.__init__ = shared


def serve() -> None:
    """Answer the lines of standard input as the module says, until {}."""
    sys.path[:1] = [str(ROOT / "tests"), str(ROOT)]  # not helpers/; this checkout, wherever .venv is from
    gc.disable()  # imports make many objects, and they stay
    warm()
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a fork would copy every page
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # a fork would take back all operators that torch registered: a tenth of a short run
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            break
        if "wait" in question:
            print(os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.chdir(question["cwd"])
            os._exit(become(question["start"], question["out"], question["env"]))
        print(child, flush=True)


def become(arguments: Sequence[str], out: str, environment: Mapping[str, str]) -> int:
    """Run a module as `python -m` in this forked process, with output to the file `out`; return the exit code.

    The caller ends the process by os._exit: to take all modules apart would cost more than most commands.
    """
    os.setsid()
    file = os.open(out, os.O_RDWR | os.O_CREAT, 0o644)  # a terminal that may be read becomes the session's own
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    sys.argv = list(arguments)
    code: object = 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter would
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    serve()
