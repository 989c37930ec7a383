"""From a folder of somebody's images to an evaluated run and its report, by commands of README and --help."""

from pathlib import Path

import pytest
from helpers.shards import image
from helpers.tables import write_csv
from helpers.tiny_runs import run_script

MODEL = "model=tiny_clip_gn global_batch_size=16 steps=4 run.dir=$MINE/runs"
JOURNEY = f"""
python -m data check $MINE/my_pictures
python -m train.doctor data.train=$MINE/my_pictures {MODEL}
python -m train data.train=$MINE/my_pictures data.val=$MINE/val.csv run.name=mine {MODEL}
python -m eval checkpoint=$MINE/runs/mine suite=[retrieval:$MINE/val.csv]
python -m eval.report run=$MINE/runs/mine
python -m data pack $MINE/my_pictures out=$MINE/shards on_error=skip
"""


@pytest.mark.soak
def test_own_images(tmp_path: Path) -> None:
    (tmp_path / "my_pictures").mkdir()
    for i in range(32):
        (tmp_path / f"my_pictures/{i}.png").write_bytes(image(i, size=(40, 30)))
        (tmp_path / f"my_pictures/{i}.txt").write_text(f"an image of colour {i}")
    rows = [{"file": f"my_pictures/{i}.png", "words": f"colour {i}"} for i in range(8)]
    named = [{"filepath": row["file"], "title": row["words"]} for row in rows]
    write_csv(tmp_path / "val.csv", named)
    out = run_script(JOURNEY, tmp_path)
    assert "was converted once" in out and "finished at step 4" in out
    assert (tmp_path / "runs/mine/report.html").is_file()
    assert (tmp_path / "runs/mine/eval/val.json").is_file()
