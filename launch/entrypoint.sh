#!/usr/bin/env bash
# What the container runs, and the same words in a checkout:  bash launch/entrypoint.sh train experiment=emoji
#   train, eval, data           python -m train, python -m eval, python -m data
#   train.export, eval.mine …   python -m train.export, python -m eval.mine …
#   doctor                      python -m train.doctor: is this machine ready?
#   torchrun                    launch/torchrun.sh: train on all GPUs of this machine, or of several
#   job FUNCTION                what launch/slurm.sbatch asks, which runs outside: a function of launch/job.sh
set -euo pipefail
trap 'exit 75' TERM INT HUP USR1 # until the command answers signals itself

case ${1:-} in
    train | eval | data | train.* | eval.*) command=(python -m "$1" "${@:2}") ;;
    doctor) command=(python -m train.doctor "${@:2}") ;;
    torchrun) command=(bash launch/torchrun.sh "${@:2}") ;;
    job) command=(bash launch/job.sh "${@:2}") ;;
    *)
        echo "'${1:-}' is none of: train, eval, data, doctor, torchrun, train.export, eval.mine, eval.report, eval.compare." >&2
        exit 2
        ;;
esac
if [ "${HOME:-}" = /cache ]; then # the container's: users that share the volume neither block nor believe each other
    HOME=/cache/$(id -u)
    export HOME XDG_CACHE_HOME=$HOME
    # in the volume, as /tmp goes with the container
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$HOME/triton} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor}
    mkdir -p "$HOME"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC2086 # several words; never none, or `source` would hand on our own arguments
source launch/setup.sh ${DYAD_EXTRAS:-demo}
exec "${command[@]}"
