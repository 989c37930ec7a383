"""python -m train.doctor translate "<open_clip command line>": the same training here, as a command to paste.

Every flag becomes a key, or one line that says what is different; a flag that changes what is learned and has no key is
refused. What open_clip has without being told is said here where our default is another. open_clip_flags.py has the
facts, open_clip_line.py reads; here is the arithmetic.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from data.errors import ConfigError, nearest
from train.command import open_clip_flags as flags
from train.command.compose import written
from train.doctor.open_clip_line import Launch, read_line

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")


@dataclass
class Translation:
    """before: commands to run first; words: the arguments of python -m train; notes: one line each."""

    launch: Launch
    words: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        return [f"{key}={written(value)}" for key, value in self.words.items()]

    def __str__(self) -> str:
        command = f"{self.launch.command} {shlex.join(self.arguments)}"
        return "\n".join([*self.before, command, *(f"# {note}" for note in self.notes)])


def translate(line: str, gpus: int | None = None) -> Translation:
    """What `python -m open_clip_train.main …`, alone, under torchrun or in a SLURM script, is here.

    gpus: how many in all, where the line does not say it. Raises ConfigError for a flag that open_clip does not know,
    with the nearest, for one whose training is not here, and for a command that does not train a pair of towers.
    """
    read = read_line(line, gpus)
    given, result = read.given, Translation(read.launch)
    job = Job(given, result)
    for name in sorted(given.keys() & flags.LOST.keys()):
        job.refuse(name, flags.LOST[name])
    if gpus is not None and read.launch.nodes > 1:
        result.notes.append(f"gpus={gpus}: {read.launch.nodes} machines of {read.launch.per_node}")
    for rule in RULES:
        rule(job)
    for name in sorted(given.keys() & flags.ABSENT.keys()):
        job.note(name, f"not here: {flags.ABSENT[name]}")
    for name in sorted(given.keys() & flags.ALREADY.keys()):
        job.note(name, flags.ALREADY[name])
    for name in read.unset:
        result.notes.append(f"${name}: a variable of your shell without a value here; put one in place of {name}")
    if job.implied:
        result.notes.append(f"without being typed, open_clip has: {' '.join(job.implied)}")
    return result


# From flags to keys ---------------------------------------------------------------------------------------------------


class Job:
    """What was given, what open_clip has by itself, and the translation as it grows."""

    def __init__(self, given: dict[str, list[str]], result: Translation) -> None:
        self._given, self._result = given, result
        self.implied: list[str] = []
        self.world = result.launch.nodes * result.launch.per_node

    def has(self, name: str) -> bool:
        return name in self._given

    def values(self, name: str) -> list[str]:
        return self._given.get(name, [])

    def text(self, name: str) -> str:
        return " ".join(self._given[name]) if name in self._given else flags.DEFAULTS.get(name, "")

    def number(self, name: str) -> int:
        try:
            return int(float(self.text(name)))
        except ValueError as error:
            raise ConfigError(f"--{name} {self.text(name)}: must be a whole number") from error

    def set(self, key: str, value: object, implied: bool = False) -> None:
        self._result.words[key] = str(value)
        if implied:
            self.implied.append(f"{key}={value}")

    def note(self, name: str, text: str) -> None:
        self._result.notes.append(f"{self._shown(name)}: {text}")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise ConfigError(f"{self._shown(name)}: not here, and it changes what is learned: {why}. Or leave it out")

    def _shown(self, name: str) -> str:
        shown = f"--{name} {self.text(name)}".strip() if self.has(name) else f"--{name}"
        return shown if len(shown) <= 60 else f"{shown[:57]}…"

    def first(self, command: str) -> None:
        self._result.before.append(command)

    @property
    def steps_per_epoch(self) -> int | None:
        """As open_clip counts those of shards: each loader worker has as many batches as every other."""
        if not self.has("train-num-samples") or self.text("dataset-type") == "csv":
            return None
        workers = max(int(self.text("workers")), 1)
        batches = math.ceil(self.number("train-num-samples") / (self.number("batch-size") * self.world))
        return max(math.ceil(batches / workers) * workers // self.number("accum-freq"), 1)


def _data(job: Job) -> None:
    if job.has("train-data"):
        job.set("data.train", _weighted(job, _shards(job, "train-data")))
    else:
        job.set("data", "emoji")
        job.note("dataset-type", "no made-up pictures here; the emoji of this repository stand in for them")
    if job.has("val-data"):
        job.set("data.val", _shards(job, "val-data"))


def _shards(job: Job, name: str) -> str:
    """A table is packed first; what a pipe copies from a bucket is read there."""
    path = job.text(name)
    if re.search(r"\.[ct]sv$", path) or job.text("dataset-type") == "csv":
        out = "shards/" + re.sub(r"\.\w+$", "", os.path.basename(path))
        options = [f"{key}={job.text(flag)}" for flag, key in flags.OF_TABLES.items() if job.has(flag)]
        job.first(shlex.join(["python", "-m", "data", "pack", path, f"out={out}", *options]))
        job.note(name, "tables become shards once, by the first command")
        return out
    piped = re.fullmatch(r"pipe:.*?((?:s3|gs|https?)://\S+).*", path)
    if piped:
        job.note(name, "no shell is started: shards are read where they are (pip install s3fs or gcsfs)")
    return piped[1] if piped else path


def _weighted(job: Job, shards: str) -> str:
    factors = job.text("train-data-upsampling-factors")
    if not factors:
        return shards
    pairs = zip(shards.split("::"), factors.split("::"), strict=False)
    job.note("train-data-upsampling-factors", "'@2' means here that every sample comes twice an epoch")
    return "::".join(f"{path}@{factor}" for path, factor in pairs)


def _captions(job: Job) -> None:
    if job.has("json-text-key"):
        names = job.text("json-text-key").split(";")
        chances = [*job.values("json-text-key-probs"), *["0"] * len(names)][: len(names)]
        job.set("data.captions", f"[{','.join(names)}]")
        if job.has("json-text-key-probs"):
            job.set("data.caption_weights", f"[{','.join(chances)}]")
        elif len(names) > 1:
            job.set("data.caption_weights", f"[{','.join(['1', *['0'] * (len(names) - 1)])}]")
            job.note("json-text-key", "no second choice where the first is empty: such a sample is refused here")
    elif job.text("text-key") not in ("", "txt"):
        job.refuse("text-key", "captions are read from the .txt member, or from fields of the .json member")


def _length(job: Job) -> None:
    """Steps where open_clip's epoch has a size; else epochs of the whole data."""
    per_gpu, every, epochs = job.number("batch-size"), job.number("accum-freq"), job.number("epochs")
    job.set("global_batch_size", per_gpu * every * job.world, implied=not job.has("batch-size"))
    times = " × ".join([f"{per_gpu} per GPU", *[f"{job.world} GPUs"] * (job.world > 1), *[f"{every}"] * (every > 1)])
    if job.world > 1 or every > 1:
        job.note("batch-size", f"global_batch_size counts all GPUs: {times}")
    if every > 1:
        job.set("chunk_size", per_gpu)
        job.note("accum-freq", f"chunk_size={per_gpu} embeds as much at a time, with the gradient of the whole batch")
    steps = job.steps_per_epoch
    if steps is None:
        job.set("epochs", epochs, implied=not job.has("epochs"))
        return
    job.set("steps", steps * epochs)
    job.note("train-num-samples", f"samples are counted by the index; steps says the length: {epochs} × {steps}")


