"""The trust boundary, piece by piece: what is never called, what strangers' files can do, what is never shown. The same
through the commands: tests/faults/test_strangers.py."""

import argparse
import ast
import hashlib
import json
import pickle
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canary import Canary
from helpers.cli import ROOT
from helpers.messages import raises
from helpers.tiny_bert import write as write_bert
from torch import nn

from dyad.data.base.errors import ConfigError, DataError, printable
from dyad.data.base.secrets import known_secrets, without_credentials, without_secrets
from dyad.data.shards.sources import parse_sources
from dyad.run.checks import check_arguments
from dyad.train.cli.compose import compose_config
from dyad.train.config import ModelConfig, TrainConfig
from dyad.train.run_folder import checkpoint
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.towers.build import build_model
from dyad.train.towers.libraries.open_clip import resolve_model_name
from dyad.train.towers.libraries.published import location_of
from dyad.train.towers.libraries.transformers_model import load_companion, load_model
from tests.journeys.test_slurm import sbatch, shell
from tests.layout.test_layout import FILES, SOURCES

# What is never called ------------------------------------------------------------------------------------------------

FORBIDDEN = set(
    """eval exec os.system os.popen pickle.load pickle.loads pickle.Unpickler dill.load joblib.load marshal.loads
    yaml.load yaml.unsafe_load torch.hub.load torch.jit.load hydra.utils.instantiate hydra.utils.call
    hydra.utils.get_class wds.WebDataset webdataset.WebDataset dcp.load torch.distributed.checkpoint.load
    accelerator.load_state faiss.read_index tarfile.extractall shutil.unpack_archive""".split()
)
NEVER = {"allow_pickle": True, "shell": True, "trust_remote_code": True, "weights_only": False}
NEEDED = {"torch.load": "weights_only", "np.load": "allow_pickle", "Image.open": "formats", "np.save": "allow_pickle"}
OWN = {
    ROOT / "tests/faults/test_strangers.py",
    ROOT / "tests/journeys/test_trust.py",
}  # they make what the others refuse


