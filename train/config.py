"""The schema of a training run's configuration: TrainConfig, whose fields and nested dataclasses have all defaults.

Does not import torch, so that --help answers at once.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.plugins import PLUGINS_HELP
from dyad.data.config import DataConfig, ItemKind, described
from dyad.train.checkpoint_config import CheckpointConfig
from dyad.train.context_config import ContextConfig
from dyad.train.eval_config import EvalConfig
from dyad.train.plan_config import PlanConfig

Task = StrEnum("Task", ["image_text", "question_passage", "views", "labelled", "sequence", "language_model"])
LISTED = (Task.question_passage, Task.language_model)  # each x has a list of right y items and a list of wrong ones
# Task → the kind of its x items; for the other tasks, data.items says it
ITEMS = {Task.image_text: ItemKind.pictures, **dict.fromkeys(LISTED, ItemKind.texts)}
Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp16"])
ImageTower = StrEnum("ImageTower", ["open_clip", "timm", "transformers", "cnn"])
TextTower = StrEnum("TextTower", ["open_clip", "transformers"])
# Towers of plugins: model.image.kind or model.text.kind → the function that builds the tower, see dyad/plugins.py
OWN_IMAGE_TOWERS: dict[str, Callable[..., Any]] = {}
OWN_TEXT_TOWERS: dict[str, Callable[..., Any]] = {}
Classes = StrEnum("Classes", ["learnt", "prompted"])
Activation = StrEnum("Activation", ["published", "model"])
Pooling = StrEnum("Pooling", ["cls", "mean", "last"])
Schedule = StrEnum("Schedule", ["cosine", "linear", "const", "const-cooldown", "wsd"])
TargetKind = StrEnum("TargetKind", ["none", "copy", "ema"])
Head = StrEnum("Head", ["none", "linear", "simclr", "simclr_v2", "byol", "vicreg"])
BatchNorm = StrEnum("BatchNorm", ["global", "per_chunk", "frozen"])
Parallel = StrEnum("Parallel", ["ddp", "fsdp2", "hsdp"])
Wandb = StrEnum("Wandb", ["auto", "online", "offline", "disabled"])

# Options of the objective whose learned values are saved with weights → the keys of the objective that set them
KNOWN_BY_WEIGHTS = {"temperature": ("temperature", "init_scale"), "init_bias": ("init_bias",)}
UNTRACED = 4  # steps before those that profile=N traces: they start the loader and choose kernels


def _tower_kind(key: str, kind: str, ours: type[StrEnum], own: Mapping[str, Any]) -> str:
    """Return the member of `ours` that `kind` names, or `kind` if a plugin has added it. Raises ConfigError otherwise.

    key: the configuration key, for the message. own: the towers of plugins, by kind.
    """
    if kind not in [*ours, *own]:
        choices = f"{nearest(kind, ours)} Choices: {', '.join([*ours, *own])}, or of your own: plugins=[MODULE]"
        raise ConfigError(f"{key}={kind}: no such tower.{choices}")
    return kind if kind in own else ours(kind)


@dataclass
class RunConfig:
    """Options of a run's folder (keys run.*), and values that the run finds in its data and adds to its config.yaml."""

    name: str | None = described(None, "folder of the run; null: <experiment>-<hash of keys that change the weights>")
    dir: str = described("runs", "where run folders are")
    classes: list[str] | None = described(None, "task=labelled: names of the classes, which the run finds and writes")
    prompts: list[str] | None = described(None, "task=labelled: a text for each class, which the run finds and writes")
    inputs: int | None = described(
        None, "task=sequence: how many ids the log has, or features a frame, which the run finds and writes"
    )

    def __post_init__(self) -> None:
        self.dir = os.path.expanduser(self.dir)  # no shell does for run.dir=~/runs; data expand ~ where they are read


