"""Translate an open_clip training command to Dyad's: python -m train.doctor translate "<open_clip command line>".

Every flag becomes a configuration key, or a note that says how Dyad differs. A flag that changes what is learned and
has no key is refused. Defaults of open_clip are written out where Dyad's differ. open_clip_flags.py lists the flags,
open_clip_line.py parses the command, translation.py holds the translation; this module computes the keys.
"""

import math
import re
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from dyad.data.base.errors import ConfigError, nearest, raise_broken
from dyad.doctor.open_clip_line import EXAMPLE, read_line
from dyad.doctor.translation import NUMBER, Translation
from dyad.train.cli import open_clip_flags as flags
from dyad.train.cli.command_line import parse_argument
from dyad.train.cli.compose import compose_config
from dyad.train.cli.unread_keys import refuse_unread
from dyad.train.config_rules import validate

UPSAMPLING = "train-data-upsampling-factors"
COOLDOWN = ("epochs-cooldown", "lr-cooldown-end", "lr-cooldown-power")


def translate(line: str, gpus: int | None = None) -> Translation:
    """Translate an open_clip command to a Dyad command; str() of the result is that command, with notes as comments.

    line: `python -m open_clip_train.main …`, alone, under torchrun or in a SLURM script, or the flags alone. gpus: the
    number of GPUs on all machines, if the line does not give it. Raises ConfigError for a line that `read_line`
    refuses, such as one with an unknown flag. Raises it also for a flag that changes the training and has no key, for a
    value from which no key can be computed, and for a command that does not train an image and a text tower; then the
    message has a line for each of the first five reasons. Whether a run takes the values of the keys is not checked
    here: `run` does.
    """
    launch, given, unset = read_line(line, gpus)
    job = Translation(launch, given)
    for flag, (part, why) in product(("model", "dataset-type"), flags.OTHER_MODELS.items()):
        if part in job.text(flag).lower():
            job.refuse(flag, why)
    for flag in sorted(given.keys() & flags.LOST.keys()):
        job.refuse(flag, flags.LOST[flag])
    if gpus is not None and launch.nodes > 1:
        job.notes.append(f"gpus={gpus}: {launch.nodes} machines of {launch.per_node}")
    for rule in RULES:
        try:
            rule(job)
        except ConfigError as error:  # the other rules may refuse more
            job.refused.append(str(error))
    raise_broken(job.refused)
    job.note_given(flags.ABSENT, "not here: ")
    job.note_given(flags.ALREADY)
    job.notes += [f"${name}: a variable of your shell without a value here; put one in its place" for name in unset]
    if implied := [job.argument(key) for key in job.keys if job.implied[key]]:
        job.notes.append(f"without being typed, open_clip has: {' '.join(implied)}")
    return job


# From flags to keys ---------------------------------------------------------------------------------------------------


def _data(job: Translation) -> None:
    """Set data.train, data.val and eval.suite of the translation `job`, from the open_clip flags for data.

    Raises ConfigError without --train-data. Refuses a --text-key other than txt.
    """
    if "train-data" not in job.given:
        evaluate = "python -m eval checkpoint=RUN suite=[imagenet:FOLDER]"
        raise ConfigError(f"there is no --train-data: the line only evaluates. Write, with one of our runs: {evaluate}")
    for flag, key in {"train-data": "data.train", "val-data": "data.val"}.items():
        if flag in job.given:
            job.set(key, _shards(job, flag))
    folders = [Path(job.text(flag), inner) for flag, inner in flags.IMAGENET.items() if flag in job.given]
    if folders:
        job.set("eval.suite", [f"imagenet:{folder}" for folder in folders])
    if job.text("text-key") not in ("", "txt"):
        job.refuse("text-key", "captions are read from the .txt member, or from fields of the .json member")


