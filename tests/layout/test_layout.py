"""The layout: layers of folders, the torch-free start, sizes, budgets, and where thirty ideas live."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("data", "train", "eval", "dyad")  # lowest first; rglob does not follow the links in dyad/
SOURCES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py") if "samples" not in p.parts)
FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
# Lowest first: the modules of a folder import folders of their own line and of the lines above it in this list.
LAYERS = """
data/base
data
data/shards
data/loading
data/image_text
data/tables
data/question_passage
data/sequence
data/cli
data/build
train/losses/options
train
train/losses/sums
train/losses/gathered
train/losses/objectives
train/losses
train/towers train/towers/text train/towers/image train/towers/libraries
train/distributed
train/run_folder
train/tracking
train/monitor
train/step
train/cli
eval
eval/encode
eval/metrics
eval/search
eval/mine eval/score
eval/results
eval/tasks eval/tasks/sequence eval/tasks/question_passage
eval/report
eval/compare
dyad dyad/evaluation dyad/evaluation/kinds dyad/run dyad/plan
dyad/export dyad/doctor
""".split("\n")
LEVEL = {folder: level for level, line in enumerate(LAYERS) for folder in line.split()}
HEAVY = {"torch", "open_clip", "transformers", "webdataset", "accelerate", "wandb", "faiss", "pyarrow", "timm"}
BUDGETS = {"data": 9700, "train": 12800, "eval": 5300, "dyad": 6800}  # code lines: no blanks, comments, docstrings
QUESTIONS = """
what nobody typed is taken from the weights | train/cli/start_defaults.py | take_start_defaults
the temperature that weights know | train/towers/libraries/calibration.py | Calibration
the temperature is clamped | train/losses/objectives/base.py | clamp_
the schedule of the learning rate | train/step/schedule.py | learning_rate
all objectives by name | train/losses/__init__.py | build_objective
the formats of question files | data/question_passage/formats.py | FORMATS
learning the scores of pairs | train/losses/objectives/scored_pairs.py | CoSENT
the correlation of ranks | eval/metrics/correlation.py | spearman_values
learning from a teacher's scores | train/losses/objectives/distillation.py | divergence
the relevance that a file gives a pair | data/base/relevance.py | relevance_of
DDP | train/distributed/data_parallel.py | wrap_towers
where compiled kernels are kept | train/distributed/compile_caches.py | use_local_caches
shards are indexed by several machines | dyad/run/indexing.py | index_shares
the layers of a tower | train/towers/layers.py | layers_of
activation checkpointing | train/towers/layers.py | checkpoint_activations
sharded towers: FSDP2 and HSDP | train/distributed/sharding.py | shard
this rank's part of a sharded tensor | train/distributed/sharded_tensors.py | local
parts of a checkpoint, by rows | train/run_folder/tensor_files.py | SavedTensors
the all-gather with a gradient | train/losses/sums/all_gather.py | Layout
GradCache: the two passes of a loss | train/step/loss_term.py | gradient
GradCache: a batch is cut into chunks | train/step/chunks.py | in_chunks
the dtype of autocast | train/distributed/devices.py | AUTOCAST
several losses in one step | train/cli/also.py | auxiliary_configs
the target network that a side learns against | train/step/target.py | Target
augmentation of images | data/image_text/noise.py | add_noise
the features of a frozen tower are cached | train/towers/frozen_cache.py | FrozenCache
a run is new, resumed, or begins with other weights | dyad/run/resume.py | lock_and_find
the best checkpoint by a metric | dyad/run/best_checkpoint.py | BestCheckpoint
which checkpoint RUN@best is | train/run_folder/locate.py | locate
what is in a checkpoint | train/run_folder/checkpoint_state.py | capture
a checkpoint is read | train/run_folder/checkpoint.py | Checkpoint
old checkpoints are deleted | train/run_folder/saving.py | _delete_old
the hard negatives of a row are drawn | data/question_passage/negatives.py | draw_negatives
the images that are wrong for a caption | data/image_text/wrong_images.py | WrongImages
wrong x among the candidates of a y | train/losses/gathered/further_rows.py | FurtherRows
the noise of NCE is drawn | data/loading/drawn_items.py | DrawnItems
the rules of mining | eval/mine/mining.py | mine
the images mined for a caption | eval/mine/images.py | CaptionsAndImages
the captions mined for an image | eval/mine/images.py | ImagesAndCaptions
R@K of images and captions | eval/tasks/image_text_retrieval.py | rank_metrics
BM25 | data/question_passage/bm25.py | build_bm25
a checkpoint of a run is put together | dyad/training_run.py | TrainingRun
whether a passage has an answer | data/question_passage/answers.py | answer_finder
log q of items by content key | data/log_weights.py | read_log_weights
nDCG | eval/metrics/trec.py | measures
partial AUC | eval/metrics/auc.py | auc_values
the context of a step of a sequence | train/towers/sequence.py | ContextNetwork
HR, nDCG and MRR of next items | eval/tasks/sequence/next_item.py | NextItem
parts of long sequences | data/sequence/windows.py | windows_of
the projection heads | train/towers/heads.py | HEADS
the linear probe of frozen features | eval/tasks/linear_probe.py | linear_probe
the trackers | train/tracking/trackers.py | TRACKERS
which samples a step sees | data/loading/order.py | Order
what replaces a broken image | data/loading/replacement.py | Replacements
the backward of the log-sum-exp | train/losses/sums/lse.py | log_partition
the name of a run that was given none | train/run_folder/folder.py | run_folder
the index of a shard | data/shards/index.py | index_shards
the hint for a key of another name | train/cli/synonyms.py | OTHER_NAMES
the search, exact or by FAISS | eval/search/index.py | Index
which FAISS indexes are taken | eval/search/index_spec.py | FACTORY
the mean over the templates of a class | eval/tasks/zero_shot.py | _weights
the hint "Did you mean" | data/base/errors.py | nearest
the lock of a run folder | train/run_folder/run_state.py | locked_folder
JPEGs are decoded | data/image_text/decode.py | decode
the sections of W&B's dashboard | train/tracking/wandb.py | GROUPS
the galleries and tables of W&B | eval/results/panels.py | panels
the score of an answer by a language model | train/towers/text/likelihood.py | Likelihood
the end of a run whose other ranks are gone | train/distributed/failures.py | PeerFailure
SIGTERM asks for a stop | train/distributed/signals.py | StopRequest
a stop that was asked for writes a last checkpoint | train/step/loop.py | fit
the random numbers of a sample's augmentation | data/loading/sample_rng.py | uniforms
a loss spike skips the step | train/monitor/loss_spikes.py | LossSpikes
the columns of an evaluator's result | eval/results/kinds.py | ResultKind
confidence intervals | eval/metrics/bootstrap.py | interval
how many graphs of chunks are kept | train/step/graph_cache.py | MemoryBudget
a file is written whole or not at all | data/base/files.py | whole_file
which changed keys a resumed run refuses | train/run_folder/folder.py | check_run
an export gives the same embeddings | dyad/export/library.py | compare_embeddings
the share of a rank in the mean of a loss | train/losses/gathered/candidates.py | share
the process group and its timeouts | train/distributed/world.py | init_world
exit codes | data/base/errors.py | ExitCode
the memory that a run will take | dyad/plan/plan.py | RunPlan
"""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file, the module first."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, as paths below the root without .py; lines of functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ENTRY_POINTS = {"train/doctor.py", "train/export.py"}  # beside each __main__.py: python -m train.doctor is a command


def files_imported(path: Path) -> Iterator[Path]:
    """The files of ours that a file imports, for typing only or inside a function, too."""
    for module in imported(path):
        target = ROOT / module.removeprefix("dyad.").replace(".", "/")
        if module.startswith("dyad.") and target.with_suffix(".py").exists():
            yield target.with_suffix(".py")
        elif module.startswith("dyad.") and (ROOT / "dyad" / target.relative_to(ROOT)).with_suffix(".py").exists():
            yield (ROOT / "dyad" / target.relative_to(ROOT)).with_suffix(".py")


def test_no_folder_imports_a_higher_one() -> None:
    for path in (p for p in SOURCES if p.name != "__main__.py" and name(p) not in ENTRY_POINTS):
        for target in files_imported(path):
            assert LEVEL[name(target.parent)] <= LEVEL[name(path.parent)], f"{name(path)} imports {name(target)}"


def test_entry_points_only_start_the_application() -> None:
    for path in SOURCES:
        if (path.name == "__main__.py" and path.parent.name != "dyad") or name(path) in ENTRY_POINTS:
            assert [name(target) for target in files_imported(path)] == ["dyad/start.py"], path


def test_no_files_import_each_other_in_a_circle() -> None:
    """Two files that need each other hold one idea, or a name that stands in the wrong one."""
    TopologicalSorter({path: set(files_imported(path)) for path in SOURCES}).prepare()


def test_the_file_that_runs_a_training_imports_few_modules() -> None:
    assert len({*files_imported(ROOT / "dyad/run/train_run.py")}) <= 30


def test_our_packages_have_one_name() -> None:
    """`import data` would load a module a second time, or a stranger's."""
    for path in FILES:
        assert {module.split(".")[0] for module in imported(path)}.isdisjoint({"data", "train", "eval"}), path


