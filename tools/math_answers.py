r"""Where in a text does the answer to a math problem stand, and what is settled about it without algebra?

What counts is, after the thinking: the last \boxed{...} (several that only commas, `and` or `or` join are one
answer), or else the content of <answer>...</answer>, the line after `####`, the whole text if it is nothing but an
answer, or what a sentence states ("the answer is 4", "x = 4", "**4**"). A number that is merely mentioned ("plain 42")
is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from srpo_env.parsers import after_thinking, boxes, tagged
from srpo_env.tools.math_exact import same

Verdict = Literal["right", "wrong", "unscorable"]
EXHAUSTED: Literal["exhausted"] = "exhausted"
"""What a comparison that ran out of time or memory says instead of a verdict."""

_AFTER_THE_REPLY = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text)\|>|<｜end▁of▁sentence｜>|</s>")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(?!#)(\S[^\n]*)", re.MULTILINE)
_JOINS = r"and|or|for\s+part\s+\(?\w\)?"
_JOINED = re.compile(
    rf"(?:[\s$,;+&]|\\[()\[\],;! ]|\\q?quad|\\text\s*\{{(?:[\s,]|{_JOINS}|\(\w\))*\}}|\b(?:{_JOINS})(?!\w))*"
)
_LONGEST_JOIN = 80
_DOLLAR = re.compile(r"(?<!\\)\$")

_WRAPPED = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]*)\$\$",
        r"\$([^$]*)\$",
        r"\\\(((?:(?!\\\)).)*)\\\)",
        r"\\\[((?:(?!\\\]).)*)\\\]",
        r"\*\*([^*]*)\*\*",
        r"\[([^\[\],;]*)\]",
    )
]
_MOST_WRAPPERS = 4
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\s*\{[^{}]*\}(?:\{[^{}]*\})?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_NOT_WORDS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
        "sqrt",
        "pi",
        "inf",
        "infinity",
        "oo",
        "and",
        "or",
        "mod",
        "max",
        "min",
        "gcd",
        "lcm",
        "pm",
        "frac",
        "cdot",
    ]
)
_PROSE = re.compile(r"[A-Za-z][A-Za-z'’,.!?\- ]*")
_NUMBER_WITH_UNIT = re.compile(r"[-+]?[$€£¥]?[\d.,/ ]*\d\s*[A-Za-z²³°%€£¥][A-Za-z²³°%€£¥.,\s]*")
_ANSWER = re.compile(r"answer", re.IGNORECASE)
_SAYS = re.compile(r"^answer(?:\s|[:=*]|is\b)*", re.IGNORECASE)
_SENTENCE = re.compile(r"\n|(?<=[.!?])\s+(?=[^a-z\s])")
_STATES = re.compile(
    r"\b(?:is|are|was|equals?|be|gives?|total|get|by|between)\b|[=:≈]|\*\*|\$[^$\n]+\$|\\\(.+?\\\)|\\\[", re.IGNORECASE
)
_CONTENT = re.compile(r"\d|\\[A-Za-z]|\$|\\\(|\\\[|\*\*")
_BRACKETED = re.compile(r"(?<!\\)\[([^\[\],;\\]*)\]")
_MONEY = re.compile(r"[-+]?\\?\$\d[\d,.]*")
_STATED_WORD = re.compile(r"(?:\banswer\b|\bis\b|:)(?:[ \t*:]|\bis\b)*([^\n]*)", re.IGNORECASE)
_LONGEST_SENTENCE = 800
_LONGEST_WORDS = 60

_CHOICE = re.compile(r"\(?([A-Za-z])\)?\.?(?:\s*[:.)]\s*\S.*)?", re.DOTALL)
_STATED_CHOICE = re.compile(r"(?:answer|option|choice)\W*(?:is|are)?\W*(?:option\s*)?\(?\b([A-J])\b", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}:\d{2}(?::\d{2})?)\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_DOTS = re.compile(r"\\[lcd]?dots\b|\.\.\.|…|⋯")
_LOOKS = [
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile("−"), "-"),
]
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad|~|\s")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[1-9]\d{0,2}(?:(?:,\d{3}){1,100}|(?: \d{3}){1,100})|\d{1,400})?"
    r"(?:\.(?P<part>\d{0,400}))?"
    r"(?:(?:e| ?(?:\\times|\\cdot) ?10\^\{?)(?P<power>[-+]?\d{1,3})\}?)?"
)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?:\\[dtc]?frac\{(\d{1,400})\}\{(\d{1,400})\}|(\d{1,400})/(\d{1,400}))")

_MIXED = re.compile(r"([-+]?)(\d{1,400}) (\d{1,400})/(\d{1,400})")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it stands in a text.

    Attributes:
        text: The answer, or the sentence that states it.
        stated: Whether `text` is the answer and nothing else.
    """

    text: str
    stated: bool = True


