"""format=dpr: question_encoder/ and ctx_encoder/, each loaded by transformers' AutoModel.

A BERT that is pooled by its first token is what DPR's own classes are: its weights are there under their names too, so
that DPRQuestionEncoder and DPRContextEncoder load the same folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel

from data.errors import ConfigError
from train.config import Pooling
from train.export.encoder import POOLING_LINES, TextSide, inputs_in_words, sides
from train.export.library import PROBES, Call, ExportSource, Library

FOLDERS = {"question_encoder": "DPRQuestionEncoder", "ctx_encoder": "DPRContextEncoder"}  # x, y; and DPR's classes


def write(folder: Path, source: ExportSource) -> None:
    for name, side in zip(FOLDERS, sides(source, "dpr"), strict=True):
        if not isinstance(side.tower.projection, nn.Identity):
            raise ConfigError(
                "format=dpr: transformers' AutoModel has no place for the projection of model.embed_dim="
                f"{source.config.model.embed_dim}. Take format=sentence_transformers, or train with embed_dim=null"
            )
        side.save(folder / name, side.length)
        if _is_dpr(side):
            _add_names(folder / name / "model.safetensors", f"{name}.bert_model.")


def calls(source: ExportSource) -> Iterator[Call]:
    """Questions and passages, also ones that are cut, by every class that loads them."""
    for folder, side in zip(FOLDERS, sides(source, "dpr"), strict=True):
        plain = [*PROBES, side.too_long]
        texts, pairs = [side.prefix + text for text in plain], plain if side.paired else None
        own_class = FOLDERS[folder] if _is_dpr(side) else None
        hints = {"folder": folder, "pooling": side.pooled.pooling.value, "own_class": own_class}
        yield Call(side.embed(texts, pairs), texts, pairs, hints=hints)


def snippet(folder: Path, source: ExportSource) -> str:
    question, _ = sides(source, "dpr")
    own = """
The folders also load as transformers.DPRQuestionEncoder and transformers.DPRContextEncoder, whose pooler_output is the
embedding. Each class reports the other's names of the weights as unexpected.
"""
    return f"""\
    import torch
    from transformers import AutoModel, AutoTokenizer

    def embed(folder, texts):
        tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        states, mask = encoder(**inputs).last_hidden_state, inputs.attention_mask[:, :, None]
        return {POOLING_LINES[question.pooled.pooling]}

    questions = embed("{folder / "question_encoder"}", ["a question"])
    passages = embed("{folder / "ctx_encoder"}", ["a passage"])
{own if _is_dpr(question) else ""}
{inputs_in_words(source.config)} Prefixes are for you to add."""


def _is_dpr(side: TextSide) -> bool:
    return isinstance(side.pooled.encoder, BertModel) and side.pooled.pooling is Pooling.cls


def _add_names(file: Path, prefix: str) -> None:
    """Every weight once more, under the name that starts with `prefix`; DPR's BERT has no pooler."""
    weights = load_file(file)
    again = {prefix + name: weight.clone() for name, weight in weights.items() if not name.startswith("pooler.")}
    save_file({**weights, **again}, file, metadata={"format": "pt"})


FRONT = {"library_name": "transformers", "pipeline_tag": "feature-extraction", "tags": ["dpr"]}
LIBRARY = Library("transformers", FRONT, "Encoders of questions and passages", write, calls, snippet)
