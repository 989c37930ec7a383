"""The command `python -m eval.report run=runs/x`, which writes report.html, an HTML report of a run in one file."""

from pathlib import Path

from dyad.data.base.command_line import command_options
from dyad.data.base.files import write_bytes, write_errors
from dyad.eval.config import ReportCommand
from dyad.eval.report.page import render
from dyad.eval.report.run_folder import read_run

PURPOSE = """\
Put a run on one page: what was trained on what, numbers with intervals and chance, curves, signs of failure, and what
it finds for some queries. One file, report.html, without anything to load; training writes it by itself at its end."""
EXAMPLES = {
    "of a run that goes on, was cut off, or was evaluated again": "python -m eval.report run=runs/emoji",
    "somewhere else": "python -m eval.report run=runs/emoji out=emoji.html",
}
NAME = "report.html"


def main() -> None:
    command = command_options(ReportCommand, "python -m eval.report", PURPOSE, EXAMPLES)
    out = None if command.out is None else Path(command.out).expanduser()
    print(f"Written: {write_report(Path(command.run).expanduser(), out)}")


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the HTML report of the run folder `run` to `out`; None: to report.html in that folder. Return the path.

    The file is written whole or not at all. Raises ConfigError if `run` is no run folder, if its config.yaml cannot be
    read, or if a newer Dyad made it; HardwareError if the file cannot be written.
    """
    content = render(read_run(run)).encode("utf-8", "replace")
    path = run / NAME if out is None else out
    with write_errors(path):
        write_bytes(path, content)
    return path
