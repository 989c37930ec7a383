"""The best checkpoint of a run, by a metric of its evaluations (checkpoint.best), and its name, RUN@best.

Each checkpoint of a run says which one was the best when it was written: the entry "best" of its state.json. So the
newest one knows the best of the run, and no second file can contradict it. Imports no torch.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.limits import MOST

SUFFIX = "@best"


class Best(TypedDict):
    """The best evaluation of a run: its metric, as metrics.jsonl names it, the value, and the finished steps."""

    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    step: Annotated[int, Field(ge=0, le=MOST)]


def without_best(path: Path) -> Path:
    """Return RUN if `path` is the name RUN@best; another path, also a folder that is called so, unchanged."""
    is_name = path.name.endswith(SUFFIX) and not path.exists()
    return Path(str(path).removesuffix(SUFFIX)) if is_name else path