def violations(tree: ast.AST) -> list[str]:
    """Calls of one file that no file has."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "LOAD_TRUNCATED_IMAGES":
            found.append(node.attr)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
        written = {k.arg for k in node.keywords}
        if name in FORBIDDEN or re.fullmatch(r"wds\.(decode|autodecode\..*)", name):
            found.append(name)
        found += [f"{name}({word}={value})" for word, value in NEVER.items() if given.get(word, not value) is value]
        if NEEDED.get(name, "formats") not in written and name in NEEDED:
            found.append(f"{name} without {NEEDED[name]}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_forbidden_calls_are_absent(path: Path) -> None:
    assert violations(ast.parse(path.read_text())) == []


def test_tests_do_not_read_what_could_run_either() -> None:
    own = {"pickle.loads", "np.save(allow_pickle=True)"}  # round trips, and what is to be refused
    own |= {"np.load without allow_pickle", "np.save without allow_pickle", "Image.open without formats"}
    for path in set(FILES) - set(SOURCES) - OWN:
        assert set(violations(ast.parse(path.read_text()))) <= own, path


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)",
        "yaml.load(f)",
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "np.load(f)",
        "subprocess.run(c, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "os.system(c)",
        "hydra.utils.instantiate(c)",
        "wds.decode()",
        "ImageFile.LOAD_TRUNCATED_IMAGES = True",
        "Image.open(f)",
    ],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert violations(ast.parse(line))


@pytest.mark.parametrize(
    ("package", "least"), [("pillow", (12, 2)), ("torch", (2, 11)), ("hydra-core", (1, 3, 7)), ("transformers", (5, 3))]
)
def test_no_version_with_a_known_hole_is_locked(package: str, least: tuple[int, ...]) -> None:
    for name in ("requirements.lock", "requirements.hashes"):
        (found,) = re.findall(rf"^{package}==([\d.]+)", (ROOT / name).read_text(), re.MULTILINE)
        assert tuple(map(int, found.split("."))) >= least


AUDIT = {
    "clean": ({"name": "a", "version": "1", "vulns": []}, 0, "1 packages checked, 0 known vulnerabilities"),
    "hole": (
        {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]},
        1,
        "a 1: CVE-1 fixed in 2\n1 packages checked, 1 known vulnerabilities",
    ),
    "unknown": ({"name": "a", "skip_reason": "not found"}, 2, "not checked: no advisory source answered"),
}


@pytest.mark.parametrize("case", AUDIT)
def test_an_audit_that_nobody_answered_is_not_a_clean_one(case: str) -> None:
    package, code, said = AUDIT[case]
    script = 'source launch/audit.sh; dyad_verdict <<<"$1"'
    ended = shell(script, json.dumps({"dependencies": [package]}))
    assert (ended.returncode, ended.stdout.strip()) == (code, said), ended.stderr


def test_what_scripts_compute_with_are_numbers(tmp_path: Path) -> None:
    evil = f"x[$(touch {tmp_path}/canary)]"
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NUM_NODES", "NPROC"):
        ended = sbatch("--dry-run", "experiment=emoji", **{"SLURM_JOB_ID": "1", name: evil})
        assert (ended.returncode, ended.stderr.strip()) == (2, f"error: {name}={evil} is no whole number")
    assert not list(tmp_path.iterdir())


# Weights of others ---------------------------------------------------------------------------------------------------


def test_the_canary_sings(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary"))).close()
    assert (tmp_path / "canary").exists()


def pretrained_by(path: Path, tower: str) -> TrainConfig:
    keys = {
        "open_clip": [f"model.name={ROOT / 'configs/model/tiny_clip.json'}", f"model.pretrained={path}"],
        "timm": ["model.image.kind=timm", "model.image.name=test_resnet", f"model.image.pretrained={path}"],
    }
    return compose_config(["experiment=emoji", *keys[tower], "model.text.kind=open_clip", "model.text.name=null"])


@pytest.mark.parametrize("tower", ["open_clip", "timm"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".npy", ".npz", ".safetensors"])
def test_pretrained_weights_that_are_pickles(tmp_path: Path, canary: Path, suffix: str, tower: str) -> None:
    path = tmp_path / f"weights{suffix}"
    config = pretrained_by(path, tower)
    for write in (lambda: path.write_bytes(pickle.dumps(Canary(canary))), lambda: torch.save(Canary(canary), path)):
        write()
        with raises(ConfigError, path):
            build_model(config)


def test_weights_beside_other_objects_are_refused_in_one_line(tmp_path: Path) -> None:
    """As old checkpoints with their command line; torch's own message has ten lines with escape codes."""
    torch.save({"state_dict": {}, "args": argparse.Namespace(lr=1)}, path := tmp_path / "weights.pt")
    with raises(ConfigError, path, "argparse.Namespace", "state_dict"):
        build_model(pretrained_by(path, "open_clip"))


def _load(name: str, pretrained: bool) -> Any:
    load_companion(f"model.text.name={name}", name, "AutoTokenizer")
    return load_model(f"model.text.name={name}", name, pretrained)


def test_pickled_weights_in_a_transformers_folder(tmp_path: Path, canary: Path) -> None:
    write_bert(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save({"x": Canary(canary)}, tmp_path / "bert" / "pytorch_model.bin")
    with raises(ConfigError, "model.text.name"):
        _load(str(tmp_path / "bert"), pretrained=True)


ABSURD = {
    "nested tokenizer": ("tokenizer.json", "[" * 200_000, "bert"),
    "nested settings": ("config.json", '{"a":' * 100_000, "config.json"),
    "no object": ("config.json", "7", "config.json"),
    "vocabulary": ("config.json", {"vocab_size": 2**40}, "vocab_size"),
    "width": ("config.json", {"hidden_size": 2**22}, "bert"),
    "layers": ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "labels": ("config.json", {"num_labels": 10**9}, "num_labels"),
    "quantised": ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    "adapters": ("adapter_config.json", {"base_model_name_or_path": "someone/else"}, "bert"),
}


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("case", ABSURD)
def test_absurd_settings_of_a_transformers_folder_are_one_line(tmp_path: Path, case: str, pretrained: bool) -> None:
    file, content, named = ABSURD[case]
    write_bert(tmp_path / "bert")
    settings = json.loads((tmp_path / "bert" / "config.json").read_text()) if file == "config.json" else {}
    written = content if isinstance(content, str) else json.dumps({**settings, **content})
    (tmp_path / "bert" / file).write_text(written)
    with raises(ConfigError, named) as caught:
        _load(str(tmp_path / "bert"), pretrained)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pretrained", [True, False])
def test_settings_choose_no_kernel(tmp_path: Path, pretrained: bool) -> None:
    """transformers would look for one in the hub."""
    write_bert(tmp_path / "bert")
    settings = json.loads((tmp_path / "bert" / "config.json").read_text())
    names = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**settings, **dict.fromkeys(names, "evil/kernel")}))
    assert _load(str(tmp_path / "bert"), pretrained).model.config._attn_implementation == "sdpa"
    text = {"hf_model_name": str(tmp_path / "bert"), "hf_tokenizer_name": str(tmp_path / "bert")}
    (tmp_path / "pair.json").write_text(json.dumps({"embed_dim": 8, "vision_cfg": {}, "text_cfg": text}))
    with raises(ConfigError, "evil/kernel"):
        build_model(TrainConfig(model=ModelConfig(name=str(tmp_path / "pair.json"))))


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "7", '{"embed_dim": 8, "vision_cfg": {"layers": 1e9}, "text_cfg": {}}', "{"]
)
def test_absurd_open_clip_configs_are_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "pair.json").write_text(content)
    with raises(ConfigError, "pair.json") as caught:
        build_model(TrainConfig(model=ModelConfig(name=str(tmp_path / "pair.json"))))
    assert "\n" not in str(caught.value)


