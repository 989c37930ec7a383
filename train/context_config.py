"""The keys model.context.*: the network of task=sequence that computes contexts. Does not import torch.

The context of a step of a sequence is one vector, computed from the items up to this step, its own included.
"""

from dataclasses import dataclass
from enum import StrEnum

from dyad.data.base.errors import ConfigError
from dyad.data.config import described

ContextKind = StrEnum("ContextKind", ["gru", "transformer"])


@dataclass
class ContextConfig:
    """Options of the network of task=sequence that computes a context for each step of a sequence (not of training).

    Raises ConfigError if `width` is not a multiple of `heads` with kind=transformer.
    """

    kind: ContextKind = described(ContextKind.gru, "task=sequence, network of contexts: gru, or a causal transformer")
    layers: int = described(1, "number of layers", least=1, most=1 << 8)
    width: int | None = described(None, "width of the states; null: that of an item's embedding", least=1, most=1 << 16)
    heads: int = described(4, "transformer: heads of attention", least=1, most=1 << 10)
    dropout: float = described(0.1, "dropout of the inputs and between layers", least=0, below=1)
    embed_dim: int | None = described(
        None, "width of a context; null: that of an item's embedding, which all objectives but cpc need", least=1
    )

    def __post_init__(self) -> None:
        self.check_width(self.width or 0)  # 0: that of an item, which the tower knows

    def check_width(self, width: int) -> None:
        """Raise ConfigError if kind=transformer and `width`, that of the states, is not a multiple of `heads`."""
        if self.kind is ContextKind.transformer and self.heads and width % self.heads:  # check_limits refuses 0
            raise ConfigError(
                f"model.context.width={width}: a multiple of model.context.heads={self.heads} is needed; null is the "
                "width of an item's embedding"
            )
