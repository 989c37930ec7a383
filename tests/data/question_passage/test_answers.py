"""Answers in texts, against a table reasoned out by hand, and against the rule written out slowly."""

import random
import unicodedata

import pytest
from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.data.config import AnswerMatch
from dyad.data.question_passage import answers
from dyad.data.question_passage.answers import answer_finder

STRING_CASES = [
    # a token is whole, whatever the case
    ("Paris", "He lives in Paris.", True),
    ("paris", "PARIS!", True),
    ("Par", "Paris", False),
    ("New York", "in new   york\tcity", True),
    ("York New", "New York", False),
    ("a a b", "a a a b", True),
    ("one two three", "one two", False),
    # punctuation: one token per character
    ("New York", "New-York", False),
    ("well-known", "a Well-Known man", True),
    ("well - known", "a well-known man", True),
    ("well known", "a well-known man", False),
    ("John", "John's house", True),
    ("John's", "at John 's", True),
    ("John's", "John’s", False),
    ("Johns", "John's", False),
    ("foo", "foo_bar", True),
    ("foo bar", "foo_bar", False),
    ("!", "Hello!", True),
    ("...", "wait...", True),
    ("...", "wait..", False),
    ("…", "...", False),
    ("“yes”", "he said “yes”.", True),
    ("50%", "50 %", True),
    ("$5", "US$5 million", True),
    # numbers
    ("1,000", "about 1,000 men", True),
    ("1000", "1,000", False),
    ("000", "1,000", True),
    ("3.14", "3.14159", False),
    ("3", "3.14", True),
    ("2", "x²", False),
    ("x²", "X²", True),
    ("½", "1½", False),
    ("ⅳ", "Ⅳ", True),
    ("IV", "Ⅳ", False),
    # German, and lower case is not case folding
    ("Straße", "STRASSE", False),
    ("Straße", "STRAẞE", True),
    ("Köln", "Ko\u0308ln", True),
    ("Koln", "Köln", False),
    # composed and decomposed; marks in either order; singletons
    ("café", "CAFE\u0301", True),
    ("Việt Nam", "Vie\u0302\u0323t Nam", True),
    ("\u212b", "\u00e5", True),
    ("\u2126", "ω", True),
    ("й", "и\u0306", True),
    ("ё", "е", False),
    ("=", "≠", True),
    ("≠", "=", False),
    # compatibility forms stay apart
    ("fi", "ﬁ", False),
    ("ﬁre", "ﬁre", True),
    ("ABC", "ＡＢＣ", False),
    ("ａｂｃ", "ＡＢＣ", True),
    ("Æsir", "æsir", True),
    ("ǆ", "ǅ", True),
    # Turkish: İ is I and a dot; I is not ı
    ("İstanbul", "istanbul", False),
    ("İstanbul", "i\u0307stanbul", True),
    ("ılık", "ILIK", False),
    # Greek: Σ at the end of a token, not of a word of the text
    ("ΟΔΟΣ", "οδος", True),
    ("ΟΔΟΣ", "οδοσ", False),
    ("Σ", "σ", True),
    ("ΑΣ", "ΑΣ'Α", True),
    ("ΑΣ", "ασ", False),
    # no spaces between words: a run of letters is one token
    ("北京", "我住在北京市", False),
    ("北京", "我住在「北京」。", True),
    ("東京", "東京は", False),
    ("ガ", "カ\u3099", True),
    ("ガ", "ｶﾞ", False),
    ("한국", "\u1112\u1161\u11ab\u1100\u116e\u11a8", True),
    ("한", "한국", False),
    ("हिन्दी", "हिन्दी भाषा", True),
    ("हिन्द", "हिन्दी", False),
    ("กรุงเทพ", "กรุงเทพมหานคร", False),
    # Arabic: marks belong to the token, in any order
    ("كِتَاب", "قرأ كِتَاب اليوم", True),
    ("كتاب", "كِتَاب", False),
    ("كتاب", "الكتاب", False),
    ("نعم", "نعم، شكرا", True),
    ("ب\u0651\u064e", "ب\u064e\u0651", True),
    ("می\u200cخواهم", "می خواهم", True),
    # modifier letters are letters
    ("Hawaiʻi", "HAWAIʻI", True),
    ("Hawai", "Hawaiʻi", False),
    # emoji: a symbol is a token, joiners are nothing, selectors are marks, flags are two letters
    ("😀", "so😀!", True),
    ("👍", "👍🏽", True),
    ("👍🏽", "👍", False),
    ("👨👩👧", "👨\u200d👩\u200d👧", True),
    ("❤", "❤\ufe0f", True),
    ("❤\ufe0f", "❤", False),
    ("🇪🇫", "🇩🇪🇫🇷", True),
    ("Ⓐ", "ⓐ", True),
    # spaces and controls of every kind separate
    ("a b", "a\u00a0b", True),
    ("a b", "a\u200bb", True),
    ("a b", "a\x00b", True),
    ("a b", "a\x1fb", True),
    ("a b", "a\u3000b\n", True),
    ("coop", "co\u00adop", False),
    ("co op", "co\u00adop", True),
    # nothing to look for is everywhere
    ("", "anything", True),
    ("", "", True),
    (" \n", "", True),
    ("\u200b\ue000", "x", True),
    ("x", "", False),
    ("x", " ", False),
]