def _shards(job: Translation, flag: str) -> str:
    """Return the path of the shards for open_clip's data flag `flag`, "train-data" or "val-data".

    A table (.csv, .tsv) is its own path; columns that are given become data.columns. A shell pipe (pipe:…) that reads a
    URL becomes this URL. Each source of "train-data" gets its upsampling factor as its weight, path@factor: both say
    how often its samples are drawn, relative to the other sources. Raises ConfigError unless there is one factor above
    0 for each source.
    """
    path = job.text(flag)
    if re.search(r"\.[ct]sv$", path) or job.text("dataset-type") == "csv":
        if job.given.keys() & flags.OF_TABLES:
            job.set("data.columns", [job.text("csv-img-key"), job.text("csv-caption-key")])
        job.note(flag, "the table is converted once, at the first start; its separator is found")
        job.drop([UPSAMPLING], "only shards have factors")
        return path
    sources = [re.sub(r"^pipe:.*?((?:s3|gs|https?)://\S+).*", r"\1", source) for source in path.split("::")]
    if sources != path.split("::"):
        job.note(flag, "no shell is started: shards are read where they are (pip install s3fs or gcsfs)")
    if flag != "train-data" or UPSAMPLING not in job.given:
        return "::".join(sources)
    factors = job.text(UPSAMPLING).split("::")
    if len(factors) != len(sources) or not all(NUMBER.fullmatch(each) and float(each) > 0 for each in factors):
        wanted = f"must be a number above 0 for each of the {len(sources)} sources of --train-data, joined by '::'"
        raise ConfigError(f"--{UPSAMPLING} {job.text(UPSAMPLING)}: {wanted}")
    return "::".join(f"{source}@{factor}" for source, factor in zip(sources, factors, strict=True))


def _length(job: Translation) -> None:
    """Set the keys global_batch_size, chunk_size (with --accum-freq above 1), and the length of the run in `job`.

    The length is the key `steps` if the steps per epoch are known, else the key `epochs`. In the first case and
    with --val-data, --imagenet-val or --imagenet-v2, eval.every is set too. Raises ConfigError for a value that is no
    whole number.
    """
    per_gpu, every, epochs = job.number("batch-size"), job.number("accum-freq"), job.number("epochs")
    job.set("global_batch_size", per_gpu * every * job.world_size, implied="batch-size" not in job.given)
    gpus = f" × {job.world_size} GPUs" if job.world_size > 1 else ""
    passes = f" × {every}" if every > 1 else ""
    if gpus or passes:
        job.note("batch-size", f"global_batch_size counts all GPUs: {per_gpu} per GPU{gpus}{passes}")
    if every > 1:
        job.set("chunk_size", per_gpu)
        job.note("accum-freq", f"chunk_size={per_gpu} embeds as much at a time, with the gradient of the whole batch")
    if (steps := job.steps_per_epoch) is None:
        job.set("epochs", epochs, implied="epochs" not in job.given)
        job.note_given(flags.WITHOUT_STEPS)
        return
    job.set("steps", steps * epochs)
    job.note("train-num-samples", f"samples are counted by the index; steps says the length: {epochs} × {steps}")
    if job.given.keys() & {"val-data", *flags.IMAGENET}:
        job.set("eval.every", steps * job.number("val-frequency", 0), implied="val-frequency" not in job.given)


def _checkpoints(job: Translation) -> None:
    """Set checkpoint.every and checkpoint.keep in `job` if the steps per epoch are known.

    open_clip deletes no checkpoint without --delete-previous-checkpoint. With --save-frequency 0, it writes one at the
    end, and with --save-most-recent also one after each epoch, which replaces the one before it.
    """
    if (steps := job.steps_per_epoch) is None:
        return
    epochs, frequency = job.number("epochs"), job.number("save-frequency", 0)
    implied = "save-frequency" not in job.given
    every = frequency or (1 if "save-most-recent" in job.given else epochs)
    job.set("checkpoint.every", steps * every, implied=implied)
    if not frequency or "delete-previous-checkpoint" in job.given:
        job.set("checkpoint.keep", 1)
        return
    job.set("checkpoint.keep", flags.KEEP_ALL, implied=implied)
    kept = f"checkpoint.keep={flags.KEEP_ALL} deletes none, as in open_clip: {math.ceil(epochs / every)} at the end"
    job.note("save-frequency", f"{kept}. A smaller checkpoint.keep leaves only the newest")


