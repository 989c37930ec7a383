"""format=onnx: write one graph per tower, for onnxruntime or another reader of ONNX. Takes any model of images or
texts.

The input of a graph is token ids or pixels, its output embeddings that are ready to be compared. Beside the graphs are
tokenizer.json (for the tokenizers library) and config.json, which says how texts and images are prepared.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import onnxruntime  # noqa: F401  (reload.py needs it)
import onnxscript  # noqa: F401  (torch.onnx.export needs it)
import torch
import torch.nn.functional as F
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import write_json
from dyad.data.batch import PADDING
from dyad.export.encoder import TextSide, text_sides
from dyad.export.library import PROBES, Call, ExportSource, Library, probe_images, render
from dyad.export.to_tokenizers import padding_id, takes_any_length, to_tokenizers
from dyad.train.losses.options.choices import Similarity
from dyad.train.towers.adapters import merged
from dyad.train.towers.models import ImageModel, ImageTextModel, TextPairModel
from dyad.train.towers.text.rows import Grouped
from dyad.train.towers.text.text_tower import OpenClipTokenizer, TextTokenizer
from dyad.train.towers.tower import Tower

OPSET = 20  # version of the ONNX operators; runtimes of 2024 support it
ONE_FILE = 1 << 30  # bytes of weights up to which the graph file holds them; larger ones get a file beside it
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PIXELS, TOKENS = "pixels", "input_ids"
ODD = ["salt &amp; pepper, &lt;b&gt;", "ﬁre １２ ｶﾞ \ufeff\x07", "ΛΟΓΟΣ „it‛s‟ a_b"]  # texts that tokenizers clean


@dataclass(frozen=True)
class TowerGraph:
    """One tower of the exported model, and the ONNX file of its graph.

    name: what the tower embeds: question, passage, image or text. file: the name of the ONNX file in the export.
    example: two input rows, to trace the tower. dynamic: input axis → torch.export.Dim of variable length. texts: how
    texts are prepared for a text tower; None for images.
    """

    name: str
    file: str
    tower: Tower
    example: Tensor
    dynamic: Mapping[int, Any]
    texts: TextSide | None = None


class InferenceTower(nn.Module):
    """A tower without the parts that only training needs: feature cache, adapters, grouping of rows by length.

    It shares its weights with `tower`, unless that has adapters, which are merged into a copy. It switches off gradient
    checkpointing of the trunk that it uses. unit: whether embeddings are scaled to L2 norm 1. fills: the token id that
    stands for padding in the input; None: no id does.
    """

    def __init__(self, tower: Tower, unit: bool, fills: int | None) -> None:
        super().__init__()
        trunk = merged(tower.trunk)
        if hasattr(trunk, "set_grad_checkpointing"):
            cast(Any, trunk).set_grad_checkpointing(False)
        self.prepare, self.trunk, self.projection, self.unit = tower.prepare, trunk, tower.projection, unit
        self.fills = fills

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed n rows of `inputs`, uint8 pixels (n, 3, S, S) or token ids int64 (n, L), as (n, D).

        S: the side of an image in pixels. The embeddings have L2 norm 1 if `unit`.
        """
        run = self.trunk.encode_group if isinstance(self.trunk, Grouped) else self.trunk
        inputs = with_padding(inputs, self.fills)
        embeddings = self.projection(run(self.prepare(inputs)))
        return F.normalize(embeddings, dim=-1) if self.unit else embeddings


def with_padding(tokens: Tensor, fills: int | None) -> Tensor:
    """Return `tokens`, int64 (n, L), with PADDING (−1) in place of the id `fills`; unchanged if `fills` is None."""
    return tokens if fills is None else torch.where(tokens == fills, PADDING, tokens)