@dataclass
class ImageTowerConfig:
    """Options of the image tower (keys model.image.*). Raises ConfigError for an unknown `kind`."""

    kind: str = described(ImageTower.open_clip, f"source of the image tower: {', '.join(ImageTower)} or a plugin")
    name: str | None = described(None, "model of open_clip (null: model.name), timm or transformers (name or folder)")
    pretrained: str | None = described(None, "weights: a file, folder or published name; null: model.pretrained")
    image_size: int | None = described(
        None, "side of the input in pixels; null: the tower's own", least=1, most=1 << 12
    )
    widths: list[int] = described(
        [32, 64, 128, 192], "channels of the cnn tower, one stride-2 convolution each", least=1, most=1 << 14
    )
    from_scratch: bool = described(False, "transformers: take the architecture, not the weights")
    patch_dropout: float | None = described(
        None, "share of patches left out in training, of ViTs; null: as the model says", least=0, below=1
    )
    frozen: bool = described(False, "train only the projection")
    unlocked_groups: int = described(0, "of a frozen tower: the last n groups of layers train all the same", least=0)
    lora_rank: int = described(0, "rank of adapters that train instead of the weights; 0: none", least=0, most=1 << 14)
    lora_alpha: float = described(16.0, "scale of the adapters: alpha / rank", above=0)
    lora_targets: list[str] | None = described(None, "modules that get adapters; null: all linear ones of attentions")

    def __post_init__(self) -> None:
        self.kind = _tower_kind("model.image.kind", self.kind, ImageTower, OWN_IMAGE_TOWERS)


@dataclass
class TextTowerConfig:
    """Options of the text tower (keys model.text.*). Raises ConfigError for an unknown `kind`."""

    kind: str = described(TextTower.open_clip, f"source of the text tower: {', '.join(TextTower)} or a plugin")
    name: str | None = described(None, "a name, a folder, or of transformers pkg:PACKAGE/FOLDER; null: model.name")
    pretrained: str | None = described(None, "open_clip weights; null: model.pretrained")
    # A SentenceTransformer brings its own values of the next three
    pooling: Pooling = described(Pooling.mean, "transformers: how the states of the tokens become one embedding")
    lower_case: bool = described(False, "transformers: turn texts into lower case first")
    dense: bool = described(False, "with model.embed_dim=null: the Dense module of a SentenceTransformer as projection")
    end_token: bool = described(
        False, "transformers: put the tokenizer's eos_token behind every text, unless a special token ends it already"
    )
    context_length: int | None = described(None, "longest text in tokens; null: the tower's own", least=1, most=1 << 20)
    from_scratch: bool = described(False, "transformers: take the architecture, not the weights")
    frozen: bool = described(False, "train only the projection")
    unlocked_layers: int = described(0, "of a frozen tower: the last n layers train all the same", least=0)
    lora_rank: int = described(0, "rank of adapters that train instead of the weights; 0: none", least=0, most=1 << 14)
    lora_alpha: float = described(16.0, "scale of the adapters: alpha / rank", above=0)
    lora_targets: list[str] | None = described(None, "modules that get adapters; null: the projections of attentions")

    def __post_init__(self) -> None:
        self.kind = _tower_kind("model.text.kind", self.kind, TextTower, OWN_TEXT_TOWERS)


@dataclass
class ModelConfig:
    """Options of the towers of a run (keys model.*)."""

    name: str | None = described("ViT-B-32", "open_clip model of both towers: a name, FOLDER, .json or hf-hub:ORG/NAME")
    pretrained: str | None = described(None, "open_clip weights for both towers: a file or a published name")
    activation: Activation = described(Activation.published, "open_clip: as the weights' tag says; model: as its name")
    embed_dim: int | None = described(
        256, "width of the projection of towers without their own; null: none", least=1, most=1 << 16
    )
    head: Head = described(Head.none, "task=views: published projection head to model.embed_dim; left out of exports")
    head_width: int | None = described(None, "width of the hidden layers; null: as published", least=1, most=1 << 16)
    classes: Classes = described(
        Classes.learnt, "task=labelled, y of a class: a trained vector, or the embedding of its prompt"
    )
    shared: bool = described(True, "question_passage: one encoder for both sides; false: two with the same start")
    grad_checkpointing: bool = described(False, "recompute activations in backward: less memory, more time")
    batch_norm: BatchNorm = described(
        BatchNorm["global"],
        "statistics of batch norms in training. global: of the whole batch over all ranks, needs one chunk; per_chunk: "
        "of each chunk on each rank, another loss; frozen: the running statistics",
    )
    frozen_cache_mb: int | None = described(
        None, "memory of each frozen tower for outputs it has computed, in MiB; null: 512 on CPUs, 0 on GPUs", least=0
    )
    image: ImageTowerConfig = field(default_factory=ImageTowerConfig)
    text: TextTowerConfig = field(default_factory=TextTowerConfig)
    context: ContextConfig = field(default_factory=ContextConfig)


