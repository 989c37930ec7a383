"""The rows of a plan: what, how much, and by which formula."""

import math
from typing import Any

import numpy as np

# what → how much, NaN if that is not known, or an array of the least and most; its unit; and the formula
Rows = dict[str, tuple[Any, str, str]]


def amount(number: Any, unit: str) -> str:
    """Write a number with its unit: bytes in KiB, MiB or GiB, and NaN as "unknown"; of an array the least and most."""
    if np.isnan(number).any():
        return "unknown"
    if isinstance(number, np.ndarray):
        least, most = (amount(float(each), unit).removesuffix(unit).rstrip() for each in number)
        return f"{least} to {most} {unit}".rstrip() if least != most else f"{least} {unit}".rstrip()
    if unit == "B":
        power = min(3, int(math.log(max(number, 1), 1024)))
        number, unit = number / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{number:,{'.0f' if number >= 1000 else '.4g'}} {unit}".rstrip()
