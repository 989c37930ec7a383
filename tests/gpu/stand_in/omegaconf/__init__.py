"""The few names of omegaconf that the schema and the losses use, for a machine that lacks it: see tests/gpu.sh.

Values are not checked; members of an enum may be given as text. Whatever needs more is not run.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args, get_type_hints

MISSING: Any = "???"
DictConfig = dict  # of annotations


class OmegaConf:
    @staticmethod
    def structured(kind: type) -> type:
        return kind

    @staticmethod
    def merge(kind: type, options: dict[str, Any]) -> tuple[type, dict[str, Any]]:
        return kind, options

    @staticmethod
    def to_object(merged: tuple[type, dict[str, Any]]) -> Any:
        kind, options = merged
        hints = get_type_hints(kind)
        return kind(**{name: _converted(hints[name], value) for name, value in options.items()})


def _converted(hint: Any, value: Any) -> Any:
    for kind in (hint, *get_args(hint)):
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
    return value


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system asks for some
        raise AttributeError(name)
    raise ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")
