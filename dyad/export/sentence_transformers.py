"""format=sentence_transformers: write one folder for SentenceTransformer, with prompts "query" and "document"."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as parts
from sentence_transformers.sentence_transformer.modules.pooling import PoolingMode
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.export.encoder import encoder_sides
from dyad.export.library import PROBES, Call, ExportSource, Library, render
from dyad.train.config import Pooling
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.libraries.sentence_transformers import SentenceFolder, folder_of_config

POOLINGS: dict[Pooling, PoolingMode] = {Pooling.cls: "cls", Pooling.mean: "mean", Pooling.last: "lasttoken"}


def write(folder: Path, source: ExportSource) -> None:
    """Write the trained encoder into `folder` by sentence-transformers' own code.

    The prefixes of questions and passages become the prompts "query" and "document", beside the prompts of the
    SentenceTransformer from which training began. Raises ConfigError for a model that is not of texts alone or has two
    encoders, and for an encoder that pools by itself or whose class AutoModel does not create.
    """
    question, passage = encoder_sides(source, "sentence_transformers")
    if question.tower is not passage.tower:
        other = "dpr" if isinstance(question.tower.projection, nn.Identity) else "onnx"
        raise ConfigError(f"format=sentence_transformers has one encoder, model.shared=false two. Take format={other}")
    similarity = source.config.objective.similarity
    with TemporaryDirectory() as encoder:
        question.save(Path(encoder), max(question.length, passage.length))
        transformer = parts.Transformer(encoder, query_length=question.length, document_length=passage.length)
    width, projection = transformer.get_embedding_dimension(), question.tower.projection
    modules: list[nn.Module] = [transformer, parts.Pooling(width, POOLINGS[question.pooling])]
    layers = [module for module in projection.modules() if isinstance(module, nn.Linear | nn.Tanh)]
    for layer, following in pairwise([*layers, nn.Identity()]):
        if isinstance(layer, nn.Linear):
            activation = nn.Identity() if isinstance(following, nn.Linear) else following
            sizes = (layer.in_features, layer.out_features, layer.bias is not None)
            dense = parts.Dense(*sizes, activation_function=activation)
            dense.linear.load_state_dict(layer.state_dict())
            modules.append(dense)
    if similarity is Similarity.cosine:
        modules.append(parts.Normalize())
    start = SentenceFolder("")
    with suppress(ConfigError):  # a folder that cannot be read has no prompts
        start = folder_of_config(source.config) or start
    model = SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts={**start.prompts, "query": question.prefix, "document": passage.prefix},
        default_prompt_name=start.default_prompt_name,
        similarity_fn_name=cast(Any, similarity.value),
    )
    model.save_pretrained(str(folder), create_model_card=False)


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield four Calls for the check of the export, with our embeddings of their texts.

    Two have texts as questions, then two have texts as passages: first the sample texts PROBES, then one text that is
    longer than the encoder takes. Raises ConfigError as `encoder_sides`.
    """
    unit = source.config.objective.similarity is Similarity.cosine
    for side, prompt in zip(encoder_sides(source, "sentence_transformers"), ("query", "document"), strict=True):
        for texts in (PROBES, [side.too_long]):
            yield side.call(texts, unit=unit, adds_prefix=True, prompt=prompt)


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and compare a question with a passage."""
    _, passage = encoder_sides(source, "sentence_transformers")
    return render("sentence_transformers.md.j2", folder, source, paired=passage.paired)


TAG = "sentence-transformers"
FRONT = {"library_name": TAG, "pipeline_tag": "sentence-similarity", "tags": [TAG, "feature-extraction"]}
LIBRARY = Library("sentence_transformers", FRONT, "Text embedding model", write, calls, snippet)
