"""README.md and docs/: commands compose, links and keys exist, the pages of docs/reference/ are those of the code."""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from helpers.documents import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    export_options,
    known_keys,
    links,
    named_keys,
    prose,
    run_commands,
    spans,
)
from helpers.shards import image

import dyad
from docs.hooks import ABOVE
from docs.write_reference import pages
from dyad.__main__ import COMMANDS
from dyad.data.base.command_line import parse_options, split_arguments
from dyad.data.base.errors import ConfigError
from dyad.data.cli.main import VERBS, parse_verb
from dyad.eval.config import CompareCommand, EvalCommand, MineCommand, ReportCommand, ScoreCommand
from dyad.train.cli.command_line import parse_command_line
from dyad.train.cli.compose import compose_config, keys
from dyad.train.config_rules import check_values
from dyad.train.losses import OBJECTIVES

README, DOCS = ROOT / "README.md", ROOT / "docs"
KINDS = {"bash", "sh", "python", "json", "yaml", "text", "csv", "dockerfile", "diff"}
OPTIONS = {
    "eval": EvalCommand,
    "mine": MineCommand,
    "report": ReportCommand,
    "compare": CompareCommand,
    "score": ScoreCommand,
    "export": export_options(),
}
STARTED = re.compile(  # a command of ours: what starts it, its name, its words
    r"(?:[A-Z_]+=\S+ )*(?:python -m (?:train\.|eval\.)?|dyad |(?:bash|sbatch|srun)(?: -\S+)* launch/)"
    r"(?P<name>train|eval|data|doctor|export|mine|report|compare|score|torchrun\.sh|slurm\.sbatch|demo\.sh)"
    r"(?: (?P<words>.*))?"
)
PLACES = r"(?:tests|launch|train|data|eval|configs|docs|dyad)/[\w/.-]*|[\w.]+\.(?:md|toml|lock|hashes)"

OF_A_RUN = {"eval/", "train/", "val/", "data/"}  # folders that a command makes

KEYS_OF_TRAINING = {key for key, _, _ in keys()}
RUN = run_commands()


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def checked(words: tuple[str, ...]) -> None:
    check_values(compose_config(words), 1)


def compose(command: str) -> bool:
    """Compose the configuration or the options of a command of ours; False for another command."""
    found = STARTED.fullmatch(command.partition(" | ")[0])
    if not found:
        return False
    words = shlex.split((found["words"] or "").partition(" > ")[0])
    if {"--help", "--json", "translate"} & {*words} or not words or any(w.startswith("plugins=") for w in words):
        return True  # tests/journeys/test_contributing.py runs the plugins
    if found["name"] == "data":
        parse_verb(next(verb for verb in VERBS if verb.name == words[0]), words[1:])
    elif found["name"] in OPTIONS:
        options = split_arguments(words)[1] if found["name"] == "compare" else words  # it takes folders, too
        parse_options(OPTIONS[found["name"]], options, found["name"])
    else:
        line = parse_command_line([word for word in words if word != "--dry-run"])
        for run in line.runs():
            checked(tuple(word for word in run if not word.startswith("run.name=")))
    return True


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_have_a_language_and_are_well_formed(page: Path) -> None:
    assert page.read_text().count("```") == 2 * len(blocks(page)), "a fence without its end, or inside a line"
    for block in blocks(page):
        assert block.kind in KINDS, f"```{block.kind}"
        if block.kind == "python":
            ast.parse(block.text)
        elif block.kind == "json":
            [json.loads(line) for line in block.text.splitlines()]
        elif block.kind == "yaml":
            yaml.safe_load(block.text)
    shell = "\n".join(block.text for block in blocks(page) if block.kind in ("bash", "sh"))
    done = subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_compose(page: Path) -> None:
    """Those of blocks, and those inside a sentence or a table, but for those that tests/journeys/test_readme.py runs.
    Others name scripts that are there."""
    told = [
        span
        for span in spans(page)
        if span.startswith(("python -m", "dyad ", "sbatch ")) and "…" not in span and "=" in span
    ]
    for command in [c for b in blocks(page) if b.kind in ("bash", "sh") for c in b.commands()] + told:
        if command not in RUN and not compose(command):
            assert not command.startswith("python -m train "), command
            scripts = re.findall(r"\b(?:bash|source|sbatch) ((?:launch|tests)/\S+)", command)
            assert [script for script in scripts if not (ROOT / script).is_file()] == [], command


