"""format=causal_lm: write a language model as a folder that transformers' AutoModelForCausalLM loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from dyad.data.base.errors import ConfigError
from dyad.export.library import Call, ExportSource, Library, render
from dyad.train.towers.adapters import merged
from dyad.train.towers.models import LanguageModel

PAIRS = [("one and one is", " two"), ("", "Grüße"), ("a wheel", " of dharma")]  # (prompt, answer) of the check


def write(folder: Path, source: ExportSource) -> None:
    """Write weights (adapters merged in), configuration and tokenizer into `folder`.

    Raises ConfigError for a model of another task than language_model.
    """
    model = _checked(source)
    cast(Any, merged(cast(Any, model.towers.y_tower).trunk)).encoder.save_pretrained(folder)
    model.tokenize.tokenizer.save_pretrained(folder)


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield a Call for each of the PAIRS (prompt, answer), for the check of the export.

    Its `ours` is our score of the answer, (1, 1): the mean log-likelihood of its tokens. Its hints are the token ids of
    prompt and answer, and the number of tokens of the prompt. Raises ConfigError as `write`.
    """
    model, config = _checked(source), source.config.data
    for prompt, answer in PAIRS:
        rows = model.tokenize([prompt], [answer], config.question.length, config.passage.length)
        ids = rows[0, 1:][rows[0, 1:] >= 0].tolist()
        with torch.no_grad():
            ours = model.towers.y_tower.eval()(rows)
        yield Call(ours, hints={"ids": ids, "start": int(rows[0, 0])})


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and score an answer."""
    return render("causal_lm.md.j2", folder, source, begin=_checked(source).tokenize.begin)


def _checked(source: ExportSource) -> LanguageModel:
    """Return the model of `source`. Raises ConfigError for a model of another task than language_model."""
    if not isinstance(source.model, LanguageModel):
        raise ConfigError("format=causal_lm: only models of task=language_model can be exported. Leave format out")
    return source.model


FRONT = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal-lm"]}
LIBRARY = Library("causal_lm", FRONT, "language model", write, calls, snippet)
