"""Starts a command. What Python or which packages it lacks is said in one line; older Pythons can read this file."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

OLDEST, NEWEST = (3, 11), (3, 13)  # requires-python of pyproject.toml
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
IN_CHECKOUT = os.path.exists(os.path.join(ROOT, "launch", "setup.sh"))
OURS = {ROOT, os.path.dirname(os.path.realpath(os.__file__))}  # and Python's own: modules are looked for there


def start(module: str) -> None:
    """Run `main` of the module of a command, print errors as messages, and exit with the command's exit code.

    With another Python, or without a package that the command imports, that is one line and exit code 2.
    """
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        found, oldest, newest = (".".join(map(str, v)) for v in (sys.version_info[:3], OLDEST, NEWEST))
        text = f"Dyad needs Python {oldest} to {newest}; {sys.executable} is {found}. {_advice()}"
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)
    leave_working_folder()
    from dyad.data.base.errors import ConfigError
    from dyad.process import run

    def main() -> None:
        try:
            import_module(module).main()
        except ModuleNotFoundError as error:
            package = (error.name or "dyad").partition(".")[0]
            if find_spec(package) is not None:  # there, but not all of it
                raise
            raise ConfigError(f"{sys.executable} has no package {package!r}. {_advice()}") from error

    run(main)


def leave_working_folder() -> None:
    """Take the working folder off the path of modules, of this interpreter and of all that it or a library starts.

    It may hold a stranger's data, and a file torch.py beside them would run in place of torch. `python -m` and an empty
    entry of PYTHONPATH put it there. The checkout stays, as `python -m train` needs it.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = filter(_is_safe, sys.path)
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(_is_safe, os.environ["PYTHONPATH"].split(os.pathsep)))


def _is_safe(folder: str) -> bool:
    """Whether modules of a folder of the path may be imported: it is not the working folder, or it is one of ours."""
    real = os.path.realpath(folder)
    return real in OURS or (folder != "" and real != os.path.realpath(os.curdir))


def _advice() -> str:
    if IN_CHECKOUT:
        return "Type: source " + os.path.relpath(os.path.join(ROOT, "launch", "setup.sh"))
    return "Install Dyad and what it needs there: pip install 'dyad.whl[cpu]'   ([gpu] with a GPU)"
