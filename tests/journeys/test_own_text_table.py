"""From a CSV of somebody's questions and answers to an evaluated run and its report: commands of README and --help."""

from pathlib import Path

import pytest
from helpers.tables import write_csv
from helpers.tiny_runs import run_script

TRAIN = "python -m train experiment=mnrl model.text.name=$MINE/bert global_batch_size=16 run.dir=$MINE/runs"
JOURNEY = f"""
python -m data check $MINE/faq.csv columns=[asked,said]
{TRAIN} data.train=$MINE/faq.csv data.columns=[asked,said] data.val=$MINE/val.csv run.name=faq
python -m eval checkpoint=$MINE/runs/faq suite=[dpr:$MINE/val.csv]
python -m eval.report run=$MINE/runs/faq
python -m data pack $MINE/faq.csv columns=[asked,said] out=$MINE/dpr to=dpr
"""


@pytest.mark.soak
def test_own_text_table(tmp_path: Path, models: Path) -> None:
    (tmp_path / "bert").symlink_to(models / "bert")
    rows = [{"number": i, "asked": f"what is {i}?", "said": f"It is number {i}, of many."} for i in range(64)]
    write_csv(tmp_path / "faq.csv", rows, ";")
    write_csv(tmp_path / "val.csv", rows[:12])
    out = run_script(JOURNEY, tmp_path)
    assert "questions       64 of 64 rows" in out and "finished at step 4" in out
    assert (tmp_path / "runs/faq/report.html").is_file()
    assert (tmp_path / "runs/faq/eval/val.json").is_file()
