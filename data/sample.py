"""One sample of a shard: its picture, captions and fields, or a DataError that names shard and key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from data.errors import DataError, nearest
from data.shards import Shards
from data.transforms import decode


@dataclass(frozen=True)
class Sample:
    """The members of one sample by suffix. Every DataError of its methods begins with `where`: shard and key."""

    where: str
    members: dict[str, bytes]

    @staticmethod
    def read(shards: Shards, sample_id: int) -> Sample:
        return Sample(f"{shards.locate(sample_id)[0].path}: sample '{shards.key(sample_id)}'", shards.read(sample_id))

    def picture(self, image_key: str) -> bytes:
        """The encoded picture: the first member that `image_key` ("jpg;png") names."""
        name = next((name for name in image_key.split(";") if name in self.members), None)
        if name is None:
            raise DataError(
                f"{self.where} has no picture: data.image_key={image_key}, its members are {self._members}."
            )
        return self.members[name]

    def decoded(self, image_key: str, max_pixels: int) -> Tensor:
        """The picture as uint8 (3, H, W)."""
        data = self.picture(image_key)
        try:
            return decode(data, max_pixels)
        except DataError as error:
            raise DataError(f"{self.where}: {error}.") from error

    def captions(self, place: str) -> list[str]:
        """Its captions at `place`: lines of the txt member, or a json field; at least one, none blank."""
        value = self._lines if place == "txt" else self.field(place)
        captions = [value] if isinstance(value, str) else value
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise DataError(f"{self.where}: '{place}' is {value!r:.80}, no text or list of texts.")
        if not captions or not all(caption.strip() for caption in captions):
            raise DataError(f"{self.where}: its caption in '{place}' is empty.")
        return captions

    def field(self, name: str) -> Any:
        """A field of the json member."""
        if name not in self._fields:
            known = f"the json member has {', '.join(self._fields)}" if self._fields else f"members are {self._members}"
            raise DataError(f"{self.where} has no field '{name}'; {known}.{nearest(name, self._fields)}")
        return self._fields[name]

    def label(self, name: str) -> str:
        """The class: the number in the cls member, or a json field."""
        if name != "cls":
            return str(self.field(name))
        text = self._text("cls").strip()
        if not text.isdecimal():
            raise DataError(f"{self.where}: its cls member is {text!r:.80}, no class number.")
        return str(int(text))

    @property
    def _members(self) -> str:
        return ", ".join(self.members)

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in self._text("txt").split("\n") if line.strip()]

    @cached_property
    def _fields(self) -> dict[str, Any]:
        if "json" not in self.members:
            return {}
        try:
            fields = json.loads(self._text("json"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where}: its json member cannot be read: {error}.") from error
        if not isinstance(fields, dict):
            raise DataError(f"{self.where}: its json member is a {type(fields).__name__}, not an object with fields.")
        return fields

    def _text(self, member: str) -> str:
        if member not in self.members:
            raise DataError(f"{self.where} has no {member} member; its members are {self._members}.")
        try:
            return self.members[member].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: its {member} member is not UTF-8: {error}.") from error
