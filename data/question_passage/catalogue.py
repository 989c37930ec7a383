"""Build the catalogue of passages: a table of all passages of the corpus and of the rows of questions, and how often an
epoch draws each as a positive (expected number of times)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dyad.data.base.errors import ConfigError
from dyad.data.base.progress import tracked
from dyad.data.config import DrawnPositives, PassageConfig
from dyad.data.loading.catalogue import FORMAT, Catalogue, Occurrence, catalogue_table
from dyad.data.loading.order import weights_of_rows
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.questions import LISTS, QuestionRows
from dyad.data.shards.index_cache import cached_array

OF_CORPUS = -1  # the part of an Occurrence whose place is a position in the corpus, not a row


def passage_catalogue(questions: QuestionRows, tokenize: TokenizeTexts, config: PassageConfig) -> Catalogue:
    """Return the Catalogue (data/loading/catalogue.py) of all passages in the rows and in the corpus of `questions`.

    questions.corpus may be None. tokenize: the tokenizer of the passage tower. config: the settings of passages, such
    as their largest number of tokens. The first call for given data reads all rows, shows its progress, and stores the
    table in a cache file. Raises ConfigError for sources with different passage prefixes, which would give a passage
    several texts; DataError for a row that cannot be used, and as `cached_array` does.
    """
    prefixes = {source.passage_prefix for source in questions.written}
    if len(prefixes) > 1:
        shown = ", ".join(repr(prefix) for prefix in sorted(prefixes, key=str))
        raise ConfigError(
            f"data.train: the sources have the passage prefixes {shown}, and drawn noise would be told from data by "
            "them. Give all sources one, or set objective.noise=batch"
        )
    (prefix,), corpus = prefixes, questions.corpus
    made_of = [FORMAT, questions.fingerprint, corpus.fingerprint if corpus else "", str(questions.weights)]
    made_of += map(str, (config.positives.value, config.pos_pool, config.neg_pool))  # the pools of scored lists
    first, *others = [file for source in questions.sources for file in source.paths]
    occurrences = partial(_occurrences, questions, config.positives)
    mapped = cached_array([first], "catalogue", others, made_of, lambda: catalogue_table(occurrences()))

    def read(place: int, part: int) -> Passage:
        if part == OF_CORPUS:
            assert corpus is not None
            return replace(corpus[place], prefix=prefix)
        j, of = divmod(part, len(LISTS))
        return replace(questions.row(place).lists[of][j], prefix=prefix)

    return Catalogue(mapped, read, lambda texts: tokens(texts, tokenize, config), tokenize)


def _occurrences(questions: QuestionRows, drawn: DrawnPositives) -> Iterator[Occurrence]:
    if questions.corpus is not None:
        for place, key in enumerate(questions.corpus.keys.tolist()):
            yield key, key, place, OF_CORPUS, 0.0
    weights = weights_of_rows(questions.sizes, questions.weights)
    for i, weight in enumerate(tracked(weights, "Catalogue of passages", len(weights))):
        row = questions.row(i)
        for of, passages in enumerate(row.lists):
            draws = row.draws(drawn) if of == 0 else [0.0] * len(passages)
            for j, key in enumerate(passages.keys):
                yield key, key, i, j * len(LISTS) + of, weight * draws[j]
