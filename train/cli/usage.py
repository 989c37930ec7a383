"""The text of `python -m train --help`: purpose, commands to copy, groups, keys. Imports no torch, so it is fast."""

from typing import Any

from dyad.train.arguments import as_argument
from dyad.train.cli.compose import groups, keys
from dyad.train.losses import OBJECTIVES

PURPOSE = """\
Train a dual encoder (CLIP: image–text; DPR: question–passage) with an exact contrastive objective over the whole
global batch.
Everything is key=value; the same command again goes on where the run stopped."""

EXAMPLES = {
    "train on the emoji that ship with the repository (minutes on two cores)": "python -m train experiment=emoji",
    "train on the questions and passages that ship with the repository": "python -m train experiment=topics",
    "train on your own shards": "python -m train model.name=ViT-B-32 'data.train=\"shards/{00..99}.tar\"' epochs=10",
    "train on your own questions (DPR, Tevatron, FlagEmbedding files, BEIR folders)": "python -m train "
    "experiment=mnrl model.text.name=bert-base-uncased data.train=train.json",
    "another objective, learning rate and batch, embedded 512 pairs at a time": "python -m train experiment=emoji "
    "objective=symmetric_dpm optim.lr=1e-3 global_batch_size=1024 chunk_size=512",
    "what a run would take on 64 GPUs: memory, traffic, hours; nothing is trained": "python -m train plan.gpus=64 "
    "plan.gpu=h100 model.name=ViT-L-14 global_batch_size=32768 chunk_size=256",
    "all GPUs of this machine": "bash launch/torchrun.sh experiment=emoji precision=bf16",
}

COMMON = """run.name run.dir seed steps epochs global_batch_size chunk_size precision compile also objective.temperature
objective.duplicates data.train data.val data.items data.label data.rare data.augment_y data.relevance data.workers
data.captions data.question.length data.passage.length data.passage.corpus data.negatives.per_row data.negatives.file
data.negatives.pictures data.negatives.picture_file data.negatives.refresh_every model.shared model.name
model.pretrained model.head model.classes model.image.kind
model.text.kind model.text.frozen model.batch_norm optim.name optim.lr optim.layer_decay optim.weight_decay optim.ema
optim.warmup optim.schedule optim.clip_norm target.kind target.momentum target.momentum_end target.every
eval.every eval.suite checkpoint.every checkpoint.keep checkpoint.best tracking.wandb
resume.mode resume.allow_batch_change resume.allow_more_data init_from plugins
plan.on plan.gpus plan.gpu plan.mfu plan.network plan.dry_run""".split()

CLOSING = """\
Braces: the shell and Hydra both want them quoted, so write   'data.train="shards/{00..99}.tar"'
Lists:  eval.suite=[retrieval:a.tar,zero_shot:task.json]      Nothing: key=null
Several runs, one after the other: -m optim.lr=1e-3,2e-3 seed=0,1      One that fails does not stop the others.
  two at a time: python -m train -m … --cfg runs | xargs -r -L1 -P2 python -m train
  jobs of SLURM: python -m train -m … --cfg runs | xargs -r -L1 sbatch --gpus-per-node=8 launch/slurm.sbatch
A recipe of your own: experiment=my/recipe.yaml; my/model/tiny.yaml beside it is model=tiny. Your code: plugins=[module]

All keys with their values: python -m train experiment=emoji --cfg job
Exit codes: 0 ok, 1 a bug, 2 configuration, 3 damaged data, 4 hardware, 75 preempted: run it again"""


def help_text() -> str:
    """Return the text that `python -m train --help` prints."""
    described: dict[str, tuple[Any, str]] = {}
    for key, default, meaning in keys():
        described.setdefault(key, (default, meaning))  # an option of several objectives: as the first one has it
    width = max(map(len, COMMON))
    sections = {
        f"{PURPOSE}\n\nCommands to copy (installed by pip, python -m train is also: dyad train):": [
            f"{command}\n      {what}" for what, command in EXAMPLES.items()
        ],
        "Groups and their choices (group=choice):": [
            f"{name:<{width}}  {' | '.join(choices)}" for name, choices in groups().items() if name != "objective"
        ],
        "Objectives (objective=name; objective=name --cfg job shows its options):": [
            f"{name:<{width}}  {(options.__doc__ or '').splitlines()[0]}" for name, options in OBJECTIVES.items()
        ],
        "Keys people change (key, default, meaning):": [
            f"{key:<{width}}  {as_argument(described[key][0]):<10}  {described[key][1]}" for key in COMMON
        ],
    }
    pages = ["\n".join([title, *(f"  {row}" for row in rows)]) for title, rows in sections.items()]
    return "\n\n".join([*pages, CLOSING])
