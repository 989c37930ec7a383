"""Decide whether a passage contains an answer, by the rule of DPR's retrieval accuracy.

Karpukhin et al. 2020 (arXiv 2004.04906) took the rule from DrQA. Text and answer are normalised to NFD (Unicode's
decomposed form) and cut into tokens. A token is a longest run of letters, numbers and marks, or one other character
that is neither space nor control. Tokens are compared in lower case (not case-folded), and the tokens of the answer
must be adjacent in the text. Titles are not searched. An answer without tokens is found in every text. In `regex` mode
the answer is a pattern, searched regardless of case; a pattern that does not compile is found in no text.

The character classes are those of the `regex` module, as in DPR: its Unicode version is newer than Python's.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import regex

from dyad.data.base.errors import DataError
from dyad.data.config import AnswerMatch

Span = tuple[int, int]

_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_BETWEEN = "\x1f"  # joins tokens: a control character is in no token, and lower() treats tokens beside it separately
_SECONDS = 10.0  # limit for one pattern in one text; a pattern with catastrophic backtracking would never end


def answer_finder(answers: Iterable[str], mode: AnswerMatch = AnswerMatch.string) -> "Answers":
    """Return an object that finds the answers of one question in texts: its methods are `within` and `spans`.

    mode: whether the answers are strings or regular expressions. A search for a regular expression raises DataError if
    it takes more than 10 seconds in one text. Without answers nothing is found.
    """
    return _Strings(answers) if mode is AnswerMatch.string else _Patterns(answers)


class _Strings:
    """Finds the answers of one question in texts, as sequences of tokens (answers are strings)."""

    def __init__(self, answers: Iterable[str]) -> None:
        self._tokens = [[t.lower() for t in _TOKEN.findall(_decomposed(answer))] for answer in answers]
        self._joined = [_joined(tokens) for tokens in self._tokens]
        self._longest = [_folded(max(tokens, key=len, default="")) for tokens in self._tokens]
        self._everywhere = [] in self._tokens

    def within(self, text: str) -> bool:
        """Whether `text` contains one of the answers of a question: all tokens of the answer, adjacent and in order,
        regardless of case. An answer without tokens is in every text.
        """
        if self._everywhere:
            return True
        text = _decomposed(text)
        folded = _folded(text.lower())
        # only texts that contain the longest token of an answer as a substring are cut into tokens: few do
        likely = [joined for joined, longest in zip(self._joined, self._longest, strict=True) if longest in folded]
        if not likely:
            return False
        tokens = _joined(_TOKEN.findall(text)).lower()
        return any(joined in tokens for joined in likely)

    def spans(self, text: str) -> list[Span]:
        """Return (start, end) of each occurrence in `text` of an answer of the question, in order: indices of
        characters of `text`, `end` exclusive. Overlapping occurrences are merged. An answer without tokens has no
        spans."""
        decomposed = _decomposed(text)
        tokens = [match.span() for match in _TOKEN.finditer(decomposed)]
        words = [decomposed[start:end].lower() for start, end in tokens]
        found = (
            (tokens[i][0], tokens[i + len(answer) - 1][1])
            for answer in self._tokens
            if answer
            for i in range(len(words) - len(answer) + 1)
            if words[i : i + len(answer)] == answer
        )
        return _joined_spans(found, _original_indices(text, decomposed))


class _Patterns:
    """Finds the answers of one question in texts; the answers are regular expressions. Methods as of _Strings.

    A pattern that does not compile is left out. The methods raise DataError if a search in one text takes more than
    _SECONDS. Empty matches are no spans.
    """

    def __init__(self, answers: Iterable[str]) -> None:
        self._patterns = [p for answer in answers if (p := _compiled(_decomposed(answer))) is not None]

    def within(self, text: str) -> bool:
        text = _decomposed(text)
        return any(next(_matches(pattern, text), None) is not None for pattern in self._patterns)

    def spans(self, text: str) -> list[Span]:
        decomposed = _decomposed(text)
        found = (span for pattern in self._patterns for span in _matches(pattern, decomposed) if span[0] < span[1])
        return _joined_spans(found, _original_indices(text, decomposed))


Answers = _Strings | _Patterns


def _compiled(pattern: str) -> regex.Pattern[str] | None:
    """Compile the regular expression of an answer as DPR does: case is ignored, ^ and $ match at each line.

    Returns None if this fails for any reason: patterns come from the data set and may be invalid in any way.
    """
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


def _joined(tokens: list[str]) -> str:
    """Join tokens to one string with a separator around each token. A joined sequence of tokens is then a substring of
    another only if the other has all of its tokens, whole, adjacent and in order."""
    return f"{_BETWEEN}{_BETWEEN.join(tokens)}{_BETWEEN}"


def _folded(lower: str) -> str:
    """Replace ς by σ in a lower-case text, so that equal words are equal texts at any position.

    Σ is the only letter whose lower case (ς at the end of a word, else σ) depends on its neighbours.
    """
    return lower.replace("ς", "σ")


def _original_indices(text: str, decomposed: str) -> Sequence[int]:
    """Return, for each character of `decomposed`, the index of the character of `text` from which it came. decomposed:
    the NFD form of `text`.

    NFD also reorders the marks (accents) of a letter, so a mark may get the index of another mark of the same letter.
    This does no harm, because the indices only say where tokens begin and end, and no token ends between two marks.
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
