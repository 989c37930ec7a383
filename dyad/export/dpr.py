"""format=dpr: write question_encoder/ and ctx_encoder/, which transformers' AutoModel loads.

A BERT with cls pooling has the architecture of DPR's own classes (Karpukhin et al. 2020). Its weights are also written
under DPR's names, so that DPRQuestionEncoder and DPRContextEncoder load the same folders.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel

from dyad.data.base.errors import ConfigError
from dyad.export.encoder import TextSide, encoder_sides
from dyad.export.library import PROBES, Call, ExportSource, Library, render
from dyad.train.config import Pooling

# folder of the x and of the y tower → DPR's class for it
FOLDERS = {"question_encoder": "DPRQuestionEncoder", "ctx_encoder": "DPRContextEncoder"}


def write(folder: Path, source: ExportSource) -> None:
    """Write the question encoder and the passage encoder, one folder each, into `folder`.

    The folders are the keys of FOLDERS. Raises ConfigError for a model that is not of texts alone, for an encoder whose
    class AutoModel does not create, and for a tower with a projection, which AutoModel does not have.
    """
    sides, model = encoder_sides(source, "dpr"), source.config.model
    for name, side in zip(FOLDERS, sides, strict=True):
        if not isinstance(side.tower.projection, nn.Identity):
            key, off = ("text.dense=true", "false") if model.text.dense else (f"embed_dim={model.embed_dim}", "null")
            other = "sentence_transformers" if sides[0].tower is sides[1].tower else "onnx"
            raise ConfigError(
                f"format=dpr: transformers' AutoModel has no place for the projection of model.{key}. Take "
                f"format={other}, or train with model.{key.partition('=')[0]}={off}"
            )
        side.save(folder / name, side.length)
        if _is_dpr(side):
            # Every weight once more, under DPR's name. DPR's BERT has no pooler.
            file = folder / name / "model.safetensors"
            weights = load_file(file)
            prefix = f"{name}.bert_model."
            again = {prefix + key: tensor.clone() for key, tensor in weights.items() if not key.startswith("pooler.")}
            save_file({**weights, **again}, file, metadata={"format": "pt"})


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield Calls for the check of the export, texts as questions, then texts as passages, with our embeddings.

    The check embeds the texts of a Call by AutoModel; for a BERT with cls pooling, a second Call has them embedded by
    DPR's own class. The last text of each Call is longer than the encoder takes, so that truncation is checked as well.
    Raises ConfigError as `encoder_sides`, and for an encoder that pools by itself.
    """
    for folder, side in zip(FOLDERS, encoder_sides(source, "dpr"), strict=True):
        for loads in ("AutoModel", FOLDERS[folder]) if _is_dpr(side) else ("AutoModel",):
            yield side.call([*PROBES, side.too_long], folder=folder, pooling=side.pooling.value, loads=loads)


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load both encoders by AutoModel, and by DPR's own classes where they fit.

    The code in it has the path `folder`.
    """
    question, _ = encoder_sides(source, "dpr")
    return render("dpr.md.j2", folder, source, pooling=question.pooling.value, is_dpr=_is_dpr(question))


def _is_dpr(side: TextSide) -> bool:
    """Return whether the encoder of this side is a BERT with cls pooling, the architecture of DPR's own classes."""
    return isinstance(side.pooled.encoder, BertModel) and side.pooled.pooling is Pooling.cls


FRONT = {"library_name": "transformers", "pipeline_tag": "feature-extraction", "tags": ["dpr"]}
LIBRARY = Library("transformers", FRONT, "Encoders of questions and passages", write, calls, snippet)
