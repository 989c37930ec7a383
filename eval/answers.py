"""Does a passage contain an answer? What DPR's retrieval accuracy counts, token for token.

Karpukhin et al. 2020 (arXiv 2004.04906) took the rule from DrQA: text and answer in NFD; a token is a longest run of
letters, numbers and marks, or else one character that is neither space nor control; lower case, not case folding; the
answer's tokens stand in the text side by side. Titles are not searched. An answer without a token is in every text.
`regex` mode: the answer is a pattern, searched without case; a pattern that cannot be compiled is in no text.

The classes of characters are those of the `regex` module, as in DPR: its Unicode is newer than Python's own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import regex

from data.errors import DataError

Mode = Literal["string", "regex"]
Span = tuple[int, int]

TOP_K = (1, 5, 20, 100)
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_BETWEEN = "\x1f"  # a control character, so in no token; and no letter, so lower() treats every token as if alone
_SECONDS = 10.0  # a pattern that needs longer for one text would never end


def has_answer(answers: Iterable[str], text: str, mode: Mode = "string") -> bool:
    """Whether `text` contains one of the answers. For many texts: `prepared(answers, mode).within`."""
    return prepared(answers, mode).within(text)


def answer_spans(answers: Iterable[str], text: str, mode: Mode = "string") -> list[Span]:
    """[start, end) of all answers in `text` as it stands, in order, those that touch each other's characters joined."""
    return prepared(answers, mode).spans(text)


class Answers(Protocol):
    """The answers of one question, made ready once."""

    def within(self, text: str) -> bool: ...

    def spans(self, text: str) -> list[Span]: ...


def prepared(answers: Iterable[str], mode: Mode = "string") -> Answers:
    return {"string": _Strings, "regex": _Patterns}[mode](answers)


def top_k_accuracy(hits: Sequence[Sequence[bool]], ks: Iterable[int] = TOP_K) -> dict[str, np.ndarray]:
    """{"accuracy@k": (n,) of 0 and 1}: does one of the first k passages of a question contain an answer?

    hits: for each of n questions, best passage first; fewer than k passages are all there are.
    """
    first = np.array([next((i for i, hit in enumerate(row) if hit), np.inf) for row in hits])
    return {f"accuracy@{k}": (first < k).astype(np.float64) for k in ks}


class _Strings:
    def __init__(self, answers: Iterable[str]) -> None:
        self._tokens = [_lower_tokens(_decomposed(answer)) for answer in answers]
        self._joined = [_joined(tokens) for tokens in self._tokens]
        self._longest = [_folded(max(tokens, key=len, default="")) for tokens in self._tokens]
        self._everywhere = [] in self._tokens

    def within(self, text: str) -> bool:
        """Tokens are made only of texts that hold the longest token of an answer, as a string: one passage in many."""
        if self._everywhere:
            return True
        text = _decomposed(text)
        folded = _folded(text.lower())
        likely = [joined for joined, longest in zip(self._joined, self._longest, strict=True) if longest in folded]
        if not likely:
            return False
        tokens = _joined(_TOKEN.findall(text)).lower()
        return any(joined in tokens for joined in likely)

    def spans(self, text: str) -> list[Span]:
        decomposed = _decomposed(text)
        places = [match.span() for match in _TOKEN.finditer(decomposed)]
        words = [decomposed[start:end].lower() for start, end in places]
        found = (
            (places[i][0], places[i + len(answer) - 1][1])
            for answer in self._tokens
            if answer
            for i in range(len(words) - len(answer) + 1)
            if words[i : i + len(answer)] == answer
        )
        return _joined_spans(found, _origin(text, decomposed))


class _Patterns:
    def __init__(self, answers: Iterable[str]) -> None:
        self._patterns = [p for answer in answers if (p := _compiled(_decomposed(answer))) is not None]

    def within(self, text: str) -> bool:
        text = _decomposed(text)
        return any(next(_matches(pattern, text), None) is not None for pattern in self._patterns)

    def spans(self, text: str) -> list[Span]:
        decomposed = _decomposed(text)
        found = (span for pattern in self._patterns for span in _matches(pattern, decomposed) if span[0] < span[1])
        return _joined_spans(found, _origin(text, decomposed))


def _compiled(pattern: str) -> regex.Pattern[str] | None:
    """None when it is no pattern, whatever the reason: the data are not ours."""
    try:
        return regex.compile(pattern, flags=regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
    except Exception:
        return None


def _matches(pattern: regex.Pattern[str], text: str) -> Iterator[Span]:
    try:
        yield from (match.span() for match in pattern.finditer(text, timeout=_SECONDS))
    except TimeoutError:
        raise DataError(
            f"the answer pattern {pattern.pattern!r} takes more than {_SECONDS:.0f} s on a text of {len(text)} "
            "characters: write it without a repetition inside a repetition"
        ) from None


def _decomposed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFD", text)


def _lower_tokens(decomposed: str) -> list[str]:
    return [token.lower() for token in _TOKEN.findall(decomposed)]


def _joined(tokens: list[str]) -> str:
    """One string in which a run of tokens is a run of characters."""
    return f"{_BETWEEN}{_BETWEEN.join(tokens)}{_BETWEEN}"


def _folded(lower: str) -> str:
    """Σ is the one letter whose lower case depends on its neighbours."""
    return lower.replace("ς", "σ")


def _origin(text: str, decomposed: str) -> Sequence[int]:
    """For each character of the NFD form, the character of `text` it came from.

    NFD also sorts the marks of a letter, but no token ends between two of them.
    """
    if decomposed == text:
        return range(len(text))
    return [i for i, character in enumerate(text) for _ in unicodedata.normalize("NFD", character)]


def _joined_spans(found: Iterable[Span], origin: Sequence[int]) -> list[Span]:
    spans: list[Span] = []
    for start, end in sorted((origin[start], origin[end - 1] + 1) for start, end in found):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans
