"""The best checkpoint of a run, by the metric that checkpoint.best names. In options, RUN@best stands for it.

Each checkpoint records which checkpoint was the best when it was written, in the entry "best" of its state.json. So the
newest checkpoint names the best of the run, and no second file can contradict it. Imports no torch.
"""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.limits import MOST


class Best(TypedDict):
    """The best evaluation of a run.

    metric: name of the metric, as in metrics.jsonl. value: its value, finite. step: finished steps at the evaluation.
    """

    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    step: Annotated[int, Field(ge=0, le=MOST)]


def read_best(entry: Any) -> Best | None:
    """Check and return `entry`, the entry "best" of a state.json: a Best, or None.

    None means that the run has no best yet. Raises ValueError for another value.
    """
    return TypeAdapter(Best | None).validate_python(entry, strict=True)
