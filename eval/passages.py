"""Questions against a corpus of passages: the model's ranking, and others beside it.

Passages are encoded and searched by all ranks, so the numbers are the same for any number of them; rank 0 scores what
was found. Beside the model, with the difference and its interval: BM25, the encoder as it was before training, and the
reciprocal rank fusion of the model's ranking with BM25's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from data.config import PassageConfig, QuestionConfig
from data.corpus import Corpus
from data.errors import ExitCode, UserError, printable
from data.files import write_json
from data.passages import Passage, Question
from data.question_passage import TextInputs, TokenizeTexts, passage_texts
from eval.bm25 import BM25, build_bm25, open_bm25
from eval.cases import ANSWERS, RIGHT, Answer, Case, Item, choose, excerpt
from eval.config import Baseline, EvalConfig
from eval.embeddings import Embeddings, encode_corpus, identity_of
from eval.encode import Encoder, Evaluator, Report
from eval.fusion import reciprocal_rank_fusion
from eval.index import Hits, Index, recall_against_exact
from eval.index_spec import EXACT
from eval.question_sets import Passages, QuestionSet
from eval.score_histogram import score_histogram, spread
from eval.scores import Judge, Values, chance, differences, summarised
from eval.trec import CUTOFFS, Context, Run, beir_result, ranked, write_dpr, write_qrels, write_run
from train.distributed.agreement import agreed, from_rank_0, rank_0_only
from train.distributed.contact import LostContact

SYSTEMS = ("model", "bm25", "untrained")  # whose answers a case shows side by side


@dataclass(frozen=True)
class Searched:
    """What an encoder found, with its queries (n, D); how: the index and its depth."""

    hits: Hits
    queries: np.ndarray
    index: Index
    how: dict[str, Any]


class PassageSide:
    """A corpus as encoders and BM25 see it, made once for all question sets that search it."""

    def __init__(self, corpus: Passages, tokenize: TokenizeTexts, config: PassageConfig, options: EvalConfig) -> None:
        self.corpus, self._config, self._options = corpus, config, options
        self._texts = passage_texts(cast(Corpus, corpus), tokenize, config)
        self._folder = None if options.embeddings is None else Path(options.embeddings).expanduser()
        self._kept: dict[str, tuple[str, Index]] = {}
        self._ids: dict[int, str] = {}

    def index(self, system: str, encode: Encoder) -> Index:
        """Of all passages, as the encoder's weights are now; kept until the same system has others. A collective."""
        seen = self._config  # what a tower sees of a passage
        facts = (self.corpus.fingerprint, seen.title.value, seen.prefix, str(seen.length))
        identity = identity_of(encode.towers["y"], *facts)
        if system not in self._kept or self._kept[system][0] != identity:
            self._kept.pop(system, None)
            vectors = self._embeddings(encode, identity).vectors
            self._kept[system] = (identity, Index(vectors, self._options.index, world=encode.world))
        return self._kept[system][1]

    def _embeddings(self, encode: Encoder, identity: str) -> Embeddings:
        folder = self._folder and self._folder / identity[:16]
        kept_as = self._options.embedding_type.value
        return encode_corpus(encode, "y", self._texts, folder, ids=self.corpus.ids, identity=identity, dtype=kept_as)

    @cached_property
    def bm25(self) -> BM25:
        """Over titles and texts."""
        passages = (self.corpus[i] for i in range(len(self.corpus)))
        texts = (f"{passage.title} {passage.text}" for passage in passages)
        return open_bm25(texts, self._folder, self.corpus.fingerprint) if self._folder else build_bm25(texts)

    def id(self, position: int) -> str:
        """Of a passage that was found: many questions find the same."""
        if position not in self._ids:
            self._ids[position] = self.corpus.ids(position, position + 1)[0]
        return self._ids[position]

    def passage(self, name: str) -> Passage:
        return self.corpus[int(self.corpus.positions([name])[0])]


