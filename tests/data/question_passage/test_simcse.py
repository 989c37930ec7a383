"""SimCSE's rows, as its nli_for_simcse.csv has them."""

from typing import Any

import pytest
from helpers.messages import raises

from dyad.data.base.errors import BadRow
from dyad.data.config import PassageConfig
from dyad.data.question_passage.formats import format_of, record_of

ROW = {"sent0": "who built the ark?", "sent1": "Noah built an ark.", "hard_neg": "Moses led the people."}


@pytest.mark.parametrize("negative", [ROW["hard_neg"], "", None])
def test_a_row_is_a_pair_with_a_hard_negative_if_it_has_one(negative: str | None) -> None:
    record: Any = record_of({**ROW, "hard_neg": negative}, PassageConfig())
    assert record.question.text == ROW["sent0"] and [p.text for p in record.positives] == [ROW["sent1"]]
    assert [p.text for p in record.hard_negatives] == [ROW["hard_neg"]] * bool(negative) and not record.negatives


def test_a_row_of_sent0_alone_is_none() -> None:
    assert format_of({"sent0": "a", "hard_neg": "b"}) is None
    with raises(BadRow, "sent1"):
        record_of({**ROW, "sent1": " "}, PassageConfig())