def test_a_revision_is_one_state_of_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's cache has it."""
    import huggingface_hub.constants
    import transformers.utils.hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers.utils.hub, "HF_HUB_CACHE", str(tmp_path), raising=False)
    folder = tmp_path / "models--someone--model"
    for commit in ("a" * 40, "b" * 40):
        write_bert(folder / "snapshots" / commit)
    settings = folder / "snapshots" / ("b" * 40) / "config.json"
    settings.write_text(settings.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    models = {n: _load(f"someone/model{n}", pretrained=False).model for n in ("", "@" + "b" * 40)}
    layers = {n: model.config.num_hidden_layers for n, model in models.items()}
    assert layers == {"": 1, "@" + "b" * 40: 2}
    assert resolve_model_name(f"hf-hub:someone/model@{'b' * 40}") == f"local-dir:{settings.parent}"
    for read in (lambda name: _load(name, pretrained=False), lambda name: resolve_model_name(f"hf-hub:{name}")):
        with raises(ConfigError, f"someone/model@{'c' * 40}"):
            read(f"someone/model@{'c' * 40}")


def test_a_package_is_looked_for_not_imported() -> None:
    """antigravity opens a browser when it is imported."""
    with raises(ConfigError, "antigravity.x"):
        location_of("pkg:antigravity.x/y")


@pytest.mark.parametrize("read", [Checkpoint.read, Checkpoint.weights, Checkpoint.step.fget])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_checkpoint_whose_manifest_fits(
    tmp_path: Path, canary: Path, name: str, read: Callable[[Checkpoint], object]
) -> None:
    layer = nn.Linear(2, 2)
    state = capture({"layer": layer}, torch.optim.AdamW(layer.parameters()), 1, {})
    folder = write_checkpoint(tmp_path, state, keep=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = {Checkpoint.weights: ("model.safetensors",), Checkpoint.step.fget: ("state.json",)}
    looked_at = name == "manifest.json" or name in parts.get(read, (name,))
    other = {"step": [], "optimizer_scalars": 3, "format": checkpoint.FORMAT, "files": {"state.json": 7}}
    for content in (pickle.dumps(Canary(canary)), b"[" * 100_000, b"7", json.dumps(other).encode()):
        (folder / name).write_bytes(content)
        if name != "manifest.json":
            manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            (folder / "manifest.json").write_text(json.dumps(manifest))
        if looked_at:
            with raises(DataError, folder):
                read(Checkpoint(folder))
        else:
            read(Checkpoint(folder))


# Words of the configuration ------------------------------------------------------------------------------------------

CALL = "{_target_:shutil.copyfile,src:/etc/hostname,dst:canary}"


@pytest.mark.parametrize(
    "words",
    [
        [f"hydra.callbacks={{x:{CALL}}}"],
        ["--cfg", "job", f"+hydra.callbacks.x={CALL}"],
        ["-m", f"+hydra.callbacks.x={CALL}"],
        ["-m", "hydra.launcher._target_=shutil.copyfile"],
        ["-m", "hydra/launcher=evil"],
        ["-m", "-p", f"+hydra.callbacks.x={CALL}", f"+hydra.callbacks.x={CALL}"],
        ["-m", "hydra.sweeper.params={steps:1}"],
        ["-i", "--experimental-rerun=canary"],
        ["--info", "--experimental-rerun=canary"],
        ["-m", "-i"],
        ["hydra.job_logging.version=1"],
        ["hydra/job_logging=default"],
        ["hydra.searchpath=[file:///tmp]"],
        ["hydra.run.dir=elsewhere"],
        ["hydra={}"],
        ["~hydra.sweep"],
        ["--config-dir=/tmp"],
        ["--config-dir"],
        ["-cd"],
        [f"+model={CALL}"],
        [f"+objective={CALL}"],
        ["objective._target_=os.system"],
    ],
    ids=" ".join,
)
def test_words_that_would_run_something(words: list[str]) -> None:
    first = next(word for word in words if word not in ("-m", "--cfg", "job"))
    with raises(ConfigError, first.split("=")[0].lstrip("+~")):
        check_arguments(["experiment=emoji", *words])


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "${oc.decode:x}", "${now:%Y}", "a${ oc.env:HOME}", '"${oc.env:X,y}"']
)
def test_only_keys_are_looked_up(value: str) -> None:
    with raises(ConfigError, "tracking.project"):
        compose_config(["experiment=emoji", f"tracking.project={value}"])
    assert compose_config(["experiment=emoji", "run.dir=x", "tracking.project=a${run.dir}"]).tracking.project == "ax"


