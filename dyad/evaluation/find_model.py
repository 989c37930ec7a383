"""Find a model by its name: the model of a run, of an export folder, or of another library.

`find_model` returns the model's configuration; only of an exported model of sequences it also loads the weights. FORMS
lists the forms of a name, also for --help. An export folder contains the file SETTINGS (dyad.json, see
train/towers/libraries/calibration.py), with the settings that the other files of the export format have no place for.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dyad.data.base.errors import ConfigError
from dyad.evaluation.load_run import LoadedModel, load_found, load_on_all, read_config, run_folder_of
from dyad.train.cli.compose import to_train_config
from dyad.train.config import Task, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import all_keys
from dyad.train.towers.libraries.calibration import SETTINGS, Calibration, exported
from dyad.train.towers.libraries.published import is_two_tower
from dyad.train.towers.libraries.sentence_transformers import open_schema, sentence_folder

if TYPE_CHECKING:
    from dyad.train.distributed.world import World

KEPT = """objective.similarity model.text.pooling data.question.prefix data.question.length data.passage.prefix
data.passage.length data.passage.title""".split()
PUBLISHED = re.compile(r"[\w.-]+/[\w.-]+")  # ORG/NAME of the Hugging Face hub

FORMS = """\
model= is one of, each with the weights, prompts and lengths that it brings:
  open_clip:NAME@WEIGHTS        an open_clip model or config .json; a file, or the tag of published weights
  open_clip:FOLDER              … that brings its weights; also open_clip:hf-hub:ORG/NAME
  st:NAME                       a SentenceTransformer, a folder or published
  hf:NAME                       a CLIP or SigLIP of transformers, or an encoder: mean of the states of 32 and 128
                                tokens, cosine
  dpr:FOLDER                    two encoders, question_encoder/ and ctx_encoder/, such as an export of format=dpr
  lm:NAME                       a causal language model of transformers, a folder or published, which scores answers
  FOLDER                        a run, a checkpoint, or a folder of one of these kinds, such as an export
  RUN@best                      the best checkpoint of a run, by its checkpoint.best; run= and checkpoint= take it, too
