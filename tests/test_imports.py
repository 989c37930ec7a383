"""The direction of imports, the torch-free start, the size of files and functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for d in ("data", "train", "eval", "tests") for p in (ROOT / d).rglob("*.py"))
SOURCES = [p for p in FILES if p.relative_to(ROOT).parts[0] != "tests"]
WIRING = {
    "train.__main__",
    "train.doctor.__main__",
    "train.doctor.run",
    "train.evaluation",
    "train.fitting",
    "train.origin",
    "train.parts",
    "train.refresh",
    "train.export.__main__",
    "eval.__main__",
    "eval.mine",
    "eval.report.__main__",
}
HEAVY = {"torch", "open_clip", "transformers", "webdataset", "accelerate", "wandb", "faiss", "pyarrow", "timm"}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(name: str) -> int:
    """data 0 ← train configuration and losses 1 ← train core 2 ← eval core 3 ← wiring 4."""
    if name in WIRING:
        return 4
    return {"data": 0, "train": 2, "eval": 3}[name.split(".")[0]]


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_nothing_imports_upwards(path: Path) -> None:
    own = module(path)
    allowed_config = {"eval.config"} if own.startswith("train.") else set()
    for name in imports(path):
        if name.split(".")[0] not in ("data", "train", "eval"):
            continue
        target = next(
            (n for n in (name, name.rpartition(".")[0]) if (ROOT / n.replace(".", "/")).with_suffix(".py").exists()),
            name,
        )
        if target in allowed_config:
            continue
        assert layer(target) <= layer(own), f"{own} imports {target}"


def test_losses_import_only_torch_and_their_configuration() -> None:
    for path in (ROOT / "train/losses").glob("*.py"):
        ours = {n for n in imports(path) if n.split(".")[0] in ("data", "train", "eval")}
        assert all(n.startswith(("train.losses", "data.errors", "data.config", "data.batch")) for n in ours), (
            path,
            ours,
        )


@pytest.mark.parametrize("path", FILES, ids=module)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 120, node.name


@pytest.mark.parametrize("path", FILES, ids=module)
def test_the_eval_package_never_hides_the_builtin(path: Path) -> None:
    assert not any(
        isinstance(n, ast.Import) and a.name.split(".")[0] == "eval"
        for n in ast.walk(ast.parse(path.read_text()))
        for a in getattr(n, "names", [])
        if isinstance(n, ast.Import)
    )


def test_no_word_of_a_task_in_the_loop_the_step_and_the_losses() -> None:
    for path in [ROOT / "train/loop.py", ROOT / "train/step.py", *(ROOT / "train/losses").glob("*.py")]:
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert not names & {"image", "images", "text", "texts", "question", "passage"}, path


def test_configuration_starts_without_heavy_imports() -> None:
    modules = "train, train.losses, train.config, train.command.compose, train.command.usage, train.runs.folder, "
    modules += "data, data.config, data.errors, data.sources, eval, eval.config, "
    modules += "data.__main__, train.__main__, train.doctor.__main__, train.export.__main__, eval.__main__, eval.mine, "
    modules += "eval.report.__main__"  # commands choose before torch loads how its threads wait
    code = f"import sys, {modules}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == ""
