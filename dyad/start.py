"""Start a command. This file has only syntax of older Pythons, so that they can run it and print which version Dyad
needs."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

OLDEST, NEWEST = (3, 11), (3, 13)  # requires-python of pyproject.toml
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
IN_CHECKOUT = os.path.exists(os.path.join(ROOT, "launch", "setup.sh"))
# The folders that stay in sys.path even if they are the working folder: the checkout, and Python's own library
OURS = {ROOT, os.path.dirname(os.path.realpath(os.__file__))}


def start(module: str) -> None:
    """Import `module` and run its function `main`; for an error, print a message and exit with its exit code.

    Sets up the process as `run` (dyad/process.py) and `leave_working_folder` do. With a Python version that Dyad does
    not support, in a working folder that was deleted, or if a package is not installed, it prints one line and exits
    with 2.
    """
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        found, oldest, newest = (".".join(map(str, v)) for v in (sys.version_info[:3], OLDEST, NEWEST))
        _refuse(f"Dyad needs Python {oldest} to {newest}; {sys.executable} is {found}. {_advice()}")
    try:
        os.getcwd()
    except FileNotFoundError:
        _refuse('the working folder was deleted: change to a folder that exists, as by cd "$PWD"')
    leave_working_folder()
    from dyad.data.base.errors import ConfigError
    from dyad.process import run

    def main() -> None:
        try:
            import_module(module).main()
        except ModuleNotFoundError as error:
            package = (error.name or "dyad").partition(".")[0]
            if find_spec(package) is not None:  # the package is installed, and lacks a submodule
                raise
            raise ConfigError(f"{sys.executable} has no package {package!r}. {_advice()}") from error

    run(main)


def leave_working_folder() -> None:
    """Remove the working folder from sys.path and PYTHONPATH, and set PYTHONSAFEPATH for child processes.

    The working folder may hold untrusted data, and a file torch.py in it would be imported in place of torch. The
    option -m of python and an empty entry of PYTHONPATH put the working folder into sys.path. The checkout stays even
    if it is the working folder, because `python -m train` needs it.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = filter(_is_safe, sys.path)
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(_is_safe, os.environ["PYTHONPATH"].split(os.pathsep)))


def _is_safe(folder: str) -> bool:
    """Return whether `folder` may stay in sys.path: it is not the working folder, or it is one of OURS."""
    real = os.path.realpath(folder)
    return real in OURS or (folder != "" and real != os.path.realpath(os.curdir))


def _refuse(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _advice() -> str:
    if IN_CHECKOUT:
        return "Type: source " + os.path.relpath(os.path.join(ROOT, "launch", "setup.sh"))
    return "Install Dyad and what it needs there: pip install 'dyad.whl[cpu]'   ([gpu] with a GPU)"
