"""What people get wrong; each is answered by one line with the key, the value and the fix, before torch loads."""

from pathlib import Path

import pytest
from helpers.messages import raises
from omegaconf import OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.evaluation.load_run import read_config
from dyad.run.checks import check_arguments, check_config
from dyad.train.cli.also import auxiliary_configs
from dyad.train.cli.compose import compose_config, groups, keys, preview, to_train_config, words_for
from dyad.train.cli.synonyms import ADVICE, SYNONYMS
from dyad.train.cli.unread_keys import READ_ONLY_WITH, refuse_unread
from dyad.train.run_folder.folder import by_section, maths_keys, open_run, run_folder

EMOJI, DATA = "experiment=emoji", "data.train=data/samples/emoji/fxemoji-trained.tar"

# kind: what is typed, and what the answer names: the key, the value, the fix
MINED_IMAGES = ["data.negatives.lists=[mined]", "data.negatives.pictures=1"]
MISTAKES = {
    "unknown key": ([EMOJI, "stepz=3"], ["stepz", "'steps'"]),
    "unknown group": ([EMOJI, "objectve=clip"], ["objectve", "'objective'?"]),
    "key of another trainer": ([EMOJI, "output_dir=x"], ["output_dir", "'run.dir'"]),
    "flag of another trainer": ([EMOJI, "--learning-rate", "1e-3"], ["--learning-rate", "'optim.lr=1e-3'"]),
    "switch of another trainer": ([EMOJI, "--fp16"], ["--fp16", "'precision=fp16'"]),
    "what the launcher says": ([EMOJI, "num_gpus=4"], ["num_gpus", "NPROC=4 bash launch/torchrun.sh"]),
    "what is always so": ([EMOJI, "local_loss=true"], ["local_loss"]),
    "a space": ([EMOJI, "steps", "=4"], ["'steps'", "steps=VALUE"]),
    "type: number": ([EMOJI, "optim.lr=fast"], ["optim.lr=fast"]),
    "type: whole": ([EMOJI, "steps=1.5"], ["steps=1.5"]),
    "type: bool": ([EMOJI, "model.text.frozen=maybe"], ["model.text.frozen=maybe", "true", "false"]),
    "type: list": ([EMOJI, "eval.recall_k=5"], ["eval.recall_k=5", "[1,2]"]),
    "choice": ([EMOJI, "optim.schedule=cosin"], ["optim.schedule=cosin", "'cosine'", "linear"]),
    "choice of a group": ([EMOJI, "model=ViT-B-32"], ["model=ViT-B-32", "model.name=ViT-B-32"]),
    "name of a model that the recipe does not have": (
        [EMOJI, "model.name=ViT-B-16"],
        ["model.name=ViT-B-16", "model=open_clip"],
    ),
    "path from the home folder as a name": ([EMOJI, 'run.name="~/a"'], ["run.name=~/a", "run.dir=PARENT"]),
    "URL as a folder": ([EMOJI, "run.dir=s3://bucket/runs"], ["run.dir=s3://bucket/runs", "run.dir=FOLDER"]),
    "images of the other task": (
        ["experiment=topics", "data.negatives.pictures=1"],
        ["data.negatives.pictures=1", "task=question_passage"],
    ),
    "mined images of a stream": (
        [EMOJI, "steps=1", "epochs=null", "data.mode=stream", "data.negatives.picture_file=a", *MINED_IMAGES],
        ["data.negatives.picture_file=a", "data.mode=indexed"],
    ),
    "where wrong captions are, and none drawn": (
        [EMOJI, "data.negatives.fields=[wrong]"],
        ["data.negatives.fields", "data.negatives.per_row above 0"],
    ),
    "where images are, and none drawn": (
        [EMOJI, "data.negatives.picture_fields=[a.jpg]"],
        ["data.negatives.picture_fields", "data.negatives.pictures above 0"],
    ),
    "range": ([EMOJI, "chunk_size=0"], ["chunk_size=0"]),
    "no data": (["steps=3"], ["data.train", "data.train=shards/train.tar"]),
    "missing data": ([EMOJI, "data.train=data/samples/emojy/a.tar"], ["data.train=", "'emojy'", "'emoji'"]),
    "no length": (["data.train=data/samples/emoji/fxemoji-trained.tar"], ["steps", "epochs", "steps=1000"]),
    "missing weights": ([EMOJI, "init_from=nowhere"], ["init_from=nowhere"]),
    "missing checkpoint": ([EMOJI, "resume=nevr"], ["resume=nevr", "'never'", "auto"]),
    "missing negatives": (
        ["experiment=topics_mined", "data.negatives.file=nowhere/mined.jsonl"],
        ["data.negatives.file=nowhere/mined.jsonl", "python -m eval.mine"],
    ),
    "entry of the suite": ([EMOJI, "eval.suite=[zeroshot:x.json]"], ["zeroshot:x.json", "'zero_shot'"]),
    "file of the suite": (
        [EMOJI, "eval.suite=[zero_shot:data/samples/emoji/group.json]"],
        ["eval.suite", "zero_shot:data/samples/emoji/group.json", "'groups.json'"],
    ),
    "suite of the other task": (
        [EMOJI, "eval.suite=[beir:data/samples/topics]"],
        ["beir:data/samples/topics", "task=question_passage"],
    ),
    "objective of another task": ([EMOJI, "objective=cpc"], ["objective=cpc", "task=sequence"]),
    "key of another tower": (
        ["model=tiny_clip", DATA, "steps=1", "model.text.lower_case=true"],
        ["lower_case=true", "kind=transformers"],
    ),
    "key of the other task": ([EMOJI, "eval.depth=200"], ["eval.depth=200", "task=question_passage"]),
    "key of another option": ([EMOJI, "optim.cooldown=3"], ["optim.cooldown=3", "const-cooldown"]),
    "option of another divergence": (
        [EMOJI, "objective=coce", "objective.alpha=0.2"],
        ["objective.alpha=0.2", "objective.divergence=cvar"],
    ),
    "temperature that cvar does not have": (
        [EMOJI, "objective=coce", "objective.divergence=cvar", "objective.temperature=0.2"],
        ["objective.temperature=0.2", "objective.divergence=kl or chi2", "objective.nu=state"],
    ),
    "two starts of a temperature": (
        [EMOJI, "objective=siglip", "objective.init_scale=10", "objective.temperature=0.05"],
        ["objective.temperature=0.05", "objective.init_scale=10"],
    ),
    "graphs of sharded towers": ([EMOJI, "dist=fsdp2", "keep_graphs=2"], ["keep_graphs=2", "dist=ddp"]),
    "cache of sharded towers": (
        [EMOJI, "dist=hsdp", "model.frozen_cache_mb=64"],
        ["model.frozen_cache_mb=64", "dist=ddp", "dist.shard_size=1"],
    ),
    "labels that are not there": (
        ["model=tiny_clip", DATA, "steps=1", "objective=coce", "objective.setting=supervised"],
        ["setting=supervised", "objective.duplicates=positive"],
    ),
    "width of a lone tower of open_clip": (
        ["task=views", "model=tiny_clip", "data=simclr", "objective=simclr", DATA, "steps=1", "model.embed_dim=64"],
        ["model.embed_dim=64", "model.head"],
    ),
    "width of one score": (
        ["experiment=rare_class", "model.embed_dim=64"],
        ["model.embed_dim=64", "data.rare=null"],
    ),
    "classes that the run finds": (["experiment=classes_emoji", "run.classes=[a,b]"], ["run.classes=['a', 'b']"]),
    "prompts that the run finds": (["experiment=classes_emoji", "run.prompts=[a,b]"], ["run.prompts=['a', 'b']"]),
    "ids that the run counts": (["experiment=next_item", "data.train=x.jsonl", "run.inputs=7"], ["run.inputs=7"]),
    "classes of an auxiliary loss": (
        [EMOJI, "also.more='task=views objective=simclr run.classes=[a,b]'"],
        ["also.more", "run.classes"],
    ),
    "adapters of frozen texts": (
        ["experiment=topics", "model.text.frozen=true", "model.text.lora_rank=4"],
        ["model.text.frozen=true", "model.text.lora_rank=4"],
    ),
    "adapters of frozen images": (
        [EMOJI, "model=tiny_clip", "model.image.frozen=true", "model.image.lora_rank=4"],
        ["model.image.frozen=true", "model.image.lora_rank=4"],
    ),
    "evaluations of nothing": ([EMOJI, "data.val=null", "eval.suite=[]", "eval.every=5"], ["eval.every=5", "data.val"]),
    "template of captions of no image": (["experiment=topics", "data.template='a {}'"], ['data.template="a {}"']),
    "a dry run and a plan": (
        [EMOJI, "plan.dry_run=2", "plan.gpus=4"],
        ["plan.gpus=4", "plan.dry_run=null"],
    ),
    "target of another objective": (
        [EMOJI, "target.kind=ema"],
        ["target.kind=ema", "objective=clip", "objective=spectral_alternating"],
    ),
    "key of another target": (
        [EMOJI, "objective=spectral_alternating", "target.kind=copy", "target.momentum=0.9"],
        ["target.momentum=0.9", "target.kind=ema"],
    ),
    "range of the target": (
        [EMOJI, "objective=spectral_alternating", "target.kind=ema", "target.momentum_end=1.5"],
        ["target.momentum_end=1.5"],
    ),
    "EPR without negatives": (
        ["experiment=topics", "objective=epr"],
        ["objective=epr", "data.negatives.per_row=1", "objective=dpr"],
    ),
    "index of images": ([EMOJI, "eval.index=HNWS32"], ["'HNWS32'", "HNSW32;efSearch=128"]),
    "index of one score": (["experiment=rare_class", "eval.index=HNSW32"], ["eval.index=HNSW32", "data.rare=null"]),
    "key without its service": ([EMOJI, "tracking.wandb=online"], ["tracking.wandb=online", "WANDB_API_KEY"]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_answered_by_one_line(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")
    arguments, named = MISTAKES[kind]
    with raises(ConfigError, *named) as caught:
        check_arguments(arguments)
    assert len(str(caught.value).splitlines()) == 1


def test_no_path_is_a_name() -> None:
    config = compose_config([EMOJI])
    for name in ("/runs/a", ".", "a/../.."):
        config.run.name = name
        with raises(ConfigError, f"run.name={name}", "run.dir=PARENT"):
            check_config(config)


def test_a_run_folder_of_another_configuration_names_what_differs(tmp_path: Path) -> None:
    words = [EMOJI, f"run.dir={tmp_path}", "run.name=mine", "tracking.wandb=disabled"]
    run = open_run(compose_config(words))
    (run / "checkpoints" / "step_00000007").mkdir(parents=True)
    check_arguments(words)
    with raises(ConfigError, "seed: 0 there, 1 now", "run.name", "resume=never") as seeded:
        check_arguments([*words, "seed=1"])
    assert "run.name=NEW" not in str(seeded.value)  # a resume elsewhere keeps the seed as well


def test_a_run_from_before_keys_were_added_and_renamed_keeps_its_name_and_goes_on(tmp_path: Path) -> None:
    words = [EMOJI, f"run.dir={tmp_path}", "tracking.wandb=disabled", "optim.max_skipped=5"]
    run = open_run(compose_config(words))
    assert run.name == "emoji-ccb9d8f7"  # as it was before model.batch_norm
    (run / "checkpoints" / "step_00000007").mkdir(parents=True)
    older = (run / "config.yaml").read_text()
    for now, before in (
        ("  batch_norm: global\n", ""),
        ("  max_skipped: 5\n", "  patience: 5\n"),
        ("  frozen_cache_mb: null\n", "  memo_mb: 64\n"),
    ):
        assert older.count(now) == 1
        older = older.replace(now, before)
    (run / "config.yaml").write_text(older)
    check_arguments(words)
    check_arguments([*words, "run.name=emoji-ccb9d8f7", "model.batch_norm=per_chunk"])
    assert read_config(run).optim.max_skipped == 5 and read_config(run).model.frozen_cache_mb == 64
    with raises(ConfigError, "optim.patience", "optim.max_skipped"):
        check_arguments([EMOJI, "optim.patience=5"])


READ = {
    "the rate at which a rare class is evaluated": [
        "experiment=rare_class",
        *("objective.divergence=kl", "objective.alpha=0.2"),
    ],
    "the width of a head": ["experiment=simclr_emoji", "model=tiny_clip", "model.head=simclr", "model.embed_dim=64"],
    "a switch off": ["experiment=dpr_nq", "data.train=data/samples/topics", "data.negatives.per_row=0"],
    "no refreshes": ["experiment=topics_ance", "data.negatives.refresh_every=0", "data.negatives.per_row=0"],
    "the temperature of a step of ν": [
        *(EMOJI, "objective=coce", "objective.divergence=cvar", "objective.temperature=0.2", "objective.nu=state"),
    ],
    "a temperature beside the scale that gives it": [
        *(EMOJI, "objective=siglip", "objective.init_scale=5", "objective.temperature=0.20"),
    ],
    "a key of one run of a sweep": [
        *(EMOJI, "objective=coce", "-m"),
        *("objective.divergence=kl,cvar", "objective.alpha=0.2"),
    ],
}


@pytest.mark.parametrize("kind", READ)
def test_what_nobody_typed_or_some_run_reads_is_not_refused(kind: str, tmp_path: Path) -> None:
    check_arguments([*READ[kind], f"run.dir={tmp_path}", "tracking.wandb=disabled"])


def test_a_sweep_in_which_no_run_reads_a_key_is_refused() -> None:
    words = [EMOJI, "-m", "objective=coce", "objective.divergence=kl,chi2", "objective.alpha=0.2"]
    with raises(ConfigError, "objective.alpha=0.2", "divergence=cvar"):
        check_arguments([*words, "tracking.wandb=disabled"])


def test_ids_have_no_text_and_are_found_among_others() -> None:
    config = compose_config(["experiment=next_item", "data.passage.length=9", "eval.depth=200", "eval.recall_k=[2]"])
    refuse_unread(["eval.depth=200", "eval.recall_k=[2]"], [config])
    with raises(ConfigError, "data.passage.length=9", "data.items=texts"):
        refuse_unread(["data.passage.length=9"], [config])


def test_a_width_is_read_by_cpc_and_by_a_running_mean_alone() -> None:
    word = ["objective.width=8"]
    refuse_unread(word, [compose_config(["experiment=cpc_verses", *word])])
    moments = ["experiment=spectral_emoji", "objective=spectral_alternating", *word]
    refuse_unread(word, [compose_config([*moments, "objective.lambda_momentum=0.5"])])
    with raises(ConfigError, "objective.width=8", "objective.lambda_momentum"):
        refuse_unread(word, [compose_config(moments)])


def test_a_key_that_an_auxiliary_loss_takes_from_the_run_is_read() -> None:
    """A run of images alone; its further loss has captions, and takes model.* of the run unless it has its own."""
    words = ["experiment=simclr_emoji", "model.grad_checkpointing=true", "model.text.context_length=8"]
    captions = "task=image_text objective=clip data=emoji model.head=none"
    config = compose_config([*words, f"also.more='{captions}'"])
    refuse_unread(words, [config], [*auxiliary_configs(config).values()])
    config = compose_config([*words, f"also.more='{captions} model.text.context_length=9'"])
    with raises(ConfigError, "model.text.context_length=8", "data.items=texts"):
        refuse_unread(words, [config], [*auxiliary_configs(config).values()])


def test_towers_of_our_own_recompute_no_activations() -> None:
    word = ["model.grad_checkpointing=true"]
    refuse_unread(word, [compose_config(["experiment=emoji", *word])])  # its text tower does
    refuse_unread(word, [compose_config(["experiment=simclr_emoji", "model=tiny_clip", *word])])
    for experiment in ("simclr_emoji", "next_item"):
        with raises(ConfigError, "model.grad_checkpointing=true", "open_clip, timm or transformers"):
            refuse_unread(word, [compose_config([f"experiment={experiment}", *word])])


def test_every_key_that_is_not_always_read_exists() -> None:
    known = [key for key, _, _ in keys()]
    of_rules = [start for starts in READ_ONLY_WITH.values() for start in starts.split()]
    assert [start for start in of_rules if not any(key.startswith(start) for key in known)] == []


def test_a_prefix_can_break_the_line() -> None:
    """No shell passes a line break on easily, so its two letters are one."""
    config = compose_config(["experiment=topics", r"data.question.prefix=Query:\n", 'data.passage.prefix="a\\tb"'])
    assert (config.data.question.prefix, config.data.passage.prefix) == ("Query:\n", "a\tb")


def test_two_backslashes_of_a_prefix_are_one_and_no_line_break() -> None:
    one, two, three = r'"solve \\nabla: "', r"'solve \\nabla: '", r"solve\ \\nabla:\ "
    data = compose_config(["experiment=topics", f"data.question.prefix={one}", f"data.passage.prefix={two}"]).data
    bare = compose_config(["experiment=topics", f"data.question.prefix={three}"]).data
    assert [data.question.prefix, data.passage.prefix, bare.question.prefix] == [r"solve \nabla: "] * 3


SOURCES = r"""data.train=[{path: a.jsonl,weight: 2,question_prefix: "Ask: {x}\nQuery: "},b.jsonl@3,{path: c.jsonl}]"""


def test_prefixes_of_sources() -> None:
    """Escapes as of data.question.prefix; typed again they are the same configuration and the same run."""
    config = compose_config(["experiment=topics", SOURCES])
    a = {"path": "a.jsonl", "weight": 2, "question_prefix": "Ask: {x}\nQuery: "}
    assert config.data.train == [a, "b.jsonl@3", {"path": "c.jsonl"}]
    again = compose_config(words_for(config))
    assert again == config and "Query: " in preview(["experiment=topics", SOURCES])
    assert "Query: " in by_section(maths_keys(config))["data"]
    other = compose_config(["experiment=topics", SOURCES.replace("Ask", "Say")])
    assert run_folder(other) != run_folder(config) == run_folder(again)
    literal = compose_config(["experiment=topics", SOURCES.replace(r"\n", r"\\n")])
    assert literal.data.train[0]["question_prefix"] == r"Ask: {x}\nQuery: "
    assert compose_config(words_for(literal)) == literal
    assert compose_config(["data.train={path: a.jsonl}"]).data.train == [{"path": "a.jsonl"}]


def test_a_prefix_from_a_file_is_read_as_it_stands() -> None:
    """Runs of other ages have these letters in config.yaml."""
    saved = OmegaConf.structured(compose_config(["experiment=topics"]))
    saved.data.passage.prefix = r"\nabla \\t"
    assert to_train_config(saved).data.passage.prefix == r"\nabla \\t"


def test_what_other_trainers_call_a_key_is_a_key_here() -> None:
    known = {key for key, _, _ in keys()} | set(groups())
    assert not {name: key for name, key in SYNONYMS.items() if key.partition("=")[0] not in known}
    assert not SYNONYMS.keys() & ADVICE.keys()
