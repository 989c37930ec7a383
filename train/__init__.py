"""The trainer. Importing this package does not import torch.

`python -m train` composes and checks the configuration (dyad/run/main.py, cli/compose.py, config.py) and calls
`train_run` of dyad/run/train_run.py. There, dyad/run/components.py `build_components` makes model, data, objective and
step, and dyad/run/resume.py `restore_components` restores a checkpoint. Then each batch takes the route below, from a
shard to the optimiser step. Paths are below the folder of this file, or of the repository.

 1. data/loading/order.py          computes the sample ids of step s of epoch e, the same for any number of ranks
 2. data/loading/loader.py         `build_loader` gives each rank its ids of each step; workers.py runs loader
                                   processes; drawn_items.py adds the noise of objective=nce;
                                   ahead.py copies a batch to a GPU during the step before it
 3. data/image_text/dataset.py, data/question_passage/dataset.py, text_views.py   ids → samples, read by offset through
                                   data/shards/shards.py, decoded (decode.py), cropped (transforms.py) or
                                   tokenized → data/batch.py `Batch` of the two views, x and y
 4. step/loop.py                   `fit` takes a batch and calls the step, then the monitor; logs, evaluates, saves
 5. step/step.py                   `TrainStep.__call__`: learning rate (step/schedule.py), gradient, skip or apply
 6. step/loss_term.py              `LossTerm.gradient`, of each loss (one, or those of also.NAME too: cli/also.py);
    step/chunks.py                 `in_chunks` cuts the batch into chunks, which the towers embed one by one
 7. step/loss_term.py              `_embed`: towers/tower.py embeds a chunk, under autocast, with dropout noise that
                                   step 9 repeats; step/graph_cache.py keeps the autograd graphs of some chunks
 8. losses/                        the objective: all embeddings → loss (losses/__init__.py has the route from there);
                                   its backward gives the gradient of the embeddings
 9. step/loss_term.py              chunk by chunk in reverse order: embeds again where no graph is cached,
                                   and runs backward from the gradient of the embeddings to the weights
10. distributed/data_parallel.py   averages the gradients over ranks, in the last of these backward passes; those of
                                   several losses after them; sharding.py: towers of which each rank holds a part
11. step/step.py                   `_averaged` averages the objective's gradients and all scalars over ranks. If the
                                   loss or gradient is not finite or spikes (monitor/loss_spikes.py), the step is
                                   skipped; else clipping, the optimiser's step (optim.py), the clamp of
                                   the temperature, the average of the weights (averaging.py), and that of the target
                                   network, which embeds each batch as well after step 7 (target.py)
12. monitor/monitor.py             stragglers (stragglers.py), bad samples and skipped steps (run_folder/ledger.py),
                                   weights equal on all ranks
13. tracking/                      metrics.jsonl and trackers; dyad/run/evaluation.py scores the weights;
                                   run_folder/saving.py writes a checkpoint, in the background
"""
