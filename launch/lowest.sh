#!/usr/bin/env bash
# Tests the lower bounds of pyproject.toml:  bash launch/lowest.sh, or bash launch/test.sh --lowest
# Makes .lowest, an environment (6 GB) with the oldest version of each package that pyproject.toml names, and runs the quick
# tests of data, train and eval there. Warnings are ignored: old packages warn of what newer ones have changed. Left out are
# a test that refuses all warnings, and those that read the files of W&B by a command of wandb 0.31.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh dev
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
python - >"$requirements" <<'PY'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
ours = [*project["dependencies"], *(r for extra in ("cpu", "demo", "bench", "onnx") for r in extras[extra])]
print(*(re.sub(r">=([^,;]+)(,<[^;]*)?", r"==\1", r) for r in ours), *extras["dev"], *extras["build"], sep="\n")
PY
[ -x .lowest/bin/python ] || python -m venv .lowest
.lowest/bin/python -m pip install -q --disable-pip-version-check -r "$requirements"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD
export PATH="$PWD/.lowest/bin:$PATH"
exec python -m pytest tests/data tests/train tests/eval -o filterwarnings=default -n "${TEST_PROCESSES:-$(nproc)}" --dist loadfile \
    -k "not the_command_and_its_mistakes" --ignore tests/train/tracking/test_wandb.py "$@"
