"""The training data set of texts with a class: a field of a row says which."""

from collections.abc import Sequence
from dataclasses import replace

from dyad.data.base.errors import BadRow, SampleError, nearest
from dyad.data.batch import Batch
from dyad.data.config import DataConfig
from dyad.data.loading.classes import ClassNumbers
from dyad.data.question_passage.dataset import TokenizeTexts
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.views import TextViews
from dyad.data.shards.rows import Rows


class LabelledTexts(TextViews):
    """The training data set of texts whose y is the number of their class, int64 (b,). numbers: of the classes."""

    def __init__(
        self, rows: Rows, tokenize: TokenizeTexts, config: DataConfig, seed: int, numbers: ClassNumbers
    ) -> None:
        self.numbers = numbers
        super().__init__(rows, tokenize, config, seed)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        batch = super().__getitems__(positions)
        labels = [text_label(self.rows, i, self.config.label) for i in batch.sample_ids.tolist()]
        return replace(batch, y=self.numbers(labels), y_lengths=None)

    def _text(self, epoch: int, i: int) -> tuple[int, Passage]:
        self.numbers([text_label(self.rows, i, self.config.label)], f"{self.rows.where(i)}: its class ")
        return super()._text(epoch, i)


def text_label(rows: Rows, i: int, name: str) -> str:
    """Return the class of row i, its field `name`, as text. Raises SampleError for a row without it."""
    try:
        fields = rows.parse(i)
    except BadRow as bad:
        raise SampleError(f"{rows.where(i)}: {bad}.") from bad
    if name not in fields:
        has = f"has no field '{name}' (data.label); its fields: {', '.join(fields)}"
        raise SampleError(f"{rows.where(i)} {has}.{nearest(name, fields)}")
    return str(fields[name])
