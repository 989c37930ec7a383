"""Command lines of open_clip that are refused: why, and with which fix."""

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.doctor.translate import run

MAIN = "python -m open_clip_train.main"


def test_all_that_is_refused_is_in_one_message() -> None:
    words = "--text-key caption --opt lion --distill-model ViT-L-14 --precision bf17 --aug-cfg use_timm=True"
    with raises(ConfigError, "--text-key", "--opt lion", "--distill-model ViT-L-14", "bf17", "use_timm") as caught:
        run([f"{MAIN} --train-data a.tar {words}"])
    assert len(str(caught.value).splitlines()) == 5
    with raises(ConfigError, "--bach-size", "--epoch"):
        run([f"{MAIN} --train-data a.tar --bach-size 3 --epoch-size 3"])


REFUSED = {
    f"{MAIN} --train-data a.tar --batchsize 3": "--batch-size",
    f"{MAIN} --train-data a.tar --b 3": "--b",
    f"{MAIN} --train-data a.tar --batch-size": "--batch-size",
    f"{MAIN} --train-data a.tar --batch-size many": "--batch-size many",
    f"{MAIN} --train-data a.tar --precision bf17": "'bf16'",
    f"{MAIN} --val-data v.csv --model RN101 --pretrained /p/epoch_K.pt": "python -m eval",
    f"{MAIN} --imagenet-val /p --model ViT-B-32-quickgelu --pretrained laion400m_e32": "python -m eval",
    f"{MAIN} --model CLAP-HTSAT-tiny --pretrained laion --audio-zeroshot-dataset ashraq/esc50": "zeroshot-dataset",
    f"{MAIN} --train-data t.csv --model coca_ViT-L-14 --coca-contrastive-loss-weight 0": "contrastive-loss-weight",
    "srun python -m open_clip_train.main --train-data a.tar": "gpus=N",
    f"{MAIN} --train-data a.tar --distill-model ViT-L-14": "--distill-model ViT-L-14",
    f"{MAIN} --train-data a.tar::b.tar --train-data-upsampling-factors 2": "--train-data-upsampling-factors 2",
    f"{MAIN} --train-data a.tar --train-data-upsampling-factors 0": "--train-data-upsampling-factors 0",
    f"{MAIN} --train-data a.tar --image-mean 0.5 0.5 0.5": "--image-mean 0.5 0.5 0.5",
    f"{MAIN} --train-data a.tar --json-text-key 'a;b'": "data.captions=[a,b]",
    f"{MAIN} --train-data a.tar --use-naflex": "--use-naflex",
    f"{MAIN} --train-data a.tar --opt lion": "timm/NAME",
    f"{MAIN} --train-data a.tar --opt timm/lion": "--lr",
    f"{MAIN} --train-data a.tar --opt timm/lion --lr 1e-4 --beta1 0.8": "--beta2",
    f"{MAIN} --train-data a.tar --momentum 0.9": "timm/NAME",
    f"{MAIN} --train-data a.tar --aug-cfg use_timm=True": "use_timm",
    f"{MAIN} --train-data a.tar --text-key caption": "--text-key caption",
    f"{MAIN} --train-data a.tar --force-image-size 224 336": "--force-image-size",
    f"{MAIN} --train-data a.tar --lr-scheduler const-cooldown --epochs-cooldown 2": "--epochs-cooldown",
    "python -m other.main --x": "",
    f"{MAIN} --train-data 'a.tar": "",
}


WRONG = {
    "--workers four": "--workers four",
    "--workers 2.5": "--workers 2.5",
    "--batch-size 0": "--batch-size 0",
    "--batch-size 1e999": "--batch-size 1e999",
    "--accum-freq 0": "--accum-freq 0",
    "--epochs 0.5": "--epochs 0.5",
    "--train-num-samples 0": "--train-num-samples 0",
    "--aug-cfg color_jitter=x color_jitter_prob=1": "data.augment.jitter=x",
    "--lr fast": "optim.lr=fast",
    "--warmup 1.5": "optim.warmup=1.5",
    "--force-patch-dropout 1": "model.image.patch_dropout=1.0",
}


for given, named in WRONG.items():  # values that no run takes
    samples = "--train-num-samples 6400 " * ("samples" not in given)
    REFUSED[f"{MAIN} --train-data a.tar {samples}{given}"] = named


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_translated_is_refused_with_the_fix(line: str) -> None:
    with raises(ConfigError, REFUSED[line]) as caught:
        run([line])
    assert len(str(caught.value).splitlines()) == 1
