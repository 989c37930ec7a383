"""Command lines of open_clip's README, docs, scripts and tests become commands that compose here."""

import shlex
from functools import cache
from operator import attrgetter

import open_clip
import pytest
from helpers.cli import Commands
from helpers.messages import raises
from open_clip_train.params import parse_args

from dyad.data.base.errors import ConfigError
from dyad.data.shards.sources import written_sources
from dyad.doctor.translate import Translation, run, translate
from dyad.train.cli import open_clip_flags as flags
from dyad.train.cli.compose import compose_config, groups, keys
from dyad.train.config import BatchNorm, Precision, TrainConfig
from dyad.train.config_rules import validate

MAIN = "python -m open_clip_train.main"
TORCHRUN = "torchrun --nproc_per_node 8 -m open_clip_train.main"
CLIPA = """--save-frequency 1 --save-most-recent --zeroshot-frequency 1 --train-data /p/laion --dataset-type webdataset
--beta1 0.9 --beta2 0.95 --wd 0.2 --workers 6 --precision amp_bf16 --local-loss --gather-with-grad --grad-checkpointing
--seed 0 --logs ./logs/ --imagenet-val /p/val"""
COLOURS = "scale='(0.4, 1.0)' color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 gray_scale_prob=0.2"
CC12M = """--train-data '/data/cc12m-train-{0000..2175}.tar' --train-num-samples 10968539 --dataset-type webdataset
--batch-size 320 --precision amp --workers 4 --imagenet-val /data/imagenet/"""
SMALL = """--save-frequency 1 --zeroshot-frequency 1 --train-data a.tar --train-num-samples 16 --warmup 1
--batch-size 4 --lr 1e-3 --wd 0.1 --epochs 1 --workers 2"""
SLURM = """#!/bin/bash -x
#SBATCH --nodes=32
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
export MASTER_PORT=12802
srun --cpu_bind=v python -u src/open_clip_train/main.py \\
  --save-frequency 1 --report-to tensorboard --train-data="/data/LAION-400M/{00000..41455}.tar" --warmup 2000 \\
  --batch-size=256 --epochs=32 --workers=8 --model ViT-B-32 --name "ViT-B-32-Vanilla" --seed 0 \\
  --local-loss --gather-with-grad
echo done"""

