"""Modules that the user names: found, imported once, and their mistakes told in one line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.messages import raises

from dyad.data.base import plugins
from dyad.data.base.errors import ConfigError
from dyad.data.base.parallel import parallel_map
from dyad.data.base.plugins import import_typed_plugins, imported_plugins, plugin_files, plugins_needed


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(plugins, "_imported", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(("own_package", "first_plugin", "second_plugin"))]:
        del sys.modules[name]


def loaded(number: int) -> list[str]:
    return imported_plugins()


def test_modules_packages_and_files_are_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dyad.train.distributed.consistency import code_digest  # not of the processes below: it loads torch

    monkeypatch.setenv("IMPORTS", "")
    (tmp_path / "first_plugin.py").write_text("import os\nos.environ['IMPORTS'] += 'x'\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/__init__.py").write_text("from own_package import part\n")
    (tmp_path / "own_package/part.py").write_text("")
    names = ["first_plugin", "own_package", f"{tmp_path}/first_plugin.py"]
    for _ in range(2):
        import_typed_plugins(["steps=1", f"plugins=[{','.join(names)}]"])
    assert imported_plugins() == names and os.environ["IMPORTS"] == "x"
    assert [name for name, _ in plugin_files()][:2] == ["first_plugin/first_plugin.py", "own_package/__init__.py"]
    before = code_digest()
    (tmp_path / "own_package/part.py").write_text("x = 1\n")
    assert code_digest() != before
    with parallel_map(2, 2) as run:
        assert list(run(loaded, range(2))) == [names, names]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError"),
        ("def f(:\n", "line 1: SyntaxError"),
        ("import json\njson.loads('x')\n", "line 2: JSONDecodeError"),
        ("import no_such_thing\n", "line 1: ModuleNotFoundError"),
        (
            "from dyad.plugins import register_objective\n"
            "from dyad.train.losses.options.spectral import SpectralOptions\n"
            "register_objective('clip', SpectralOptions)\n",
            "line 3: objective=clip",
        ),
        (
            "from dyad.plugins import register_objective\n"
            "from dyad.train.losses.options.spectral import SpectralOptions\n"
            "register_objective('clip_emoji', SpectralOptions)\n",
            "line 3: objective=clip_emoji",
        ),
        (
            "from dyad.train.losses.options.common import number\nnumber(0.2, 'gap', '0 or morre')\n",
            "line 2: number(…): no range '0 or morre'",
        ),
        (
            "from dyad.plugins import register_image_tower\nregister_image_tower('timm', print)\n",
            "line 2: model.image.kind=timm",
        ),
    ],
)
def test_a_mistake_of_a_plugin_is_one_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "faulty_plugin.py").write_text(text)
    with raises(ConfigError, f"plugins=[faulty_plugin]: {tmp_path}/faulty_plugin.py, {named}") as caught:
        import_typed_plugins(["plugins=[faulty_plugin]"])
    assert len(str(caught.value).splitlines()) == 1 and imported_plugins() == []


def test_what_is_no_plugin_is_refused(tmp_path: Path) -> None:
    for word, named in {
        "plugins=mine": "plugins=[mine]",
        "plugins=[nowhere]": "PYTHONPATH",
        "plugins=[nowhere.py]": "nowhere.py",
    }.items():
        with raises(ConfigError, named):
            import_typed_plugins([word])
    (tmp_path / "colorsys.py").write_text("")
    with raises(ConfigError, "colorsys.py"):
        import_typed_plugins(["plugins=[colorsys.py]"])


def test_the_hint_for_a_run_names_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "second_plugin.py").write_text("")
    assert plugins_needed([]) == ""
    hint = plugins_needed(["second_plugin", "code/third_plugin.py"])
    assert "plugins=[second_plugin,code/third_plugin.py]" in hint and "import second_plugin, third_plugin" in hint
    import_typed_plugins(["plugins=[second_plugin]"])
    assert plugins_needed(["second_plugin", "json"]) == ""  # the other one by the import of Python


def test_a_command_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "faulty_plugin.py").write_text("1 / 0\n")
    command = [sys.executable, "-m", "dyad", "report", "run=x", "plugins=[faulty_plugin.py]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_a_plugin_that_registers_nothing_is_named(tmp_path: Path) -> None:
    from dyad.train.cli.compose import compose_config
    from dyad.train.cli.presets import groups

    (tmp_path / "first_plugin.py").write_text("")
    import_typed_plugins(["plugins=[first_plugin]"])
    with raises(ConfigError, "objective=first", ", ".join(groups()["objective"]), "plugins=[first_plugin]"):
        compose_config(["objective=first"])
