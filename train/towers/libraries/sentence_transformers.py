"""Read the settings of a SentenceTransformer folder: pooling, lengths, prompts, similarity and Dense module.

When the text tower comes from such a folder, its settings are the defaults of our configuration keys; keys that the
user sets win. The JSON files are untrusted: names of modules are compared with a list, and nothing is imported. This
module does not import torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from omegaconf import MISSING, DictConfig, OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.train.arguments import as_argument
from dyad.train.config import LISTED, Pooling, Task, TextTower, TrainConfig
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.libraries.published import (
    cache_cannot_tell,
    check_settings,
    file_of,
    json_object,
    location_of,
    read_json,
)

# keys that keep the default of the configuration if the folder cannot be used
LAYERS = ["model.text.lower_case", "model.text.dense"]
OF_PAIRS = "data.question.length data.passage.length data.question.prefix data.passage.prefix objective.similarity"
OF_TASK = {task: [*LAYERS, "model.text.pooling", *OF_PAIRS.split()] for task in Task}
OF_TASK[Task.image_text] = [*LAYERS, "model.text.pooling", "model.text.context_length"]
OPEN = {key for keys in OF_TASK.values() for key in keys}  # keys that may take their default from a folder
CHAIN = re.compile("Transformer Pooling( Dense)*( Normalize)?")
ACTIVATIONS = ("Identity", "Tanh")  # of Dense modules
POOLINGS = {"cls": Pooling.cls, "mean": Pooling.mean, "lasttoken": Pooling.last}
POOLINGS |= {"cls_token": Pooling.cls, "mean_tokens": Pooling.mean}  # before sentence-transformers 6
MODULES = "modules.json"
# model_type of encoders whose position ids begin at padding index + 1
BEHIND_PADDING = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
BEHIND_PADDING += ("data2vec-text", "longformer", "luke", "xmod")
FLAG = "pooling_mode_"  # before sentence-transformers 6, the prefix of a boolean key for each mode


@dataclass(frozen=True)
class Dense:
    """One Dense module: a linear layer, and an activation of ACTIVATIONS.

    settings: its config.json, unchecked. weights: its weight file; None: it has none, as in the copy that a run keeps.
    """

    settings: dict[str, Any]
    activation: str
    weights: Path | None


@dataclass(frozen=True)
class SentenceFolder:
    """The settings of one SentenceTransformer folder, in terms of our configuration.

    name: the model's folder or published name. defaults: dotted configuration key → the folder's value. refused: dotted
    configuration key → text that describes the folder's setting that this key cannot express. prompts: prompt name →
    text. default_prompt_name: the name of the prompt that applies by default; None: none. dense: its Dense modules,
    unless one is no linear layer. no_dense: why `dense` is empty, as text for a message.
    """

    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dense: tuple[Dense, ...] = ()
    no_dense: str = "it has no Dense module"


def sentence_folder(name: str, fetch: bool = False) -> SentenceFolder | None:
    """Read the SentenceTransformer settings of the model `name`; return None if it has no modules.json.

    name: a folder, pkg:PACKAGE/FOLDER or a published model. fetch: download files of a published model that the local
    cache of the Hugging Face hub lacks; without it, a file that the cache lacks counts as not there. Prompts that are
    no texts are left out. Raises ConfigError for a chain of modules or a setting that we do not support, such as a
    truncate_dim, and for damaged files. Two things raise nothing here: a setting that no configuration key can express,
    which the field `refused` of the result names, and a Dense module that we cannot load, for which `no_dense` says
    why.
    """
    if (path := file_of(name, MODULES, fetch)) is None:
        return None
    settings = partial(json_object, name, fetch=fetch)
    instead = f"To take its encoder alone, name a folder without {path.name}"
    folders = _module_folders(path, instead)
    encoder, model = settings("sentence_bert_config.json"), settings("config_sentence_transformers.json")
    if encoder.get("transformer_task", "feature-extraction") != "feature-extraction" or encoder.get("query_expansion"):
        raise ConfigError(f"{path.parent}/sentence_bert_config.json: it embeds no single texts. {instead}")
    tokenizer = settings("tokenizer_config.json")
    defaults: dict[str, Any] = _lengths(name, encoder, tokenizer.get("model_max_length"), fetch)
    defaults |= {"model.text.lower_case": True} if encoder.get("do_lower_case") is True else {}
    refused: dict[str, str] = {}
    dense, no_dense = [], SentenceFolder.no_dense
    for folder in (folder for kind, folder in folders if kind == "Dense"):
        defaults["model.text.dense"] = True
        layer, file = settings(f"{folder}/config.json"), file_of(name, f"{folder}/model.safetensors", fetch)
        activation = str(layer.get("activation_function")).rpartition(".")[2]
        if activation not in ACTIVATIONS or layer.get("use_residual"):
            no_dense = f"its Dense module is no plain linear layer ({activation})"
        else:
            dense.append(Dense(layer, activation, file))
    pooling = settings(f"{dict(folders)['Pooling']}/config.json")
    flags = [key.removeprefix(FLAG) for key, is_set in pooling.items() if key.startswith(FLAG) and is_set]
    modes = pooling.get("pooling_mode") or flags or "mean"
    mode = " and ".join(map(str, modes)) if isinstance(modes, list) else str(modes)
    if not pooling.get("include_prompt", True):
        mode += " without the prompt's tokens"
    if mode in POOLINGS:
        defaults["model.text.pooling"] = POOLINGS[mode]
    else:
        refused["model.text.pooling"] = f"its pooling is {mode}"
    prompts = model.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ConfigError(f"{path.parent}/config_sentence_transformers.json: prompts must be texts by name")
    prompts = {str(name): text for name, text in prompts.items() if isinstance(text, str)}
    # The first of these prompts becomes our prefix.
    for side, names in (("question", ("query", "question")), ("passage", ("document", "passage", "corpus"))):
        found = [prompts[name] for name in names if name in prompts]
        defaults |= {f"data.{side}.prefix": found[0]} if found else {}
    if model.get("truncate_dim"):
        raise ConfigError(f"{path.parent}/config_sentence_transformers.json: truncate_dim is not read. {instead}")
    similarity = "cosine" if "Normalize" in dict(folders) else model.get("similarity_fn_name")
    if similarity in ("cosine", "dot"):
        defaults["objective.similarity"] = Similarity(similarity)
    elif similarity:
        refused["objective.similarity"] = f"its similarity is {similarity}"
    default_prompt = next((name for name in prompts if name == model.get("default_prompt_name")), None)
    known = tuple(dense) if no_dense == SentenceFolder.no_dense else ()
    return SentenceFolder(name, defaults, refused, prompts, default_prompt, known, no_dense)


def folder_of_config(config: TrainConfig | DictConfig, fetch: bool = False) -> SentenceFolder | None:
    """Read the SentenceTransformer settings of the model that `config` names for its text tower.

    Returns None if the text tower is no transformers encoder or has no name, or its model has no modules.json. `fetch`
    and errors are as in `sentence_folder`.
    """
    text = config.model.text
    name = text.name or config.model.name
    return sentence_folder(name, fetch) if name and text.kind == TextTower.transformers else None


def fill_defaults(config: DictConfig) -> None:
    """Set, in place, each key of OPEN that has no value yet, because the user left it unset.

    OPEN holds the keys that may take their default from a SentenceTransformer folder. The value comes from the folder
    of the text tower if the folder has one and the task takes it from there (OF_TASK), else from the default of the
    configuration's dataclass; so does model.text.dense if model.embed_dim is set. With an objective of scored pairs
    both prefixes are the folder's default prompt, or "" if it has none, as its library's losses and its evaluation of
    such pairs use no prompt of questions or passages. Files of a published model are downloaded. Raises ConfigError for
    a setting of the folder that our key cannot express, and for a damaged or unsupported folder whose settings are
    needed.
    """
    open_keys = sorted(OmegaConf.missing_keys(config) & OPEN)
    try:
        found = folder_of_config(config, fetch=True) if open_keys else None
    except ConfigError as error:
        if missing := [key for key in open_keys if key in OF_TASK[config.task] and key not in LAYERS]:
            raise ConfigError(f"{error}. Or choose {', '.join(missing)} yourself") from error
        found = None
    objective: Any = OmegaConf.get_type(config.objective)
    for key in open_keys:
        parent, _, name = key.rpartition(".")
        value = getattr(OmegaConf.get_type(OmegaConf.select(config, parent)), name)
        replaced = key == "model.text.dense" and config.model.embed_dim is not None
        if found and key in OF_TASK[config.task] and not replaced:
            if key in found.refused:
                choices: type[Enum] = type(value)
                raise ConfigError(
                    f"model.text.name={found.name} is a SentenceTransformer, and {found.refused[key]}, which {key} "
                    f"does not have: its own embeddings cannot be computed. A run that trains it may set {key} to one "
                    f"of {', '.join(choice.name for choice in choices)}"
                )
            value = found.defaults.get(key, value)
            if key.endswith(".prefix") and objective.inputs == "scored pairs":
                value = found.prompts.get(found.default_prompt_name or "", "")  # the texts of a pair are equals
        OmegaConf.update(config, key, value)


def open_schema(config: Any, prefix: str = "") -> DictConfig:
    """Return the OmegaConf schema of the dataclass `config`, with the keys of OPEN set to MISSING.

    OPEN lists the keys that may take their default from a SentenceTransformer folder; with MISSING, `fill_defaults` can
    tell a key that nobody set from one set to its default. prefix: the dotted path of `config` in the whole
    configuration, with its final dot.
    """
    node = OmegaConf.structured(config)
    for key in OPEN:
        if key.startswith(prefix) and OmegaConf.select(node, key.removeprefix(prefix).rpartition(".")[0]) is not None:
            OmegaConf.update(node, key.removeprefix(prefix), MISSING)
    return node


def describe_choices(config: TrainConfig) -> Iterator[str]:
    """Yield lines for the log on what the text tower takes from its model, such as a SentenceTransformer folder.

    The first says that a pretrained encoder of questions and passages gets a projection with random weights, if it
    does. The others name the folder's settings that the run uses and those for which it has other values, and warn of a
    temperature that does not suit the run's cosine similarity, if the folder names a similarity. For a folder or
    published model whose settings cannot be read, they say why only its transformers encoder is used. Any other model
    yields nothing. Nothing is downloaded.
    """
    text, name = config.model.text, config.model.text.name or config.model.name
    key = f"model{'.text' if text.name else ''}.name={name}"
    is_pretrained = config.init_from is None and not text.from_scratch
    if is_pretrained and config.task is Task.question_passage and (width := config.model.embed_dim) is not None:
        yield (
            f"model.embed_dim={width}: {key} gets a projection to this width, with random weights. The encoder alone, "
            "as with model=encoder: model.embed_dim=null"
        )
    try:
        found = folder_of_config(config)
    except ConfigError as error:
        yield f"{key}: only its encoder is taken. {error}"
        return
    if found is None:
        if name and text.kind == TextTower.transformers and cache_cannot_tell(name, MODULES):
            yield (
                f"{key} is taken as a plain encoder: the hub's cache does not know whether it has a "
                f"{MODULES}, as SentenceTransformers have. Fetch it once: hf download {name} {MODULES}"
            )
        own_config = json_object(name, "config.json", False) if name and text.kind == TextTower.transformers else {}
        kinds = own_config.get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else ""
        if text.pooling is not Pooling.last and str(kind).endswith("ForCausalLM") and config.task in LISTED:
            yield (
                f"model.text.pooling={text.pooling.value}: {key} is a {kind}, whose tokens see only those before them. "
                "model=decoder takes the last one, with LoRA: type it before model.text.name"
            )
        return
    own = {key: as_argument(value) for key, value in found.defaults.items() if key in OF_TASK[config.task]}
    here = {key: as_argument(attrgetter(key)(config)) for key in own}
    same = ", ".join(f"{key}={own[key]}" for key in sorted(own) if here[key] == own[key]) or "nothing"
    other = ", ".join(f"{key}={here[key]} ({own[key]} there)" for key in own if here[key] != own[key])
    yield f"{found.name} is a SentenceTransformer. As its folder says: {same}. Chosen otherwise: {other or 'nothing'}"
    temperature = getattr(config.objective, "temperature", 0.0)
    if here.get("objective.similarity") == Similarity.cosine and temperature >= 1:
        yield (
            f"objective.temperature={temperature:g} suits dot products: cosine similarities between -1 and 1 hardly "
            "train with it. Set objective.temperature=0.05, or objective.similarity=dot"
        )


def _module_folders(path: Path, instead: str) -> list[tuple[str, str]]:
    """Read modules.json and return its modules, as (class name, folder): folders are relative to the model's root.

    The folder "" is the root itself. path: the path of modules.json. instead: advice for the user, put at the end of
    most error messages. Raises ConfigError for modules that we do not support, and for folders outside the root.
    """
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path} is no list of modules. {instead}")
    types = [str(module.get("type")) for module in modules]
    chain = " ".join(kind.rpartition(".")[2] for kind in types)
    if not CHAIN.fullmatch(chain) or not all(kind.startswith("sentence_transformers.") for kind in types):
        raise ConfigError(f"{path}: its modules are {', '.join(types)}; known is {CHAIN.pattern}. {instead}")
    folders = list(zip(chain.split(), (str(module.get("path", "")) for module in modules), strict=True))
    if encoder := folders[0][1]:
        raise ConfigError(f"{path}: the encoder is in the folder {encoder}: name it, and type its keys")
    if any(".." in Path(folder).parts or Path(folder).is_absolute() for _, folder in folders):
        raise ConfigError(f"{path}: the path of a module leads out of the folder. {instead}")
    return folders


def _lengths(name: str, encoder: dict[str, Any], model_max_length: Any, fetch: bool) -> dict[str, int]:
    """Return the default of each configuration key that limits the tokens of a text, from the model's files.

    A default is the limit in `encoder`, else `model_max_length`, else the number of positions, and at most this number.
    Positions are the position embeddings that a token can have: in RoBERTa and its like (BEHIND_PADDING), those after
    the padding index. Keys for which the files have no limit are left out. name: the model. encoder: content of
    sentence_bert_config.json; a query_length or document_length of 0 or null counts as absent. model_max_length: from
    the tokenizer's settings, ignored if it is no valid length. fetch: download config.json if the hub's cache lacks it.
    Raises ConfigError for another limit in `encoder` that is not an integer from 2 to 2²⁰ - 1, and as `check_settings`.
    """
    settings = check_settings(name, file_of(name, "config.json", fetch))
    total, padding = settings.get("max_position_embeddings"), settings.get("pad_token_id", 1)
    before = padding + 1 if settings.get("model_type") in BEHIND_PADDING and isinstance(padding, int) else 0
    positions = total - before if isinstance(total, int) and _is_length(total - before) else None
    longest = encoder.get("max_seq_length")
    if longest is None:
        longest = model_max_length if _is_length(model_max_length) else positions
    lengths = {
        "model.text.context_length": longest,
        "data.question.length": encoder.get("query_length") or longest,
        "data.passage.length": encoder.get("document_length") or longest,
    }
    for key, value in lengths.items():
        if value is not None and not _is_length(value):
            raise ConfigError(f"{location_of(name)}/sentence_bert_config.json: {value!r} is no length for {key}")
    return {key: min(value, positions or value) for key, value in lengths.items() if value is not None}


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 2 <= value < 1 << 20
