"""The trainer. Importing this package loads nothing heavy.

The route of one batch, from a shard to the optimiser step. `python -m train` composes and checks the configuration
(__main__.py, command/compose.py, config.py) and calls fitting.py `train_run`, which puts a run together:
parts.py `build_parts` makes model, data, objective and step, origin.py `restore_parts` restores a checkpoint.

 1. data/order.py     step s of epoch e sees these sample ids: arithmetic, the same for any number of ranks and workers
 2. data/loader.py    `build_loader` gives each rank its ids of each step; data/workers.py runs loader processes
 3. data/image_text.py, data/question_passage.py   ids → samples, read by offset through data/shards.py, decoded and
                      augmented by data/transforms.py or tokenized → data/batch.py `Batch` of x and y
 4. loop.py           `fit` takes a batch and calls the step; then the monitor; then logs, evaluates, saves
 5. step.py           `TrainStep.__call__`: learning rate (optim.py), gradient, skip or apply
 6. chunks.py         `in_chunks` cuts the batch into what the towers get at a time
 7. step.py `_embed`  towers/tower.py embeds a chunk, under autocast and keyed noise; graphs.py caches some graphs
 8. losses/           the objective: all embeddings → loss (losses/__init__.py has the route from there); its backward
                      gives the gradient of the embeddings
 9. step.py           `_gradient`, chunk by chunk in reverse order: embeds again where no graph is cached, and runs
                      backward from the gradient of the embeddings to the weights
10. distributed/parallel.py   averages the gradients over ranks, in the last of these backward passes
11. step.py           `_averaged` the objective's gradients and all scalars. A loss or gradient that is not finite, or
                      a spike (spikes.py), skips the step; else clipping, AdamW, and the temperature is clamped
12. monitor.py        stragglers (pace.py), bad samples and skipped steps (runs/ledger.py), weights equal on all ranks
13. tracking/         metrics.jsonl and trackers; evaluation.py scores the weights; runs/saving.py and
                      runs/checkpoint.py write a checkpoint in the background
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

for _name in ("data", "eval"):  # a folder of that name in the working folder would be imported instead
    _found = find_spec(_name)
    if _found is None or Path(_found.origin or "").resolve().parent.parent != _ROOT:
        _origin = _found.origin if _found else "missing"
        print(f"error: the package '{_name}' is {_origin}, not the one beside train: cd {_ROOT} first", file=sys.stderr)
        sys.exit(2)