@pytest.mark.parametrize(("answer", "text", "expected"), STRING_CASES)
def test_string_mode(answer: str, text: str, expected: bool) -> None:
    assert answer_finder([answer]).within(text) is expected
    assert slow(answer, text) is expected
    assert bool(answer_finder([answer]).spans(text)) is (expected and bool(tokens(answer)))


def test_the_classes_are_newer_than_the_python_that_runs() -> None:
    """U+1FAE8, shaking face, Unicode 15: Python 3.11 would take it for nothing, which is everywhere."""
    assert answer_finder(["\U0001fae8"]).within("so \U0001fae8!")
    assert not answer_finder(["\U0001fae8"]).within("calm")


def tokens(text: str) -> list[str]:
    """By the general category of each character, one at a time."""
    found: list[str] = []
    running = False
    for character in unicodedata.normalize("NFD", text):
        kind = unicodedata.category(character)[0]
        if kind in "LNM":
            if not running:
                found.append("")
            found[-1] += character
        elif kind not in "ZC":
            found.append(character)
        running = kind in "LNM"
    return [token.lower() for token in found]


def slow(answer: str, text: str) -> bool:
    short, long = tokens(answer), tokens(text)
    return any(long[i : i + len(short)] == short for i in range(len(long) - len(short) + 1))


def test_random_strings_against_the_slow_rule() -> None:
    """Few different characters, so that answers are found, and all of the awkward kinds."""
    draw = random.Random(0)
    alphabet = [
        "a",
        "B",
        " ",
        "Σ",
        "σ",
        "ς",
        "'",
        "-",
        "é",
        "\u0301",
        "\u0323",
        "İ",
        "ß",
        "北",
        "1",
        "\u200d",
        "≠",
        "\x1f",
    ]
    hits = 0
    for _ in range(4000):
        text = "".join(draw.choices(alphabet, k=draw.randrange(12)))
        wanted = ["".join(draw.choices(alphabet, k=draw.randrange(1, 4))) for _ in range(2)]
        expected = any(slow(answer, text) for answer in wanted)
        assert answer_finder(wanted).within(text) is expected, (wanted, text)
        hits += expected
    assert 500 < hits < 3500


REGEX_CASES = [
    (r"19\d\d", "in 1984", True),
    (r"^19\d\d$", "in 1984", False),
    (r"^b$", "a\nb\nc", True),
    ("PARIS", "in paris", True),
    ("ar", "paris", True),
    ("straße", "STRASSE", False),
    ("Köln", "KO\u0308LN", True),
    (r"\bcafé\b", "café", True),  # a mark is part of a word, for this module
    (r"(?<=x+)y", "xxy", True),  # legal for this module, not for re
    ("[[a]", "[", True),
    ("", "x", True),
    ("[", "[", False),
    ("(a", "(a", False),
    ("*", "*", False),
    (r"\p{Lu}", "a", True),
    ("a" * 10 + "(" * 5000, "a", False),
]


@pytest.mark.parametrize(("pattern", "text", "expected"), REGEX_CASES)
def test_regex_mode(pattern: str, text: str, expected: bool) -> None:
    assert answer_finder([pattern], AnswerMatch.regex).within(text) is expected
    assert answer_finder(["[", pattern], AnswerMatch.regex).within(text) is expected


def test_a_pattern_without_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.1)
    with raises(DataError, "'(a|aa)+$'"):
        answer_finder(["(a|aa)+$"], AnswerMatch.regex).within("a" * 200 + "b")


@pytest.mark.parametrize(
    ("wanted", "text", "mode", "found"),
    [
        (["paris"], "In Paris, PARIS.", "string", ["Paris", "PARIS"]),
        (["New York"], "in New\n York!", "string", ["New\n York"]),
        (["köln"], "Köln, Ko\u0308ln, Koln", "string", ["Köln", "Ko\u0308ln"]),
        (["a b", "b c"], "x a b c y b c", "string", ["a b c", "b c"]),
        (["", "y"], "x y", "string", ["y"]),
        (["="], "1≠2", "string", ["≠"]),
        (["việt"], "ở Vie\u0302\u0323t Nam", "string", ["Vie\u0302\u0323t"]),
        (["한국"], "남 한국 북", "string", ["한국"]),
        ([r"\d+"], "É 12, É 3", "regex", ["12", "3"]),
        (["é|x*", "["], "Éa xx", "regex", ["É", "xx"]),
    ],
)
def test_spans_are_of_the_text_as_it_stands(wanted: list[str], text: str, mode: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in answer_finder(wanted, AnswerMatch(mode)).spans(text)] == found


def test_answers_of_a_question_are_made_ready_once() -> None:
    ready = answer_finder(["12 June", "June 12"])
    assert [ready.within(text) for text in ("on June 12.", "12 June", "June 13, 12", "")] == [True, True, False, False]
    assert not answer_finder([]).within("x")
