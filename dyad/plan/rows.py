"""The rows of a plan: each has a name, an amount, a unit, and the formula of the amount."""

import math
from typing import Any

import numpy as np

# name → (amount: a number, NaN if unknown, or an array of the least and the most; its unit; its formula as text)
Rows = dict[str, tuple[Any, str, str]]


def amount_text(number: Any, unit: str) -> str:
    """Return a number and its unit as text: bytes ("B") in B, KiB, MiB or GiB, and NaN as "unknown".

    An array of two numbers, the least and the most, gives "LEAST to MOST UNIT". unit "": the number alone.
    """
    if np.isnan(number).any():
        return "unknown"
    if isinstance(number, np.ndarray):
        least, most = (amount_text(float(each), unit).removesuffix(unit).rstrip() for each in number)
        return f"{least} to {most} {unit}".rstrip() if least != most else f"{least} {unit}".rstrip()
    if unit == "B":
        power = min(3, int(math.log(max(number, 1), 1024)))
        number, unit = number / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{number:,{'.0f' if number >= 1000 else '.4g'}} {unit}".rstrip()
