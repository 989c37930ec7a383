"""One sample of a shard: its picture, captions and fields, or a SampleError that names shard and key.

What becomes of odd texts:
    no member or field where data.captions says, null, a number     SampleError
    empty, or nothing but blanks; in a list: also one of several    SampleError
    not UTF-8, half a surrogate pair, json that cannot be read      SampleError
    json nested deep or of very many values (data/json_text.py)     SampleError
    longer than LONGEST letters                                     its first LONGEST, of which towers read less
    a .txt member of more than 1 MiB, a .json of more than 16       found by the index, which training refuses
    no caption at all where other samples of the shard have one     found by the index, which training refuses
In training another sample takes the place of one with a SampleError (data/substitutes.py); an evaluation stops at it.
Odd pictures: data/pictures.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from data.errors import DataError, SampleError, nearest
from data.json_text import parse_json
from data.shards import Shards
from data.transforms import decode

HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # which JSON can write and UTF-8 cannot
LONGEST = 16_384  # open_clip's tokenizer takes time by the square of a word without blanks


@dataclass(frozen=True)
class Sample:
    """The members of one sample by suffix. Every SampleError of its methods begins with `where`: shard and key."""

    where: str
    members: dict[str, bytes]

    @staticmethod
    def read(shards: Shards, sample_id: int) -> Sample:
        path, key = shards.origin(sample_id)
        return Sample(f"{path}: sample '{key}'", shards.read(sample_id))

    def picture(self, image_key: str) -> bytes:
        """The encoded picture: the first member that `image_key` ("jpg;png") names."""
        name = next((name for name in image_key.split(";") if name in self.members), None)
        if name is None:
            raise SampleError(
                f"{self.where} has no picture: data.image_key={image_key}, its members are {self._members}."
            )
        return self.members[name]

    def decoded(self, image_key: str, max_pixels: int) -> Tensor:
        """The picture as uint8 (3, H, W)."""
        data = self.picture(image_key)
        try:
            return decode(data, max_pixels)
        except DataError as error:
            raise SampleError(f"{self.where}: {error}.") from error

    def captions(self, place: str) -> list[str]:
        """Its captions at `place`: lines of the txt member, or a json field; at least one, none blank or too long."""
        value = self._lines if place == "txt" else self.field(place)
        captions = [value] if isinstance(value, str) else value
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise SampleError(f"{self.where}: '{place}' is {value!r:.80}, no text or list of texts.")
        captions = [caption[:LONGEST] for caption in captions]
        if not captions or not all(caption.strip() for caption in captions):
            raise SampleError(f"{self.where}: its caption in '{place}' is empty.")
        if any(HALF_A_PAIR.search(caption) for caption in captions):
            raise SampleError(f"{self.where}: its caption in '{place}' has half a surrogate pair: it is no Unicode.")
        return captions

    def field(self, name: str) -> Any:
        """A field of the json member."""
        if name not in self.fields:
            known = f"the json member has {', '.join(self.fields)}" if self.fields else f"members are {self._members}"
            raise SampleError(f"{self.where} has no field '{name}'; {known}.{nearest(name, self.fields)}")
        return self.fields[name]

    def label(self, name: str) -> str:
        """The class: the number in the cls member, or a json field."""
        if name != "cls":
            return str(self.field(name))
        text = self._text("cls").strip()
        if not re.fullmatch(r"\d{1,9}", text):
            raise SampleError(f"{self.where}: its cls member is {text!r:.80}, no class number.")
        return str(int(text))

    @property
    def _members(self) -> str:
        return ", ".join(self.members)

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in self._text("txt").split("\n") if line.strip()]

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The json member; without one, none."""
        if "json" not in self.members:
            return {}
        try:
            fields = parse_json(self._text("json"))
        except ValueError as error:
            raise SampleError(f"{self.where}: its json member cannot be read: {error}.") from error
        if not isinstance(fields, dict):
            raise SampleError(f"{self.where}: its json member is a {type(fields).__name__}, not an object with fields.")
        return fields

    def _text(self, member: str) -> str:
        if member not in self.members:
            raise SampleError(f"{self.where} has no {member} member; its members are {self._members}.")
        try:
            return self.members[member].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SampleError(f"{self.where}: its {member} member is not UTF-8: {error}.") from error