def test_losses_import_only_torch_and_their_configuration() -> None:
    allowed = (
        "dyad.train.losses",
        "dyad.data.base.arrays",
        "dyad.data.base.errors",
        "dyad.data.base.limits",
        "dyad.data.config",
        "dyad.data.batch",
        "dyad.data.log_weights",
    )
    for path in (ROOT / "train/losses").rglob("*.py"):
        ours = {module for module in imported(path) if module.startswith("dyad.")}
        assert all(module.startswith(allowed) for module in ours), (path, ours)


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path} has {lines} lines, and may have 400: split it by its ideas"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno < 120, f"{path}: {node.name}"


def test_folders_stay_small() -> None:
    modules = Counter(path.parent for path in SOURCES if path.name not in ("__init__.py", "__main__.py"))
    assert {name(folder): count for folder, count in modules.items() if count > 14} == {}


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in SOURCES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def code_lines(path: Path) -> int:
    text, documented = path.read_text(), set[int]()
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines |= set(range(token.start[0], token.end[0] + 1)) if token.string else set()
    return len(lines - documented)


@pytest.mark.parametrize("package", BUDGETS)
def test_packages_stay_within_their_budgets(package: str) -> None:
    paths = [p for p in FILES if p.relative_to(ROOT).parts[0] == package]
    lines = sum(map(code_lines, paths))
    told = f"{package}/ has {lines:,} code lines, and may have {BUDGETS[package]:,}"
    assert lines <= BUDGETS[package], f"{told}: take some away, or raise BUDGETS and say in CHANGELOG.md for what"