@dataclass(frozen=True)
class PassageRetrieval(Evaluator):
    """One set of questions on its corpus. untrained: makes the encoder as it was before training, a baseline."""

    data: QuestionSet
    side: PassageSide
    tokenize: TokenizeTexts
    question: QuestionConfig
    options: EvalConfig
    baselines: Sequence[Baseline] = ()
    untrained: Callable[[], Encoder] | None = None

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        world, model = encode.world, self._search("model", encode)
        found = {"model": model.hits}
        if Baseline.untrained in self.baselines and self.untrained:
            before = None
            with _left_out(Baseline.untrained):
                before = agreed(world, self.untrained)
            if before:
                found["untrained"] = self._search("untrained", before).hits
        runs = rank_0_only(world, lambda: self._runs(found)) or {}
        report = from_rank_0(world, lambda: self._scored(runs, model, examples))
        return replace(report, files=self._files(runs["model"])) if runs else report

    # Runs -------------------------------------------------------------------------------------------------------------

    def _search(self, system: str, encode: Encoder) -> Searched:
        """The best passages of every question as an encoder ranks them. A collective."""
        index = self.side.index(system, encode)
        lengths = np.array([len(question.text.encode()) for question in self.data.questions])
        texts = TextInputs(self.data.questions.__getitem__, lengths, self.tokenize, self.question)
        queries = encode("x", texts)
        hits = index.search(queries, self._depth)
        how: dict[str, Any] = {**index.how, "depth": self.options.depth}
        if how["index"] != EXACT:
            share = recall_against_exact(hits, queries, index.corpus, world=encode.world)
            how[f"recall_against_exact@{hits.positions.shape[1]}"] = share
        return Searched(hits, queries, index, how)

    def _runs(self, found: Mapping[str, Hits]) -> dict[str, Run]:
        """What the encoders have found, and the other systems that are asked for."""
        every = range(len(self.data.questions))
        runs = {name: self._run(hits.found(query) for query in every) for name, hits in found.items()}
        if {Baseline.bm25, Baseline.fusion} & set(self.baselines):
            with _left_out(Baseline.bm25):
                pairs = self.side.bm25.search([question.text for question in self.data.questions], self._depth)
                words = self._run(list(zip(places.tolist(), scores.tolist(), strict=True)) for scores, places in pairs)
                fused = reciprocal_rank_fusion([runs["model"], words], depth=self.options.depth)
                others = {Baseline.bm25: words, Baseline.fusion: fused}
                runs |= {baseline.value: run for baseline, run in others.items() if baseline in self.baselines}
        return runs

    def _run(self, found: Iterable[Sequence[tuple[int, float]]]) -> Run:
        """From (position, score) of what each question finds; the passage that is the question itself is left out."""
        run = {}
        for question, pairs in zip(self.data.questions, found, strict=True):
            scores = {self.side.id(position): score for position, score in pairs}
            if question.id in self._own:
                scores.pop(question.id, None)
            run[question.id] = dict(ranked(scores, self.options.depth))
        return run

    @cached_property
    def _own(self) -> set[str]:
        """Ids of questions that are ids of passages too, which nobody judged for them."""
        if not self.data.drop_own:
            return set()
        names = [q.id for q in self.data.questions if q.id not in self.data.qrels.get(q.id, {})]
        return {name for name, place in zip(names, self.data.corpus.positions(names), strict=True) if place >= 0}

    @property
    def _depth(self) -> int:
        return self.options.depth + bool(self._own)

    # Scores -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.data, self.options.answers.value, self.options.depth)

    def _scored(self, runs: Mapping[str, Run], searched: Searched, examples: int | None) -> Report:
        judge = self._judge
        values = {name: judge.values(run) for name, run in runs.items()}
        model = values.pop("model")
        summary = summarised(model, judge)
        details = {
            "search": searched.how,
            "intervals": summary.intervals,
            "mean_over_groups": summary.over_groups,
            "baselines": {
                name: {**asdict(summarised(v, judge)), "difference": differences(model, v, judge)}
                for name, v in values.items()
            },
        }
        if examples is not None:
            details["scores"] = self._histogram(runs["model"], searched)
            details["gallery"] = {"question → passages": self._cases(runs, model, examples)}
        questions, passages = len(self.data.questions), len(self.data.corpus)
        sizes = {"num_questions": float(questions), "num_passages": float(passages)}
        return Report("passage_retrieval", {**summary.metrics, **sizes}, chance(self.data.qrels, passages), details)

    # What people look at ----------------------------------------------------------------------------------------------

    def _histogram(self, run: Run, searched: Searched) -> dict[str, list[Any]]:
        picks = spread(len(self.data.questions))
        names = [self.data.questions[pick].id for pick in picks.tolist()]
        right = [self.data.corpus.positions(self._right(name, run)) for name in names]
        wrong = [
            max((s for p, s in run[name].items() if not self._judge.right(name, p)), default=-np.inf) for name in names
        ]
        return score_histogram(searched.queries[picks], searched.index.corpus, right, np.array(wrong))

    def _right(self, question: str, run: Run) -> list[str]:
        """Passages that are right, the best first: by grade, or as the model ranks those that have an answer."""
        if self.data.qrels:
            grades = self.data.qrels.get(question, {})
            judged = [p for p, grade in sorted(grades.items(), key=lambda pair: -pair[1]) if grade > 0]
            return [p for p, place in zip(judged, self.data.corpus.positions(judged), strict=True) if place >= 0]
        return [p for p, _ in ranked(run[question]) if self._judge.hit(question, p)]

    def _cases(self, runs: Mapping[str, Run], model: Values, examples: int) -> list[dict[str, Any]]:
        metric, value = self._judge.per_question(runs["model"], model)
        asked = [question for question in self.data.questions if question.id in value]
        quality = np.array([value[question.id] for question in asked])
        sure = np.array([max(runs["model"][question.id].values(), default=0.0) for question in asked])
        groups = [question.group or question.id for question in asked]
        chosen = choose(quality, sure, groups, examples)
        return [self._case(kind, asked[i], {metric: float(quality[i])}, runs).as_json() for kind, i in chosen]

    def _case(self, kind: str, question: Question, value: dict[str, float], runs: Mapping[str, Run]) -> Case:
        systems = {
            name: [
                Answer(self._item(question, passage), score, self._judge.right(question.id, passage))
                for passage, score in ranked(runs[name][question.id], ANSWERS)
            ]
            for name in SYSTEMS
            if name in runs
        }
        right = [self._item(question, passage) for passage in self._right(question.id, runs["model"])[:RIGHT]]
        return Case(kind, Item(question.id, question.text), value, systems, right)

    def _item(self, question: Question, name: str) -> Item:
        passage = self.side.passage(name)
        spans = self._judge.spans(question.id, passage.text)
        text, spans = excerpt(passage.text, spans)
        return Item(name, text, title=passage.title, spans=spans)

    # Files ------------------------------------------------------------------------------------------------------------

    def _files(self, run: Run) -> dict[str, Callable[[Path], None]]:
        """Ending → what writes it: the run and judgements for other tools, BEIR's result, DPR's retriever output."""
        files: dict[str, Callable[[Path], None]] = {".trec": lambda path: write_run(path, run, "dyad")}
        if self.data.qrels:
            files[".qrels"] = lambda path: write_qrels(path, self.data.qrels)
            cutoffs = [k for k in CUTOFFS if k <= self.options.depth]
            files[".beir.json"] = lambda path: write_json(path, beir_result(self.data.qrels, run, cutoffs))
        if any(question.answers for question in self.data.questions):
            files[".dpr.json"] = lambda path: write_dpr(path, self._contexts(run))
        return files

    def _contexts(self, run: Run) -> Iterator[tuple[str, Sequence[str], Iterator[Context]]]:
        for question in self.data.questions:
            yield question.text, question.answers, self._found(question, run)

    def _found(self, question: Question, run: Run) -> Iterator[Context]:
        for name, score in ranked(run[question.id]):
            passage = self.side.passage(name)
            yield Context(name, passage.title, passage.text, score, self._judge.hit(question.id, name))


@contextmanager
def _left_out(baseline: Baseline) -> Iterator[None]:
    """A baseline that cannot be had is left out with a line: the model's own scores do not need it."""
    try:
        yield
    except UserError as error:
        if isinstance(error, LostContact) or error.exit_code is ExitCode.REQUEUE:
            raise
        if str(error):  # of several ranks, one has the message
            print(f"left out: the baseline {baseline.value}: {printable(str(error))}", file=sys.stderr)
