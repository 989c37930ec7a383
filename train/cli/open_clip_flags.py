"""Tables of the flags of open_clip's trainer (open_clip_train 3.3) and the keys that replace them. Imports no torch."""

import re
from collections.abc import Mapping

# Keys that take the value of the flag of the same name
SAME_NAME = """model.pretrained run.name seed data.workers data.image_key data.max_image_pixels optim.lr optim.beta1
optim.beta2 optim.eps optim.warmup""".split()

# Flag → key that takes the same value
KEYS = {"model": "model.name"} | {key.rpartition(".")[2].replace("_", "-"): key for key in SAME_NAME}
KEYS |= {
    "logs": "run.dir",
    "image-resize-mode": "data.resize",
    "wd": "optim.weight_decay",
    "lr-scheduler": "optim.schedule",
    "lr-cooldown-end": "optim.cooldown_end",
    "lr-cooldown-power": "optim.cooldown_power",
    "grad-clip-norm": "optim.clip_norm",
    "lock-image-unlocked-groups": "model.image.unlocked_groups",
    "lock-text-unlocked-layers": "model.text.unlocked_layers",
    "force-context-length": "model.text.context_length",
    "force-patch-dropout": "model.image.patch_dropout",
    "log-metric-every-n-steps": "tracking.every",
    "wandb-project-name": "tracking.project",
}

# Flag without a value → the key that it sets, and its value
SWITCHES = {
    "siglip": ("objective", "siglip"),
    "fsdp": ("dist", "fsdp2"),
    "lock-image": ("model.image.frozen", True),
    "lock-text": ("model.text.frozen", True),
    "grad-checkpointing": ("model.grad_checkpointing", True),
    "torchcompile": ("compile", True),
    "delete-previous-checkpoint": ("checkpoint.keep", 1),
}

# Name in --aug-cfg → key that takes the same value
AUGMENT = {"scale": "data.augment.crop_scale", "gray_scale_prob": "data.augment.grey"}
AUGMENT |= {"color_jitter": "data.augment.jitter", "color_jitter_prob": "data.augment.jitter_prob"}
AUGMENT_DEFAULTS = {"scale": "0.9, 1.0"}  # those of open_clip that differ from ours

# Flags of tables (.csv, .tsv)
OF_TABLES = {"csv-separator", "csv-img-key", "csv-caption-key"}

# Flag of ImageNet → the folder, inside that of its value, that has the class folders
IMAGENET = {"imagenet-val": "", "imagenet-v2": "ImageNetV2-matched-frequency"}

