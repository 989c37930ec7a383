"""What each flag of open_clip's trainer (open_clip_train 3.3) is here. Torch-free: facts only, no code."""

from __future__ import annotations

import re

# The flag's value is the key's value
KEYS = {
    "model": "model.name",
    "pretrained": "model.pretrained",
    "name": "run.name",
    "logs": "run.dir",
    "seed": "seed",
    "workers": "data.workers",
    "image-key": "data.image_key",
    "max-image-pixels": "data.max_image_pixels",
    "image-resize-mode": "data.resize",
    "lr": "optim.lr",
    "beta1": "optim.beta1",
    "beta2": "optim.beta2",
    "eps": "optim.eps",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup",
    "lr-scheduler": "optim.schedule",
    "lr-cooldown-end": "optim.cooldown_end",
    "lr-cooldown-power": "optim.cooldown_power",
    "grad-clip-norm": "optim.clip_norm",
    "lock-image-unlocked-groups": "model.image.unlocked_groups",
    "lock-text-unlocked-layers": "model.text.unlocked_layers",
    "force-context-length": "model.text.context_length",
    "log-metric-every-n-steps": "tracking.every",
    "wandb-project-name": "tracking.project",
}

# A switch, and the key=value that it is
SWITCHES = {
    "siglip": "objective=siglip",
    "lock-image": "model.image.frozen=true",
    "lock-text": "model.text.frozen=true",
    "grad-checkpointing": "model.grad_checkpointing=true",
    "torchcompile": "compile=true",
    "delete-previous-checkpoint": "checkpoint.keep=1",
}

# Tables become shards first: keys of python -m data pack
OF_TABLES = {"csv-separator": "csv_separator", "csv-img-key": "csv_image_key", "csv-caption-key": "csv_caption_key"}

# The flag of translate.py's own rules, and the keys it becomes there
RULES = {
    "train-data": "data.train",
    "train-data-upsampling-factors": "data.train",
    "val-data": "data.val",
    "dataset-type": "data.train",
    **OF_TABLES,
    "text-key": "data.captions",
    "json-text-key": "data.captions",
    "json-text-key-probs": "data.caption_weights",
    "batch-size": "global_batch_size",
    "accum-freq": "global_batch_size, chunk_size",
    "epochs": "epochs",
    "train-num-samples": "steps",
    "epochs-cooldown": "optim.cooldown",
    "save-frequency": "checkpoint.every",
    "val-frequency": "eval.every",
    "zeroshot-frequency": "eval.every",
    "imagenet-val": "eval.suite",
    "imagenet-v2": "eval.suite",
    "precision": "precision",
    "aug-cfg": "data.augment",
    "force-image-size": "model.image.image_size",
    "opt": "AdamW",
    "skip-scheduler": "optim.schedule",
    "report-to": "tracking",
    "use-bn-sync": "model.batch_norm",
    "resume": "resume, model.pretrained",
}

# Nothing has to be said here: so it is already
ALREADY = {
    "local-loss": "always: every rank computes its own rows, and the gradient is that of the whole global batch",
    "gather-with-grad": "always: the gradient is exact for any number of GPUs",
    "dataset-resampled": "nothing is drawn twice in an epoch here, and a run goes on at the exact sample",
    "val-num-samples": "samples are counted by the index",
    "val-retrieval-chunk-size": "ranks are counted exactly, in tiles",
    "val-retrieval-precision": "scores are float32",
    "save-most-recent": "the newest checkpoints are kept (checkpoint.keep), each written whole or not at all",
    "lock-image-freeze-bn-stats": "whatever is frozen keeps its statistics",
    "lock-text-freeze-layer-norm": "whatever is frozen keeps its statistics",
    "force-custom-text": "both towers are modules of their own",
    "no-set-device-rank": "each process takes the device of its local rank",
    "dist-url": "the launcher's environment says it",
    "dist-backend": "NCCL on GPUs, gloo on CPUs",
    "device": "a GPU where there is one; CUDA_VISIBLE_DEVICES= (empty) hides it",
    "ddp-static-graph": "gradients are averaged once a step, in a tower's last backward",
    "loss-dist-impl": "one exact schedule",
    "log-local": "rank 0 writes all logs",
    "log-every-n-steps": "one line follows tracking.every",
    "train-loss-ema-samples": "metrics.jsonl has every value",
    "cache-dir": "set HF_HOME",
    "text-pooler-own-group": "a tower's projection always trains",
}

