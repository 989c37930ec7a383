"""format=dpr: question_encoder/ and ctx_encoder/, each loaded by transformers' AutoModel.

A BERT that is pooled by its first token is what DPR's own classes are: its weights are there under their names too, so
that DPRQuestionEncoder and DPRContextEncoder load the same folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertModel, DPRContextEncoder, DPRQuestionEncoder

from data.errors import ConfigError
from train.config import Pooling
from train.export_encoder import (
    LONG,
    POOLING_LINES,
    Side,
    embedded_alone,
    inputs_in_words,
    sides,
    without_reports,
)
from train.exported import PROBES, Library, Source, largest_difference

FOLDERS = {"question_encoder": DPRQuestionEncoder, "ctx_encoder": DPRContextEncoder}  # x, y; and DPR's classes


def write(folder: Path, source: Source) -> None:
    for name, side in zip(FOLDERS, sides(source, "dpr"), strict=True):
        if not isinstance(side.tower.projection, nn.Identity):
            raise ConfigError(
                "format=dpr: transformers' AutoModel has no place for the projection of model.embed_dim="
                f"{source.config.model.embed_dim}. Take format=sentence_transformers, or train with embed_dim=null"
            )
        side.save(folder / name, side.length)
        if _is_dpr(side):
            _add_names(folder / name / "model.safetensors", f"{name}.bert_model.")


def difference(folder: Path, source: Source) -> float:
    """Of questions and passages, also of ones that are cut, by every class that loads them."""
    with without_reports():
        return largest_difference("transformers", _pairs(folder, source))


def _pairs(folder: Path, source: Source) -> Iterator[tuple[Tensor, Tensor]]:
    for name, side in zip(FOLDERS, sides(source, "dpr"), strict=True):
        place = folder / name
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        encoder = AutoModel.from_pretrained(place, local_files_only=True).eval()
        texts = [side.prefix + text for text in (*PROBES, LONG)]
        pairs = [*PROBES, LONG] if side.paired else None
        ours = side.embed(texts, pairs)
        yield ours, embedded_alone(encoder, tokenizer, side, texts, pairs)
        if _is_dpr(side):
            whole = FOLDERS[name].from_pretrained(place, local_files_only=True).eval()
            inputs = tokenizer(texts, pairs, padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                yield ours, whole(**inputs).pooler_output


def snippet(folder: Path, source: Source) -> str:
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


def _is_dpr(side: Side) -> bool:
    return isinstance(side.pooled.encoder, BertModel) and side.pooled.pooling is Pooling.cls


def _add_names(file: Path, prefix: str) -> None:
    """Every weight once more, under the name that starts with `prefix`; DPR's BERT has no pooler."""
    weights = load_file(file)
    again = {prefix + name: weight.clone() for name, weight in weights.items() if not name.startswith("pooler.")}
    save_file({**weights, **again}, file, metadata={"format": "pt"})


FRONT = "library_name: transformers\npipeline_tag: feature-extraction\ntags: [dpr]"
LIBRARY = Library("transformers", FRONT, "Encoders of questions and passages", write, difference, snippet)
