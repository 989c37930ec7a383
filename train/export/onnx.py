"""format=onnx: a graph per tower, for onnxruntime or anything else that reads ONNX; any model of either task.

Tokens or pixels go in, embeddings that are ready to be compared come out. Beside the graphs lie tokenizer.json (of the
tokenizers library) and config.json: what is done to texts and pictures before they go in.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from data.errors import ConfigError
from data.transforms import ImageSpec
from train.export.encoder import TextSide, both_sides, inputs_in_words
from train.export.library import PROBES, Call, ExportSource, Library, probe_pictures
from train.export.to_tokenizers import to_tokenizers
from train.losses.options.common import Similarity
from train.towers.adapters import merged
from train.towers.build import ImageTextModel, TextPairModel
from train.towers.pooled import Pooled
from train.towers.text import TextTokenizer
from train.towers.tower import Tower

try:
    import onnxruntime  # noqa: F401  (reload.py runs it)
    import onnxscript  # noqa: F401  (torch.onnx.export does)
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
except ImportError as error:
    raise ConfigError(
        f"format=onnx: {error.name} is not installed, without which no graph is written and checked:  "
        "pip install -e '.[onnx]' -c requirements.lock"
    ) from error

OPSET = 20  # of the standard operators: old enough for the runtimes of 2024
ONE_FILE = 1 << 30  # bytes of weights that a graph holds itself; above they lie in a file beside it
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PIXELS, TOKENS = "pixels", "input_ids"


@dataclass(frozen=True)
class TowerGraph:
    """One tower and its graph. example: two rows of its inputs; free: the names of the axes whose length is open.

    texts: of which texts become tokens, None for pictures.
    """

    name: str
    file: str
    tower: Tower
    example: Tensor
    free: Mapping[int, Any]
    texts: TextSide | None = None


class Graph(nn.Module):
    """A tower without what only training needs: no memo, no adapters, no groups of rows by their length."""

    def __init__(self, tower: Tower, unit: bool) -> None:
        super().__init__()
        trunk = tower.trunk
        if isinstance(trunk, Pooled):
            trunk = Pooled(merged(trunk.encoder), trunk.pooling, trunk.pad)
        if hasattr(trunk, "set_grad_checkpointing"):
            cast(Any, trunk).set_grad_checkpointing(False)
        self.prepare, self.trunk, self.projection, self.unit = tower.prepare, trunk, tower.projection, unit

    def forward(self, inputs: Tensor) -> Tensor:
        run = self.trunk.encode_group if isinstance(self.trunk, Pooled) else self.trunk
        embeddings = self.projection(run(self.prepare(inputs)))
        return F.normalize(embeddings, dim=-1) if self.unit else embeddings


def write(folder: Path, source: ExportSource) -> None:
    tokenizer = to_tokenizers(source.model)
    tokenizer.save(str(folder / TOKENIZER))
    _refuse_other_tokens(tokenizer, source)
    for part in {part.file: part for part in _parts(source)}.values():
        _write_graph(folder / part.file, part, _is_unit(source))
    (folder / CONFIG).write_text(json.dumps(_settings(source), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_graph(file: Path, part: TowerGraph, unit: bool) -> None:
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # of constants that it does not fold
    with torch.no_grad():
        program = torch.onnx.export(
            Graph(part.tower, unit).eval(),
            (part.example,),
            dynamo=True,
            dynamic_shapes=({axis: dimension for axis, dimension in part.free.items()},),
            input_names=[TOKENS if part.texts else PIXELS],
            output_names=["embeddings"],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # folders of this machine, of every operator
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    program.save(file, external_data=size > ONE_FILE)


def calls(source: ExportSource) -> Iterator[Call]:
    """Several numbers of rows, lengths and paddings, texts that are cut, and none."""
    for part in _parts(source):
        if part.texts is None:
            for pictures in (probe_pictures(part.example.shape[-1]), part.example[:1]):
                with torch.no_grad():
                    ours = part.tower.eval()(pictures)
                yield Call(_as_scored(ours, source), pictures=pictures, hints={"graph": part.file})
            continue
        for texts in (PROBES, [part.texts.too_long, "", *PROBES], ["a"]):
            given = [part.texts.prefix + text for text in texts]
            pairs = texts if part.texts.paired else None
            ours = _as_scored(part.texts.embed(given, pairs), source)
            yield Call(ours, given, pairs, hints={"graph": part.file, "length": part.texts.length})


def _parts(source: ExportSource) -> list[TowerGraph]:
    model, batch = source.model, torch.export.Dim("batch")
    if isinstance(model, TextPairModel):
        sides = dict(zip(("question", "passage"), both_sides(model, source.config), strict=True))
        shared = sides["question"].tower is sides["passage"].tower
        free = {0: batch, 1: torch.export.Dim("length", max=cast(TextTokenizer, model.tokenize).limit)}
        return [
            TowerGraph(name, f"{'encoder' if shared else name}.onnx", side.tower, _short(side), free, side)
            for name, side in sides.items()
        ]
    assert isinstance(model, ImageTextModel)
    x_tower, y_tower = cast(Tower, model.towers.x_tower), cast(Tower, model.towers.y_tower)
    context = model.tokenize(["a"]).shape[1]
    side = TextSide(y_tower, lambda texts, length, pairs=None: model.tokenize(texts), "", context)
    length = {1: torch.export.Dim("length", max=context)} if isinstance(y_tower.trunk, Pooled) else {}
    example = _short(side) if length else model.tokenize(PROBES[:2])
    return [
        TowerGraph("image", "image.onnx", x_tower, probe_pictures(model.image.size)[:2], {0: batch}),
        TowerGraph("text", "text.onnx", y_tower, example, {0: batch, **length}, side),
    ]


def _short(side: TextSide) -> Tensor:
    """Two rows of fewer tokens than there may be."""
    return side.tokenize(PROBES[:2], side.length)[:, :8]


def _is_unit(source: ExportSource) -> bool:
    return source.config.objective.similarity is Similarity.cosine


def _as_scored(embeddings: Tensor, source: ExportSource) -> Tensor:
    return F.normalize(embeddings, dim=-1) if _is_unit(source) else embeddings


def _refuse_other_tokens(tokenizer: Tokenizer, source: ExportSource) -> None:
    for side in (part.texts for part in _parts(source) if part.texts):
        texts = [*PROBES, side.too_long]
        tokenizer.enable_truncation(side.length)
        theirs = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        ours = side.tokenize(texts, side.length)[:, : theirs.shape[1]]
        if not torch.equal(ours, theirs):
            raise ConfigError(
                "format=onnx: this model's tokenizer does more than a tokenizer.json can say. Take another format"
            )


def _settings(source: ExportSource) -> dict[str, Any]:
    """config.json: everything between a text or a picture and a score."""
    scale = source.logit_scale
    parts: dict[str, Any] = {}
    for part in _parts(source):
        if side := part.texts:
            form = {"prefix": side.prefix, "length": side.length, "pair": ["title", "text"] if side.paired else None}
            parts[part.name] = {"graph": part.file, "input": TOKENS, **form}
        else:
            image = cast(ImageTextModel, source.model).image
            form = {"type": "uint8, RGB", "size": image.size, "resize": image.resize, "by": image.interpolation}
            parts[part.name] = {"graph": part.file, "input": PIXELS, **form}
    return {
        "opset": OPSET,
        "output": "embeddings",
        "similarity": source.config.objective.similarity.value,
        "unit_length": _is_unit(source),
        "temperature": None if scale is None else math.exp(-scale),
        **parts,
    }


def snippet(folder: Path, source: ExportSource) -> str:
    parts = {part.name: part for part in _parts(source)}
    texts = {name: part.texts for name, part in parts.items() if part.texts}
    embed = f"""\
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    folder = {json.dumps(str(folder))}

    def embed(graph, texts, length):
        tokenizer = Tokenizer.from_file(f"{{folder}}/{TOKENIZER}")
        tokenizer.enable_truncation(length)
        tokens = np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)], np.int64)
        return onnxruntime.InferenceSession(f"{{folder}}/{{graph}}").run(None, {{"{TOKENS}": tokens}})[0]
