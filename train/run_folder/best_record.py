"""The best checkpoint of a run, by a metric of its evaluations (checkpoint.best): RUN@best.

Each checkpoint of a run says which one was the best when it was written: the entry "best" of its state.json. So the
newest one knows the best of the run, and no second file can contradict it. Imports no torch.
"""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.limits import MOST


class Best(TypedDict):
    """The best evaluation of a run: its metric, as metrics.jsonl names it, the value, and the finished steps."""

    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    step: Annotated[int, Field(ge=0, le=MOST)]


def read_best(entry: Any) -> Best | None:
    """Check the entry "best" of a state.json, None without checkpoint.best. Raises ValueError for any other value."""
    return TypeAdapter(Best | None).validate_python(entry, strict=True)