@pytest.mark.soak
@pytest.mark.parametrize("command", RUN)
def test_commands_that_are_run_compose_as_shown(command: str) -> None:
    """tests/journeys/test_readme.py takes fewer steps, and smaller batches and models."""
    assert compose(command) or not command.startswith("python -m train ")


def test_the_readme_installs_what_its_exports_need() -> None:
    page = README.read_text()
    extras = {word for line in re.findall(r"source launch/setup.sh ([\w -]+)", page) for word in line.split()}
    for format_ in re.findall(r"train\.export .*format=(\w+)", page):
        assert {"onnx": "onnx", "sentence_transformers": "sentence-transformers"}.get(format_, "demo") in extras, (
            format_
        )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{path}: no such file"
        inside = target.is_relative_to(DOCS) or target in {ROOT / name for name in ABOVE}
        assert page == README or inside, f"{path}: MkDocs has the pages of docs/ and of docs/hooks.py alone"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_and_files_between_backticks_exist(page: Path) -> None:
    missing = [(span, key) for span in spans(page) for key in named_keys(span) if key not in known_keys()]
    assert missing == [], "no such key"
    for span in spans(page):
        if re.fullmatch(PLACES, span) and span not in OF_A_RUN:
            assert any((folder / span).exists() for folder in (ROOT, page.parent)), f"`{span}`: no such file"


def test_what_the_map_of_contributing_names_exists() -> None:
    """Each file and folder of "Where things are", as seen from the folders of its row, the one above, or the root."""
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].split("```")[1].splitlines()
    room, folders, missing = ROOT, [ROOT], list[str]()
    for row in filter(None, rows):
        first, second, text = row[:8].strip(), row[8:34].strip(), row[34:]
        if first:
            room, folders = ROOT / first, [ROOT / first]
        if second:  # "towers/image/ text/" are folders of one folder; a row that begins with a file is of the room
            head, *others = second.split()
            named = [room / head, *((room / head).parent / other for other in others)]
            folders = [room] if named[0].suffix else named
            missing += [name(path) for path in named if not path.exists()]
        for file in re.findall(r"[\w/]+\.py\b|\b[a-z_]+/(?=[a-z_]+/)[a-z_/]+/", text):
            places = [ROOT, *folders, *(folder.parent for folder in folders)]
            missing += [file] * (not any((place / file).exists() for place in places))
    assert missing == []


def test_quoted_values_between_backticks_can_be_copied() -> None:
    """The shell and Hydra both read quotes and braces."""
    quoted = {span for page in PAGES for span in spans(page) if re.match(r"'?[a-z_.]+=.*[\"'{]", span)}
    assert len(quoted) > 5
    lines: list[dict[str, str]] = [{}]  # each composes once, with a value of each key
    for words in map(shlex.split, sorted(quoted)):
        if all(named_keys(word) <= KEYS_OF_TRAINING for word in words) and "…" not in "".join(words):
            own = {word.partition("=")[0]: word for word in words}
            free = next((line for line in lines if not line.keys() & own.keys()), None)
            if free is None:
                lines.append(free := {})
            free.update(own)
    for line in lines:
        compose_config([*line.values()])


@pytest.mark.parametrize("route", ["train/__init__.py", "train/losses/__init__.py"])
def test_the_files_of_a_route_exist(route: str) -> None:
    """A path with folders is below that of the route, or the repository; of a file alone the folder is named before."""
    text = ast.get_docstring(ast.parse((ROOT / route).read_text())) or ""
    named, places = re.findall(r"[\w/]+\.py\b", text), (ROOT, (ROOT / route).parent)
    assert len(named) > 9
    there = {path.name for folder in ("data", "train", "dyad") for path in (ROOT / folder).rglob("*.py")}
    missing = [path for path in named if not any((place / path).is_file() for place in places)]
    assert [path for path in missing if "/" in path or path not in there] == []


