#!/usr/bin/env bash
# Every test that needs a GPU, on the torch that is installed here; needs no network and no set-up script.
#   bash tests/gpu.sh                     all of them; figures are appended to tests/benchmarks/RESULTS.md
#   bash tests/gpu.sh tests/gpu -k step   any arguments go to pytest instead of the list of files
#   PYTHON=python3.12 bash tests/gpu.sh   another interpreter
# What this machine lacks (packages, a newer torch, more GPUs) is listed as not run, with the reason. A figure has the
# command that measures it and, where one is known, its share of what the hardware can do. Exit codes: 0 all that ran
# passed, 1 a test failed, 4 no GPU that torch can use, or no torch or pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}" # for the tests of equal bits
export DYAD_FIGURES="${DYAD_FIGURES:-$PWD/tests/benchmarks/RESULTS.md}"

if ! "$python" -c 'import torch, pytest' 2>/dev/null; then
    echo "error: $python has no torch, or no pytest: set PYTHON to one that has both" >&2
    exit 4
fi
if ! "$python" -W ignore -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "error: no GPU that torch $("$python" -c 'import torch; print(torch.__version__)') can use. Is there one, and a driver? nvidia-smi" >&2
    exit 4
fi
"$python" -c 'from gpu.plugin import machine; print(machine())'
if ! "$python" -c 'import omegaconf' 2>/dev/null; then # of which losses, steps and towers need a few names alone
    export PYTHONPATH="$PYTHONPATH:$PWD/tests/gpu/stand_in"
fi
if [ $# = 0 ]; then
    mapfile -t files < <(grep -rlE 'mark\.gpu|ON_GPU|DEVICES' tests --include='test_*.py')
    set -- "${files[@]}"
fi
exec "$python" -m pytest -m gpu -p gpu.plugin -p no:cacheprovider -o filterwarnings=default -rs --durations=15 "$@"
