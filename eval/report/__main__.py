"""The entry point of python -m eval.report. The command is in dyad/eval/report/main.py."""

from dyad.data.base.errors import run
from dyad.eval.report.main import main

if __name__ == "__main__":
    run(main)
