"""Files of strangers, given to the commands that read them: nothing in them runs, nothing is written elsewhere, no
secret is kept. What is refused is refused in one line. File by file, without commands: tests/journeys/test_trust.py."""

import hashlib
import json
import os
import pickle
import shutil
import stat
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from helpers.canary import Canary
from helpers.cli import ROOT, Commands
from helpers.shards import image, index_shard
from helpers.tiny_runs import QUIET, records, refused
from helpers.topics import arguments, write_topics

from dyad.train.run_folder.checkpoint import FORMAT

SMALL = {**QUIET, "steps": 2, "global_batch_size": 8, "eval.suite": "[]"}


@pytest.fixture
def bomb(canary: Path) -> bytes:
    return pickle.dumps(Canary(canary))


def shard(path: Path, count: int = 16, more: list[tarfile.TarInfo | tuple[str, bytes]] | None = None) -> Path:
    """Images with a caption in JSON, and between them other members."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for n in range(count):
            facts = {"caption": f"image {n}", "label": str(n % 2)}
            for name, content in ((f"{n:03}.png", image(n)), (f"{n:03}.json", json.dumps(facts).encode())):
                _add(tar, name, content)
        for member in more or []:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                _add(tar, *member)
    return path


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, BytesIO(content))


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


# Data ----------------------------------------------------------------------------------------------------------------


def test_members_that_are_no_images_and_paths_that_lead_out(
    commands: Commands, tiny, tmp_path: Path, bomb: bytes
) -> None:
    """The names come back in galleries, rankings and reports."""
    facts = json.dumps({"caption": "=cmd() <script>canary()</script> $(touch canary)", "label": "../../canary"})
    more = [
        ("canary.pkl", bomb),
        ("000.pyd", bomb),
        ("canary.pt", bomb),
        ("canary.npy", bomb),
        link("001.txt", tarfile.SYMTYPE, "/etc/passwd"),
        link("002.txt", tarfile.LNKTYPE, "../../canary"),
        link("canary", tarfile.DIRTYPE, ""),
        ("../../../canary.png", image(90)),
        ("../../../canary.json", facts.encode()),
        ("/tmp/canary;$(touch canary).png", image(91)),
        ("/tmp/canary;$(touch canary).json", facts.encode()),
    ]
    path = shard(tmp_path / "data; $(touch canary)" / "a b.tar", more=more)
    before = files(tmp_path)
    keys = {**SMALL, "data.train": f'"{path}"', "data.val": f'"{path}"', "tracking.report": "true"}
    ended = commands.run(*tiny({**keys, "tracking.tensorboard": "true", "tracking.wandb": "offline", "run.name": "a"}))
    assert ended.code == 0, ended.out
    assert (tmp_path / "runs/a/report.html").exists()
    places = {tmp_path / "runs", path.parent / ".index"}
    assert not [f for f in files(tmp_path) - before if not places & set(f.parents)]
    assert not (ROOT / "canary").exists() and not list(Path("/tmp").glob("canary*"))


def test_an_index_that_came_with_the_data(commands: Commands, tiny, tmp_path: Path, bomb: bytes) -> None:
    path = shard(tmp_path / "data" / "a.tar")
    index_shard(str(path))
    (table,) = (path.parent / ".index").glob("*.npy")
    np.save(table, np.full(3, Canary(tmp_path / "canary"), object), allow_pickle=True)
    refused(commands.run(*tiny({**SMALL, "data.train": path})), 3, path)
    (path.parent / ".index" / "a.tar.json").write_bytes(bomb)
    ended = commands.run(*tiny({**SMALL, "data.train": path}))
    assert ended.code == 0, ended.out  # indexed anew


def test_mined_negatives_of_others(commands: Commands, models: Path, tmp_path: Path, bomb: bytes) -> None:
    topics = write_topics(tmp_path / "topics")
    mined = tmp_path / "mined.jsonl"
    mined.write_bytes(bomb)
    keys = {"data.negatives.lists": "[mined]", "data.negatives.per_row": 1, "data.negatives.file": mined}
    refused(commands.run(*arguments(models / "bert", topics, tmp_path / "runs", keys)), 3, "mined.jsonl")


@pytest.mark.soak
def test_embeddings_that_lie_where_ours_would(commands: Commands, models: Path, tmp_path: Path, canary: Path) -> None:
    """A folder of half a corpus is completed: what it holds is read."""
    topics = write_topics(tmp_path / "topics")
    run = tmp_path / "runs" / "a"
    assert commands.run(*arguments(models / "bert", topics, run.parent, {"run.name": "a", "steps": 1})).code == 0
    mine = ["eval.mine", f"run={run}", "first_rank=1", "last_rank=5"]
    ended = commands.run(*mine)
    assert ended.code == 0, ended.out
    vectors = min((run / "mined").rglob("embeddings.npy"))
    array = BytesIO()
    np.save(array, np.full((len(np.load(vectors)), 1), Canary(canary), object), allow_pickle=True)
    vectors.write_bytes(array.getvalue())
    refused(commands.run(*mine), 3, "embeddings.npy")


# Weights -------------------------------------------------------------------------------------------------------------


def test_pretrained_weights_and_a_checkpoint_of_somebody_else(
    commands: Commands, tiny, tmp_path: Path, bomb: bytes
) -> None:
    weights, theirs = tmp_path / "weights.pt", tmp_path / "step_00000001"
    weights.write_bytes(bomb)
    refused(commands.run(*tiny({**SMALL, "model.text.pretrained": weights})), 2, weights)
    theirs.mkdir()
    (theirs / ".metadata").write_bytes(bomb)
    listed = {}
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        (theirs / name).write_bytes(bomb)
        listed[name] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
    (theirs / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": listed}))
    refused(commands.run(*tiny({**SMALL, "init_from": theirs})), 3, theirs)


def evil_model(folder: Path, bert: Path, canary: Path) -> Path:
    """A transformers folder whose settings name a module that lies beside them."""
    shutil.copytree(bert, folder)
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    settings = json.loads((folder / "config.json").read_text())
    own = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "evil", "auto_map": own}))
    words = json.loads((folder / "tokenizer_config.json").read_text())
    words |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def test_code_that_comes_with_a_model(commands: Commands, tiny, models: Path, tmp_path: Path, canary: Path) -> None:
    theirs = evil_model(tmp_path / "evil", models / "bert", canary)
    text = {"model.text.kind": "transformers", "model.text.name": theirs}
    refused(commands.run(*tiny({**SMALL, **text})), 2, theirs)

    config = json.loads((models / "open_clip.json").read_text())
    config["text_cfg"] |= {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    (theirs / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    refused(commands.run(*tiny({**SMALL, "model.text.name": theirs})), 2, theirs)

    config["text_cfg"] = {"hf_model_name": str(theirs), "hf_tokenizer_name": str(theirs), "pooler_type": "mean_pooler"}
    (tmp_path / "hf.json").write_text(json.dumps(config))
    refused(commands.run(*tiny({**SMALL, "model.text.name": tmp_path / "hf.json"})), 2, "hf.json")


# Words of the configuration ------------------------------------------------------------------------------------------


def test_words_that_would_run_something(commands: Commands, tiny, tmp_path: Path, canary: Path) -> None:
    call = f"{{_target_:shutil.copyfile,src:/etc/hostname,dst:{canary}}}"
    refused(commands.run(*tiny(SMALL), f"+hydra.callbacks.x={call}"), 2, "hydra.callbacks.x")
    refused(commands.run(*tiny(SMALL), "-m", f"hydra.sweeper={call}"), 2, "hydra.sweeper")
    trick = f"+hydra.callbacks.x={call}"  # its first copy passes for the value of Hydra's -p
    refused(commands.run(*tiny(SMALL), "-m", "-p", trick, trick), 2, "-p")
    rerun = tmp_path / "config.pickle"
    rerun.write_bytes(pickle.dumps(Canary(canary)))
    refused(commands.run(*tiny(SMALL), "-i", f"--experimental-rerun={rerun}"), 2, "-i")
    refused(commands.run(*tiny(SMALL), "tracking.project=${oc.env:HOME}"), 2, "tracking.project")
    assert not (tmp_path / "runs").exists()


def test_words_in_the_configuration_of_a_run(commands: Commands, tiny, tmp_path: Path, canary: Path) -> None:
    """A run folder of somebody else, evaluated here."""
    assert commands.run(*tiny({**SMALL, "run.name": "a"})).code == 0
    config = tmp_path / "runs/a/config.yaml"
    sound = config.read_text()
    for line in ("project: ${oc.env:HOME}", f"project: !!python/object/apply:builtins.open ['{canary}', w]"):
        config.write_text(sound.replace("project: dyad", line))
        refused(commands.run("eval", f"checkpoint={config.parent}"), 2, config)


# Secrets, and who may read -------------------------------------------------------------------------------------------

SECRETS = {
    "WANDB_API_KEY": "canary0" + "k" * 33,
    "HF_TOKEN": "hf_canary1",
    "AWS_SECRET_ACCESS_KEY": "canary2",
    "HTTPS_PROXY": "http://me:canary3@127.0.0.1:9",
}
URL = "https://me:canary4@data.example/{}.tar?X-Amz-SignedHeaders=host;x&X-Amz-Signature=canary5,canary6"


def secretless(out: str, folder: Path) -> None:
    assert "canary" not in out
    held = [path for path in files(folder) if b"canary" in path.read_bytes()]
    assert not held


def test_no_secret_is_written_or_said(commands: Commands, tiny, tmp_path: Path) -> None:
    path = shard(tmp_path / "data" / "a.tar", 24)
    shutil.copy(path, path.with_name("b.tar"))
    keys = {
        **SMALL,
        "data.train": f'"{URL.format("a")}@2::{URL.format("b")}"',
        "data.val": f'"{URL.format("b")}"',
        "tracking.wandb": "offline",
        "tracking.tensorboard": "true",
        "run.name": "a",
    }
    run, cache = tmp_path / "runs" / "a", tmp_path / "cache"
    environment = {"SERVED": str(path.parent), "XDG_CACHE_HOME": str(cache), **SECRETS}
    command = ["faults.signed", *tiny(keys)[1:]]
    ended = commands.run(*command, **environment)
    assert ended.code == 0, ended.out
    assert "data.example/a.tar?[redacted]@2::https://[redacted]@data.example/b.tar" in (run / "config.yaml").read_text()
    assert len(records(run)) == 3 and list(run.glob("wandb/offline-run-*/*.wandb")) and list(cache.rglob("a.tar.json"))
    evaluated = json.loads((run / "eval" / "val.json").read_text())
    assert evaluated["source"] == "https://[redacted]@data.example/b.tar?[redacted]"
    secretless(ended.out, run)
    secretless("", cache)

    again = [word.replace("canary5", "canary7") for word in command]
    gone_on = commands.run(*again, **environment)  # signed anew: the same data, the same run
    assert gone_on.code == 0 and "already finished" in gone_on.out, gone_on.out
    path.write_bytes(path.read_bytes()[:-9000])
    damaged = commands.run(*[word.replace("run.name=a", "run.name=b") for word in command], **environment)
    refused(damaged, 3, "data.example/a.tar?[redacted]")
    refused(commands.run("eval", f"checkpoint={run}", **environment), 2, "[redacted]")
    secretless(gone_on.out + damaged.out, run.parent)


@pytest.mark.soak
def test_others_cannot_read_what_is_written(commands: Commands, tiny, tmp_path: Path) -> None:
    path = shard(tmp_path / "data" / "a.tar")
    mask = os.umask(0)  # the commands start with it
    try:
        own = Commands(tmp_path)
        ended = own.run(*tiny({**SMALL, "data.train": path, "data.val": path, "tracking.wandb": "offline"}))
        own.close()
    finally:
        os.umask(mask)
    assert ended.code == 0, ended.out
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "runs").rglob("*") if not p.is_symlink()}
    assert len(modes) > 12
    assert not {p: oct(m) for p, m in modes.items() if m & 0o027}
    index = path.parent / ".index"
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o444 == 0o444 for p in (index, *index.iterdir()))


def test_a_link_is_removed_not_what_it_leads_to(commands: Commands, tiny, tmp_path: Path) -> None:
    """Where retention and the clearing up after a kill come along."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    checkpoints = tmp_path / "runs/a/checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("step_00000000", ".step_00000001.partial", ".step_00000002.partial", ".step_00000002.aside"):
        (checkpoints / name).symlink_to(precious)
    keys = {**SMALL, "run.name": "a", "checkpoint.every": 1, "checkpoint.keep": 1, "resume": "never"}
    ended = commands.run(*tiny(keys))
    assert ended.code == 0, ended.out
    assert (precious / "file").read_text() == "mine"
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]
