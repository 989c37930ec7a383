"""Mining of hard negatives: passages that a model ranks high for a question although they are not right.

A search with the model gives each question its best passages, ranked from 1. Those from first_rank to last_rank are
candidates; a candidate is left out for the first of these reasons that holds, and the others keep their ranks:
    right      it is a right passage of the question, by its id, or because its text is that of a right passage
    unscored   a file with scores of another model is given, and the file has no score for it
    unknown    a margin is set, but no right passage of the question has a score (for example none is in the corpus)
    margin     its score is above the best score of a right passage minus the margin
    max_score  its score is above max_score
    repeated   an earlier candidate, not left out for a reason above, has the same text
    answer     it contains an answer of the question
A relative margin (an option) is a share of the absolute value of the best right score, so it also works for negative
scores.
Scores of another model, for example a cross-encoder, replace those of the search in the margins and in max_score, but
not in the ranks.

Shape letters: b questions in a block, n questions in all, m passages, D embedding width, k hits of a question.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dyad.data.base.files import whole_file, writable, write_json
from dyad.data.config import AnswerMatch, DataConfig, MiningConfig
from dyad.data.loading.order import local_rows
from dyad.data.question_passage.answers import prepared
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.dataset import TokenizeTexts, passage_texts, question_texts
from dyad.data.question_passage.questions import QuestionRows
from dyad.data.shards.storage import sha256_of
from dyad.eval.encode.embeddings import encode_corpus, identity_of
from dyad.eval.encode.encoder import Encoder
from dyad.eval.metrics.matches import positions_with
from dyad.eval.mine.pair_scores import PairScores
from dyad.eval.search.index import Hits, Index
from dyad.train.distributed.agreement import raise_on_all, rank_0_only
from dyad.train.distributed.world import World, gather_objects

MINED, SUMMARY = "mined.jsonl", "mined.json"
FORMAT = 1
BLOCK = 16_384  # questions at a time; a corpus larger than memory is read once for each block
# reasons that need no text of the passage, in their order; "": none of them
BY_NUMBERS = ("", "rank", "right", "unscored", "unknown", "margin", "max_score")


@dataclass(frozen=True)
class MiningInput:
    """The n questions and the m passages to mine hard negatives from, with their embeddings of width D.

    queries_nD: embeddings of the questions; passages_mD: embeddings of the corpus; both may be memory-mapped. scores:
    question–passage scores of another model, which then decide about margins and max_score. With None, the search
    scores decide.
    """

    questions: QuestionRows
    queries_nD: np.ndarray
    corpus: Corpus
    passages_mD: np.ndarray
    scores: PairScores | None = None


def mine(
    source: MiningInput, config: MiningConfig, out: Path, world: World, identity: dict[str, Any]
) -> dict[str, Any]:
    """Mine hard negatives for all questions; write out/mined.jsonl and its summary out/mined.json, and return the
    summary.

    All processes must call it together: the search and the questions are divided among them, and process 0 writes the
    lines. source: the questions and passages with their embeddings. mined.jsonl has a line for each question id:
    {"query_id", "negatives": passage ids, best first, "scores": search score of each}. If several rows have one
    question id, the right passages of all of them count. identity: origin of model and data, copied into the summary.
    Memory: one block of questions, and about 60 bytes for each question.

    Raises ConfigError for a bad index, DataError for damaged data, HardwareError if the files cannot be written.
    """
    order, ends = grouped(source.questions.id_hashes[0])
    index = raise_on_all(world, lambda: Index(source.passages_mD, config.index, world=world))
    counts: Counter[str] = Counter()
    with _written(out / MINED, world) as write:
        for start in range(0, len(ends) - 1, BLOCK):
            block = [order[begin:end].tolist() for begin, end in pairwise(ends[start : start + BLOCK + 1])]
            queries_bD = np.asarray(source.queries_nD[[rows[0] for rows in block]], dtype=np.float32)
            hits = index.search(queries_bD, config.last_rank)
            own = local_rows(len(block), world.rank, world.size)
            work = partial(_mined, source, config, block[own], queries_bD[own], hits.of(own))
            for lines, part in gather_objects(raise_on_all(world, work), world):
                rank_0_only(world, partial(write, lines))
                counts.update(part)
    summary = {
        "format": FORMAT,
        **{name: counts.pop(name, 0) for name in ("questions", "without", "negatives", "found")},
        "left_out": dict(sorted(counts.items())),
        "settings": asdict(config),
        "search": index.how,
        "identity": identity,
    }

    end = writable(out / SUMMARY)(lambda: write_json(out / SUMMARY, summary | {"sha256": sha256_of(out / MINED)}))
    rank_0_only(world, end)
    return summary


def embedded(
    encode: Encoder,
    questions: QuestionRows,
    corpus: Corpus,
    tokenize: TokenizeTexts,
    config: DataConfig,
    folder: Path,
    log: Callable[[str], None] | None = None,
) -> MiningInput:
    """Encode questions and passages with the current weights of `encode`, write the embeddings into `folder`, and
    return the questions and passages with their embeddings.

    All processes must call it together. Embeddings that an earlier call has written there, complete or not, are reused
    if the weights and the data are the same. tokenize: the model's tokenizer. config: the data options. log: function
    that prints a line; None: a progress bar on a terminal, lines on standard output elsewhere.
    """
    asked = question_texts(questions, tokenize, config.question)
    passages = passage_texts(corpus, tokenize, config.passage)
    x = identity_of(encode.towers["x"], questions.fingerprint, repr(config.question))
    y = identity_of(encode.towers["y"], corpus.fingerprint, repr(config.passage))

    def names(start: int, stop: int) -> list[str]:
        return [questions.question(i).id for i in range(start, stop)]

    queries_nD = encode_corpus(encode, "x", asked, folder / "questions", ids=names, identity=x, log=log)
    passages_mD = encode_corpus(encode, "y", passages, folder / "passages", ids=corpus.ids, identity=y, log=log)
    return MiningInput(questions, queries_nD, corpus, passages_mD)


def grouped(keys_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group the rows of a question file that have the same question id, in the order of their first rows.

    keys_n: for each of n rows the hash of its question id. Returns (n row indices, ends): group g has the row indices
    from position ends[g] to ends[g + 1] − 1, in increasing order.
    """
    _, first, group_n = np.unique(keys_n, return_index=True, return_inverse=True)
    first_n = first[group_n]
    order = np.argsort(first_n, kind="stable")
    return order, np.flatnonzero(np.diff(first_n[order], prepend=-1, append=len(keys_n)))