# What changes the training and is not here: such a line is refused
LOST = {
    "momentum": "the optimiser is AdamW",
    "opt-kwargs": "the optimiser is AdamW",
    "opt-fallback-list": "the optimiser is AdamW",
    "wd-exclude": "decay leaves out biases, norms and the temperature, and nothing else",
    "text-layer-decay": "one learning rate for all layers; model.text.unlocked_layers trains only the last",
    "image-layer-decay": "one learning rate for all layers; model.image.unlocked_groups trains only the last",
    "visual-layer-decay": "one learning rate for all layers; model.image.unlocked_groups trains only the last",
    "pretrained-image": "take model.image.kind=timm model.image.name=… model.image.pretrained=… instead",
    "image-mean": "taken from the model's own preprocessing",
    "image-std": "taken from the model's own preprocessing",
    "image-interpolation": "taken from the model's own preprocessing",
    "force-quick-gelu": "give the model's -quickgelu name instead, e.g. --model ViT-B-32-quickgelu",
    "force-patch-dropout": "write patch_dropout into a copy of the model's config: --model my_model.json",
    "distill-model": "there is no distillation",
    "distill-pretrained": "there is no distillation",
}
LOST |= dict.fromkeys(
    """use-naflex force-naflex-vision naflex-num-train-image-tokens naflex-patch-sizes naflex-patch-size-probs
    naflex-seq-lens naflex-seq-len-probs naflex-max-tokens-per-batch naflex-max-text-tokens naflex-batch-divisor
    naflex-loss-scale naflex-pad-multiple""".split(),
    "pictures are squares of one size (model.image.image_size)",
)

# What open_clip can and this project cannot, and what is learned stays the same
ABSENT = {
    "audio-layer-decay": "there is no audio tower",
    "torchcompile-strategy": "each tower is compiled",
    "torchcompile-backend": "torch's default",
    "torchcompile-mode": "torch's default",
    "fsdp": "every GPU holds the whole model (dist=ddp)",
    "fsdp-no-reshard-after-forward": "every GPU holds the whole model (dist=ddp)",
    "fsdp-offload-cpu": "every GPU holds the whole model (dist=ddp)",
    "fsdp-checkpoint": "every GPU holds the whole model (dist=ddp)",
    "wandb-notes": "write them in W&B",
    "debug": "log.txt and metrics.jsonl have everything",
    "copy-codebase": "config.yaml in the run folder says what ran",
    "coca-caption-loss-weight": "there is no caption loss",
    "coca-contrastive-loss-weight": "the contrastive loss is the whole loss",
    "remote-sync": "copy the run folder; every file in it is whole or absent",
    "remote-sync-frequency": "copy the run folder; every file in it is whole or absent",
    "remote-sync-protocol": "copy the run folder; every file in it is whole or absent",
    "use-bnb-linear": "no 8-bit layers; precision=bf16",
    "length-bucketing": "texts of pictures are filled up to one length",
    "bucket-pool": "texts of pictures are filled up to one length",
    "bucket-chunk": "texts of pictures are filled up to one length",
    "bucket-prefetch-pools": "texts of pictures are filled up to one length",
    "text-pad-multiple": "texts of pictures are filled up to one length",
    "torchscript": "compile=true speeds a tower up, and exports are graphs (python -m train.export)",
    "trace": "compile=true speeds a tower up, and exports are graphs (python -m train.export)",
    "horovod": "processes are torchrun's",
}
ABSENT |= dict.fromkeys(
    """audio-ext pretrained-audio audio-fill audio-trunc audio-fusion audio-int16-normalize audio-zeroshot-dataset
    audio-zeroshot-split audio-zeroshot-audio-key audio-zeroshot-target-key audio-zeroshot-class-key
    audio-zeroshot-template audio-zeroshot-workers audio-zeroshot-multiprocessing-context
    audio-multiprocessing-context""".split(),
    "there is no audio tower",
)

# Names that flags had in earlier versions
FORMER = {"interpolation": "image-interpolation", "resize-mode": "image-resize-mode"}

# How many words follow a flag: none, all up to the next flag, else one
NO_VALUE = {*SWITCHES, "skip-scheduler", "save-most-recent", "dataset-resampled", "debug", "copy-codebase", "fsdp"}
NO_VALUE |= {"torchscript", "trace", "horovod"}
NO_VALUE |= set(
    """local-loss gather-with-grad lock-image-freeze-bn-stats lock-text-freeze-layer-norm force-custom-text log-local
    no-set-device-rank ddp-static-graph text-pooler-own-group use-bn-sync pretrained-image force-quick-gelu
    fsdp-no-reshard-after-forward fsdp-offload-cpu length-bucketing use-naflex force-naflex-vision audio-fusion
    audio-int16-normalize""".split()
)
MANY_VALUES = set(
    """aug-cfg force-image-size image-mean image-std json-text-key-probs opt-kwargs opt-fallback-list wd-exclude
    naflex-patch-sizes naflex-patch-size-probs naflex-seq-lens naflex-seq-len-probs""".split()
)

# What open_clip has without being told, where we have something else
DEFAULTS = {"model": "RN50", "batch-size": "64", "epochs": "32", "workers": "4", "warmup": "10000"}
DEFAULTS |= {"precision": "amp", "val-frequency": "1", "save-frequency": "1", "accum-freq": "1"}

NORMED = re.compile(r"RN\d|MobileCLIP")  # models of open_clip that have batch norms

PRECISIONS = {
    "amp": "fp16",
    "amp_bf16": "bf16",
    "amp_bfloat16": "bf16",
    "bf16": "bf16",
    "pure_bf16": "bf16",
    "fp16": "fp16",
    "pure_fp16": "fp16",
    "fp32": "fp32",
}
ALL = {*KEYS, *SWITCHES, *RULES, *ALREADY, *ABSENT, *LOST}