def _model(job: Translation) -> None:
    """Set model.image.image_size, and model.pretrained from open_clip's --resume PATH, in the translation `job`.

    --resume latest only gives a note. Refuses images that are not square.
    """
    size = job.given.get("force-image-size", [])
    if len(set(size)) == 1:
        job.set("model.image.image_size", size[0])
    elif size:
        job.refuse("force-image-size", "images are squares")
    if job.text("resume") == "latest":
        job.note("resume", "the same command again goes on by itself, at the exact sample")
    elif "resume" in job.given:
        job.set("model.pretrained", job.text("resume"))
        job.note("resume", "model.pretrained takes its weights; optimiser, step and order begin anew")


def _batch_norm(job: Translation) -> None:
    """Set model.batch_norm=per_chunk in `job` if open_clip's batch norms would not see the whole global batch.

    That is so with several GPUs without --use-bn-sync, and with gradient accumulation (--accum-freq above 1). The key
    is set only for models with batch norms that train. With --use-bn-sync, add a note.
    """
    chunks = job.number("accum-freq") > 1
    normed = flags.BATCH_NORM_MODELS.match(job.text("model")) and "lock-image" not in job.given
    if normed and (chunks or (job.world_size > 1 and "use-bn-sync" not in job.given)):
        job.set("model.batch_norm", "per_chunk", implied=True)
    if "use-bn-sync" in job.given:
        several = "statistics of several passes cannot be synchronised here: those of each chunk on each GPU"
        job.note("use-bn-sync", several if normed and chunks else "model.batch_norm=global is the default")


def _optimiser(job: Translation) -> None:
    """Set the optimiser, the learning rate schedule and its cooldown in `job`, from open_clip's flags.

    Must run after `_direct`, whose optim.beta1, beta2 and eps it moves to optim.options for an optimiser of timm. For
    timm/adamw, and for AdamW and models that are no ViT, beta2 and eps get the defaults there, if no flag gives them.
    Refuses an optimiser that is neither AdamW nor timm's, and --momentum without timm. Raises ConfigError for one of
    timm's without --lr or with one of --beta1 and --beta2 alone, and for a cooldown whose number of steps is unknown.
    """
    _, is_timm, name = job.text("opt").lower().rpartition("timm/")
    if is_timm and "lr" not in job.given:
        raise ConfigError(f"--opt {job.text('opt')}: say its learning rate, --lr: each one of timm has its own")
    if is_timm and ("beta1" in job.given) != ("beta2" in job.given):
        raise ConfigError(f"--opt {job.text('opt')}: open_clip wants --beta1 and --beta2 both, or neither")
    if is_timm and name != "adamw":
        job.set("optim.name", name)
        betas = [job.keys.pop(f"optim.{key}", "") for key in ("beta1", "beta2")]
        options = {"eps": job.keys.pop("optim.eps", ""), "momentum": job.text("momentum")}
        options["betas"] = parse_argument(f"betas=[{','.join(betas)}]").value() if all(betas) else ""
        for key, value in options.items():
            if value:
                job.set(f"optim.options.{key}", value)
    elif is_timm or "vit" not in job.text("model").lower():  # timm's AdamW is torch's, with the defaults of torch
        for key, value in {"beta2": "0.999", "eps": "1e-8"}.items():
            if key not in job.given:
                job.set(f"optim.{key}", value, implied=True)
    if not is_timm and (name not in ("", "adamw") or "momentum" in job.given):
        job.refuse("opt", "open_clip has adamw, and any of timm's as timm/NAME, which have a --momentum")
    if "skip-scheduler" in job.given or job.text("lr-scheduler") != "const-cooldown":
        job.drop(COOLDOWN, "only --lr-scheduler const-cooldown has a cooldown")
    if "skip-scheduler" in job.given:
        job.set("optim.schedule", "const")
        job.set("optim.warmup", 0)
        job.note("skip-scheduler", "the learning rate stays; there is no warm-up then, nor a cooldown")
        return
    if job.text("lr-scheduler") == "const-cooldown":
        if not ("epochs-cooldown" in job.given and job.steps_per_epoch):
            wanted = "--epochs-cooldown, and --train-num-samples of shards"
            raise ConfigError(f"--lr-scheduler const-cooldown: optim.cooldown counts steps. Add {wanted}")
        job.set("optim.cooldown", job.number("epochs-cooldown", 0) * job.steps_per_epoch)


