"""python -m eval.report: writes the report, see dyad/eval/report/main.py."""

from dyad.data.base.errors import run
from dyad.eval.report.main import main

if __name__ == "__main__":
    run(main)
