#!/usr/bin/env bash
# Writes requirements.lock anew: exact versions for Python 3.11-3.13 and every extra, no URLs; and requirements.hashes, the
# same with the hashes of their files. Needs uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_CUSTOM_COMPILE_COMMAND="bash launch/lock.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
extras=(demo bench onnx build dev)
compile() { # compile OUT FAISS_EXTRA [MORE...]
    uv pip compile -q --universal --no-header --no-annotate --python-version 3.11 \
        "${extras[@]/#/--extra=}" --extra="$2" pyproject.toml -o "$1" "${@:3}"
}
# cpu and gpu name the same module, so one resolution cannot hold both: resolve twice, the second under the first.
compile "$work/cpu.txt" cpu
compile "$work/gpu.txt" gpu -c "$work/cpu.txt"
{
    echo "# Written by launch/lock.sh; used as: pip install -c requirements.lock"
    sort -u "$work/cpu.txt" "$work/gpu.txt"
} >requirements.lock
{
    echo "# Written by launch/lock.sh: requirements.lock for launch/setup.sh. pip install -e takes no hashes."
    uv pip compile -q --universal --no-header --no-annotate --python-version 3.11 --no-deps --generate-hashes requirements.lock
} >requirements.hashes