LINES = {
    "README, one GPU, tables": f"""{MAIN} --save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard
        --train-data="/p/train.csv" --val-data="/p/val.csv" --csv-img-key filepath --csv-caption-key title
        --imagenet-val=/p/val/ --warmup 10000 --batch-size=128 --lr=1e-3 --wd=0.1 --epochs=30 --workers=8
        --model RN50""",
    "README, one machine": f"torchrun --nproc_per_node 4 -m open_clip_train.main {CC12M}",
    "README, machines": f"torchrun --nproc_per_node=4 --nnodes=2 --rdzv_endpoint=n-1:2 -m open_clip_train.main {CC12M}",
    "README, SLURM script": SLURM,
    "README, going on": f"{MAIN} --train-data=/p/t.csv --val-data=/p/v.csv --resume /p/epoch_K.pt",
    "README, text tower in part": f"""{MAIN} --train-data="pipe:aws s3 cp s3://b/cc3m/{{00000..00329}}.tar -"
        --train-num-samples 3000000 --val-data="pipe:aws s3 cp s3://b/cc3m/{{00330..00331}}.tar -"
        --val-num-samples 10000 --dataset-type webdataset --batch-size 256 --warmup 2000 --epochs 10 --lr 5e-4
        --precision amp --workers 6 --model roberta-ViT-B-32 --lock-text --lock-text-unlocked-layers 10
        --name 10_unfrozen --report-to tensorboard""",
    "README, accumulation": f"{TORCHRUN} {CC12M} --accum-freq 4 --model ViT-B-16",
    "README, int8": f"{TORCHRUN} {CC12M} --use-bnb-linear SwitchBackLinearGlobal",
    "README, a sixteenth of an epoch": f"{TORCHRUN} {CC12M} --dataset-resampled --torchcompile",
    "clipa b16 pretrain": f"""{TORCHRUN} {CLIPA} --lr 2.048e-3 --warmup 782 --batch-size 8192 --epochs 6
        --aug-cfg scale='(0.4, 1.0)' --model ViT-B-16-CL16 --ddp-static-graph --force-image-size 112""",
    "clipa b16 finetune": f"""{TORCHRUN} {CLIPA} --lr 2.56e-5 --warmup 3072 --batch-size 1024 --epochs 1
        --aug-cfg scale='(0.4, 1.0)' --train-num-samples 131072000 --model ViT-B-16-CL16 --pretrained /p/ckpt""",
    "clipa l16 i17 pretrain": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --lr 1.024e-3 --warmup 1563 --batch-size 4096
        --epochs 6 --model ViT-L-16-CL16-GAP --force-image-size 64""",
    "clipa l16 i17 finetune": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --lr 2.24e-5 --warmup 3571 --batch-size 896
        --epochs 1 --train-num-samples 131072000 --model ViT-L-16-CL16-GAP --pretrained /p/ckpt""",
    "clipa l16 i37 pretrain": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --lr 1.024e-3 --warmup 1563 --batch-size 4096
        --epochs 6 --model ViT-L-16-CL8-Syntax-GAP --force-image-size 96""",
    "clipa l16 i37 finetune": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --lr 2.24e-5 --warmup 3571 --batch-size 896
        --epochs 1 --train-num-samples 131072000 --model ViT-L-16-CL32-GAP --pretrained /p/ckpt""",
    "clipav2 h14 pretrain": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --train-num-samples 4e8 --lr 2.048e-3
        --warmup 3200 --batch-size 8192 --epochs 32 --model ViT-H-14-CL8-Syntax-GAP --force-image-size 84""",
    "clipav2 h14 finetune": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --train-num-samples 131072000 --lr 5.12e-5
        --warmup 800 --batch-size 4096 --epochs 4 --model ViT-H-14-CL32-GAP --pretrained /p/84
        --force-image-size 224""",
    "clipav2 h14 finetune 336": f"""{TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --train-num-samples 131072000 --lr 6.4e-6
        --warmup 1600 --batch-size 2048 --epochs 1 --model ViT-H-14-CL32-GAP --pretrained /p/224
        --force-image-size 336""",
    "scripts h14 pretrain": f"""TORCH_CUDNN_V8_API_ENABLED=1 {TORCHRUN} {CLIPA} --aug-cfg {COLOURS} --lr 2.048e-3
        --warmup 782 --batch-size 4096 --epochs=7 --model ViT-H-14-CL8-SyntaxMask-GAP --force-image-size 84
        --name 'name' --report-to "wandb" --wandb-project-name "project_name" """,
    "stability": """srun -N 30 --ntasks-per-node=8 --comment laion python -m open_clip_train.main --save-frequency 1
        --train-data="pipe:aws s3 cp s3://s/{a/{0..9}.tar,b/{0..7}.tar} -" --train-num-samples 135646078
        --dataset-type webdataset --dataset-resampled --warmup 2000 --batch-size=375 --epochs=97 --lr 1e-3 --workers=8
        --report-to wandb --name ${EXP_NAME_OF_NOBODY} --logs /scratch/logs/ --model ViT-B-32 --seed 0
        --ddp-static-graph --local-loss --gather-with-grad --grad-checkpointing --precision amp_bfloat16
        --wandb-project-name open_clip6 --resume "latest" --remote-sync s3://s/logs""",
    "tests, RN50": f"{MAIN} {SMALL} --model RN50",
    "tests, mt5": f"{MAIN} {SMALL} --model mt5-base-ViT-B-32 --lock-text --lock-text-unlocked-layers 2",
    "tests, part of a ViT": f"""{MAIN} {SMALL} --model ViT-B-32 --lock-image --lock-image-unlocked-groups 5
        --accum-freq 2""",
}


# of the same flags with other numbers, or of the same keys
ALIKE = {"README, machines", "README, int8", "clipa l16 i17 pretrain", "clipa l16 i17 finetune"}
ALIKE |= {"clipa l16 i37 pretrain", "clipa l16 i37 finetune", "clipav2 h14 finetune 336"}


