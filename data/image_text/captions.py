"""Split a text (a .txt file beside an image, a txt member of a shard, a column txt) into captions. Imports no torch."""

import re

from dyad.data.config import CaptionPer

ENDS = {CaptionPer.paragraph: re.compile(r"\n\s*\n"), CaptionPer.line: re.compile("\n")}


def captions_in(text: str, per: CaptionPer) -> list[str]:
    """Return the captions in a text, stripped of surrounding whitespace, without empty ones. per: what is one caption,
    a line or a paragraph (all lines up to a blank one, with their line breaks). The list is empty for a blank text."""
    return [caption for caption in map(str.strip, ENDS[per].split(text)) if caption]
