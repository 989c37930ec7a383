"""Plans of runs beside what real steps take: memory, bytes of collectives, FLOPs; and what people type."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dist import launch
from helpers.messages import raises
from helpers.plan import measured_step, planned
from helpers.towers import mpnet_folder, transformers_folder

from dyad.data.base.errors import ConfigError
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.plan.cluster import planned_devices
from dyad.plan.measure import only_rank_0
from dyad.plan.objective import nothing_kept, objective_cost, products, random_batch, small_step, value_of
from dyad.plan.plan import RunPlan, counted_samples
from dyad.plan.speed import published_mfu, samples_per_core, seconds_sent
from dyad.plan.summary import changed_plans, plan_lines
from dyad.run.checks import check_config
from dyad.run.main import train_or_plan
from dyad.train.cli.command_line import parse_command_line
from dyad.train.cli.compose import compose_config
from dyad.train.config import DistConfig, Parallel, Precision, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.gpus import KINDS
from dyad.train.monitor.telemetry import peak_tflops

pytestmark = pytest.mark.uniform_ranks
FEW = ["small_cnn", "frozen in chunks, sharded"]  # of tests/jobs/plan_job.py: DDP, and a frozen tower in shards


def config_of(*words: str) -> TrainConfig:
    return compose_config(parse_command_line(words).words)


def sent_by(plan: RunPlan) -> Mapping[str, float]:
    """The bytes of each kind of collective in a step."""
    found = Counter[str]()
    for what, (size, *_) in plan.sent().items():
        found[what.partition(",")[0]] += round(size)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small steps on a machine that does other things too take seconds longer with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The key of an open_clip model, of which layers are nearly all of the FLOPs."""
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 4}
    text = {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    file = tmp_path_factory.mktemp("models") / "toy.json"
    file.write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    return f"model.name={file}"


@pytest.fixture(scope="module")
def sixteen(toy: str) -> RunPlan:
    """The plan of a toy on 16 GPUs, whose measurements other plans take over."""
    return RunPlan(config_of(toy, "plan.gpus=16", "plan.gpu=h100", "steps=9"))


@pytest.mark.parametrize(
    "name", ["tiny_clip_gn", "small_bert", pytest.param("minilm", marks=pytest.mark.soak), "byte_lm", "small_cnn"]
)
def test_planned_memory_is_what_a_step_takes(name: str, tmp_path: Path) -> None:
    words = [f"model.text.name={transformers_folder(tmp_path, 'bert')}"] if name == "small_bert" else []
    config = planned(name, *words)
    plan = RunPlan(config)
    taken, _ = measured_step(config, World())
    assert plan.peak(plan.pairs, plan.chunk) == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("runs", [FEW, pytest.param([], marks=pytest.mark.soak)], ids=["a few", "all"])
def test_two_ranks_take_and_send_what_is_planned(runs: list[str]) -> None:
    launch("plan_job.py", 2, *runs)


@pytest.mark.filterwarnings("ignore:Importing from timm", "ignore:FSDP2-wrapped module")
def test_hybrid_shards_send_what_is_planned_and_fill_up_rows() -> None:
    """As rank 0 of two copies of three shards; three divides few of the weights' rows."""
    words = ("dist=hsdp", "dist.shard_size=3")
    config = planned("frozen in chunks", *words, "plan.gpus=6", "plan.gpu=t4")
    with only_rank_0(6):
        _, sent = measured_step(config, World(0, 6))
    plan = RunPlan(config)
    filled = plan.sent()["reduce-scatter, gradients"][0]
    assert filled > sum(weight.nbytes for weight in plan.towers.trained)
    assert sent_by(plan) == {kind: sent[kind] for kind in sent_by(plan)}


@pytest.mark.parametrize(("objective", "images"), [("siglip", 0), ("sogclr", 0), ("clip", 2)])
def test_the_formulas_of_an_objective_hold_for_larger_batches(objective: str, images: int) -> None:
    """With images: wrong x beside each pair."""
    config = config_of(f"objective={objective}", f"data.negatives.pictures={images}")
    cost, sizes = objective_cost(config, 16), (100, 16, 320)
    with nothing_kept():
        step = small_step(config, *sizes)
    keeping, at = small_step(config, *sizes), products(*sizes)
    assert {kind: value_of(formula, at) for kind, formula in cost.sent.items()} == {
        kind: step.sent[kind] for kind in ("all-gather", "all-reduce", "reduce-scatter")
    }
    assert value_of(cost.memory, at) == pytest.approx(step.peak, rel=0.25)  # another moment may take the most
    assert 100 * value_of(cost.flops, at) == pytest.approx(step.flops, rel=0.01)
    assert cost.keeps == (keeping.flops < step.flops) == (objective != "siglip")
    assert value_of(cost.memory, at) + cost.kept(100, 1600) == pytest.approx(keeping.peak, rel=0.25)


@pytest.mark.parametrize(
    ("name", "millions", "width", "gflops"),  # FLOPs of a pair, as open_clip's model profile says: forward times three
    [("ViT-B-32", 151.3, 512, 44.34), pytest.param("ViT-L-14", 427.6, 768, 526, marks=pytest.mark.soak)],
)
def test_a_large_model_on_512_gpus_is_planned(
    name: str, millions: float, width: int, gflops: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = RunPlan(
        config_of("plan.gpus=512", "plan.gpu=h100", f"model.name={name}", "global_batch_size=32768", "steps=9")
    )
    assert "512 × H100, bf16, ddp" in next(plan_lines(plan))  # the last lines are of three plans
    assert plan.towers.weights / 4e6 == pytest.approx(millions, abs=0.1)
    flops = plan.time()["a step, towers"][0]
    assert flops / 64 * 1e3 == pytest.approx(gflops, rel=0.01)
    sent = plan.sent()
    weights = sum(weight.nbytes for weight in plan.towers.trained)
    assert sent["all-gather, objective"][0] == 32768 * width * 2 and sent["all-reduce, gradients"][0] == weights
    assert not list(tmp_path.iterdir())


LARGER = [pytest.param(name, marks=pytest.mark.soak) for name in ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-g-14")]


@pytest.mark.parametrize("name", ["", *LARGER])
@pytest.mark.parametrize("gpu", ["h100", pytest.param("a100-80", marks=pytest.mark.soak)])
def test_towers_that_compute_layers_again_are_planned(name: str, gpu: str, toy: str) -> None:
    """All of a layer but its last product, a third of the layer's, is computed again: 2 + 2/3 of the forward pass."""
    words = (f"model.name={name}" if name else toy, "plan.gpus=8", f"plan.gpu={gpu}", "steps=9")
    plain = RunPlan(config_of(*words))
    again = RunPlan(config_of(*words, "model.grad_checkpointing=true"), plain)
    assert again.towers.forward_flops == plain.towers.forward_flops
    assert plain.towers.backward_flops / plain.towers.forward_flops == pytest.approx(2, rel=0.02)
    assert again.towers.backward_flops / again.towers.forward_flops == pytest.approx(8 / 3, rel=0.03)
    assert again.towers.graph < plain.towers.graph / 3
    assert again.peak(again.pairs, again.chunk) < plain.peak(plain.pairs, plain.chunk)


def test_shards_divide_weights_and_moments(sixteen: RunPlan) -> None:
    config, whole = sixteen.config, sixteen
    assert whole.cost.flops == {"B·D": pytest.approx(8)}  # for each pair: clip needs 8·b·B·D
    assert whole.cost.keeps and whole.cost.kept(64, 1024) == 4 * 64 * 1024 and not whole.cost.kept(8192, 8192)
    assert whole.peak(64, 8) < whole.peak(64, 16) < whole.peak(128, 16)
    stays, _ = whole.memory(16, 16)
    for name, shards in (("fsdp2", 16), ("hsdp", 8)):
        plan = RunPlan(replace(config, dist=DistConfig(name=Parallel[name])), whole)
        sharded, _ = plan.memory(16, 16)
        assert plan.devices.shards == shards and plan.towers is whole.towers
        assert [sharded[what][0] * shards for what in ("weights", "moments")] == [
            stays["weights"][0],
            stays["moments"][0],
        ]
        assert ("all-reduce, gradients" in plan.sent()) == (name == "hsdp")
    cut = RunPlan(replace(config, chunk_size=whole.pairs // 2), whole)
    assert cut.towers.inputs == pytest.approx(whole.towers.inputs / 2) and cut.towers.graph < whole.towers.graph


def test_an_older_torch_is_one_line(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fake process group has no options."""
    monkeypatch.setattr("torch._C._distributed_c10d.FakeProcessGroup.Options", object)
    with raises(ConfigError, torch.__version__):
        objective_cost(config_of(toy, "plan.gpus=2", "plan.gpu=t4", "steps=9"), 2)


def test_every_gpu_has_peaks() -> None:
    precisions = (Precision.fp32, Precision.fp16)
    assert all(peak_tflops(name, precision) for _, name in KINDS.values() for precision in precisions)
    assert planned_devices(config_of("plan.gpu=t4", "plan.gpus=2")).precision is Precision.fp32


def test_both_short_forms_are_read() -> None:
    assert config_of("plan=true").planned and config_of("plan=true", "plan.gpus=64").plan.gpus == 64
    assert config_of("plan.gpus=64").planned and not config_of("plan=false").planned
    with raises(ConfigError, "plan.gpu=h10", "h100"):
        config_of("plan.gpu=h10")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `python -m train` prints for these words, which name a plan."""
    config = config_of(*words)
    check_config(config)
    train_or_plan(config)
    return capsys.readouterr().out


def test_a_plan_needs_no_data_and_writes_nothing(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [toy, f"run.dir={tmp_path}/runs", "steps=10"]
    cluster = ["plan=true", "plan.gpus=16", "plan.gpu=h100", "plan.network=1e-3"]
    out, _, short = printed(capsys, *keys, *cluster, "data.train=not/there.tar").partition("In short")
    assert "16 × H100" in out and "largest chunk_size" in out
    assert "sending weights" in short and "GPU h" in short and "fits" in short
    assert all(key in short for key in ("model.grad_checkpointing=true", "chunk_size=", "dist=fsdp2"))
    assert not list(tmp_path.iterdir())
    with raises(ConfigError, "plan.gpus=0"):
        printed(capsys, *keys, "plan.gpus=0")
    with raises(ConfigError, "global_batch_size=256"):
        printed(capsys, *keys, "plan.gpus=512")


def test_the_summary_leaves_out_checkpointing_that_a_tower_does_not_support(tmp_path: Path) -> None:
    words = ["task=question_passage", "model=encoder", f"model.text.name={mpnet_folder(tmp_path)}", "objective=dpr"]
    plan = RunPlan(config_of(*words, "plan.gpus=2", "plan.gpu=h100", "steps=9", "data.train=none.jsonl"))
    assert [key for key, _ in changed_plans(plan)] == ["chunk_size=64", "dist=fsdp2"]
    own = RunPlan(config_of("experiment=simclr_emoji", "data.train=none.tar"))
    assert [key for key, _ in changed_plans(own)] == ["chunk_size=128"]


def test_samples_are_counted_by_the_first_shard(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "frog"}\n' * 30)
    here, away = config_of(f'data.train="{tmp_path}/{{a,b}}.jsonl"'), config_of("data.train=not/there.tar")
    assert counted_samples(here) == (60, 17)
    (tmp_path / "b.jsonl").write_text('{"text": "a frog"}\n' * 30)  # b is counted by the bytes of a's samples
    assert counted_samples(here) == (60 + 60 / 17, 17)
    assert all(map(math.isnan, counted_samples(away)))


def test_sources_with_prefixes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "frog"}\n' * 30)
    source = f"{{path: {tmp_path}/a.jsonl, weight: 2, question_prefix: 'ask '}}"
    assert counted_samples(config_of("experiment=topics", f"data.train=[{source}]")) == (60, 17)


def test_the_plan_says_how_samples_are_counted(sixteen: RunPlan) -> None:
    rows = sixteen.data()
    assert rows["samples"][2] == "weight · bytes of each shard of data.train / bytes of a sample"
    assert rows["bytes of a sample"][2] == "bytes of the first shard / its samples"


def test_the_steps_of_epochs_are_those_of_a_run(sixteen: RunPlan, toy: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "frog"}\n' * (2 * sixteen.config.global_batch_size + 6))
    words = (toy, "plan.gpus=16", "plan.gpu=h100", f"data.train={tmp_path}/a.jsonl", "epochs=10")
    assert RunPlan(config_of(*words), sixteen).steps == 20


# GFLOP of a pair forward (open_clip's model_profile.csv), forward passes of a step, GPUs, TFLOP/s of each, pairs
# a second of all: open_clip's docs/PRETRAINED.md (GPU hours of 12.8 billion pairs), NVIDIA NeMo's page of CLIP
PUBLISHED = {
    "ViT-B-32": (14.78, 3, 128, 312, 12.8e9 / (4600 / 128 * 3600)),
    "ViT-B-16": (41.09, 3, 176, 312, 12.8e9 / (10700 / 176 * 3600)),
    "ViT-L-14, layers computed again": (175.33, 11 / 3, 400, 312, 12.8e9 / (50800 / 400 * 3600)),
    "ViT-g-14 on A100": (581.15, 3, 8, 312, 559),
    "ViT-g-14 on H100": (581.15, 3, 8, 989.4, 935),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_are_in_the_range_of_the_plan(name: str) -> None:
    """… or less than 15 % beside it."""
    forward, passes, gpus, peak, pairs = PUBLISHED[name]
    least, most = published_mfu(forward * 1e9) * peak * gpus / (passes * forward / 1e3)
    assert least / 1.15 < pairs < most * 1.15


def test_a_core_takes_longer_for_a_sample_of_several_images() -> None:
    emoji = ["experiment=emoji"]
    runs = emoji, ["experiment=simclr_emoji"], [*emoji, "data.negatives.pictures=2"]
    one, two, three = (samples_per_core(config_of(*words), None, None)[0] for words in runs)
    assert one == 2 * two == 3 * three


def test_the_run_measures_what_a_plan_takes(sixteen: RunPlan, toy: str, tmp_path: Path) -> None:
    """MFU, if its metrics have it; and what a core decodes of its own images, larger ones in more time."""
    words = (toy, f"run.dir={tmp_path}", "run.name=a", "plan.gpus=16", "plan.gpu=h100", "steps=9")
    least, most = sixteen.time()["MFU"][0]
    assert most == pytest.approx(2 * least)
    (tmp_path / "a").mkdir()
    lines = [f'{{"step": {step}, "train/mfu": {mfu}}}\n' for step, mfu in enumerate((0.1, 0.3, "null", 0.2, 7.0), 1)]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(lines))
    for keys, mfu in ((), 0.2), (("plan.mfu=0.5",), 0.5):
        assert RunPlan(config_of(*words, *keys), sixteen).time()["MFU"][0].tolist() == [mfu, mfu]
    words += "data=emoji", "data.train=data/samples/emoji/fxemoji-trained.tar"
    small, large = (
        RunPlan(config_of(*words, *keys), sixteen)
        for keys in (("model.image.image_size=32",), ("model.image.image_size=1536",))
    )
    assert "samples that a core decodes" in small.data()["cores of a GPU"][2]
    rates = [small.data()["pairs/s of a GPU"][0] / small.data()["cores of a GPU"][0] for small in (small, large)]
    assert (rates[0] > 1.5 * rates[1]).all()


def test_the_hours_hold_what_is_sent(sixteen: RunPlan, toy: str) -> None:
    words = (toy, "plan.gpus=16", "plan.gpu=h100", "steps=9")
    fast, slow = (RunPlan(config_of(*words, f"plan.network={speed}"), sixteen) for speed in ("1e6", "1e-3"))
    assert fast.time()["a step"][0] == pytest.approx(fast.time()["a step, computing"][0], rel=1e-3)
    sent = {row: size for row, (size, *_) in slow.sent().items()}
    weights = seconds_sent("all-reduce", sent.pop("all-reduce, gradients"), 16, slow.devices)
    rest = sum(seconds_sent(row.partition(",")[0], size, 16, slow.devices) for row, size in sent.items())
    assert slow.time()["a step"][0].tolist() == pytest.approx([weights + rest] * 2)
    assert weights == 2 * 15 / 16 * slow.sent()["all-reduce, gradients"][0] / 1e6
    assert seconds_sent("all-gather", 450e9, 8, slow.devices) == 7 / 8  # within a node


@pytest.mark.parametrize(
    ("words", "sent", "negatives"),
    [
        (["experiment=sts"], [8 * 2 * 4, 8 * 4], 0),  # two numbers of each of eight pairs, and the gradient of one
        (["experiment=mnrl", "objective=distill_kl", "data.teacher=x"], [2 * 4 * 8, 0], 1),  # four sizes of two ranks
    ],
)
def test_given_scores_are_planned(exact_bert: Path, words: list[str], sent: list[int], negatives: int) -> None:
    config = compose_config([*words, f"model.text.name={exact_bert}", "data.train=x", "steps=1"])
    found = small_step(config, 4, 2, 8).sent
    assert [found[kind] for kind in ("all-gather", "reduce-scatter")] == sent, found
    assert RunPlan(config).data()["negatives of an anchor"][0] == negatives


def test_the_rows_of_a_planned_batch_are_pairs_or_classes() -> None:
    config = compose_config(["experiment=classes_emoji"])
    for classes, shape in (([], (6, 8)), (["one"], (6, 1)), (["a", "b", "c"], (2, 8))):  # two ranks share the classes
        config.run.classes = classes
        batch = random_batch(config, 6, 2, 8)
        assert (tuple(batch.y.shape), batch.positives is None) == (shape, len(classes) < 2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_plan_needs_no_item_of_a_file_of_weights(ranks: int, tmp_path: Path) -> None:
    """Its batches are random; further columns have weights too, and keys are sent."""
    path = str(tmp_path / "w.safetensors")
    write_log_weights(LogWeights(path, LOG_Q, np.array([10**9]), np.zeros(1)))
    words = ["experiment=mnrl", "model.text.name=x", "data.train=x", "objective=one_sided_dpm"]
    weighed = [f"objective.importance_file={path}", "objective.importance=log_q"]
    with_weights, plain = (small_step(compose_config(each), 4, ranks, 8) for each in ([*words, *weighed], words))
    assert with_weights.sent["all-reduce"] == plain.sent["all-reduce"]
    keys = 2 * 8 * 4 * ranks  # of the pair and the hard negative of each row
    assert with_weights.sent["all-gather"] - plain.sent["all-gather"] == (keys if ranks > 1 else 0)


def test_a_dry_run_sends_what_is_planned(
    tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny({"plan.dry_run": 4, "global_batch_size": 256, "objective": "clip"})[1:]
    out = printed(capsys, *words)
    assert "rank 0 of 4, fp32: 64 of 256 pairs" in out
    assert not (tmp_path / "runs").exists()
    found = dict(line.split(": ") for line in out.splitlines() if line.startswith("  "))
    loss = float(out.partition("loss ")[2].split()[0])
    assert loss == pytest.approx(float(found["  expected"].split()[-1]), abs=0.03)
    plan = RunPlan(config_of(*words, "plan.gpus=4", "plan.gpu=h100", "precision=fp32"))
    for kind, size in sent_by(plan).items():
        assert size == int(found[f"  {kind}"].replace(",", "")), kind


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_a_dry_run_has_a_column_for_each_class(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine classes are no multiple of two ranks, and fewer than sixteen."""
    words = ["experiment=classes_emoji", "data.val=null", "global_batch_size=32", "data.workers=0"]
    out = printed(capsys, *words, "objective=clip", f"plan.dry_run={ranks}")
    assert f"rank 0 of {ranks}, fp32: {32 // ranks} of 32 pairs" in out and "expected" not in out