ONE_PLACE = {  # pattern → the files of data/ and eval/ that may have it
    r"utf-8-sig|BOM_UTF": {"data/shards/text_files.py", "data/base/json_text.py"},
    r"Image\.open|decode_jpeg\(": {"data/image_text/image_files.py", "data/image_text/decode.py"},
    r"TextIOWrapper\((?!open_text)": set(),
}


@pytest.mark.parametrize("pattern", ONE_PLACE)
def test_files_of_others_are_opened_and_decoded_in_one_place(pattern: str) -> None:
    paths = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("data", "eval")]
    found = {p.relative_to(ROOT).as_posix() for p in paths if re.search(pattern, p.read_text())}
    assert found == ONE_PLACE[pattern]


def test_what_data_check_finds_are_faults_of_the_readers() -> None:
    assert not re.search(r"(BadRow|SampleError)\(", (ROOT / "data/cli/check.py").read_text())


def test_no_word_of_a_task_in_the_loop_the_step_and_the_losses() -> None:
    for path in [ROOT / "train/step/loop.py", ROOT / "train/step/step.py", *(ROOT / "train/losses").rglob("*.py")]:
        names = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
        assert not names & {"image", "images", "text", "texts", "question", "passage"}, path


@pytest.mark.parametrize(
    ("path", "promise"), [("SECURITY.md", r"^- \*\*.*"), ("docs/faults.md", r"^\| (?!---|what happens).*")]
)
def test_each_promise_names_tests_that_exist(path: str, promise: str) -> None:
    promises = re.findall(promise, (ROOT / path).read_text(), re.MULTILINE)
    assert len(promises) > 20
    for line in promises:
        named = re.findall(r"`(tests/[\w/]+\.(?:py|sh))`", line)
        assert named and all((ROOT / name).is_file() for name in named), line


@pytest.mark.parametrize("line", QUESTIONS.strip().splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_ideas_live_where_their_names_say(line: str) -> None:
    """The questions of a newcomer: idea | file | a name that it defines."""
    _, path, defined = map(str.strip, line.split("|"))
    whole = nodes(ROOT / path)
    assert isinstance(whole[0], ast.Module)
    found = {
        getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None) or ""
        for node in whole
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    } | {
        target.id
        for node in whole[0].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert defined in found, (defined, sorted(found))


def test_commands_start_without_heavy_imports() -> None:
    """They choose before torch loads how its threads wait, and refuse a mistake before they wait for torch."""
    modules = """dyad dyad.__main__ dyad.train.losses dyad.train.config dyad.train.cli.compose dyad.train.cli.usage
        dyad.train.run_folder.folder dyad.data.config dyad.data.base.errors dyad.data.shards.sources dyad.eval.config
        dyad.data.cli.main dyad.run.main dyad.doctor.main dyad.export.main dyad.evaluation.main
        dyad.evaluation.mine dyad.eval.report.main dyad.eval.compare.main""".split()
    check = "dyad.run.checks.check_arguments(['experiment=emoji'])"
    code = f"import sys, {', '.join(modules)}; {check}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == ""


@pytest.mark.parametrize(
    "command", ["train", "data", "eval", "eval.mine", "eval.report", "eval.compare", "train.doctor", "train.export"]
)
def test_no_module_has_two_names(command: str) -> None:
    """Of a file there is one module, but for the sentence of the folder that holds the entry point."""
    code = (
        "import sys, runpy; from contextlib import suppress; sys.argv = ['x', '--help']\n"
        f"with suppress(SystemExit): runpy.run_module({command!r}, run_name='__main__', alter_sys=True)\n"
        "from pathlib import Path; from collections import Counter;"
        "files = Counter(Path(m.__file__).resolve() for n, m in sys.modules.items()"
        f" if n != '__main__' and str(getattr(m, '__file__', None)).startswith({str(ROOT)!r})"
        " and Path(m.__file__).name not in ('__init__.py', '__main__.py'));"
        "print('twice', [str(f) for f, n in files.items() if n > 1])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "twice []", run.stdout + run.stderr


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports a file outside of packages by its name alone."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    assert len({*names}) == len(names)


def test_a_process_group_is_ended_where_it_is_begun() -> None:
    """Else gloo's threads outlive it, and one that frees a tensor while the interpreter ends aborts the process."""
    for path in FILES:
        code = path.read_text()
        if re.search(r"\bdist\.init_process_group\(", code):
            assert "dist.destroy_process_group()" in code, path