def test_the_site_has_every_page_once() -> None:
    def flat(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        parts = nav.values() if isinstance(nav, dict) else nav
        assert not isinstance(parts, str)
        return [page for part in parts for page in flat(part)]  # type: ignore[attr-defined]

    listed = flat(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = [page.relative_to(DOCS).as_posix() for page in PAGES if page != README]
    assert sorted(listed) == sorted([*there, *ABOVE])


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 700


def test_the_pages_of_the_reference_are_those_of_the_code() -> None:
    stale = [path.name for path, text in pages().items() if not path.is_file() or path.read_text() != text]
    assert stale == [], "run: python -m docs.write_reference"
    assert {path.name for path in (DOCS / "reference").iterdir()} == {path.name for path in pages()}


def test_every_objective_has_its_formula_and_its_use() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / "objectives.md").read_text(), re.MULTILINE)
    assert {*OBJECTIVES} == {row[0] for row in rows}


def test_names_of_the_python_api_exist() -> None:
    for page in PAGES:
        for found in re.findall(r"`dyad\.(\w+)[`(]", prose(page)):
            assert found in dyad.__all__ or import_module(f"dyad.{found}"), f"{name(page)}: dyad.{found}"


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, below = re.findall(r"3\.(\d+)", project["requires-python"])
    torch = next(r for r in project["dependencies"] if r.startswith("torch>"))
    install = (DOCS / "install.md").read_text()
    assert f"Python 3.{least} to 3.{int(below) - 1}" in install and torch.partition(">=")[2].split(",")[0] in install


def test_the_checks_can_fail() -> None:
    assert compose("python -m train experiment=emoji steps=3") and not compose("ls")
    for command in ("python -m train stepz=3", "NPROC=8 bash launch/torchrun.sh model.nam=x", "dyad eval runn=x"):
        with pytest.raises(ConfigError):
            compose(command)
    assert Block(README, "sh", "a \\\n b # c\n# d\n").commands() == ["a b"]
    assert "bash launch/demo.sh" in RUN


SAMPLES = re.findall(r"`([\w./]+)`[^`\n]*:\n\n```\w+\n(.*?)```", (DOCS / "formats.md").read_text(), re.DOTALL)


def test_the_samples_of_the_formats_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each by `python -m data check`; the files of a BEIR folder together, a log by `python -m data sequences`."""
    assert len(SAMPLES) >= 12
    for file, text in SAMPLES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(image(number))
    for file in dict.fromkeys(file.partition("/")[0] for file, _ in SAMPLES):
        is_log = file.startswith("log")
        words = ["sequences", f"out={tmp_path}/parts"] if is_log else ["check", "workers=1"]
        monkeypatch.setattr("sys.argv", ["data", *words, str(tmp_path / file)])
        import_module(COMMANDS["data"][0]).main()
        told = capsys.readouterr().out
        assert ("1 users had fewer" if is_log else "fine: ") in told, f"{file}\n{told}"


def test_the_messages_that_are_explained_exist() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| .* \| .* \|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    sources = [path for room in ("data", "train", "eval", "dyad") for path in (ROOT / room).rglob("*.py")]
    told = (ROOT / "tests/messages.txt").read_text() + "".join(path.read_text() for path in sources)
    assert len(rows) > 15 and [row for row in rows if row not in told] == []


@pytest.mark.parametrize("walk", sorted((ROOT / "tests/journeys/walks").glob("*.txt")), ids=lambda path: path.stem)
def test_the_journeys_are_made_of_commands_that_the_documents_show(walk: Path) -> None:
    shown = {command for page in PAGES for block in blocks(page) for command in block.commands()}
    assert [line for line in walk.read_text().splitlines() if line not in shown] == []


def test_the_core_of_an_own_objective_is_that_of_the_example_that_is_run() -> None:
    lines = next(b.text for b in blocks(DOCS / "own_objective.md") if b.kind == "python").splitlines()
    example = [line.partition("  #")[0].strip() for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()]
    assert [line for line in lines if line.partition("  #")[0].strip() not in example] == []