def answer_of(text: str) -> Answer | None:
    r"""Returns what a reply gives as its answer; None where it gives none.

    >>> answer_of(r"<think>\boxed{1}</think> So \boxed{2}, \boxed{3}.").text
    '2, 3'
    >>> answer_of("64 + 67 = 131\n#### 131").text, answer_of("I like 42.")
    ('131', None)
    """
    text = after_thinking(text)
    end = _AFTER_THE_REPLY.search(text)
    text = text[: end.start()] if end else text
    marked = _marked(text)
    if marked is not None:
        return _clean(marked, marked=True)
    bare = _clean(text)
    if bare is None or bare.stated or (len(bare.text) <= _LONGEST_WORDS and _PROSE.fullmatch(bare.text)):
        return bare
    return _sentence(bare.text)


def reference_of(text: str) -> Answer | None:
    """Returns a reference answer, taken out of the solution that it may stand in; None where it is empty."""
    marked = _marked(text)
    return _clean(text) if marked is None else _clean(marked, marked=True)


def _marked(text: str) -> str | None:
    """What the text marks as its answer, "" where the mark holds nothing; None where it has no mark."""
    found = boxes(text)
    if found:
        return _joined(text)
    if _OPEN_BOX.search(text):
        return ""
    if pairs := tagged(text, ["answer"]):
        _, start, end = pairs[-1]
        return text[start:end].strip()
    lines = _HASHES.findall(text)
    return lines[-1].strip() if lines else None


def _joined(text: str) -> str:
    """The content of the last box, with those that belong to the same answer before it."""
    found = boxes(text)
    group = [found[-1]]
    for box in reversed(found[:-1]):
        gap = text[box.end : group[0].start]
        if len(gap) > _LONGEST_JOIN or not _JOINED.fullmatch(gap):
            break
        group.insert(0, box)
    return ", ".join(dict.fromkeys(box.content for box in group if box.content))


def _clean(text: str, *, marked: bool = False) -> Answer | None:
    """Takes wrappers such as $...$ off; what is left is the answer, or a sentence that holds it."""
    text = text.strip()
    as_mathematics = False
    for _ in range(_MOST_WRAPPERS):
        before = text
        text = text.removesuffix(".").strip() if not text.endswith("..") else text
        for wrapper in _WRAPPED:
            if match := wrapper.fullmatch(text):
                text = match[1].strip()
                as_mathematics |= "**" not in before and not before.startswith("[")
    if marked and not _MONEY.fullmatch(text):
        text = _DOLLAR.sub("", text).strip()
    return Answer(text, as_mathematics or _is_bare(text, words=int(marked))) if text else None


def _is_bare(text: str, words: int = 0) -> bool:
    """Whether a text is an answer and nothing else: mathematics, a word, or text marked as such."""
    if re.fullmatch(r"[A-Za-z]+", text) or _MONEY.fullmatch(text):
        return True
    if _DOLLAR.search(text) or r"\(" in text or r"\[" in text or "**" in text:
        return False
    rest = _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", _TEXT.sub(" ", text)))
    found = [word for word in _WORD.findall(rest) if word.lower() not in _NOT_WORDS]
    return sum(len(word) > 2 or " " in text for word in found) <= words