def _cadence(job: Job) -> None:
    """How often to save and evaluate: open_clip counts epochs, we count steps."""
    steps, often = job.steps_per_epoch, job.number("save-frequency")
    if steps is not None:
        job.set("checkpoint.every", steps * often, implied=not job.has("save-frequency"))
        if job.has("val-data"):
            job.set("eval.every", steps * job.number("val-frequency"), implied=not job.has("val-frequency"))
    elif job.has("save-frequency"):
        job.note("save-frequency", "checkpoint.every counts steps (500 unless set), and a run resumes at any of them")
    if steps is None and job.has("val-frequency"):
        job.note("val-frequency", "eval.every counts steps; 0 evaluates at the end")
    if job.has("zeroshot-frequency"):
        job.note("zeroshot-frequency", "eval.every is one rhythm, in steps, for data.val and eval.suite")
    for name in ("imagenet-val", "imagenet-v2"):
        if job.has(name):
            job.note(name, "eval.suite=[wds:FOLDER] takes ImageNet as CLIP_benchmark ships it, with its prompts")


def _model(job: Job) -> None:
    job.set("model.name", job.text("model"), implied=not job.has("model"))
    size = job.values("force-image-size")
    if len(set(size)) == 1:
        job.set("model.image.image_size", size[0])
    elif size:
        job.refuse("force-image-size", "pictures are squares")
    if job.text("resume") == "latest":
        job.note("resume", "the same command again goes on by itself, at the exact sample")
    elif job.has("resume"):
        job.set("model.pretrained", job.text("resume"))
        job.note("resume", "model.pretrained takes its weights; optimiser, step and order begin anew")


def _batch_norm(job: Job) -> None:
    """open_clip's statistics are of one GPU and one pass of --accum-freq; with --use-bn-sync of all GPUs."""
    chunks = job.number("accum-freq") > 1
    normed = flags.NORMED.match(job.text("model")) and not job.has("lock-image")
    if normed and (chunks or (job.world > 1 and not job.has("use-bn-sync"))):
        job.set("model.batch_norm", "per_chunk", implied=True)
    if job.has("use-bn-sync"):
        several = "statistics of several passes cannot be synchronised here: those of each chunk on each GPU"
        job.note("use-bn-sync", several if normed and chunks else "model.batch_norm=global is the default")


