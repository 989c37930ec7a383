"""Passage retrieval for questions: evaluate the model and the baselines on one question set.

All processes encode and search together, and the result does not depend on their number. Process 0 computes the
metrics. The baselines are BM25, the encoder before training, and the reciprocal rank fusion of the model with BM25. The
result has the difference of the model to each baseline, with its 95 % interval.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.files import write_json
from dyad.data.config import PassageConfig, QuestionConfig
from dyad.data.question_passage.bm25 import BM25, build_bm25, open_bm25
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.dataset import TextInputs, TokenizeTexts, passage_texts
from dyad.data.question_passage.passages import Passage, Question
from dyad.eval.config import Baseline
from dyad.eval.encode.embeddings import encode_corpus, identity_of, token_digest
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.bootstrap import Values, comparison, summary
from dyad.eval.metrics.trec import CUTOFFS, Run, beir_result, ranked, write_dpr, write_qrels, write_run
from dyad.eval.results.cases import ANSWERS, RIGHT, Case, Item, answer, choose, excerpt, item
from dyad.eval.results.score_histogram import QUERIES, score_histogram
from dyad.eval.search.fusion import reciprocal_rank_fusion
from dyad.eval.search.index import Hits, Index
from dyad.eval.tasks.baselines import skip_on_error, untrained_encoder
from dyad.eval.tasks.question_passage.passage_metrics import Judge, chance
from dyad.eval.tasks.question_passage.question_sets import QuestionSet, SearchedCorpus
from dyad.train.distributed.agreement import from_rank_0, rank_0_only
from dyad.train.eval_config import EvalConfig

SYSTEMS = ("model", "bm25", "untrained")  # a case shows the answers of these side by side


@dataclass(frozen=True)
class Searched:
    """The passages that one encoder found for n questions.

    hits: scores and corpus indices of the best passages of each question. queries (n, D): embeddings of the questions.
    index: the index that was searched. recall_metrics: the result of Index.recall_metrics, {} if the index is exact.
    """

    hits: Hits
    queries: np.ndarray
    index: Index
    recall_metrics: dict[str, float]


class PassageSide:
    """The passages of a corpus, prepared for search with encoders and with BM25.

    It is made once and shared by all question sets that search this corpus. tokenize: the tokenizer of the model.
    config: how the text of a passage is made. options: the options of the evaluation, such as the kind of index and the
    folder for embeddings. id(position): the id of the passage with this index in the corpus.
    """

    def __init__(
        self, corpus: SearchedCorpus, tokenize: TokenizeTexts, config: PassageConfig, options: EvalConfig
    ) -> None:
        self.corpus, self._config, self._options = corpus, config, options
        self._texts = passage_texts(cast(Corpus, corpus), tokenize, config)
        self._folder = None if options.embeddings is None else Path(options.embeddings).expanduser()
        self._indexes: dict[str, tuple[str, Index]] = {}
        # the id of the passage at an index of the corpus; cached, since many questions find the same passages
        self.id = cache(lambda position: corpus.ids(position, position + 1)[0])

    def index(self, system: str, encode: Encoder) -> Index:
        """Return the search index of all passages, encoded with the current weights of `encode`.

        system: name of the encoder, "model" or "untrained". For each name one index is kept, until the weights change.
        If eval.embeddings names a folder, the embeddings are written there and used again. All processes must call it
        together.
        """
        config = self._config  # these options decide which tokens a tower gets
        facts = (self.corpus.fingerprint, config.title.name, config.prefix, str(config.length), self._tokens)
        identity = identity_of(encode.towers["y"], *facts)
        if system not in self._indexes or self._indexes[system][0] != identity:
            self._indexes.pop(system, None)  # frees its memory before the new one is made
            folder, dtype = self._folder and self._folder / identity[:16], str(self._options.embedding_type)
            y_mD = encode_corpus(encode, "y", self._texts, folder, ids=self.corpus.ids, identity=identity, dtype=dtype)
            self._indexes[system] = (identity, Index(y_mD, self._options.index, world=encode.world))
        return self._indexes[system][1]

    @cached_property
    def _tokens(self) -> str:
        return token_digest(self._texts)

    @cached_property
    def bm25(self) -> BM25:
        """The BM25 index of the titles and texts of all passages, made at the first access.

        If the option eval.embeddings names a folder, the index is kept there and reused, else it is built in memory.
        """
        passages = (self.corpus[i] for i in range(len(self.corpus)))
        texts = (f"{passage.title} {passage.text}" for passage in passages)
        return open_bm25(texts, self._folder, self.corpus.fingerprint) if self._folder else build_bm25(texts)

    def passage(self, name: str) -> Passage:
        """Return the passage of the corpus whose id is `name`; the id must be in the corpus."""
        return self.corpus[int(self.corpus.positions([name])[0])]


@dataclass(frozen=True)
class PassageRetrieval(Evaluator):
    """Evaluator of passage retrieval on one question set.

    data: the questions and what is right for them. side: the passages, prepared for search. tokenize: the tokenizer of
    the model. question: how the text of a question is made. options: the options of the evaluation. baselines: bm25 and
    fusion, if the model is compared with them; other names are not read.
    """

    data: QuestionSet
    side: PassageSide
    tokenize: TokenizeTexts
    question: QuestionConfig
    options: EvalConfig
    baselines: Sequence[Baseline] = ()

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        world, model = encode.world, self._search("model", encode)
        found = {"model": model.hits}
        if before := untrained_encoder(self.untrained, world):
            found["untrained"] = self._search("untrained", before).hits
        runs = rank_0_only(world, lambda: self._runs(found)) or {}
        report = from_rank_0(world, lambda: self._scored(runs, model, examples))
        return replace(report, files=self._files(runs["model"])) if runs else report

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(self._judge.metrics, True)

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _search(self, system: str, encode: Encoder) -> Searched:
        """Encode all questions, find the passages with the highest scores for each, and return the Searched.

        system: name of the encoder, "model" or "untrained". All processes must call it together.
        """
        index = self.side.index(system, encode)
        queries = encode("x", TextInputs.of(self.data.questions, self.tokenize, self.question))
        hits = index.search(queries, self._depth)
        return Searched(hits, queries, index, index.recall_metrics(hits, queries))

    def _runs(self, hits: Mapping[str, Hits]) -> dict[str, Run]:
        """Return system name → run (question id → passage id → score) of all systems.

        These are the encoders, BM25, and the fusion of the model with BM25. BM25 and the fusion are in the result only
        if they are among the baselines and BM25 does not fail. hits: encoder name → the passages that this encoder
        found.
        """
        every = range(len(self.data.questions))
        runs = {name: self._run(of.found(query) for query in every) for name, of in hits.items()}
        if {Baseline.bm25, Baseline.fusion} & set(self.baselines):
            with skip_on_error(Baseline.bm25):
                pairs = self.side.bm25.search([question.text for question in self.data.questions], self._depth)
                words = self._run(list(zip(rows.tolist(), scores.tolist(), strict=True)) for scores, rows in pairs)
                fused = reciprocal_rank_fusion([runs["model"], words], depth=self.options.depth)
                others = {Baseline.bm25: words, Baseline.fusion: fused}
                runs |= {str(baseline): run for baseline, run in others.items() if baseline in self.baselines}
        return runs

    def _run(self, found: Iterable[Sequence[tuple[int, float]]]) -> Run:
        """Return the run (question id → passage id → score) of one system, at most eval.depth passages a question.

        found: for each question, (index of a passage in the corpus, score) of the passages that the system found. The
        passage with the id of the question is removed from the results of the questions in `_own`.
        """
        run = {}
        for question, pairs in zip(self.data.questions, found, strict=True):
            scores = {self.side.id(position): score for position, score in pairs}
            if question.id in self._own:
                scores.pop(question.id, None)
            run[question.id] = dict(ranked(scores, self.options.depth))
        return run

    @cached_property
    def _own(self) -> set[str]:
        """The ids of the questions whose results must leave out the passage that has the id of the question.

        That passage counts as the question itself, as a document of the corpus; only the ids are compared. Questions
        for which the judgements (qrels) grade this passage are not in the set. Empty if the question set has
        drop_own = False.
        """
        if not self.data.drop_own:
            return set()
        names = [q.id for q in self.data.questions if q.id not in self.data.qrels.get(q.id, {})]
        return {name for name, position in zip(names, self.data.corpus.positions(names), strict=True) if position >= 0}

    @property
    def _depth(self) -> int:
        """How many passages are searched for a question: eval.depth, and one more if a question may find itself."""
        return self.options.depth + bool(self._own)

    # ---- scores ------------------------------------------------------------------------------------------------------

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.data, self.options.answers, self.options.depth)

    def _scored(self, runs: Mapping[str, Run], searched: Searched, examples: int | None) -> Report:
        judge = self._judge
        values = {name: judge.values(run) for name, run in runs.items()}
        model = values.pop("model")
        own = summary(model, judge.groups)
        details = {
            "search": {**searched.index.how, "depth": self.options.depth},
            "intervals": own["intervals"],
            "baselines": {name: comparison(model, v, judge.groups) for name, v in values.items()},
        }
        if any(question.answers for question in self.data.questions):
            details["answers"] = str(self.options.answers)
        if examples is not None:
            details["scores"] = self._histogram(runs["model"], searched)
            details["gallery"] = {"question → passages": self._cases(runs, model, examples)}
        counted = {question.id for question in self.data.questions} | self.data.qrels.keys()  # or not asked
        sizes = {"num_questions": float(len(counted)), "num_passages": float(len(self.data.corpus))}
        metrics = {**own["metrics"], **searched.recall_metrics, **sizes}
        return Report("passage_retrieval", metrics, chance(self.data.qrels, self.data.corpus), details)

    # ---- cases -------------------------------------------------------------------------------------------------------

    def _histogram(self, run: Run, searched: Searched) -> dict[str, list[Any]]:
        picks = evenly_spaced(len(self.data.questions), QUERIES)
        names = [self.data.questions[pick].id for pick in picks.tolist()]
        right = [self.data.corpus.positions(self._right(name, run)) for name in names]
        wrong = [
            max((s for p, s in run[name].items() if not self._judge.right(name, p)), default=-np.inf) for name in names
        ]
        return score_histogram(searched.queries[picks], searched.index.corpus, right, np.array(wrong))

    def _right(self, question: str, run: Run) -> list[str]:
        """Return the ids of the right passages of a question, best first.

        Judged passages are ordered by grade, and those missing from the corpus are left out. In a set without
        judgements, the right passages are those in `run` that contain an answer, in the order of the run.
        """
        if self.data.qrels:
            grades = self.data.qrels.get(question, {})
            judged = [p for p, grade in sorted(grades.items(), key=lambda pair: -pair[1]) if grade > 0]
            return [p for p, i in zip(judged, self.data.corpus.positions(judged), strict=True) if i >= 0]
        return [p for p, _ in ranked(run[question]) if self._judge.hit(question, p)]

    def _cases(self, runs: Mapping[str, Run], model: Values, examples: int) -> list[Case]:
        metric, value = self._judge.per_question(runs["model"], model)
        asked = [question for question in self.data.questions if question.id in value]
        quality = np.array([value[question.id] for question in asked])
        sure = np.array([max(runs["model"][question.id].values(), default=0.0) for question in asked])
        chosen = choose(quality, sure, [question.group or question.id for question in asked], examples)
        return [self._case(kind, asked[i], {metric: float(quality[i])}, runs) for kind, i in chosen]

    def _case(self, kind: str, question: Question, value: dict[str, float], runs: Mapping[str, Run]) -> Case:
        def answers(run: Run) -> list[Item]:
            best, right = ranked(run[question.id], ANSWERS), self._judge.right
            return [answer(self._item(question, name), score, right(question.id, name)) for name, score in best]

        systems = {name: answers(runs[name]) for name in SYSTEMS if name in runs}
        right = [self._item(question, passage) for passage in self._right(question.id, runs["model"])[:RIGHT]]
        query = item(question.id, question.text)
        return {"kind": kind, "query": query, "value": {**value}, "systems": systems, "right": right}

    def _item(self, question: Question, name: str) -> Item:
        passage = self.side.passage(name)
        text, spans = excerpt(passage.text, self._judge.spans(question.id, passage.text))
        return item(name, text, title=passage.title, spans=spans)

    # ---- files -------------------------------------------------------------------------------------------------------

    def _files(self, run: Run) -> dict[str, Callable[[Path], None]]:
        """Return ending of a file name → function that writes the file to a path, for the files beside the JSON result.

        The files are a TREC file of `run` (question id → passage id → score); if there are judgements, the judgements
        and BEIR's metrics; if there are answers, DPR's retriever output.
        """
        files: dict[str, Callable[[Path], None]] = {".trec": lambda path: write_run(path, run, "dyad")}
        if self.data.qrels:
            files[".qrels"] = lambda path: write_qrels(path, self.data.qrels)
            cutoffs = [k for k in CUTOFFS if k <= self.options.depth]
            files[".beir.json"] = lambda path: write_json(path, beir_result(self.data.qrels, run, cutoffs))
        if any(question.answers for question in self.data.questions):
            files[".dpr.json"] = lambda path: write_dpr(path, (self._dpr_row(q, run) for q in self.data.questions))
        return files

    def _dpr_row(self, question: Question, run: Run) -> dict[str, Any]:
        """Return a question and the passages found for it in the form of DPR's retriever output.

        Scores are strings in it. run: question id → passage id → score.
        """
        contexts = []
        for name, score in ranked(run[question.id]):
            passage, has_answer = self.side.passage(name), self._judge.hit(question.id, name)
            text = {"id": name, "title": passage.title, "text": passage.text}
            contexts.append({**text, "score": str(score), "has_answer": has_answer})
        return {"question": question.text, "answers": list(question.answers), "ctxs": contexts}