# What is never shown -------------------------------------------------------------------------------------------------


def test_secrets_are_blacked_out() -> None:
    config = {
        "a": {"API_KEY": "x", "image_key": "png", "tokens": 3, "list": [{"password": "y", "lr": 1}]},
        "secret": None,
        "lr": 0.1,
    }
    told = {"image_key": "png", "tokens": 3, "list": [{"password": "[redacted]", "lr": 1}]}
    expected = {"a": {"API_KEY": "[redacted]", **told}}
    assert without_secrets(config, by_name=True) == {**expected, "secret": None, "lr": 0.1}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/a.tar?sig=x", "https://[redacted]@host/a.tar?[redacted]"),
        ("https://me:p@ss@host/a.tar", "https://[redacted]@host/a.tar"),
        ("https://h/a?X=host;date&S=a,b@2::s3://b/?.tar", "https://h/a?[redacted]@2::s3://b/?.tar"),
        ("see 'https://h/a?k=v', or", "see 'https://h/a?[redacted]', or"),
        ("https://h/a?k=v: sample 'x?y'", "https://h/a?[redacted]: sample 'x?y'"),
        ("s3://key:secret@bucket/a.tar", "s3://[redacted]@bucket/a.tar"),
        ("a@b?c https://h/dir@2", "a@b?c https://h/dir@2"),
    ],
)
def test_credentials_of_urls_are_blacked_out(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
    assert without_secrets([text], by_name=True) == [shown]


def test_secrets_of_the_environment_are_blacked_out_wherever_they_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password canary-of-netrc")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", "canary-of-the-environment")
    monkeypatch.setenv("SECRET_KEY", "canary-of-a-secret-key")
    monkeypatch.setenv("HF_TOKEN", "short")
    basic = b64encode(b"api:canary-of-netrc").decode()
    known_secrets.cache_clear()
    said = f"401: canary-of-netrc, canary-of-the-environment canary-of-a-secret-key, Basic {basic}, a short word"
    assert without_credentials(said) == "401: [redacted], [redacted] [redacted], Basic [redacted], a short word"
    known_secrets.cache_clear()


def test_a_terminal_is_not_driven_by_names_in_data() -> None:
    assert (
        printable("sample '\x1b]0;owned\x07\x9b2J': bad\n\tnext") == "sample '\\x1b]0;owned\\x07\\x9b2J': bad\n\tnext"
    )
    assert printable("half a pair: \ud800") == r"half a pair: \ud800"


def test_credentials_that_were_not_kept_are_asked_for_again() -> None:
    with raises(ConfigError, "[redacted]"):
        parse_sources(without_credentials("https://me:pass@host/a.tar?sig=x"))