# ---- one block of questions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledQuestion:
    """A question with the answers and right passages of all its rows, and its embedding.

    keys: content keys (hashes of the text) of the right passages. positions: indices of the right passages in the
    corpus: of all that are given by id, and of the first passage with each right text.
    """

    id: str
    answers: tuple[str, ...]
    keys: np.ndarray
    positions: np.ndarray
    query_D: np.ndarray


def _mined(
    source: MiningInput, config: MiningConfig, groups: Sequence[list[int]], queries_bD: np.ndarray, hits: Hits
) -> tuple[bytes, Counter[str]]:
    """Choose the hard negatives of b questions; return (their lines of mined.jsonl, counts for the summary).

    The counts are of questions, questions without negatives, hits, negatives, and the hits left out for each reason.
    groups: the row indices of each question. queries_bD: the embeddings of the questions. hits: the passages that the
    search found for them.
    """
    counts: Counter[str] = Counter()
    lines = []
    for i, question in enumerate(_labelled(source, groups, queries_bD)):
        found = hits.scores[i] > -np.inf
        own = Hits(hits.scores[i][found], hits.positions[i][found])
        chosen = _chosen(source, config, question, own, counts)
        counts.update(questions=1, without=not chosen, negatives=len(chosen), found=len(own.positions))
        names, best = zip(*chosen, strict=True) if chosen else ((), ())
        line = {"query_id": question.id, "negatives": names, "scores": [float(f"{score:.6g}") for score in best]}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines).encode(), counts


def _chosen(
    source: MiningInput, config: MiningConfig, question: LabelledQuestion, hits: Hits, counts: Counter[str]
) -> list[tuple[str | None, float]]:
    """Choose the negatives of a question among its hits; return (passage id, search score) of at most config.keep
    passages, best first.

    hits: the k passages that the search found for this question, best first. For each hit that is left out, the count
    of the reason in `counts` is increased.
    """
    keys_k = source.corpus.keys[hits.positions]
    reasons_k = _reasons(source, config, question, hits, keys_k)
    counts.update(BY_NUMBERS[reason] for reason in reasons_k[reasons_k > 0])
    left = np.flatnonzero(reasons_k == 0).tolist()
    answers = question.answers if config.drop_answers else ()
    wrong = prepared(answers, AnswerMatch.regex if config.regex_answers else AnswerMatch.string)
    chosen: list[tuple[str | None, float]] = []
    seen: set[int] = set()
    for number, i in enumerate(left):
        if len(chosen) == config.keep:
            counts["beyond_keep"] += len(left) - number  # not read
            break
        key, passage = int(keys_k[i]), source.corpus[int(hits.positions[i])]
        reason = "repeated" if key in seen else "answer" if wrong.within(passage.text) else ""
        seen.add(key)
        if reason:
            counts[reason] += 1
        else:
            chosen.append((passage.id, float(hits.scores[i])))
    return chosen