def _sentence(text: str) -> Answer | None:
    """The last part of a text that states an answer."""
    text = _BRACKETED.sub(r"\1", text).replace("{,}", ",").replace(r"\!", "")
    if _NUMBER_WITH_UNIT.fullmatch(text.strip()):
        return Answer(text.strip(), stated=False)
    for match in reversed(list(_ANSWER.finditer(text))[-10:]):
        said = text[match.start() : match.start() + _LONGEST_SENTENCE]
        first = _SENTENCE.split(said)[0]
        rest = said[len("answer") :].strip(" :*\n")
        plain = _clean(_SAYS.sub("", first).strip(" *"))
        if plain and number(plain.text) is not None:
            return plain
        if _CONTENT.search(first) or _CONTENT.match(rest) or _STATED_CHOICE.match(said):
            return Answer(said, stated=False)
    for sentence in reversed(_SENTENCE.split(text)[-40:]):
        said = sentence.strip()[-_LONGEST_SENTENCE:]
        if _CONTENT.search(said) and _STATES.search(said):
            return Answer(said, stated=False)
    stated = _last(_STATED_WORD, text[-_LONGEST_SENTENCE:])
    return Answer(stated[0], stated=False) if stated and stated[1] else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return found[-1] if found else None


def settle(gold: Answer | None, answer: Answer | None, tolerance: float = 0.0) -> tuple[Verdict, str] | None:
    """Decides what needs no algebra; None where it is needed. What is decided here is certain."""
    if gold is None:
        return "unscorable", "no reference answer"
    if is_prose(gold):
        return "unscorable", "the reference answer is prose, which can't be compared as mathematics"
    if answer is None:
        return "wrong", "no answer"
    if (gold.stated or not _CONTENT.search(gold.text)) and (choice := _choice_of_gold(gold.text)):
        return _equal(choice == _choice(answer))
    if answer.stated and same_text(gold.text, answer.text):
        return "right", "same text"
    if (words := _words(gold.text)) is not None:
        return _equal(words == _words_of(answer))
    times = _TIME.fullmatch(gold.text), _TIME.fullmatch(answer.text)
    if times[0] and times[1]:
        return _equal(_clock(times[0]) == _clock(times[1]))
    if not (gold.stated and answer.stated):
        return None
    if _DOTS.search(gold.text) or _DOTS.search(answer.text):
        return _equal(_same_sequence(gold.text.split(","), answer.text.split(",")))
    numbers = number(gold.text, answer.text), number(answer.text, gold.text)
    if numbers[0] is not None and numbers[1] is not None:
        near = abs(numbers[0][0] - numbers[1][0]) <= Fraction(tolerance)
        return _equal(near or same_number(*numbers[0], *numbers[1]))
    exact = same(gold.text, answer.text)
    return _equal(exact) if exact or (exact is False and not tolerance) else None


def _equal(same: bool) -> tuple[Verdict, str]:
    return ("right", "equal") if same else ("wrong", "not equal")


def is_prose(gold: Answer) -> bool:
    r"""Whether a reference is words that nothing marks as an answer: `see figure`, not `even` or `\text{no one}`."""
    return bool(_PROSE.fullmatch(gold.text)) and len(_WORD.findall(gold.text)) > 1 and not gold.stated


def same_text(first: str, second: str) -> bool:
    """Whether two answers are the same but for white-space and commands that only change the look."""
    return _look(first) == _look(second)


def _look(text: str) -> str:
    for written, plain in _LOOKS:
        text = written.sub(plain, text)
    return _SPACES.sub("", text)


def _words(text: str) -> str | None:
    r"""The words of an answer that is text: a word, or what \text{...} marks; None for mathematics."""
    inner = _TEXT.fullmatch(text)
    words = " ".join((inner[1] if inner else text).split()).rstrip(".").casefold()
    if not re.fullmatch(r"[^\W\d_]{2}[^\d\\$^_{}=+*/]*" if inner else r"[^\W\d_]{3,}", words):
        return None
    return None if words in _NOT_WORDS else words


def _words_of(answer: Answer) -> str | None:
    if answer.stated:
        return _words(answer.text) or answer.text.casefold()
    stated = _last(_STATED_WORD, answer.text)
    cleaned = _clean(stated[1].strip(" *.!") if stated else answer.text)
    return None if cleaned is None else _words(cleaned.text) or cleaned.text.casefold()


def _choice_of_gold(text: str) -> str | None:
    r"""The letter of a multiple choice: one capital out of A to J, alone, in brackets or in \text{...}."""
    match = re.fullmatch(r"\(?([A-J])\)?", _TEXT.sub(r"\1", text).strip())
    return match[1] if match else None


def _choice(answer: Answer) -> str | None:
    """The letter that an answer chooses, as a capital: `(E)`, `E: polygenic risk`, `the answer is E`."""
    if answer.stated or not _ANSWER.search(answer.text):
        match = _CHOICE.fullmatch(_TEXT.sub(r"\1", answer.text).strip())
        if match:
            return match[1].upper()
    stated = _last(_STATED_CHOICE, _TEXT.sub(r"\1", answer.text).replace("$", ""))
    return stated[1].upper() if stated else None


def _clock(match: re.Match[str]) -> tuple[str, str]:
    return match[1].zfill(5), (match[2] or "").casefold()


def _same_sequence(first: list[str], second: list[str]) -> bool:
    r"""Whether two lists with dots, such as `1, 2, \ldots, 9`, have equal elements and the dots in the same places."""
    if len(first) != len(second):
        return False
    pairs = [(_DOTS.sub("…", one), _DOTS.sub("…", other)) for one, other in zip(first, second, strict=True)]
    return all(same_text(*pair) or _same_plain_number(*pair) for pair in pairs)


def _same_plain_number(first: str, second: str) -> bool:
    one, other = number(first, second), number(second, first)
    return one is not None and other is not None and same_number(*one, *other)


def number(text: str, other: str = "") -> tuple[Fraction, bool] | None:
    r"""Reads a plain number or a fraction of two, or both (`1 1/2`); None where the text is anything else.

    Digits may be grouped by commas or spaces, `1{,}000` and `1\,000` too. A single comma is read as a decimal one where
    `other`, what it is compared with, has a decimal point.

    Returns:
        The value, and whether it is written with a decimal point.

    >>> number("1,000.50"), number("2,4,6"), number("3,5", other="3.5")
    ((Fraction(2001, 2), True), None, (Fraction(7, 2), True))
    """
    text = text.replace("−", "-").replace("{,}", ",").replace(r"\!", "").replace(r"\,", " ")
    text = re.sub(r"^([-+]?)\s*\\?\$", r"\1", text.strip())
    match = _FRACTION.fullmatch(text)
    if match:
        above, below = match[2] or match[4], match[3] or match[5]
        value = Fraction(int(above), int(below)) if int(below) else None
        return None if value is None else (-value if match["sign"] == "-" else value, False)
    if match := _MIXED.fullmatch(text):
        value = Fraction(int(match[3]), int(match[4])) if int(match[4]) else None
        if value is None or value >= 1:
            return None
        value += int(match[2])
        return -value if match[1] == "-" else value, False
    match = _NUMBER.fullmatch(text)
    if not match and "." in other and _DECIMAL_COMMA.fullmatch(text):
        match = _NUMBER.fullmatch(text.replace(",", "."))
    if not match or not (match["whole"] or match["part"]):
        return None
    whole = (match["whole"] or "0").replace(",", "").replace(" ", "")
    value = Fraction(f"{match['sign']}{whole}.{match['part'] or '0'}e{match['power'] or '0'}")
    return value, bool(match["part"] or match["power"])


def same_number(first: Fraction, first_decimal: bool, second: Fraction, second_decimal: bool) -> bool:
    """Whether two numbers are equal: exactly, or with a decimal to six digits both after the point and in all.

    >>> same_number(Fraction(1, 3), False, Fraction("0.333333"), True)
    True
    """
    if first == second or not (first_decimal or second_decimal):
        return first == second
    return abs(first - second) * 2_000_000 <= min(Fraction(1), 2 * max(abs(first), abs(second)))
