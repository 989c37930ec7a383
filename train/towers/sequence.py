"""The tower of sequences, which embeds single items, and steps of sequences as contexts.

The context of a step is a vector computed from the items of its sequence up to this step, by a recurrent or causal
network: van den Oord et al. 2018 (CPC); Hidasi et al. 2016 (GRU4Rec); Kang & McAuley 2018 (SASRec). Both sides of a
pair use this one tower: side x is a context, side y a later item.

Letters in shapes: S steps of all sequences; b sequences; T steps of the longest; H width of the network; D width of an
item's embedding or of a context; E width of a context where it differs from D.
"""

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn

from dyad.data.batch import Lengths
from dyad.train.context_config import ContextConfig, ContextKind
from dyad.train.towers.text.rows import index_on
from dyad.train.towers.tower import Tower

LONGEST_WAVE = 10_000  # of positions, as Vaswani et al. 2017, section 3.5


class ContextNetwork(nn.Module):
    """Computes the context of each step of sequences, (S, D), from the embeddings of the items up to that step.

    config: the kind, layers and widths of the network. width: the width of an item's embedding. Raises ConfigError if
    the width of a transformer is not a multiple of its heads.
    """

    def __init__(self, config: ContextConfig, width: int) -> None:
        super().__init__()
        inside, outside = config.width or width, config.embed_dim or width
        config.check_width(inside)
        self.kind, self.inside = config.kind, inside
        self.enter = nn.Identity() if inside == width else nn.Linear(width, inside)
        self.dropout = nn.Dropout(config.dropout)
        between = config.dropout if config.layers > 1 else 0.0
        if config.kind is ContextKind.gru:
            self.network: nn.Module = nn.GRU(inside, inside, config.layers, batch_first=True, dropout=between)
        else:
            how = {"activation": "gelu", "batch_first": True, "norm_first": True}
            layer = nn.TransformerEncoderLayer(inside, config.heads, 4 * inside, config.dropout, **how)
            norm = nn.LayerNorm(inside)
            self.network = nn.TransformerEncoder(layer, config.layers, norm, enable_nested_tensor=False)
        self.leave = nn.Identity() if inside == outside else nn.Linear(inside, outside)

    def forward(self, items_SD: Tensor, places: Lengths) -> Tensor:
        """Return the contexts of S steps of sequences, (S, D), in float32 or float64.

        items_SD: the embeddings of the items of all sequences, one sequence after the other. places: the place of each
        step in its sequence, int64 (S,) in NumPy: 0, 1, 2, … for each sequence; S is at least 1.
        """
        device = items_SD.device
        row, place = (index_on(device, each) for each in (np.cumsum(places == 0) - 1, places))
        # float32: states of a recurrent network are sums over many steps, and its kernels have no autocast on CPUs
        with torch.autocast(device.type, enabled=False):
            wide_SD = items_SD.to(torch.promote_types(items_SD.dtype, torch.float32))
            entered = self.dropout(self.enter(wide_SD))
            shape = int((places == 0).sum()), int(places.max()) + 1, self.inside
            padded = entered.new_zeros(shape).index_put((row, place), entered)  # zeros behind the ends are not read
            return self.leave(self._states(padded)[row, place])

    @torch.no_grad()
    def followed_by(self, w_DE: Tensor) -> "ContextNetwork":
        """Return a copy of this network that gives w_DE c, (D,), where this network gives the context c, (E,).

        The matrix and the last layer become one linear layer. This network does not change.
        """
        made, leave = copy.deepcopy(self), self.leave
        made.leave = nn.Linear(self.inside, len(w_DE), device=w_DE.device)
        inside, bias = (leave.weight, leave.bias) if isinstance(leave, nn.Linear) else (torch.eye(len(w_DE.T)), None)
        made.leave.weight.copy_(w_DE @ inside.to(w_DE))
        made.leave.bias.copy_(w_DE.new_zeros(len(w_DE)) if bias is None else w_DE @ bias.to(w_DE))
        return made

    def _states(self, padded_bTH: Tensor) -> Tensor:
        """Run the network over padded sequences, (b, T, H) → (b, T, H); a state depends on no later place."""
        if self.kind is ContextKind.gru:
            return self.network(padded_bTH)[0]
        steps = padded_bTH.shape[1]
        ahead = torch.ones(steps, steps, dtype=torch.bool, device=padded_bTH.device).triu(1)
        return self.network(padded_bTH * math.sqrt(self.inside) + positions(padded_bTH), mask=ahead, is_causal=True)


