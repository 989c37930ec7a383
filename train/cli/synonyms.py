"""Names that other trainers use for our keys, to answer an unknown key with a hint. Imports no torch.

The names come from open_clip, Tevatron, sentence-transformers, transformers and Lightning, and from our earlier
versions.
"""

from dyad.train.cli.open_clip_flags import KEYS as OPEN_CLIP, by_name

# Key, or key=value → its names elsewhere and earlier: the last part of a dotted name, lower case, with underscores
OTHER_NAMES = {
    "checkpoint.best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.every": "save_every save_steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.patience": "early_stopping_patience",
    "chunk_size": "accum_freq gc_p_chunk_size gc_q_chunk_size grad_cache gradient_accumulation_steps "
    "micro_batch_size mini_batch_size",
    "compile": "torch_compile",
    "data.negatives.per_row": "num_hard_negatives num_negatives train_group_size",
    "data.passage.corpus": "corpus_path",
    "data.passage.length": "max_seq_length p_max_len passage_max_len",
    "data.passage.prefix": "passage_prefix",
    "data.question.length": "q_max_len query_max_len",
    "data.question.prefix": "query_prefix",
    "data.train": "dataset dataset_name train_data train_dataset train_dir train_file train_files train_path",
    "data.val": "eval_data val_data validation_data",
    "data.workers": "num_workers dataloader_num_workers",
    "epochs": "epoch max_epochs num_epochs num_train_epochs",
    "eval.every": "eval_steps",
    "global_batch_size": "per_device_train_batch_size per_gpu_batch_size train_batch_size",
    "init_from": "init_checkpoint load_from",
    "model.frozen_cache_mb": "memo_mb",
    "model.grad_checkpointing": "gradient_checkpointing",
    "model.name": "model_id",
    "model.shared": "untie_encoder",
    "model.text.name": "model_name_or_path",
    "model.text.pooling": "pool_type pooling_mode",
    "objective": "criterion loss loss_fn",
    "objective.temperature": "logit_scale scale tau",
    "optim.clip_norm": "gradient_clip_val max_grad_norm",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type scheduler",
    "optim.ema": "ema_decay model_ema model_ema_decay use_ema",
    "optim.layer_decay": "layer_wise_lr_decay llrd lr_layer_decay",
    "optim.name": "opt optimizer optimizer_name",
    "optim.options": "optim_args opt_kwargs",
    "optim.warmup": "warmup_ratio warmup_steps",
    "precision": "mixed_precision",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "resume.mode": "ckpt_path resume_from resume_from_checkpoint",
    "run.dir": "checkpoint_dir output output_dir outdir save_dir",
    "run.name": "run_name",
    "seed": "random_seed",
    "steps": "max_steps",
    "tracking.every": "log_every_n_steps logging_steps",
    "tracking.project": "wandb_project",
    "tracking.wandb": "report_to",
}
SYNONYMS = {flag.replace("-", "_"): key for flag, key in OPEN_CLIP.items()}
SYNONYMS |= by_name(OTHER_NAMES)

# Name of another trainer's option that has no key here → what to do instead
ADVICE = by_name(
    {
        "Processes are the launcher's: NPROC=4 bash launch/torchrun.sh …": "device devices gpu gpus num_gpus n_gpu "
        "nproc nproc_per_node accelerator strategy",
        "The gradient is always that of the whole global batch: leave it out.": "local_loss gather_with_grad "
        "gather_across_devices negatives_cross_device cross_batch_negatives",
        "A recipe is experiment=NAME.": "config config_file config_path recipe",
    }
)