@cache
def composed(arguments: tuple[str, ...]) -> TrainConfig:
    return compose_config(arguments)


def translated(line: str) -> tuple[Translation, TrainConfig]:
    translation = translate(line)
    return translation, composed(tuple(translation.arguments))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * (n in ALIKE)) for n in LINES])
def test_the_command_composes_and_keeps_its_braces_in_a_shell(name: str) -> None:
    translation, config = translated(LINES[name])
    validate(config, translation.launch.nodes * translation.launch.per_node)
    shown = str(translation).splitlines()
    command = next(line for line in shown if not line.startswith(("#", "python -m data")))
    assert shlex.split(command)[-len(translation.arguments) :] == translation.arguments
    assert all(line.startswith("# ") for line in shown[shown.index(command) + 1 :])


def test_the_batch_is_over_all_gpus_and_the_length_in_steps() -> None:
    translation, config = translated(LINES["README, accumulation"])
    assert (config.global_batch_size, config.chunk_size) == (320 * 8 * 4, 320)
    assert config.steps == 32 * (4288 // 4)  # 4285 batches of 2560, rounded up to a multiple of 4 workers
    assert f"steps says the length: 32 × {4288 // 4}" in str(translation)
    assert translation.launch.command == "NPROC=8 bash launch/torchrun.sh"
    assert config.precision is Precision.fp16 and config.model.name == "ViT-B-16"


def test_launchers_are_those_of_this_repository() -> None:
    commands = {name: translate(line).launch.command for name, line in LINES.items()}
    assert commands["README, one GPU, tables"] == "python -m train"
    assert commands["README, machines"] == "NNODES=2 MASTER_ADDR=n-1 NPROC=4 bash launch/torchrun.sh"
    assert commands["README, SLURM script"] == "sbatch --nodes=32 --gpus-per-node=4 launch/slurm.sbatch"
    assert commands["stability"] == "sbatch --nodes=30 --gpus-per-node=8 launch/slurm.sbatch"
    assert translated(SLURM)[1].global_batch_size == 256 * 128


def test_what_open_clip_has_without_being_told_is_said() -> None:
    translation, config = translated(f"{MAIN} --train-data a.tar")
    optim = config.optim
    assert (config.model.name, config.global_batch_size, config.epochs) == ("RN50", 64, 32)
    assert (optim.lr, optim.warmup, optim.beta2, optim.eps) == (5e-4, 10000, 0.999, 1e-8)
    assert config.data.augment.crop_scale == [0.9, 1.0] and config.precision is Precision.fp16
    assert "optim.warmup=10000" in translation.notes[-1] and "precision=fp16" in translation.notes[-1]
    assert translated(f"{MAIN} --train-data a.tar --model ViT-B-32")[1].optim.beta2 == 0.98


def test_batch_norms_have_the_statistics_that_open_clip_gives_them() -> None:
    one, four = f"{MAIN} --train-data a.tar --model RN50", f"{TORCHRUN} --train-data a.tar --model RN50"
    lines = {one: "global", f"{one} --accum-freq 2": "per_chunk", four: "per_chunk", f"{four} --use-bn-sync": "global"}
    lines |= {f"{four} --use-bn-sync --accum-freq 2": "per_chunk", f"{four} --lock-image": "global"}
    for line, statistics in lines.items():
        assert translate(line).keys.get("model.batch_norm", TrainConfig().model.batch_norm.name) == statistics, line
    assert translated(four)[1].model.batch_norm is BatchNorm.per_chunk
    normed = {name for name in open_clip.list_models() if flags.BATCH_NORM_MODELS.match(name)}
    assert {"RN50", "RN101-quickgelu", "MobileCLIP-S1"} < normed and not any("ViT" in name for name in normed)


@pytest.mark.parametrize("model", ["RN50", "ViT-B-32"])
def test_the_defaults_are_those_of_the_installed_open_clip(model: str) -> None:
    theirs = {name.replace("_", "-"): value for name, value in vars(parse_args(["--model", model])).items()}
    assert {name: str(theirs[name]) for name in flags.DEFAULTS} == flags.DEFAULTS | {"model": model}
    _, config = translated(f"{MAIN} --train-data a.tar --model {model}")
    for flag, key in flags.KEYS.items():
        if key.startswith(("optim.", "seed", "data.workers", "model.name")) and theirs[flag] is not None:
            ours = attrgetter(key)(config)
            assert getattr(ours, "name", ours) == theirs[flag], flag
    assert theirs["precision"] == "amp" and theirs["opt"] == "adamw" and not theirs["report-to"]


def test_no_schedule_is_no_warm_up() -> None:
    for more in ("", "--warmup 2000", "--lr-scheduler const-cooldown --epochs-cooldown 3"):
        translation, config = translated(f"{MAIN} --train-data a.tar --skip-scheduler {more}")
        assert (config.optim.warmup, config.optim.cooldown, config.optim.schedule.name) == (0, 0, "const")
        assert "warmup" not in translation.notes[-1]
    line = f"{MAIN} --train-data a.tar --train-num-samples 6400 --lr-scheduler const-cooldown --epochs-cooldown 3"
    assert translated(line)[1].optim.cooldown == 300


def test_an_optimiser_of_timm_has_the_options_that_were_typed_and_else_its_own() -> None:
    line = f"{MAIN} --train-data a.tar --opt timm/lion --lr 1e-4 --beta1 0.9 --beta2 0.95 --model RN50"
    keys = translate(line).keys
    assert (keys["optim.name"], keys["optim.lr"], keys["optim.options.betas"]) == ("lion", "1e-4", [0.9, 0.95])
    assert not keys.keys() & {"optim.beta1", "optim.beta2", "optim.eps", "optim.options.eps"}
    momentum = translate(f"{MAIN} --train-data a.tar --opt timm/sgdw --lr 1 --momentum 0.8 --eps 1e-7").keys
    assert (momentum["optim.options.momentum"], momentum["optim.options.eps"]) == ("0.8", "1e-7")
    config = compose_config(translate(line).arguments)
    assert config.optim.options == {"betas": [0.9, 0.95]} and config.optim.name == "lion"


def test_timms_adamw_is_ours_with_the_defaults_of_torch() -> None:
    line = f"{MAIN} --train-data a.tar --model ViT-B-32 --opt timm/adamw --lr 1e-3"
    for given, wanted in {"": (0.9, 0.999, 1e-8), "--beta1 0.8 --beta2 0.98 --eps 1e-6": (0.8, 0.98, 1e-6)}.items():
        optim = compose_config(run([f"{line} {given}"]).arguments).optim
        assert (optim.name, optim.beta1, optim.beta2, optim.eps) == ("adamw", *wanted)


def test_values_arrive() -> None:
    _, config = translated(LINES["scripts h14 pretrain"])
    assert config.data.augment.crop_scale == [0.4, 1.0]
    augment = config.data.augment
    assert (augment.jitter, augment.jitter_prob, augment.grey) == ([0.32, 0.32, 0.32, 0.08], 0.8, 0.2)
    assert (config.run.name, config.tracking.project) == ("name", "project_name")
    assert (config.model.image.image_size, config.model.grad_checkpointing) == (84, True)
    _, config = translated(LINES["README, text tower in part"])
    assert config.data.train == "s3://b/cc3m/{00000..00329}.tar" and config.data.val == "s3://b/cc3m/{00330..00331}.tar"
    assert (config.model.text.frozen, config.model.text.unlocked_layers) == (True, 10)
    assert translated(f"{MAIN} --train-data a.tar --siglip")[1].objective.name == "siglip"


def test_texts_arrive_whatever_they_look_like() -> None:
    for name in ("ünix", "null", "true", "[a]", "2024_01_01", "a b", 'say "x"'):
        translation, config = translated(f"{MAIN} --train-data /d/bücher.tar --name {shlex.quote(name)}")
        assert (config.run.name, config.data.train) == (name, "/d/bücher.tar"), translation
    table = f"{MAIN} --train-data a.csv --csv-img-key 'image path' --csv-caption-key 1e3"
    assert translated(table)[1].data.columns == ["image path", "1e3"]


def test_a_colour_jitter_without_a_probability_has_no_effect_in_open_clip() -> None:
    translation, config = translated(f"{MAIN} --train-data a.tar --aug-cfg color_jitter='(0.4, 0.4, 0.4, 0.1)'")
    assert config.data.augment.jitter == [0, 0, 0, 0]
    assert any("color_jitter_prob" in note for note in translation.notes)


SAVED = {  # of 40 epochs, each of 100 steps → checkpoint.every, checkpoint.keep; open_clip deletes none unless told
    "": (100, flags.KEEP_ALL),
    "--save-frequency 2": (200, flags.KEEP_ALL),
    "--save-frequency 2 --save-most-recent": (200, flags.KEEP_ALL),
    "--save-frequency 1 --delete-previous-checkpoint": (100, 1),
    "--save-frequency 0": (4000, 1),
    "--save-frequency 0 --save-most-recent": (100, 1),
}


@pytest.mark.parametrize("saved", SAVED)
def test_as_many_checkpoints_stay_as_in_open_clip(saved: str) -> None:
    translation = translate(f"{MAIN} --train-data a.tar --train-num-samples 6400 --epochs 40 {saved}")
    every, keep = (int(translation.keys[f"checkpoint.{key}"]) for key in ("every", "keep"))
    assert (every, keep) == SAVED[saved]
    told = any(note.startswith("--save-frequency") and "checkpoint.keep" in note for note in translation.notes)
    assert told == (keep > 1)


def test_upsampling_factors_are_weights_of_sources() -> None:
    _, config = translated(f"{MAIN} --train-data 'a.tar::d/{{0..9}}.tar' --train-data-upsampling-factors 2::0.5")
    assert [(each.path, each.weight) for each in written_sources(config.data.train, "data.train")] == [
        ("a.tar", 2),
        ("d/{0..9}.tar", 0.5),
    ]
    table, _ = translated(f"{MAIN} --train-data a.csv --train-data-upsampling-factors 2")
    assert table.keys["data.train"] == "a.csv"


def test_each_source_of_a_line_may_be_a_pipe() -> None:
    pipes = "::".join(f"pipe:aws s3 cp s3://b/{name}.tar -" for name in "ac")
    assert translated(f"{MAIN} --train-data '{pipes}'")[1].data.train == "s3://b/a.tar::s3://b/c.tar"


def test_tables_are_taken_as_they_are() -> None:
    _, config = translated(LINES["README, one GPU, tables"])
    assert (config.data.train, config.data.val, config.steps) == ("/p/train.csv", "/p/val.csv", None)
    assert config.data.columns == ["filepath", "title"]
    assert translated(f"{MAIN} --train-data a.csv")[1].data.columns == []
    assert translated(f"{MAIN} --train-data a.csv --csv-img-key x")[1].data.columns == ["x", "title"]


def test_imagenet_is_evaluated_from_the_folders_that_open_clip_reads() -> None:
    _, config = translated(f"{MAIN} {SMALL} --imagenet-val '/p/image net/val/' --imagenet-v2 /p/v2")
    assert config.eval.suite == ["imagenet:/p/image net/val", "imagenet:/p/v2/ImageNetV2-matched-frequency"]
    assert config.eval.every == 4 and translated(f"{MAIN} {SMALL}")[1].eval.every == 0
    assert translated(LINES["README, one machine"])[1].eval.suite == ["imagenet:/data/imagenet"]


def test_a_flag_that_has_no_key_is_one_line() -> None:
    given = {"wandb-notes": "X", "remote-sync": "s3://x", "local-loss": "", "horovod": "", "epochs-cooldown": "3"}
    translation, _ = translated(f"{MAIN} --train-data a.tar " + " ".join(f"--{k} {v}" for k, v in given.items()))
    for flag in given:
        assert sum(note.startswith(f"--{flag}") for note in translation.notes) == 1


def test_a_variable_of_the_shell_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    translation, config = translated(LINES["stability"])
    assert config.run.name == "EXP_NAME_OF_NOBODY"
    assert any("variable of your shell" in note for note in translation.notes)
    monkeypatch.setenv("EXP_NAME_OF_NOBODY", "mine")
    assert "run.name=mine" in translate(LINES["stability"]).arguments


VALUES = {  # of flags that take another value than 1
    "val-data": "b.tar", "dataset-type": "webdataset", "text-key": "txt", "precision": "bf16", "model": "ViT-B-16",
    "aug-cfg": "scale='(0.4, 1.0)'", "force-image-size": "112", "opt": "adamw", "report-to": "wandb",
    "resume": "latest", "lr-scheduler": "const", "image-resize-mode": "longest", "force-patch-dropout": "0.3",
    "beta1": "0.8", "beta2": "0.9", "batch-size": "64", "save-frequency": "0", "val-frequency": "0",
    "epochs-cooldown": "3",
}  # fmt: skip


SEVERAL = "--skip-scheduler --fsdp --val-data v.tar --lock-image --lock-text"
SOME = [(8, ""), pytest.param(1, "", marks=pytest.mark.soak), pytest.param(1, SEVERAL, marks=pytest.mark.soak)]


@pytest.mark.parametrize(("together", "rest"), SOME)
def test_train_takes_what_is_printed_for_every_flag(together: int, rest: str) -> None:
    """Of the flags that set keys, so many in a line. --momentum is of the optimisers of timm."""
    every = sorted({*flags.KEYS, *flags.SWITCHES, *flags.OF_TABLES, *flags.OWN_RULE} - {"train-data", "momentum"})
    for first in range(0, len(every), together):
        part = every[first : first + together]
        given = " ".join(f"--{flag}" if flag in flags.NO_VALUE else f"--{flag} {VALUES.get(flag, 1)}" for flag in part)
        own = "" if "model" in part else "--model ViT-B-32"
        assert run([f"{MAIN} --train-data a.tar --train-num-samples 6400 {own} {rest} {given}"]).arguments


def test_a_line_without_quotes_and_the_number_of_gpus() -> None:
    words = "srun python -m open_clip_train.main --train-data a.tar --batch-size 8".split()
    two_machines = run([*words, "gpus=16"])
    assert "global_batch_size=128" in two_machines.arguments and "gpus=16: 2 machines of 8" in two_machines.notes
    assert not any("machines" in note for note in run([*words, "gpus=8"]).notes)
    assert run([*words, "gpus=32"]).launch.command == "sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sbatch"
    assert run([*words, "gpus=4"]).launch.command == "sbatch --nodes=1 --gpus-per-node=4 launch/slurm.sbatch"
    assert run(["srun", "-N", "3", *words[1:], "gpus=12"]).launch.command.startswith(
        "sbatch --nodes=3 --gpus-per-node=4"
    )
    for line in (words, ["srun", "-N", "5", *words[1:]]):
        with raises(ConfigError, "gpus=12"):
            run([*line, "gpus=12"])


def test_patch_dropout_is_a_key() -> None:
    assert (
        "model.image.patch_dropout=0.3" in translate(f"{MAIN} --train-data a.tar --force-patch-dropout 0.3").arguments
    )


def test_every_flag_has_one_place_and_every_key_exists() -> None:
    places = [flags.KEYS, flags.SWITCHES, flags.OF_TABLES, flags.OWN_RULE, flags.ALREADY, flags.ABSENT, flags.LOST]
    assert sum(map(len, places)) == len(flags.ALL) >= 110
    theirs = {name.replace("_", "-") for name in vars(parse_args([]))}
    assert {name for name in theirs if not any(part in name for part in flags.OTHER_MODELS)} <= flags.ALL
    known = {key for key, _, _ in keys()} | {*groups()}
    assert {*flags.KEYS.values(), *(key for key, _ in flags.SWITCHES.values())} <= known


def test_the_command_prints_it(commands: Commands) -> None:
    done = commands.run("train.doctor", "translate", f"{MAIN} --train-data a.tar --model ViT-B-32")
    assert done.code == 0 and done.out.startswith("python -m train data.train=a.tar model.name=ViT-B-32")
    refused = commands.run("train.doctor", "translate", "--bach-size")
    assert (refused.code, len(refused.out.splitlines())) == (2, 1)