"""
    lines = [
        f'    {name}s = embed("{parts[name].file}", [{_example(name, side)}], {side.length})\n'
        for name, side in texts.items()
    ]
    image = _image_lines(source.model.image) if isinstance(source.model, ImageTextModel) else ""
    x, y = parts
    told = f"Opset {OPSET}. {CONFIG} says the same for programs."
    words = f"{inputs_in_words(source.config)} Prefixes are for you to add. " if "question" in parts else ""
    return f"{embed}\n{''.join(lines)}{image}    scores = {x}s @ {y}s.T\n\n{words}{told}"


def _example(name: str, side: TextSide) -> str:
    text = json.dumps(f"{side.prefix}a {name}", ensure_ascii=False)
    return f'({json.dumps(f"{side.prefix}its title", ensure_ascii=False)}, "a {name}")' if side.paired else text


def _image_lines(image: ImageSpec) -> str:
    filters = f"Image.Resampling.{image.interpolation.upper()}"
    square = f"picture, ({image.size}, {image.size}), {filters}"
    resized = {
        "shortest": f"ImageOps.fit({square})",
        "longest": f'ImageOps.pad({square}, "black")',
        "squash": f"picture.resize(({image.size}, {image.size}), {filters})",
    }[image.resize]
    return f"""
    from PIL import Image, ImageOps

    picture = Image.open("picture.png").convert("RGB")
    pixels = np.array({resized}).transpose(2, 0, 1)[None]
    images = onnxruntime.InferenceSession(f"{{folder}}/image.onnx").run(None, {{"{PIXELS}": pixels}})[0]
"""


FRONT = {"library_name": "onnx", "pipeline_tag": "feature-extraction", "tags": ["onnx", "dual-encoder"]}
LIBRARY = Library("onnxruntime", FRONT, "Dual encoder in ONNX graphs", write, calls, snippet)