@dataclass
class OptimConfig:
    """Options of the optimiser, the learning rate and skipped steps (keys optim.*)."""

    name: str = described("adamw", "optimiser: adamw, or a name of timm.optim.list_optimizers(), e.g. lion, lamb, muon")
    options: dict[str, Any] = described({}, "other arguments of a timm optimiser, e.g. optim.options.betas=[0.9,0.99]")
    lr: float = described(5e-4, "peak learning rate", above=0)
    layer_decay: float | None = described(
        None, "learning rate of a tower's layer over that of the next, e.g. 0.75; null: one rate", above=0, below=1
    )
    weight_decay: float = described(0.2, "weight decay; never on biases, norms and the temperature", least=0)
    beta1: float = described(0.9, "AdamW β1", least=0, below=1)
    beta2: float = described(0.98, "AdamW β2", least=0, below=1)
    eps: float = described(1e-6, "AdamW ε", above=0)
    ema: float | None = described(
        None, "decay of an average of the weights, for evaluation, mining and exports, e.g. 0.999", above=0, below=1
    )
    warmup: int | float = described(0, "steps of linear warm-up; below 1, as 0.1: a share of the run", least=0)
    schedule: Schedule = described(Schedule["cosine"], f"of the learning rate after the warm-up: {', '.join(Schedule)}")
    cooldown: int = described(0, "const-cooldown and wsd: steps of the cooldown at the end", least=0)
    cooldown_end: float = described(0.0, "const-cooldown and wsd: learning rate at the end", least=0)
    cooldown_power: float = described(1.0, "const-cooldown: power of the polynomial by which the rate falls", least=0)
    clip_norm: float | None = described(None, "largest norm of the whole gradient; null: no clipping", above=0)
    max_skipped: int = described(3, "skipped steps in a row (not finite, or a spike) that end the run", least=1)
    spike: float | None = described(None, "skip steps of a loss above n times the mean of the last 10, e.g. 2", above=1)


@dataclass
class TargetConfig:
    """Options of the target network (keys target.*), see step/target.py."""

    kind: TargetKind = described(
        TargetKind.none, "targets of a side: the other side, detached (none), or as embedded by a copy or ema of towers"
    )
    momentum: float = described(0.996, "ema: share of the old target after the first step", least=0, below=1)
    momentum_end: float = described(1.0, "ema: share at the end, by a cosine; as momentum: constant", least=0, most=1)
    every: int = described(1, "copy: steps between copies", least=1)


@dataclass
class DistConfig:
    """Options of work on several ranks (keys dist.*): sharding, timeouts, checks between ranks."""

    name: Parallel = described(
        Parallel.ddp, "every rank has all weights (ddp), a part of each (fsdp2), or a part within its machine (hsdp)"
    )
    shard_size: int | None = described(
        None, "ranks that share one copy of the weights; null: all (fsdp2), those of a machine (hsdp)", least=1
    )
    timeout: float = described(600.0, "seconds a collective may wait before the run stops", above=0, most=1e9)
    start_timeout: float | None = described(
        None,
        "seconds to join, and for collectives until the first step and evaluation end; null: at least 600; "
        "launch/torchrun.sh takes it from its arguments alone",
        above=0,
        most=1e9,
    )
    slow_rank: float = described(0.7, "warn of a rank below this share of the others' pace; 0: never", least=0, below=1)
    digest_every: int = described(500, "compare all weights every n steps, and at checkpoints; 0: never", least=0)
    restarts: int = described(
        3, "how often launch/ starts a job again after a hardware failure (code 4), if it has a new checkpoint", least=0
    )

    @property
    def seconds_to_start(self) -> float:
        """Seconds that processes may take to join, and that a collective may wait before and in the first step.

        Collectives of the first evaluation may wait so long too. It is dist.start_timeout; if that is None, the larger
        of dist.timeout and 600.
        """
        return self.start_timeout or max(self.timeout, 600.0)


@dataclass
class TrackingConfig:
    """Options of what a run logs and of its trackers (keys tracking.*)."""

    wandb: Wandb = described(
        Wandb.auto, "online, offline, disabled, or auto: as WANDB_MODE says, else online with an API key, else disabled"
    )
    project: str = described("dyad", "W&B project")
    tensorboard: bool = described(False, "also write TensorBoard event files")
    every: int = described(10, "steps between metric lines", least=1)
    report: bool = described(True, "write report.html when the run ends; `python -m eval.report` writes it later, too")
    postmortem: bool = described(False, "files to read after a failure on GPUs: NCCL's flight recorder, allocations")


@dataclass
class ResumeConfig:
    """Options of how a run goes on (keys resume.*)."""

    mode: str = described(
        "auto", "auto (the run's newest checkpoint), never, or a checkpoint or RUN@best to begin at. Short: resume=…"
    )
    allow_batch_change: bool = described(False, "resume with another global_batch_size at the same number of samples")
    allow_more_data: bool = described(False, "resume with files added after the old ones; samples keep ids and state")

    def __post_init__(self) -> None:
        self.mode = os.path.expanduser(self.mode)


