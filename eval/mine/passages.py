"""Questions and the passages of a corpus, as queries and items for the mining of hard negatives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from dyad.data.config import DataConfig, Title
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.dataset import TextInputs, TokenizeTexts, passage_texts
from dyad.data.question_passage.questions import QuestionRows
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.eval.metrics.matches import Labels, Matches, positions_with
from dyad.eval.mine.mining import LabelledQuery, Side


@dataclass(frozen=True)
class QuestionsAndPassages:
    """MiningData whose queries are questions and whose items are the m passages of a corpus.

    Rows of `questions` with the same question id are one query. Texts are read with the prefixes of training; those of
    passages are explained in QuestionRows.passage_config. tokenize: the tokenizer of the model. config: the data
    options.
    """

    questions: QuestionRows
    corpus: Corpus
    tokenize: TokenizeTexts
    config: DataConfig
    names: ClassVar[tuple[str, str]] = ("questions", "passages")

    @property
    def row_keys(self) -> Int64s:
        return self.questions.id_hashes[0]

    @property
    def item_keys(self) -> Int64s:
        return self.corpus.keys

    def sides(self) -> tuple[Side, Side]:
        def ids(start: int, stop: int) -> list[str]:
            return [self.questions.question(i).id for i in range(start, stop)]

        asked = TextInputs(self.questions.question, self.questions.lengths, self.tokenize, self.config.question)
        of_passages = self.questions.passage_config(self.config.passage)
        passages = passage_texts(self.corpus, self.tokenize, of_passages)
        return (
            Side("x", asked, ids, self.questions.fingerprint, repr(self.config.question)),
            Side("y", passages, self.corpus.ids, self.corpus.fingerprint, repr(of_passages)),
        )

    def item(self, position: int) -> tuple[str, str]:
        passage = self.corpus[position]
        return str(passage.id), passage.text

    def labelled(self, groups: Sequence[list[int]], queries_bD: np.ndarray) -> list[LabelledQuery]:
        """Return b questions with their right passages, those of all rows with the text of the question.

        groups: for each question the numbers of its rows. queries_bD: the embeddings of the b questions, (b, D).
        """
        asked = [self._question(rows, query_D) for rows, query_D in zip(groups, queries_bD, strict=True)]
        keys_m = self.corpus.keys
        found = positions_with(
            keys_m, np.array([key for question in asked for key in question.keys.tolist()], np.int64)
        )
        # reversed, so that the first passage of a key wins
        first = dict(zip(keys_m[found[::-1]].tolist(), found[::-1].tolist(), strict=True))
        by_text = [[first[key] for key in question.keys.tolist() if key in first] for question in asked]
        pairs = zip(asked, by_text, strict=True)
        return [replace(one, positions=np.union1d(one.positions, np.array(more, np.int64))) for one, more in pairs]

    def _question(self, numbers: Sequence[int], query_D: np.ndarray) -> LabelledQuery:
        """Return one question, built from the rows `numbers` and all other rows with its text.

        Its positions are only the corpus indices of the right passages that these rows give by id. A passage with the
        text of a right passage and another title is also right if one of the two titles is empty, or if titles are
        dropped. query_D: the embedding of the question. Only content keys and corpus indices of passages are kept, to
        save memory.
        """
        keys, texts = set[int](), set[int]()
        ids: list[str] = []
        answers: dict[str, None] = {}
        for number in sorted({same for i in numbers for same in self._same_text.pairs(i, i + 1)[1].tolist()}):
            row = self.questions.row(number)
            for passage in row.positives:
                keys.update((passage.key, replace(passage, title="").key))
                if not passage.title or self.config.passage.title is Title.drop:
                    texts.add(content_key(passage.text.encode()))
                if passage.id is not None:
                    ids.append(passage.id)
            answers.update(dict.fromkeys(answer for answer in row.question.answers if answer.strip()))  # "" is in all
        name, positions = self.questions.question(numbers[0]).id, self.corpus.positions(ids)
        right = positions[positions >= 0]
        own = np.array(sorted(keys), dtype=np.int64)
        return LabelledQuery(name, tuple(answers), own, right, query_D, frozenset(texts))

    @cached_property
    def _same_text(self) -> Matches:
        keys_n = self.questions.text_keys
        rows = Labels(np.arange(len(keys_n)), keys_n, len(keys_n))
        return Matches(rows, rows)