"""


@dataclass(frozen=True)
class FoundModel:
    """A model that has been found by its name.

    load: returns the model with its weights, on the CPU; may download them; raises ConfigError or DataError. An export
    of a model of sequences is loaded already, and each call returns that object; any other model is built in the call.
    trained: the path of the run or checkpoint that holds the model, as the user wrote it; None for a model of another
    library or an export.
    """

    config: TrainConfig
    load: Callable[[], LoadedModel]
    trained: str | None = None

    def load_on_all(self, world: "World") -> LoadedModel:
        """Load the model on every rank. Every rank must call it; a UserError on one rank is raised on all.

        If weights may have to be downloaded, the first rank of each machine loads before the others.
        """
        from dyad.train.distributed.agreement import node_first, raise_on_all
        from dyad.train.towers.libraries.open_clip import may_download

        if self.trained:
            return load_on_all(self.trained, world)
        return (node_first if may_download(self.config) else raise_on_all)(world, self.load)


def find_model(name: str) -> FoundModel:
    """Find the model `name`, written in one of the forms that the help text FORMS lists, and read its configuration.

    Of a published model, small files such as config.json may be downloaded; weights are not. The `source` of the model
    in results will be `name`, and that of a run its checkpoint folder. Raises ConfigError for a name or folder that is
    no model, and for settings that are damaged or not supported.
    """
    (kind, colon, target), folder = name.partition(":"), Path(name).expanduser()
    if colon and kind in KINDS:
        found = KINDS[kind][0](target)
    elif colon and not folder.exists():
        raise ConfigError(f"{name}: no such kind of model. Write FOLDER or {', '.join(f'{k}:…' for k in KINDS)}")
    elif find := next((find for find, file in KINDS.values() if file and (folder / file).exists()), None):
        found = find(name)
    else:
        _refuse_what_is_no_run(name, folder)
        return find_trained(name)
    return replace(found, load=lambda: replace(found.load(), source=name))


def _refuse_what_is_no_run(name: str, folder: Path) -> None:
    """Raise ConfigError for an export that only another library loads, and for what may be a published model."""
    if (folder / SETTINGS).exists():
        loads = "is an export for onnxruntime, which loads it as its README.md shows"
        raise ConfigError(f"{name} {loads}. Give its run, or an export of another format")
    if PUBLISHED.fullmatch(name) and not folder.parent.exists():
        forms = f"st:{name} (a SentenceTransformer), hf:{name} or open_clip:hf-hub:{name}"
        raise ConfigError(f"'{name}' is no folder. Give a run folder, or for a published model {forms}")


def find_trained(path: str) -> FoundModel:
    """Find the model of a run folder (its newest checkpoint), of a checkpoint folder, or of RUN@best.

    The checkpoint is chosen when the model is loaded. Raises ConfigError for a path that is none of these, and for a
    config.yaml that is no configuration of this version.
    """
    return FoundModel(read_config(run_folder_of(path)), lambda: load_found(path), path)


def settings_of(config: TrainConfig, calibration: Calibration | None) -> dict[str, Any]:
    """Return the JSON object for the file dyad.json (SETTINGS) of an export; no file is written.

    Its entries: "keys", configuration key → value for the keys KEPT (similarity, pooling, prefixes, lengths, title),
    and of a language model, whose folder looks like an encoder's, its task; "logit_scale", a number or None;
    "logit_bias", if there is one. calibration: scale and bias of the logits; None if they are unknown.
    """
    keys = all_keys(config)
    kept = [*KEPT, *["task"] * (config.task is Task.language_model)]
    bias = {} if calibration is None or calibration.logit_bias is None else {"logit_bias": calibration.logit_bias}
    return {"keys": {key: keys[key] for key in kept}, "logit_scale": calibration and calibration.logit_scale, **bias}


def _found_by_keys(task: Task, keys: Mapping[str, Any], folder: str) -> FoundModel:
    """Return the FoundModel of a configuration with this task, objective=clip, the values `keys`, else defaults.

    keys: dotted configuration key → value. folder: where the file dyad.json of an export is looked for: a folder, or
    the name of a published model, of which the file is downloaded; "": nowhere. If there is one, its values of the keys
    KEPT replace those of `keys`, and its scale and bias become the model's calibration. Raises ConfigError for invalid
    values and a damaged file.
    """
    objective = open_schema(OBJECTIVES["clip"], "objective.")
    schema: Any = OmegaConf.merge(open_schema(TrainConfig), {"task": task.value, "objective": objective})
    saved, calibration = exported(folder, folder) if folder else ({}, None)
    try:
        for key, value in {**keys, **{key: value for key, value in saved.items() if key in KEPT}}.items():
            OmegaConf.update(schema, key, value)
        config = to_train_config(schema)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder}/{SETTINGS} is not of an export of this version: {reason}") from error

    def load() -> LoadedModel:
        """Build the model with its weights; the field `source` is left empty, and `find_model` sets it."""
        from dyad.train.towers.build import build_model

        model = build_model(config)
        return LoadedModel("", config, model, calibration or model.calibration)

    return FoundModel(config, load)


def _open_clip(target: str) -> FoundModel:
    """Find the model open_clip:`target`, where `target` is NAME@WEIGHTS, a folder, or hf-hub:ORG/NAME.

    Raises ConfigError without WEIGHTS, unless the target is a folder or on the hub, which bring their own.
    """
    name, at, weights = target.partition("@")
    folder = target.removeprefix("local-dir:")
    if target.startswith("hf-hub:") or Path(folder).expanduser().is_dir():
        return _found_by_keys(Task.image_text, {"model.name": target}, folder)
    if not at:
        raise ConfigError(f"open_clip:{name}: say which weights, open_clip:{name}@FILE or @TAG of published ones")
    return _found_by_keys(Task.image_text, {"model.name": name, "model.pretrained": weights}, "")


def _text(name: str, folder: str | None = None, **keys: Any) -> FoundModel:
    """Return the FoundModel of the transformers model `name` as encoder of questions and passages.

    If the model has the file modules.json of sentence-transformers, pooling, prompts and lengths have its values by
    default. folder: the export folder that contains the model, by default `name`. keys: further configuration keys →
    values.
    """
    own = {"model.name": None, "model.embed_dim": None, "model.text.kind": "transformers", "model.text.name": name}
    return _found_by_keys(Task.question_passage, own | keys, folder or name)


def _transformers(target: str) -> FoundModel:
    """Find the model hf:`target` of transformers: a CLIP or SigLIP as image and text towers, any other as text encoder.

    An export of format=causal_lm is a language model. May download config.json and dyad.json of a published model.
    """
    if exported(target)[0].get("task") == Task.language_model:
        return _language_model(target)
    if not is_two_tower(target):
        return _text(target)
    both = dict.fromkeys(("model.image.kind", "model.text.kind"), "transformers")
    return _found_by_keys(Task.image_text, {"model.name": target, "model.embed_dim": None, **both}, target)


def _sentence_transformer(target: str) -> FoundModel:
    """Find the SentenceTransformer st:`target`; may download modules.json, and raises ConfigError if there is none."""
    if sentence_folder(target, fetch=True) is None:
        raise ConfigError(f"st:{target} is no SentenceTransformer, it has no modules.json. Plain encoders: hf:{target}")
    return _text(target)


def _dpr(target: str) -> FoundModel:
    """Find the model dpr:`target`, whose towers are question_encoder/ and ctx_encoder/ in the folder `target`.

    Both encoders are pooled by [CLS] and compared by inner product, unless a file dyad.json says otherwise.
    """
    of_dpr = {"model.text.pooling": "cls", "objective.similarity": "dot"}
    question, passage = (_text(f"{target}/{part}", target, **of_dpr) for part in ("question_encoder", "ctx_encoder"))

    def load() -> LoadedModel:
        """Load both encoders, and make them the towers of one model; if they are equal, one tower, as in its run."""
        from dyad.eval.encode.embeddings import identity_of
        from dyad.train.towers.tower import TwoTower

        x, y = question.load(), passage.load()
        x_tower, y_tower = x.model.towers.x_tower, y.model.towers.y_tower
        equal = identity_of(x_tower) == identity_of(y_tower)
        return replace(x, model=replace(x.model, towers=TwoTower(x_tower, x_tower if equal else y_tower)))

    return FoundModel(question.config, load)


def _sequence(target: str) -> FoundModel:
    """Load the model of sequences in the export folder `target`; its FoundModel returns this model, loaded once."""
    from dyad.sequence_folder import read_sequence_folder

    found = read_sequence_folder(target)
    return FoundModel(found.config, lambda: found)


def _language_model(target: str) -> FoundModel:
    """Find the model lm:`target`, a causal language model of transformers, a folder or a published name.

    Prompts have at most 192 tokens and answers 64, unless dyad.json of an export says otherwise.
    """
    keys = {"model.name": None, "model.embed_dim": None, "model.text.kind": "transformers", "model.text.name": target}
    keys |= {"objective.similarity": "dot", "data.question.length": 192, "data.passage.length": 64}
    return _found_by_keys(Task.language_model, keys, target if (Path(target).expanduser() / SETTINGS).exists() else "")


# Kind of models → the function that finds a model by the part of its name after KIND:, and a file that only folders
# of this kind contain
KINDS: dict[str, tuple[Callable[[str], FoundModel], str]] = {
    "open_clip": (_open_clip, "open_clip_config.json"),
    "st": (_sentence_transformer, "modules.json"),
    "dpr": (_dpr, "question_encoder/config.json"),
    "sequence": (_sequence, "sequence.json"),
    "hf": (_transformers, "tokenizer_config.json"),
    "lm": (_language_model, ""),  # its folders look like those of hf: of other programs, KIND: must be written
}