# Flags that translate.py handles one by one
OWN_RULE = """train-data val-data dataset-type text-key batch-size accum-freq epochs train-num-samples epochs-cooldown
imagenet-val imagenet-v2 save-frequency val-frequency precision aug-cfg force-image-size opt momentum skip-scheduler
report-to use-bn-sync resume train-data-upsampling-factors""".split()


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of text → names joined by spaces: {"text": "a b"} → {"a": "text", "b": "text"}."""
    return {name: text for text, joined in names.items() for name in joined.split()}


# Flag that needs no key here → what happens without it
ALREADY = by_name(
    {
        "always: the gradient is that of the whole global batch, exact for any number of GPUs": "local-loss "
        "gather-with-grad loss-dist-impl",
        "an epoch has each sample once, or as its weight says; a run resumes at the exact one": "dataset-resampled",
        "samples are counted by the index": "val-num-samples",
        "ranks are counted exactly, in tiles of float32 scores": "val-retrieval-chunk-size val-retrieval-precision",
        "a run goes on from its newest checkpoint, written whole or not at all": "save-most-recent",
        "whatever is frozen keeps its statistics": "lock-image-freeze-bn-stats lock-text-freeze-layer-norm",
        "both towers are modules of their own": "force-custom-text",
        "the launcher's environment says it; NCCL on GPUs, gloo on CPUs": "dist-url dist-backend no-set-device-rank "
        "horovod",
        "a GPU where there is one; CUDA_VISIBLE_DEVICES= (empty) hides it": "device",
        "gradients are averaged once a step, in a tower's last backward": "ddp-static-graph",
        "rank 0 writes log.txt; metrics.jsonl has every value": "log-local log-every-n-steps train-loss-ema-samples "
        "debug",
        "set HF_HOME": "cache-dir",
        "a tower's projection always trains": "text-pooler-own-group",
        "eval.every is one rhythm, in steps, for data.val and eval.suite": "zeroshot-frequency",
    }
)

# Flag that counts epochs → what to say where the number of steps in an epoch is unknown
WITHOUT_STEPS = {
    "save-frequency": "checkpoint.every counts steps (500 unless set), and only the newest 3 checkpoints stay "
    "unless checkpoint.keep is set",
    "val-frequency": "eval.every counts steps; 0 evaluates at the end",
}

# Flag that changes the training and has no counterpart here → what to do; a command with one is refused
LOST = by_name(
    {
        "write them as optim.options.NAME=VALUE behind the translation": "opt-kwargs opt-fallback-list",
        "decay leaves out biases, norms and the temperature, and nothing else": "wd-exclude",
        "optim.layer_decay is of both towers; write it behind the translation": "text-layer-decay image-layer-decay "
        "visual-layer-decay",
        "take model.image.kind=timm model.image.name=… model.image.pretrained=… instead": "pretrained-image",
        "taken from the model's own preprocessing": "image-mean image-std image-interpolation",
        "give the model's -quickgelu name instead, e.g. --model ViT-B-32-quickgelu": "force-quick-gelu",
        "there is no distillation": "distill-model distill-pretrained",
        "name the fields by data.captions=[a,b] and their shares by data.caption_weights=[1,0]": "json-text-key "
        "json-text-key-probs",
    }
)

# Word in a flag, in a model's name or in --dataset-type that shows another kind of model → why the command is refused
OTHER_MODELS = {
    "naflex": "images are squares of one size (model.image.image_size)",
    "audio": "there is no audio tower",
    "clap": "there is no audio tower",
    "synthetic": "there are no made-up images; experiment=emoji runs on images that are here",
    "coca": "no captions are generated; take a pair of towers, like ViT-B-32",
}

# Flag without a counterpart here that does not change what is learned → what happens instead
ABSENT = by_name(
    {
        "each tower is compiled, with torch's defaults": "torchcompile-strategy torchcompile-backend torchcompile-mode",
        "with dist=fsdp2 layers are gathered as they run, and all ranks write the checkpoint": "fsdp-checkpoint "
        "fsdp-no-reshard-after-forward fsdp-offload-cpu",
        "write them in W&B": "wandb-notes",
        "config.yaml in the run folder says what ran": "copy-codebase",
        "copy the run folder; every file in it is whole or absent": "remote-sync remote-sync-frequency "
        "remote-sync-protocol",
        "no 8-bit layers; precision=bf16": "use-bnb-linear",
        "texts of images are filled up to one length": "length-bucketing bucket-pool bucket-chunk "
        "bucket-prefetch-pools text-pad-multiple",
        "compile=true speeds a tower up, and exports are graphs (python -m train.export)": "torchscript trace",
    }
)

# Flag → its names in earlier versions of open_clip
FORMER = {"image-interpolation": ["--interpolation"], "image-resize-mode": ["--resize-mode"]}

# Flags that no value follows, and flags that one or more values follow; all other flags take exactly one
NO_VALUE = {*SWITCHES} | set(
    """skip-scheduler save-most-recent dataset-resampled debug copy-codebase torchscript trace horovod local-loss
    gather-with-grad lock-image-freeze-bn-stats lock-text-freeze-layer-norm force-custom-text log-local
    no-set-device-rank ddp-static-graph text-pooler-own-group use-bn-sync pretrained-image force-quick-gelu
    fsdp-no-reshard-after-forward fsdp-offload-cpu length-bucketing""".split()
)
MANY_VALUES = set(
    """aug-cfg force-image-size image-mean image-std json-text-key-probs opt-kwargs opt-fallback-list
    wd-exclude""".split()
)

# Defaults of open_clip that differ from ours
DEFAULTS = {"model": "RN50", "batch-size": "64", "epochs": "32", "workers": "4", "warmup": "10000"}
DEFAULTS |= {"precision": "amp", "val-frequency": "1", "save-frequency": "1", "accum-freq": "1"}
DEFAULTS |= {"csv-img-key": "filepath", "csv-caption-key": "title"}

KEEP_ALL = 10**6  # the checkpoint.keep with which no checkpoint is deleted

BATCH_NORM_MODELS = re.compile(r"RN\d|MobileCLIP")  # models of open_clip that have batch norms

PRECISIONS = {"fp32": "fp32"}  # value of --precision → value of our key
PRECISIONS |= dict.fromkeys(("amp", "fp16", "pure_fp16"), "fp16")
PRECISIONS |= dict.fromkeys(("amp_bf16", "amp_bfloat16", "bf16", "pure_bf16"), "bf16")
ALL = {*KEYS, *SWITCHES, *OF_TABLES, *OWN_RULE, *ALREADY, *ABSENT, *LOST}
