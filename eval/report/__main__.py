"""The entry point of python -m eval.report. The command is in dyad/eval/report/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.eval.report.main")
