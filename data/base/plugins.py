"""Imports the modules that the user names by plugins=[…] on the command line. dyad.plugins has the functions that
these modules call to register what they add.

Only the command line names code: `plugins` in a recipe, a config.yaml or a checkpoint is never imported.
"""

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from dyad.data.base.errors import ConfigError, first_line

PLUGINS = "plugins"
PLUGINS_HELP = "modules or .py files of your own code, imported first: plugins=[my_module]; see CONTRIBUTING.md"
OURS = Path(__file__).parents[2]  # the folder of Dyad: a line of a traceback in it is not the plugin's
_imported: dict[str, ModuleType] = {}  # by the names that the user typed


def import_typed_plugins(arguments: Iterable[str]) -> None:
    """Import the modules of the argument plugins=[…], if the command line has it.

    arguments: the arguments of a command line; others are ignored. Raises ConfigError if the value of plugins= is no
    list, and as `import_plugins` does.
    """
    for value in (argument.partition("=")[2] for argument in arguments if argument.startswith(f"{PLUGINS}=")):
        if value[:1] + value[-1:] != "[]":
            raise ConfigError(f"{PLUGINS}={value}: must be a list of modules or .py files. Write {PLUGINS}=[{value}]")
        import_plugins(name.strip("'\" ") for name in value[1:-1].split(","))


def import_plugins(names: Iterable[str]) -> None:
    """Import plugins that are not imported yet. names: modules, or paths of .py files, as the user typed them.

    The code of a module runs, and registers what it adds. The folder of a plugin that is not installed is appended to
    sys.path. Empty names are skipped. Raises ConfigError for a module that does not exist, has the name of another one,
    or raises an error.
    """
    for name in names:
        if name and name not in _imported:
            _imported[name] = _import(name)


def imported_plugins() -> list[str]:
    """Return the names of the imported plugins, as the user typed them."""
    return list(_imported)


def plugin_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) for each Python file of the imported plugins, all those of a package.

    name: "MODULE/PATH", with the path relative to the plugin's folder, so that it is equal on all machines.
    """
    for module in _imported.values():
        path = Path(module.__file__ or "")
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        yield from ((f"{module.__name__}/{file.relative_to(path.parent)}", file) for file in files)


def plugins_needed(recorded: Sequence[str]) -> str:
    """Return a hint for an error message, to import the plugins with which a run was made; "" if all are imported.

    The hint begins with a blank. recorded: the names of these plugins, from the key `plugins` of the run's config.yaml.
    """
    modules = [Path(name).stem if name.endswith(".py") else name for name in recorded]
    if all(name in _imported or module in sys.modules for name, module in zip(recorded, modules, strict=True)):
        return ""
    trusted = f"add {PLUGINS}=[{','.join(recorded)}]; in Python, type before: import {', '.join(modules)}"
    return f" The run was made with code beside Dyad. If you trust it, {trusted}"


def _import(name: str) -> ModuleType:
    """Import the plugin `name` and return its module. Errors, all ConfigError, as of `import_plugins`."""
    path = Path(name).expanduser().absolute() if name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ConfigError(f"{PLUGINS}=[{name}]: no such file")
    folder, module = (Path.cwd(), name) if path is None else (path.parent, path.stem)
    root = folder
    try:
        # At the end: no file of the folder hides a package that others import. Not at all for an installed module
        if str(folder) not in sys.path and (path is not None or find_spec(module.partition(".")[0]) is None):
            sys.path.append(str(folder))
        if (spec := find_spec(module.partition(".")[0])) is None:
            raise ConfigError("no such module in the working folder, in PYTHONPATH or installed")
        root = Path(spec.origin or folder / module).absolute().parent
        if (found := import_module(module)).__file__ is None:
            raise ConfigError("a folder without __init__.py is no module")
    except Exception as error:
        name_of_error = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        text = error.msg if isinstance(error, SyntaxError) else first_line(error)
        raise ConfigError(f"{PLUGINS}=[{name}]: {_where(error, root)}{name_of_error}{text}") from error
    if path is not None and Path(found.__file__ or "").resolve() != path.resolve():
        raise ConfigError(f"{PLUGINS}=[{name}]: {found.__file__} has the same name. Give your file another one")
    return found


def _where(error: Exception, root: Path) -> str:
    """Return "FILE, line N: " for the innermost line of the plugin in the traceback of `error`; "" if there is none.
    root: the plugin's folder."""
    lines = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines = [(Path(error.filename), error.lineno)]
    own = [f"{file}, line {line}: " for file, line in lines if root in file.parents and OURS not in file.parents]
    return own[-1] if own else ""
