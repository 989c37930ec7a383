#!/usr/bin/env bash
# A newcomer's first hour in one go, in a fresh clone and from the README only: the demo, a folder of own images packed
# and trained for 50 steps, evaluated, reported, exported, and loaded by open_clip and onnxruntime in a folder of its own.
#   bash tests/journey.sh             with the whole demo, about 15 minutes on two cores
#   bash tests/journey.sh steps=40    arguments go to the demo
set -euo pipefail
origin=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '\n== %s  (%s s)\n' "$*" "$SECONDS"; }

say "clone"
git clone -q "$origin" "$work/dyad"
cd "$work/dyad"

say "the demo"
bash launch/demo.sh run.name=demo "$@"
test -s runs/demo/report.html

say "240 images of our own, each with a line of text"
# shellcheck disable=SC1091
source launch/setup.sh demo onnx
export HF_HUB_OFFLINE=1
python - <<'PY'
from pathlib import Path
from PIL import Image, ImageDraw

sizes, colours = {"small": 18, "big": 28}, ["red", "green", "blue", "orange", "purple", "black"]
for folder, shifts in {"my_pictures": range(5), "my_other_images": [-3]}.items():
    Path(folder).mkdir()
    for shape in ("ellipse", "rectangle", "triangle", "cross"):
        for size, radius in sizes.items():
            for colour in colours:
                for shift in shifts:
                    image = Image.new("RGB", (64, 64), "white")
                    draw, a, b = ImageDraw.Draw(image), 32 + shift - radius, 32 + shift + radius
                    match shape:
                        case "triangle":
                            draw.polygon([(a, b), (b, b), ((a + b) / 2, a)], fill=colour)
                        case "cross":
                            draw.line([(a, a), (b, b)], fill=colour, width=7)
                            draw.line([(a, b), (b, a)], fill=colour, width=7)
                        case _:
                            getattr(draw, shape)([a, a, b, b], fill=colour)
                    name = f"{size}-{colour}-{shape}-{shift}"
                    image.save(f"{folder}/{name}.png")
                    Path(f"{folder}/{name}.txt").write_text(f"a {size} {colour} {shape}")
PY

say "pack and check"
python -m data pack my_pictures out=shards
python -m data pack my_other_images out=shards_of_others
python -m data check shards

say "train for 50 steps"
python -m train data.train=shards data.val=shards_of_others model=tiny_clip_gn steps=50 global_batch_size=96 optim.lr=1e-3 \
    optim.warmup=10 run.name=mine

say "evaluate, report, export"
python -m eval checkpoint=runs/mine 'suite=[retrieval:shards]'
python -m eval.report run=runs/mine
python -m train.export run=runs/mine format=open_clip
python -m train.export run=runs/mine format=onnx
test -s runs/mine/report.html

say "load it elsewhere"
mkdir "$work/elsewhere"
mv runs/mine/export/* "$work/elsewhere"
cd "$work/elsewhere"
python - <<'PY'
import onnxruntime, open_clip

model, preprocess = open_clip.create_model_from_pretrained("local-dir:open_clip")
print(type(model).__name__, sum(p.numel() for p in model.parameters()), "parameters")
print([onnxruntime.InferenceSession(f"onnx/{name}.onnx").get_outputs()[0].shape for name in ("image", "text")])
PY
say "the whole journey works"
