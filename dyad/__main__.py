"""The console script `dyad COMMAND …`, which has all commands. `dyad train …` is the same as `python -m train …`."""

import sys
from importlib import import_module

from dyad.data.base.errors import ConfigError, nearest
from dyad.start import start

COMMANDS = {
    "train": ("dyad.run.main", "train a run, or go on with it"),
    "eval": ("dyad.evaluation.main", "evaluate a run"),
    "data": ("dyad.data.cli.main", "index, check and pack data"),
    "doctor": ("dyad.doctor.main", "is this machine ready for that run?"),
    "export": ("dyad.export.main", "weights for other libraries"),
    "mine": ("dyad.evaluation.mine", "mine hard negatives with a run"),
    "score": ("dyad.evaluation.score", "score prompts by a language model"),
    "report": ("dyad.eval.report.main", "write the report of a run"),
    "compare": ("dyad.eval.compare.main", "compare runs: keys that differ, scores"),
}


def main() -> None:
    """Run the command that the first command-line argument names, such as train or eval.

    sys.argv is replaced by the arguments of that command. Without arguments, the list of commands is printed. Raises
    ConfigError for an unknown command, and the errors of the command.
    """
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print("dyad COMMAND …\n\n" + "\n".join(f"  {name:8} {purpose}" for name, (_, purpose) in COMMANDS.items()))
        return
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        raise ConfigError(f"dyad {command}: no such command.{near} Choices: {', '.join(COMMANDS)}")
    sys.argv = [f"dyad {command}", *arguments]
    import_module(COMMANDS[command][0]).main()


def script() -> None:
    """Run the console script `dyad`: call `main`; for an error, print a message and exit with its exit code."""
    start("dyad.__main__")


if __name__ == "__main__":
    script()
