"""The captions in a text, of a .txt beside an image, of a txt member of a shard, of a column txt. Imports no torch."""

import re

from dyad.data.config import CaptionPer

ENDS = {CaptionPer.paragraph: re.compile(r"\n\s*\n"), CaptionPer.line: re.compile("\n")}


def captions_in(text: str, per: CaptionPer) -> list[str]:
    """Return the captions in a text, without blanks around them. A paragraph ends at a blank line."""
    return [caption for caption in map(str.strip, ENDS[per].split(text)) if caption]
