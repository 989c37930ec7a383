#!/usr/bin/env bash
# BM25's hard negatives and weights against popularity on the topics, four arms that differ in nothing else:
#   bash tests/benchmarks/topics_arms.sh FOLDER [SEED]      two arms at a time, about 25 minutes on two cores
# MiniLM as shipped, 60 steps of 64 questions; the end of the run is evaluated, none is chosen. Split: test.
#   plain        info_nce, in-batch negatives, the shipped judgements
#   bm25         … and one hard negative a row, of python -m data negatives
#   unweighted   one_sided_dpm, importance=none
#   weighted     … importance=log_q, of python -m data weights: popular verses count less as candidates
set -euo pipefail
folder=$1 seed=${2:-0} topics=data/samples/topics
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$folder"
export OMP_NUM_THREADS=1
[ -e "$folder/bm25.jsonl" ] || python -m data negatives "$topics" "out=$folder/bm25.jsonl"
[ -e "$folder/log_q.safetensors" ] || python -m data weights "$topics" "out=$folder/log_q.safetensors"

arm() { # name, then what it has beside the others
    local run="$folder/runs/$1-$seed"
    python -m train experiment=topics steps=60 global_batch_size=64 "seed=$seed" "run.dir=$folder/runs" "run.name=$1-$seed" \
        data.val=null 'eval.suite=[]' tracking.wandb=disabled tracking.report=false "${@:2}" >"$folder/$1-$seed.log" 2>&1
    python -m eval "checkpoint=$run" "suite=[beir:$topics@test]" 'baselines=[]' "out=$run/test" >"$folder/$1-$seed.txt" 2>&1
}

dpm="objective=one_sided_dpm objective.temperature=0.05"
(arm plain objective=info_nce_text &&
    arm bm25 objective=info_nce_text "data.train=$folder/bm25.jsonl" data.negatives.per_row=1) &
# shellcheck disable=SC2086 # several words
(arm unweighted $dpm && arm weighted $dpm objective.importance=log_q "objective.importance_file=$folder/log_q.safetensors") &
wait -n
wait
grep -A 1 "^ model" "$folder"/*-"$seed".txt
