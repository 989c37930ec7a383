#!/usr/bin/env bash
# Tests the lower bounds of pyproject.toml:  bash launch/lowest.sh, or bash launch/test.sh --lowest
# Makes .lowest, an environment (6 GB) with the oldest version of each package that pyproject.toml names, and runs the quick
# tests of data, train, eval and dyad there. Warnings are ignored: old packages warn of what newer ones have changed. Left
# out are a test that refuses all warnings, one of imports (torch 2.8 imports sympy), and those that read the files of W&B
# by a command of wandb 0.31. Then the wheel must leave the torch of .lowest as it is, and runs of the oldest and the
# newest torch must be the same.
#   bash launch/lowest.sh -k towers   any arguments go to pytest, which then runs alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh dev
newest=$PWD/.venv/bin/python lowest=$PWD/.lowest/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python - >"$work/requirements.txt" <<'PY'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
ours = [*project["dependencies"], *(r for extra in ("cpu", "demo", "bench", "onnx") for r in extras[extra])]
print(*(re.sub(r">=([^,;]+)(,<[^;]*)?", r"==\1", r) for r in ours), *extras["dev"], *extras["build"], sep="\n")
PY
[ -x "$lowest" ] || python -m venv .lowest
"$lowest" -m pip install -q --disable-pip-version-check -r "$work/requirements.txt"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD:$PWD/tests
export PATH="$PWD/.lowest/bin:$PATH"
if [ $# -gt 0 ]; then exec python -m pytest -o filterwarnings=default "$@"; fi
python -m pytest tests/data tests/train tests/eval tests/dyad -o filterwarnings=default -n "${TEST_PROCESSES:-$(nproc)}" \
    --dist loadfile -k "not the_command_and_its_mistakes and not without_slow_imports" --ignore tests/train/tracking/test_wandb.py
"$newest" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work" .
python -m pip install -q --disable-pip-version-check --dry-run --report "$work/report.json" "$(echo "$work"/dyad-*.whl)[cpu]"
python - "$work/report.json" <<'PY'
import json, re, sys

names = [each["metadata"]["name"] for each in json.load(open(sys.argv[1]))["install"]]
print("with the wheel pip installs:", *names)
assert not [name for name in names if re.match("torch|triton|nvidia|cuda", name)]
PY
python -m tests.other_torch "$newest" "$lowest"