def _precision(job: Translation) -> None:
    """Set the key `precision` from open_clip's --precision or its default; bf16 in place of fp16 with --fsdp.

    Raises ConfigError for a value that open_clip does not have.
    """
    name = job.text("precision")
    if name not in flags.PRECISIONS:
        raise ConfigError(f"--precision {name}: no such choice.{nearest(name, flags.PRECISIONS)}")
    sharded = "fsdp" in job.given and flags.PRECISIONS[name] == "fp16"
    implied = not sharded and "precision" not in job.given
    job.set("precision", "bf16" if sharded else flags.PRECISIONS[name], implied=implied)
    if sharded:
        job.note("fsdp", "towers are not sharded in fp16 here; precision=bf16 needs no scaling of the loss")
    if not name.startswith("amp") and name != "fp32":
        job.note("precision", "the weights stay float32; the towers compute in it")


def _augment(job: Translation) -> None:
    """Set the keys of crop scale, colour jitter and grey in the translation `job`, from open_clip's --aug-cfg.

    open_clip changes the images by the same operations in the same order. Refuses other augmentations of --aug-cfg.
    """
    given = dict(piece.split("=", 1) for piece in job.given.get("aug-cfg", []) if "=" in piece)
    if "color_jitter_prob" not in given and given.pop("color_jitter", ""):
        job.note("aug-cfg", "open_clip has no colour jitter without color_jitter_prob")
    for name, key in flags.AUGMENT.items():
        if text := given.get(name, flags.AUGMENT_DEFAULTS.get(name)):
            numbers = [*map(float, NUMBER.findall(text))]
            job.set(key, numbers if len(numbers) > 1 else text, implied=name not in given)
    if others := sorted(given.keys() - flags.AUGMENT.keys()):
        job.refuse("aug-cfg", f"there is no {', '.join(others)}")


def _tracking(job: Translation) -> None:
    """Set the W&B and TensorBoard keys in `job` from open_clip's --report-to.

    Unless the flag names wandb or all, W&B is disabled, as in open_clip.
    """
    services = set(job.text("report-to").split(",")) - {""}
    if not services & {"wandb", "all"}:
        job.set("tracking.wandb", "disabled", implied="report-to" not in job.given)
    if services & {"tensorboard", "all"}:
        job.set("tracking.tensorboard", True)
    if "trackio" in services:
        job.note("report-to", "no trackio; metrics.jsonl has every value")


def _direct(job: Translation) -> None:
    """Set the keys of those open_clip flags that need no computation, by the tables KEYS and SWITCHES.

    The tables are in train/cli/open_clip_flags.py. Flags with the value "none" are left out; missing flags get
    open_clip's default where ours differs. Add a note for a locked (frozen) tower, because Dyad still trains its
    projection.
    """
    for flag, key in flags.KEYS.items():
        value = job.text(flag)
        if value.lower() not in ("", "none"):
            job.set(key, value, implied=flag not in job.given)
    for flag, (key, value) in flags.SWITCHES.items():
        if flag in job.given:
            job.set(key, value)
    for lock, unlocked in (("lock-image", "lock-image-unlocked-groups"), ("lock-text", "lock-text-unlocked-layers")):
        if lock not in job.given:
            job.drop([unlocked], f"only --{lock} leaves something to unlock")
        elif unlocked not in job.given:
            job.note(lock, f"the projection still trains here, as with --{unlocked} 1; open_clip freezes it as well")


RULES = (_data, _direct, _model, _batch_norm, _length, _checkpoints, _optimiser, _precision, _augment, _tracking)


def run(arguments: Sequence[str]) -> Translation:
    """Translate the open_clip command line in `arguments`, and check that training takes the result; print nothing.

    arguments: those of `python -m train.doctor translate`: the open_clip line, as one string or split at its spaces,
    and optionally gpus=N. Raises ConfigError if there is no line, a line that cannot be translated, or one with values
    that no run takes. Files need not exist.
    """
    numbers = [word for word in arguments if re.fullmatch(r"gpus=\d+", word)]
    line = [word for word in arguments if word not in numbers]
    if not line:
        raise ConfigError(f"the line is missing: {EXAMPLE}")
    job = translate(line[0] if len(line) == 1 else shlex.join(line), int(numbers[-1][5:]) if numbers else None)
    config = compose_config(job.arguments)
    validate(config, job.world_size)
    refuse_unread(job.arguments, [config])
    return job