def _reasons(
    source: MiningInput, config: MiningConfig, question: LabelledQuestion, hits: Hits, keys_k: np.ndarray
) -> np.ndarray:
    """Find the first reason to leave out each of the k hits (passages that the search found) of a question.

    Returns (k,) indices into BY_NUMBERS, the tuple of reasons; 0 stands for no reason. The reasons "repeated" and
    "answer", which need the text of the passage, are not checked. keys_k: content keys (hashes of the text) of the
    hits.

    Margins and max_score apply to the scores of another model, if source.scores has them, with NaN for a pair that it
    lacks; else to those of the search.
    """
    right_k = np.isin(keys_k, question.keys) | np.isin(hits.positions, question.positions)
    if source.scores is None:
        scores_k = hits.scores
        right_scores = source.passages_mD[question.positions].astype(np.float32) @ question.query_D
    else:
        ids = ([source.corpus.ids(p, p + 1)[0] for p in some.tolist()] for some in (hits.positions, question.positions))
        scores_k, right_scores = (source.scores.of(question.id, names) for names in ids)
    right_scores = np.concatenate([right_scores, scores_k[right_k]])
    right_scores = right_scores[~np.isnan(right_scores)]
    best = float(right_scores.max()) if len(right_scores) else np.nan
    limits = [] if config.margin is None else [best - config.margin]
    limits += [] if config.relative_margin is None else [best - config.relative_margin * abs(best)]
    limit = min(limits, default=np.inf)  # NaN: no right passage has a score
    conditions = [
        np.arange(1, len(keys_k) + 1) < config.first_rank,
        right_k,
        np.isnan(scores_k),
        np.full(len(keys_k), np.isnan(limit)),
        scores_k > limit,
        scores_k > (np.inf if config.max_score is None else config.max_score),
    ]
    return np.select(conditions, range(1, len(BY_NUMBERS)), 0)


# ---- right passages --------------------------------------------------------------------------------------------------


def _labelled(source: MiningInput, groups: Sequence[list[int]], queries_bD: np.ndarray) -> list[LabelledQuestion]:
    """Build the questions of a block with the corpus indices of all their right passages, found by id or by text.

    groups: the row indices of each question. queries_bD: their embeddings.
    """
    asked = [_question_of(source, rows, query_D) for rows, query_D in zip(groups, queries_bD, strict=True)]
    keys_m = source.corpus.keys
    found = positions_with(keys_m, np.array([key for question in asked for key in question.keys.tolist()], np.int64))
    first = dict(zip(keys_m[found[::-1]].tolist(), found[::-1].tolist(), strict=True))  # backwards: the first one stays
    by_text = [[first[key] for key in question.keys.tolist() if key in first] for question in asked]
    pairs = zip(asked, by_text, strict=True)
    return [replace(one, positions=np.union1d(one.positions, np.array(more, np.int64))) for one, more in pairs]


def _question_of(source: MiningInput, numbers: Sequence[int], query_D: np.ndarray) -> LabelledQuestion:
    """Build one question from its rows, with the corpus indices of the right passages that the rows give by id.

    numbers: the row indices. Of the passages only content keys and corpus indices are kept, because the rows with all
    their passages take a thousand times as much memory.
    """
    keys: set[int] = set()
    ids: list[str] = []
    answers: dict[str, None] = {}
    for number in numbers:
        row = source.questions.row(number)
        keys.update(row.positives.keys)
        ids += [passage.id for passage in row.positives if passage.id is not None]
        answers.update(dict.fromkeys(answer for answer in row.question.answers if answer.strip()))  # "" is in all
    name, positions = source.questions.question(numbers[0]).id, source.corpus.positions(ids)
    right = positions[positions >= 0]
    return LabelledQuestion(name, tuple(answers), np.array(sorted(keys), dtype=np.int64), right, query_D)


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _written(path: Path, world: World) -> Iterator[Callable[[bytes], Any]]:
    """Context manager: give the block a function that appends lines to a new file, which replaces `path` at the end of
    the block.

    The file appears whole. If the block raises, an older file at `path` stays as it was, but its summary (mined.json)
    is deleted at the beginning in any case. All processes must enter it together; only process 0 may call the function.
    """
    errors = writable(path)
    with ExitStack() as stack:

        def begin() -> BinaryIO:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / SUMMARY).unlink(missing_ok=True)  # it describes the file that is about to be replaced
            return stack.enter_context(whole_file(path))

        file = rank_0_only(world, errors(begin))
        yield errors(lambda lines: file and file.write(lines))
        rank_0_only(world, errors(stack.close))