def write(folder: Path, source: ExportSource) -> None:
    """Write the graphs, tokenizer.json (for texts) and config.json into `folder`.

    Towers that are one encoder get one graph. Weights above ONE_FILE bytes get a file beside their graph. Raises
    ConfigError if the model's tokenizer cannot be written as tokenizer.json with the same token ids. Sets the level of
    the logger onnxscript to ERROR.
    """
    graphs = _graphs(source)
    for side in (graph.texts for graph in graphs if graph.texts):
        tokenizer = to_tokenizers(source.model)
        tokenizer.save(str(folder / TOKENIZER))
        texts = [*PROBES, *ODD, side.too_long]
        tokenizer.enable_truncation(side.length)
        theirs = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        ours = side.tokenize(texts, side.length)[:, : theirs.shape[1]]
        if not torch.equal(ours, with_padding(theirs, padding_id(source.model))):
            raise ConfigError("format=onnx: its tokenizer does more than a tokenizer.json can say. Take another format")
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns of constants that it does not fold
    for graph in {graph.file: graph for graph in graphs}.values():  # a shared encoder once
        with torch.no_grad():
            program = torch.onnx.export(
                InferenceTower(graph.tower, _is_unit(source), padding_id(source.model) if graph.texts else None).eval(),
                (graph.example,),
                dynamo=True,
                dynamic_shapes=(dict(graph.dynamic),),
                input_names=[TOKENS if graph.texts else PIXELS],
                output_names=["embeddings"],
                opset_version=OPSET,
                verbose=False,
            )
        assert program is not None
        ClearMetadataAndDocStringPass()(program.model)  # the metadata of operators has paths of this machine
        weights = [value.const_value for value in program.model.graph.initializers.values() if value.const_value]
        program.save(folder / graph.file, external_data=sum(weight.nbytes for weight in weights) > ONE_FILE)
    write_json(folder / CONFIG, _settings(source, graphs))


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield Calls for the check of the ONNX graphs: batches of images or texts, with our embeddings of them.

    The batches have several sizes. The texts have several lengths; one is empty, one is longer than its tower takes.
    """
    unit = _is_unit(source)
    for graph in _graphs(source):
        if side := graph.texts:
            for texts in (PROBES, [side.too_long, "", *PROBES], ["a"]):
                yield side.call(texts, unit=unit, graph=graph.file, length=side.length)
            continue
        for images in (probe_images(graph.example.shape[-1]), graph.example[:1]):
            with torch.no_grad():
                ours = graph.tower.eval()(images)
            yield Call(F.normalize(ours, dim=-1) if unit else ours, images=images, hints={"graph": graph.file})


def _graphs(source: ExportSource) -> list[TowerGraph]:
    """Return a TowerGraph (a tower and its ONNX file) for each tower of the model, that of side x first.

    The result has one entry for a model of images alone, and two for other models. If questions and passages share one
    encoder, both entries name the same file.
    """
    model, batch = source.model, torch.export.Dim("batch")
    if isinstance(model, TextPairModel):
        sides = dict(zip(("question", "passage"), text_sides(model, source.config), strict=True))
        shared = sides["question"].tower is sides["passage"].tower
        dynamic = {0: batch, 1: torch.export.Dim("length", max=cast(TextTokenizer, model.tokenize).limit)}
        return [
            TowerGraph(name, f"{'encoder' if shared else name}.onnx", side.tower, _short(side), dynamic, side)
            for name, side in sides.items()
        ]
    assert isinstance(model, ImageModel)
    x_tower, y_tower = cast(Tower, model.towers.x_tower), cast(Tower, model.towers.y_tower)
    images = TowerGraph("image", "image.onnx", x_tower, probe_images(model.image.size)[:2], {0: batch})
    if not isinstance(model, ImageTextModel):
        return [images]
    context = model.tokenize(["a"]).shape[1]
    side = TextSide(y_tower, lambda texts, length, pairs=None: model.tokenize(texts), "", context)
    length = {1: torch.export.Dim("length", max=context)} if takes_any_length(y_tower) else {}
    example = _short(side) if length else model.tokenize(PROBES[:2])
    return [images, TowerGraph("text", "text.onnx", y_tower, example, {0: batch, **length}, side)]


def _short(side: TextSide) -> Tensor:
    """Return two sample texts as token ids (2, 8), each cut to 8 tokens: the example input for tracing a graph."""
    return side.tokenize(PROBES[:2], side.length)[:, :8]


def _is_unit(source: ExportSource) -> bool:
    """Return whether the graphs scale embeddings to L2 norm 1, because the model compares by cosine."""
    return source.config.objective.similarity is Similarity.cosine


def _settings(source: ExportSource, graphs: list[TowerGraph]) -> dict[str, Any]:
    """Return the content of an ONNX export's config.json, which says how to get from texts or images to scores."""
    known = source.calibration
    inputs: dict[str, Any] = {}
    for graph in graphs:
        if side := graph.texts:
            form = {"prefix": side.prefix, "length": side.length, "pair": ["title", "text"] if side.paired else None}
        else:
            image = cast(ImageModel, source.model).image
            form = {"type": "uint8, RGB", "size": image.size, "resize": image.resize, "by": image.interpolation}
            form |= {"resized": image.resized} if image.resized else {}
        inputs[graph.name] = {"graph": graph.file, "input": TOKENS if graph.texts else PIXELS, **form}
    return {
        "opset": OPSET,
        "output": "embeddings",
        "similarity": source.config.objective.similarity.value,
        "unit_length": _is_unit(source),
        "temperature": known and known.temperature,
        "bias": known and known.logit_bias,
        **inputs,
    }


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to embed texts and images with the exported ONNX graphs."""
    image = source.model.image if isinstance(source.model, ImageModel) else None
    cleans = isinstance(getattr(source.model, "tokenize", None), OpenClipTokenizer)
    return render("onnx.md.j2", folder, source, graphs=_graphs(source), image=image, cleans=cleans, opset=OPSET)


FRONT = {"library_name": "onnx", "pipeline_tag": "feature-extraction", "tags": ["onnx", "dual-encoder"]}
LIBRARY = Library("onnxruntime", FRONT, "Dual encoder in ONNX graphs", write, calls, snippet)