@dataclass
class TrainConfig:
    """The configuration of a training run. `compose_config` (cli/compose.py) makes it from the command line.

    objective: an instance of an options class of OBJECTIVES (losses/options/registry.py). Values are checked by
    `check_limits` and `check_values`, not by the constructor. The constructors of sections, such as DataConfig, check
    some of theirs.
    """

    task: Task = described(
        Task.image_text, "images and texts, questions and passages, two views of each, classes, or items in sequences"
    )
    seed: int = described(0, "of everything random: order, augmentation, initial weights, dropout", least=0)
    steps: int | None = described(None, "optimiser steps; wins over epochs", least=1)
    epochs: float | None = described(None, "passes over the data when steps is null", above=0)
    global_batch_size: int = described(256, "pairs per optimiser step over all ranks", least=1, most=1 << 26)
    chunk_size: int | None = described(
        None,
        "pairs per rank embedded at a time; null: all. The gradient stays that of the whole batch; dropout draws "
        "anew for each chunk size; for batch norm see model.batch_norm",
        least=1,
    )
    keep_graphs: int | None = described(None, "chunks that need no second forward; null: as memory allows", least=1)
    precision: Precision = described(
        Precision.auto, "of the towers, not the loss. auto: bf16 if all GPUs have it, else fp32; a resume keeps it"
    )
    compile: bool = described(False, "torch.compile the towers")
    deterministic: bool = described(False, "equal runs on equal GPUs give equal bits; slower, fails for some towers")
    profile: int = described(0, f"steps to trace after the first {UNTRACED}, into profile/ of the run folder", least=0)
    init_from: str | None = described(
        None, "run folder, RUN@best or checkpoint to start from: its weights, its kind of model"
    )
    from_weights: list[str] = described([*KNOWN_BY_WEIGHTS], "objective options that the weights set unless typed")
    weight: float = described(1.0, "of the loss, where a step has several (also)", above=0)
    also: dict[str, Any] = described(
        {}, "auxiliary losses over the same towers, each with arguments of its own: also.NAME='task=views objective=…'"
    )
    experiment: str | None = described(None, "name of a recipe in configs/experiment, or a recipe file, PATH.yaml")
    plugins: list[str] = described([], PLUGINS_HELP)
    run: RunConfig = field(default_factory=RunConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: Any = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        self.init_from = self.init_from and os.path.expanduser(self.init_from)

    @property
    def planned(self) -> bool:
        """Whether any key of `plan` differs from its default: then the command prints a plan, and trains nothing."""
        return self.plan != PlanConfig()

    @property
    def evaluates(self) -> bool:
        """Whether the run may have data to evaluate on: data.val, eval.suite, or those of an auxiliary loss (also)."""
        return bool(self.data.val or self.eval.suite or self.also)

    @property
    def learns_by_chunks(self) -> bool:
        """Whether chunk_size changes a loss: with batch norms per chunk, also of an auxiliary loss without its own."""
        auxiliary = [text for text in map(str, self.also.values()) if "chunk_size=" not in text]
        return any(BatchNorm.per_chunk in text for text in [self.model.batch_norm, *auxiliary])

    @property
    def has_images(self) -> bool:
        """Whether the x items are images. Otherwise they are texts or, with task=sequence, ids or feature vectors."""
        return ITEMS.get(self.task, self.data.items) is ItemKind.pictures

    @property
    def unit(self) -> str:
        """The word for what `global_batch_size` counts."""
        return unit_of(self.task)

    @property
    def images_of_sample(self) -> int:
        """The images of a training sample: one or, with task=views, two views of it, and its hard negative images.

        Of a sequence of images one alone counts; 0 for a task without images.
        """
        return self.has_images * (1 + (self.task is Task.views) + self.data.negatives.pictures)

    @property
    def has_texts(self) -> bool:
        """Whether the x or the y items are texts."""
        prompted = self.task is Task.labelled and self.model.classes is Classes.prompted and self.data.rare is None
        texts = self.data.items is ItemKind.texts if self.task not in ITEMS else not self.has_images
        return self.task is Task.image_text or prompted or texts


def unit_of(task: str | None) -> str:
    """Return the word for what `global_batch_size` counts in a task; None stands for an unknown one."""
    return "sequences" if task == Task.sequence else "pairs"
