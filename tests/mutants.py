"""Mutants: small faults put into the code one at a time, to see whether the tests notice.

    python -m tests.mutants SEED [COUNT] [PYTEST ARGUMENT …]

SEED, such as a commit, draws COUNT (50) lines of data, train, eval and dyad, and in each an operator that is swapped,
a constant that is changed or a call that is dropped. In a clone of the last commit, tests run until one fails: those
of the changed file's own name, of its folder, those that import it, then those that the arguments for pytest name.
Prints a line for each mutant: by which test it was caught, or that it is alive. One to two hours on two idle cores.
"""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


@dataclass(frozen=True)
class Mutant:
    """Source text of one line (or lines, of one node) and what takes its place."""

    path: Path
    line: int
    before: str
    after: str
    text: str  # of the whole mutated file

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.before.split())} → {' '.join(self.after.split())}"


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt) and (after := mutated(node)) is not None:
            before = ast.get_source_segment(source, node) or ""
            start = sum(len(line) for line in source.splitlines(keepends=True)[: node.lineno - 1])
            begin = start + len(source.splitlines()[node.lineno - 1].encode()[: node.col_offset].decode())
            text = source[:begin] + after + source[begin + len(before) :]
            yield Mutant(path.relative_to(ROOT), node.lineno, before, after, text)


def mutated(node: ast.AST) -> str | None:
    """The source of a node with one fault; None where it has none of these."""
    match node:
        case ast.Expr(value=ast.Call()):
            return "None"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value) | float(value)):
            return repr(value + 1)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            node.op = SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            node.ops = [SWAPPED[type(op)]()]  # type: ignore[list-item]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ast.unparse(operand)
        case _:
            return None
    return f"({ast.unparse(node)})"


def draw(seed: str, count: int) -> list[Mutant]:
    """One mutant for each of `count` lines, drawn from all lines that have one."""
    paths = sorted(p for folder in ("data", "train", "eval", "dyad") for p in (ROOT / folder).rglob("*.py"))
    found = [m for path in paths if not path.is_symlink() and "samples" not in path.parts for m in mutants(path)]
    dice = random.Random(seed)
    lines = dice.sample(sorted({(str(m.path), m.line) for m in found}), count)
    return [dice.choice([m for m in found if (str(m.path), m.line) == line]) for line in lines]


def tests_of(checkout: Path, module: Path) -> Iterator[list[str]]:
    """Groups of tests, in the order in which they run: of the module's own name, of its folder, that import it."""
    folder = checkout / "tests" / module.parent
    yield [str(path) for path in folder.glob(f"test_{module.stem}*.py")]
    yield [str(folder)]
    package = ".".join(["dyad", *module.parent.parts])
    imports = re.compile(rf"{package}\.{module.stem}\b|from {package} import .*\b{module.stem}\b")
    named = (path for path in (checkout / "tests").rglob("test_*.py") if imports.search(path.read_text()))
    yield [str(path) for path in named if path.parent != folder]


def fails(checkout: Path, *tests: str) -> str:
    """The first test that fails in a checkout, "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout}/tests"}  # also of what the tests start
    try:
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "time"
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return " ".join(failed[:1]) or ("" if ended.returncode in (0, 5) else ended.stdout[-200:] + ended.stderr[-200:])


def main(seed: str, count: str = "50", *further: str) -> None:
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(ROOT), folder], check=True)
        for mutant in draw(seed, int(count)):
            target = Path(folder) / mutant.path
            whole = target.read_text()
            target.write_text(mutant.text)
            groups = filter(None, [*tests_of(Path(folder), mutant.path), further])
            by = next(filter(None, (fails(Path(folder), *group) for group in groups)), "")
            target.write_text(whole)
            caught += bool(by)
            print(f"{'caught' if by else 'ALIVE '} {mutant}  {by}", flush=True)
    print(f"{caught} of {count} caught, seed {seed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
