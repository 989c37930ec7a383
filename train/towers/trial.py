"""Find the width of a tower's embeddings and the parameters that they depend on, by one run of the tower.

The run is on the meta device if the tower can run there.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dyad.data.image_text.transforms import ImageSpec
from dyad.train.towers.libraries.published import explain_errors
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.rows import Grouped
from dyad.train.towers.tower import Tower


def probe_images(tower: Tower, spec: ImageSpec) -> int:
    """Return the result of `probe` for an image tower and one black image of the size of `spec`.

    Effects and errors are those of `probe`.
    """
    image = torch.zeros(1, 3, spec.size, spec.size, dtype=torch.uint8)
    return probe(tower, image, f"model.image: this tower cannot take images of {spec.size} x {spec.size}")


def probe(tower: Tower, inputs: Tensor, problem: str) -> int:
    """Return the width D of a tower's embeddings, and freeze parameters that the embeddings do not depend on.

    DDP (torch's DistributedDataParallel) would wait for gradients of such parameters. A copy of the tower on the meta
    device is run once. The tower itself is run if that fails, or if it could miss a token id or a position that is out
    of range. The tower is left in eval() mode. inputs: one or more inputs of the tower, on its device: uint8 pixels or
    token ids. Raises ConfigError, with a message that begins with `problem`, if the tower cannot take `inputs`.
    """
    tower.eval()
    try:
        width, used = _run_once(on_meta(tower), inputs.to("meta"))
        if inputs.dtype != torch.uint8 and _may_exceed_tables(tower, inputs):
            raise IndexError
    except Exception:  # the trunk reads values (.tolist(), `if`), or fails, and the run with values has the reason
        with explain_errors(problem):
            width, used = _run_once(tower, inputs)
    for parameter, is_used in zip(tower.parameters(), used, strict=True):
        parameter.requires_grad_(is_used)
    return width


def _may_exceed_tables(tower: Tower, tokens: Tensor) -> bool:
    """Whether an id or a position of `tokens`, int64 (b, L), may be outside its nn.Embedding.

    A run on the meta device does not notice this. Among the nn.Embedding of more than two rows (smaller ones are of
    token types), the largest is taken for that of ids, and the smallest for that of positions, which RoBERTa counts
    from padding_idx + 1. Without any, the answer is True.
    """
    tables = [m for m in tower.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 2]
    if not tables:
        return True
    smallest = min(tables, key=lambda table: table.num_embeddings)
    largest = max(table.num_embeddings for table in tables)
    first = 0 if smallest.padding_idx is None else smallest.padding_idx + 1
    pad = tower.trunk.pad if isinstance(tower.trunk, Pooled) else 0
    return max(int(tokens.max()), pad) >= largest or first + tokens.shape[1] > smallest.num_embeddings


def on_meta(tower: Tower) -> Tower:
    """Return a copy of a tower on the meta device, without its cache. Its tensors have no values and take no memory."""
    copies: dict[int, Any] = {id(b): b.detach().to("meta") for b in tower.buffers()}
    copies[id(tower._frozen_cache)] = None  # the cached outputs may be large
    copies |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in tower.parameters()}
    return copy.deepcopy(tower, copies)


def features_on_meta(tower: Tower, inputs: Tensor) -> Tensor:
    """Return the features (before the projection) of a tower on the meta device for `inputs` on the meta device.

    Only shapes and the autograd graph have a meaning. Texts are not grouped or cut by length, as tokens cannot be read
    on the meta device. In place of the pooled states of a Pooled trunk, the features are the last hidden state of the
    first token, unless its encoder pools by itself.
    """
    if isinstance(tower.trunk, Pooled):
        found = tower.trunk.encoder(input_ids=inputs)
        return found.pooler_output if tower.trunk.pooling is None else found.last_hidden_state[:, 0]
    return tower.trunk.encode_group(inputs) if isinstance(tower.trunk, Grouped) else tower.features(inputs)


def _run_once(tower: Tower, inputs: Tensor) -> tuple[int, list[bool]]:
    """Run a tower on `inputs`; return the width of its embeddings, and for each parameter whether it has a gradient.

    A parameter that does not train has none. Gradients are computed and dropped.
    """
    embedding = tower.projection(features_on_meta(tower, inputs) if inputs.is_meta else tower.features(inputs))
    trained = [p for p in tower.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(embedding.sum(), trained, allow_unused=True) if trained else ()
    used = {id(p) for p, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    return embedding.shape[1], [id(p) in used for p in tower.parameters()]