def _optimiser(job: Job) -> None:
    if "vit" not in job.text("model").lower():
        for key, value in {"beta2": "0.999", "eps": "1e-8"}.items():
            if not job.has(key):
                job.set(f"optim.{key}", value, implied=True)
    if job.text("opt") not in ("", "adamw"):
        job.refuse("opt", "the optimiser is AdamW")
    if job.has("skip-scheduler"):
        job.set("optim.schedule", "const")
        job.set("optim.warmup", 0)
        job.note("skip-scheduler", "the learning rate stays; there is no warm-up then, nor a cooldown")
        return
    if not job.has("warmup"):
        job.set("optim.warmup", flags.DEFAULTS["warmup"], implied=True)
    if job.text("lr-scheduler") == "const-cooldown":
        if not (job.has("epochs-cooldown") and job.steps_per_epoch):
            raise ConfigError(
                "--lr-scheduler const-cooldown: optim.cooldown counts steps. Add --epochs-cooldown, and "
                "--train-num-samples of shards, for how many steps an epoch has"
            )
        job.set("optim.cooldown", job.number("epochs-cooldown") * job.steps_per_epoch)
    elif job.has("epochs-cooldown"):
        job.note("epochs-cooldown", "only --lr-scheduler const-cooldown has a cooldown")


def _precision(job: Job) -> None:
    name = job.text("precision")
    if name not in flags.PRECISIONS:
        raise ConfigError(f"--precision {name}: no such choice.{nearest(name, flags.PRECISIONS)}")
    job.set("precision", flags.PRECISIONS[name], implied=not job.has("precision"))
    if not name.startswith("amp") and name != "fp32":
        job.note("precision", "the weights stay float32; the towers compute in it")


def _augmentation(job: Job) -> None:
    pieces = dict(piece.split("=", 1) for piece in job.values("aug-cfg") if "=" in piece)
    scale = NUMBER.findall(pieces.get("scale", "0.9, 1.0"))
    job.set("data.augment.crop_scale", f"[{','.join(scale)}]", implied="scale" not in pieces)
    if "color_jitter" in pieces:
        job.set("data.augment.brightness", NUMBER.findall(pieces["color_jitter"])[0])
        job.note("aug-cfg", "of color_jitter brightness only, and always; contrast, saturation and hue stay")
    if "gray_scale_prob" in pieces:
        job.set("data.augment.grey", pieces["gray_scale_prob"])
    others = sorted({*pieces} - {"scale", "color_jitter", "color_jitter_prob", "gray_scale_prob"})
    if others:
        job.refuse("aug-cfg", f"there is no {', '.join(others)}")


def _tracking(job: Job) -> None:
    services = set(job.text("report-to").split(",")) - {""}
    if not services & {"wandb", "all"}:
        job.set("tracking.wandb", "disabled", implied=not job.has("report-to"))
    if services & {"tensorboard", "all"}:
        job.set("tracking.tensorboard", "true")
    if "trackio" in services:
        job.note("report-to", "no trackio; metrics.jsonl has every value")


def _as_they_are(job: Job) -> None:
    """The flags whose value is a key's value, and the switches."""
    for name, key in flags.KEYS.items():
        value = job.text(name)
        if job.has(name) and value.lower() not in ("", "none"):
            job.set(key, value)
    if not job.has("workers"):
        job.set("data.workers", flags.DEFAULTS["workers"], implied=True)
    for name, word in flags.SWITCHES.items():
        if job.has(name):
            key, _, value = word.partition("=")
            job.set(key, value)
    for lock, unlocked in (("lock-image", "lock-image-unlocked-groups"), ("lock-text", "lock-text-unlocked-layers")):
        if job.has(lock) and not job.has(unlocked):
            job.note(lock, f"the projection still trains here, as with --{unlocked} 1; open_clip freezes it as well")


RULES = (
    _data,
    _captions,
    _model,
    _batch_norm,
    _as_they_are,
    _length,
    _cadence,
    _optimiser,
    _precision,
    _augmentation,
    _tracking,
)


def run(words: Sequence[str]) -> Translation:
    """The words behind `python -m train.doctor translate`: the line, quoted or not, and gpus=N."""
    numbers = [word for word in words if re.fullmatch(r"gpus=\d+", word)]
    line = [word for word in words if word not in numbers]
    if not line:
        raise ConfigError('the line is missing: python -m train.doctor translate "python -m open_clip_train.main --…"')
    return translate(line[0] if len(line) == 1 else shlex.join(line), int(numbers[-1][5:]) if numbers else None)
