"""A chart is a function of its numbers: it is drawn once for all tests of this folder."""

import pickle
from collections.abc import Callable

import pytest
from markupsafe import Markup

from dyad.eval.report.page import ENVIRONMENT

DRAWN: dict[bytes, Markup] = {}


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Markup]:
    """What is drawn; without its entries a chart is drawn again."""
    for name in ("line_chart", "score_histogram", "confusion_matrix"):
        monkeypatch.setitem(ENVIRONMENT.globals, name, _once(ENVIRONMENT.globals[name]))
    return DRAWN


def _once(draw: Callable[..., Markup]) -> Callable[..., Markup]:
    def chart(*numbers: object) -> Markup:
        key = pickle.dumps((draw.__name__, numbers))
        if key not in DRAWN:
            DRAWN[key] = draw(*numbers)
        return DRAWN[key]

    return chart
