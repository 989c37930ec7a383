"""What can be said about data. Torch-free: `python -m train --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from data.errors import ConfigError

LIMITS = {"rotate": 180, "aspect": 0.99, "shift": 1, "brightness": 1, "grey": 1, "flip": 1}


class Shuffle(Enum):
    window = "window"
    full = "full"


class ResizeMode(Enum):
    shortest = "shortest"
    longest = "longest"
    squash = "squash"


def described(default: Any, meaning: str) -> Any:
    """A field with its one-line meaning, which `--help` prints."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


@dataclass
class AugmentConfig:
    """Training-time picture noise, drawn from (seed, epoch, sample id) alone. Zero turns a part off."""

    crop_scale: list[float] = described([1.0, 1.0], "random resized crop: smallest and largest share of the area")
    rotate: float = described(0.0, "largest rotation in degrees, either way")
    zoom: list[float] = described([1.0, 1.0], "range of the random zoom factor")
    aspect: float = described(0.0, "largest relative change of the aspect ratio")
    shift: float = described(0.0, "largest shift as a share of the side")
    gain: list[float] = described([1.0, 1.0], "range of the random gain of each colour channel")
    brightness: float = described(0.0, "largest relative change of brightness")
    grey: float = described(0.0, "probability of a grey picture")
    flip: float = described(0.0, "probability of a horizontal flip")

    def __post_init__(self) -> None:
        for name in ("crop_scale", "zoom", "gain"):
            interval = getattr(self, name)
            if len(interval) != 2 or not 0 < interval[0] <= interval[1]:
                raise ConfigError(f"data.augment.{name}={interval} must be two numbers, 0 < smallest <= largest.")
        if self.crop_scale[1] > 1:
            raise ConfigError(f"data.augment.crop_scale={self.crop_scale} is a share of the area: at most 1.")
        for name, limit in LIMITS.items():
            if not 0 <= getattr(self, name) <= limit:
                raise ConfigError(f"data.augment.{name}={getattr(self, name)} must be in 0 … {limit}.")


@dataclass
class DataConfig:
    """Where pairs come from and how a training sample is made of one."""

    train: Any = described(None, "training shards: path, glob, 'd/{00..99}.tar', 'a@2::b@0.5' with weights, or a list")
    val: Any = described(None, "shards for retrieval while training, written like data.train")
    workers: int = described(2, "loader processes per rank; the order of samples never depends on it")
    image_key: str = described("jpg;jpeg;png;webp", "member names of the picture, first match wins")
    captions: list[str] = described(
        ["txt"], "where captions are: 'txt' (one a line) or fields of the json member; evaluation takes the first"
    )
    caption_weights: list[float] | None = described(None, "chance of each entry of data.captions; null: all alike")
    text_key: str | None = described(None, "json field that says which texts mean the same item; null: the text itself")
    shuffle: Shuffle = described(
        Shuffle.window, "window: chunks of 256 and a window of max(65536, 4G); full: every sample"
    )
    resize: ResizeMode | None = described(
        None,
        "how a picture is brought to size when it is not cropped at random; null: as the tower's own preprocessing",
    )
    max_image_pixels: int = described(25_000_000, "larger pictures are refused before they are decoded")
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if not self.captions:
            raise ConfigError("data.captions is empty. Write [txt], or fields of the json member like [caption].")
        weights = self.caption_weights
        if weights is not None and (len(weights) != len(self.captions) or min(weights) < 0 or not sum(weights)):
            raise ConfigError(
                f"data.caption_weights={weights} must be one chance for each of data.captions={self.captions}."
            )
