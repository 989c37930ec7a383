"""Read the image, captions and json fields of one sample of a shard. Every SampleError names its shard and its key.

How unusual texts are treated:

    the member or field of data.captions is missing, null, a number    SampleError
    empty or blank, also one of several captions in a list             SampleError
    not UTF-8, half a surrogate pair, unreadable json                  SampleError
    json nested deep or with very many values (data/base/json_text.py)    SampleError
    longer than MAX_LETTERS                                            cut; towers read less than that
    a .txt member of more than 1 MiB, a .json of more than 16          reported by the index, which training refuses;
                                                                       a stream leaves it out

In training a sample with a SampleError is replaced (data/loading/replacement.py), in a stream left out; with
data.bad_samples=stop the run stops. An evaluation stops at it. Unusual images: data/image_text/image_files.py.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from dyad.data.base.errors import BadRow, DataError, SampleError, nearest
from dyad.data.base.json_text import SURROGATE, parse_json
from dyad.data.base.relevance import relevance_of
from dyad.data.config import CaptionPer
from dyad.data.image_text.captions import captions_in
from dyad.data.image_text.decode import decode
from dyad.data.shards.shards import Shards
from dyad.data.shards.text_files import decoded

CLASS_FIELDS = ("class", "label", "fine_label")
LONGEST_NAME = 80  # of an object whose fields are read: each of half a million fields would repeat a long one
MAX_LETTERS = 16_384  # open_clip's tokenizer takes time quadratic in the length of a word


@dataclass(frozen=True)
class ShardSample:
    """A sample of a shard. shard: path of the shard. key: name of the sample in the shard. members: the files of the
    sample as {suffix: bytes}, such as {"jpg": …, "txt": …}."""

    shard: str
    key: str
    members: dict[str, bytes]

    @staticmethod
    def read(shards: Shards, sample_id: int) -> "ShardSample":
        """Read the sample with this id from its shard. Raises SampleError when its bytes are damaged, and DataError
        when the shard has changed or cannot be read."""
        return ShardSample(*shards.origin(sample_id), shards.read(sample_id))

    @property
    def where(self) -> str:
        """The location of a sample as text: its shard and key. Every SampleError begins with this text."""
        return f"{self.shard}: sample '{self.key}'"

    def image(self, image_key: str) -> bytes:
        """Return the encoded image of a sample: the bytes of its member with the first suffix in `image_key`, for
        example "jpg;png", that it has. Raises SampleError when it has none of them."""
        name = next((name for name in image_key.split(";") if name in self.members), None)
        if name is None:
            raise SampleError(f"{self.where} has no image: data.image_key={image_key}, its {self._members}.")
        return self.members[name]

    def decoded(self, image_key: str, max_pixels: int) -> Tensor:
        """Return the decoded image of a sample in its own height H and width W, uint8 (3, H, W). image_key: as in
        `image`.

        Raises SampleError when the image is missing, cannot be decoded, or has more than `max_pixels` pixels.
        """
        data = self.image(image_key)
        try:
            return decode(data, max_pixels)
        except DataError as error:
            raise SampleError(f"{self.where}: {error}.") from error

    def captions(self, name: str, per: CaptionPer = CaptionPer.paragraph) -> list[str]:
        """Return the captions of a sample, at least one. name: "txt" for its txt member, else the json field that holds
        one text or a list of texts. per: what is one caption in the txt member.

        Long captions are cut to MAX_LETTERS characters. Raises SampleError when the captions are missing, when one is
        blank or no valid Unicode, or when the json field has another type.
        """
        value = captions_in(self.text("txt"), per) if name == "txt" else self.field(name)
        captions = [value] if isinstance(value, str) else value
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise SampleError(f"{self.where}: '{name}' is {value!r:.80}, no text or list of texts.")
        captions = [caption[:MAX_LETTERS] for caption in captions]
        if not captions or not all(caption.strip() for caption in captions):
            raise SampleError(f"{self.where}: its caption in '{name}' is empty.")
        if any(SURROGATE.search(caption) for caption in captions):
            raise SampleError(f"{self.where}: its caption in '{name}' has half a surrogate pair: it is no Unicode.")
        return captions

    def field(self, name: str, hint: str = "") -> Any:
        """Return the value of the field `name` in a sample's json member. Raises SampleError, with `hint` at its end,
        when there is no such field."""
        if name not in self.fields:
            there = f"the json member has {', '.join(self.fields)}" if self.fields else self._members
            raise SampleError(f"{self.where} has no field '{name}'; {there}.{nearest(name, self.fields)}{hint}")
        return self.fields[name]

    def named(self, name: str, hint: str = "") -> str | None:
        """Return the value of the field `name` in a sample's json member as text; None if it is null. Raises
        SampleError when there is no such field, with `hint` at its end, or when its value is no valid Unicode."""
        value = self.field(name, hint)
        if SURROGATE.search(str(value)):
            raise SampleError(f"{self.where}: its field '{name}' has half a surrogate pair: it is no Unicode.")
        return None if value is None else str(value)

    def relevance(self, name: str | None) -> float | None:
        """Return the weight of a sample as a positive pair, the number in (0, 1] in its json field `name`. None if
        `name` is None. Raises SampleError when the field is missing or has no such number."""
        try:
            return None if name is None else relevance_of(self.field(name), f"'{name}'")
        except BadRow as bad:
            raise SampleError(f"{self.where}: {bad}.") from bad

    def label(self, name: str) -> str:
        """Return the class label of a sample as text. name: "cls" for the number in the cls member (leading zeros are
        dropped), "txt" for the stripped text of the txt member, else the name of a json field.

        If the cls or txt member is missing, the first of the json fields `class`, `label` and `fine_label` is taken,
        which tables and folders of classes have. Raises SampleError when the field or member is missing, when the field
        is null or no valid Unicode, or when the cls member holds no number of at most nine digits.
        """
        if name in ("cls", "txt") and name not in self.members:
            name = next((field for field in CLASS_FIELDS if field in self.fields), name)
        if name not in ("cls", "txt"):
            if (label := self.named(name)) is None:
                raise SampleError(f"{self.where}: its field '{name}' is null, no class.")
            return label
        if name == "txt":
            return self.text("txt").strip()
        text = self.text("cls").strip()
        if not re.fullmatch(r"\d{1,9}", text):
            raise SampleError(f"{self.where}: its cls member is {text!r:.80}, no class number.")
        return str(int(text))

    @property
    def _members(self) -> str:
        return f"members are {', '.join(self.members)}"

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of a sample's json member, and those of the objects in it by names such as meta.caption; empty if
        the sample has no such member. Raises SampleError when the member cannot be read."""
        if "json" not in self.members:
            return {}
        try:
            fields = parse_json(self.text("json"))
        except ValueError as error:
            raise SampleError(f"{self.where}: its json member cannot be read: {error}.") from error
        if not isinstance(fields, dict):
            raise SampleError(f"{self.where}: its json member is a {type(fields).__name__}, not an object with fields.")
        objects = {name: each for name, each in fields.items() if isinstance(each, dict) and len(name) <= LONGEST_NAME}
        return {f"{name}.{key}": value for name, each in objects.items() for key, value in each.items()} | fields

    def text(self, member: str) -> str:
        """Return a member (file) of a sample, decoded as UTF-8. member: its suffix. Raises SampleError when it is
        missing or not UTF-8."""
        if member not in self.members:
            raise SampleError(f"{self.where} has no {member} member; its {self._members}.")
        try:
            return decoded(self.members[member])
        except UnicodeDecodeError as error:
            raise SampleError(f"{self.where}: its {member} member is not UTF-8: {error}.") from error