def positions(like_bTH: Tensor) -> Tensor:
    """Return the sinusoidal position embeddings of T positions, (T, H) (Vaswani et al. 2017, section 3.5).

    like_bTH: a tensor that gives T, H, and the dtype and device of the result; its values are not read.
    """
    _, steps, width = like_bTH.shape
    place_T = torch.arange(steps, device=like_bTH.device, dtype=like_bTH.dtype)
    wave_h = LONGEST_WAVE ** (-torch.arange(0, width, 2, device=like_bTH.device, dtype=like_bTH.dtype) / width)
    angle = place_T[:, None] * wave_h
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[:, :width]


class SequenceTower(Tower):
    """Embeds single items (b, …) as (b, D) with the modules of the tower `items`; or steps of sequences as contexts.

    items: a Tower, whose modules and cache this one takes over. context: the network that computes contexts from the
    embeddings of items.
    """

    def __init__(self, items: Tower, context: ContextNetwork) -> None:
        super().__init__(items.trunk, items.projection, prepare=items.prepare)
        self._frozen_cache = items._frozen_cache
        self.context = context
        self._ahead: tuple[Tensor, ...] = ()

    def forward(self, inputs: Tensor, lengths: Lengths | None = None, places: Lengths | None = None) -> Tensor:
        """Embed S items as (S, D); with `places`, embed S steps of sequences as contexts, see ContextNetwork.

        inputs: items (S, …). lengths: the number of tokens of each item, for items that are texts; None: items are no
        texts, or tokens are to be counted here. places: the place of each item in its sequence, int64 (S,) in NumPy,
        from 0, for items of whole sequences, one after the other; None: embed single items.
        """
        embedded = super().forward(inputs, lengths)
        return embedded if places is None else self.context(embedded, places)

    def set_prediction_matrices(self, w_HDD: Tensor) -> None:
        """Store the matrices W_s of CPC: a context c predicts the item s = 1, 2, … steps ahead by W_s c.

        next_network and HistoryEncoder use the first; embeddings do not change. The tensor is kept, not copied, and is
        no parameter of this module. w_HDD: a (D, E) matrix for each s, in order of s; or one matrix for all s, as a
        tensor (1, D, E).
        """
        self._ahead = (w_HDD,)  # in a tuple, as it is a parameter of the objective, not of the tower

    @property
    def next_network(self) -> ContextNetwork:
        """The network whose outputs predict the next items: for CPC a new copy that gives W_1 c, else `context` itself.

        c is the context, W_1 the first matrix of `set_prediction_matrices`.
        """
        return self.context.followed_by(self._ahead[0][0]) if self._ahead else self.context

    def contexts(self, items_SD: Tensor, places: Lengths) -> Tensor:
        """Return the contexts of S steps of sequences, (S, D), from the embeddings of their items.

        places: the place of each step in its sequence, int64 (S,) in NumPy, from 0.
        """
        return self.context(items_SD, places)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the trunk, which embeds items, in place, with the arguments of torch.compile.

        The context network is not compiled: each length of a sequence would be a further shape to compile for.
        """
        self.trunk.compile(*args, **kwargs)


class FrameEncoder(nn.Sequential):
    """Embeds frames (b, F), vectors of F = `features` numbers, as (b, H), H = `width`.

    It has two linear layers, each followed by GELU, the last one too.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU())


class HistoryEncoder(nn.Module):
    """Embeds histories as (b, D), by the context of the last step of each, to be compared with items that may follow.

    A history is a row of item numbers in the order of time, at least one; an input is b of them, int64 (b, T), padded
    with −1 on the right. items_ND: embeddings of the N items, on the device of `tower`. ahead: whether a model trained
    by CPC gives W_1 c instead of the context c, with W_1 of SequenceTower.set_prediction_matrices; other models give c.
    """

    def __init__(self, tower: SequenceTower, items_ND: Tensor, ahead: bool = True) -> None:
        super().__init__()
        self.tower, self.items, self.ahead = tower, items_ND, ahead

    def forward(self, numbers_bT: Tensor) -> Tensor:
        numbers, device = numbers_bT.cpu().numpy(), self.items.device
        sizes = (numbers >= 0).sum(1)
        places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        contexts = self.tower.contexts(self.items[index_on(device, numbers[numbers >= 0])], places)
        last = contexts[index_on(device, np.cumsum(sizes) - 1)]
        return last @ self.tower._ahead[0][0].to(last).T if self.ahead and self.tower._ahead else last
