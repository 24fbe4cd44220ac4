r"""Are two answers equal, as far as exact arithmetic tells? Formulas, lists, matrices, intervals, equations.

It is much cheaper than algebra and certain where it decides; None is left to math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from srpo_env.tools.math_polynomials import Polynomial, Unreadable, polynomial
from srpo_env.tools.math_spelling import spelled

_LONGEST = 400
_LOOKS = [
    (re.compile(r"\\\\"), "⏎"),
    (re.compile(r"\\begin\{[pb]matrix\}"), "⟪"),
    (re.compile(r"\\end\{[pb]matrix\}"), "⟫"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\leq?(?:slant)?(?![A-Za-z])|<="), "≤"),
    (re.compile(r"\\geq?(?:slant)?(?![A-Za-z])|>="), "≥"),
    (re.compile(r"\\neq?(?![A-Za-z])|!="), "≠"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\approx(?![A-Za-z])|≈"), "="),
    (re.compile(r"\\in(?![A-Za-z])"), "∈"),
    (re.compile(r"\\cup(?![A-Za-z])"), "∪"),
    (re.compile(r"\\infty(?![A-Za-z])"), "∞"),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])|\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])"), "∨"),
    (re.compile(r",?\s*(?:\\text\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z]))"), ","),
    (re.compile(r"\{,\}|,\\!\s*|\\!"), ""),
    (re.compile(r"\\\{"), "⟦"),
    (re.compile(r"\\\}"), "⟧"),
]
_DIGITS_APART = re.compile(r"[\d.](?:\\[,;: ]|~|\s)+[\d.]")
_SPACES = re.compile(r"\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_THOUSANDS = re.compile(r"(?<!\d)\d{1,3},\d{3}(?!\d)")
_NAME = re.compile(r"[A-Za-z](?:_(?:\{\w{1,3}\}|\w))?(?:\([A-Za-z]\))?")
_NAMES = re.compile(r"\((?:[A-Za-z](?:_\w)?,)+[A-Za-z](?:_\w)?\)=")
_RELATION = re.compile(r"[<>≤≥≠]")
_BRACKETS = {"(": 1, "[": 1, "{": 1, "⟦": 1, "⟪": 1, ")": -1, "]": -1, "}": -1, "⟧": -1, "⟫": -1}
_INTERVALS = frozenset({"()", "[]", "(]", "[)"})
_AMBIGUOUS = frozenset("ei")
_INFINITY = {"∞": 1, "+∞": 1, "-∞": -1}


@dataclass(frozen=True)
class _End:
    """An end of an interval; without a `value` it is infinite."""

    value: Polynomial | None
    closed: bool = False


@dataclass(frozen=True)
class _Region:
    """A set of real numbers: intervals that neither meet nor touch, in order; the variable it is said of, if any."""

    intervals: tuple[tuple[_End, _End], ...]
    variable: str | None = None


@dataclass(frozen=True)
class _List:
    """Several things; `brackets` are a tuple's, ⟪⟫ of a matrix and of its rows, "" of a list or set: no order."""

    items: tuple[_Thing, ...]
    brackets: str


@dataclass(frozen=True)
class _Equation:
    """`left = right`; `name` where the left side is no more than a name."""

    left: Polynomial | None
    right: Polynomial
    name: str | None


_Thing = Polynomial | _Region | _List | _Equation


def same(gold: str, answer: str) -> bool | None:
    r"""Returns whether two answers are equal; None where that is not certain.

    >>> same(r"\frac{\sqrt8}{2}", r"\sqrt2"), same("(1, 2)", "(2, 1)"), same("x > 3", r"(3, \infty)"), same("e", "3")
    (True, False, True, None)
    """
    first, second = read(gold), read(answer)
    if first is None or second is None:
        return None
    try:
        return _same(first, second)
    except (Unreadable, ArithmeticError):  # what has grown too large on the way
        return None


@lru_cache(maxsize=4096)
def read(text: str) -> _Thing | None:
    """Returns what an answer says; None where it is none of these things."""
    if len(text) > _LONGEST:
        return None
    try:
        return _read(_plain(text))
    except (Unreadable, ArithmeticError):
        return None


def _plain(text: str) -> str:
    text = spelled(text)
    for written, plain in _LOOKS:
        text = written.sub(plain, text)
    if _DIGITS_APART.search(text):
        raise Unreadable  # 1 000 or 1 1/2
    text = _SPACES.sub("", text).rstrip(".")
    if _WORD.search(_COMMAND.sub(" ", text)) or _THOUSANDS.search(text):
        raise Unreadable  # a product of letters or a word, a thousand or two numbers
    return text


def _read(text: str) -> _Thing:
    if text.startswith("⟪") and _encloses(text):
        rows = [row.split("&") for row in text[1:-1].split("⏎") if row]
        return _List(tuple(_List(tuple(polynomial(cell) for cell in row), "⟪⟫") for row in rows), "⟪⟫")
    if text.count(r"\pm") == 1 and not _split_at(text, ",;")[1:]:
        return _List((_read(text.replace(r"\pm", "+")), _read(text.replace(r"\pm", "-"))), "")
    if "∨" in text or "∪" in text or "∈" in text or _RELATION.search(text):
        return _region(text)
    parts = _split_at(text, ",;")
    if len(parts) > 1:
        return _List(tuple(_read(part) for part in parts), "")
    if "=" in text:
        named = _NAMES.match(text)
        return _read(text[named.end() :]) if named else _equation(text)
    brackets = text[:1] + text[-1:]
    if brackets in _INTERVALS | {"⟦⟧", "{}"} and _encloses(text):
        parts = _split_at(text[1:-1], ",;")
        if "∞" in text:
            return _region(text)
        if brackets == "()" and len(parts) == 1 and "⟪" in text:
            return _read(text[1:-1])
        if len(parts) > 1 or brackets == "⟦⟧":
            return _List(tuple(_read(part) for part in parts), "" if brackets in ("⟦⟧", "{}") else brackets)
    return polynomial(text)


def _split_at(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that stand in no brackets."""
    depth = start = 0
    parts = []
    for at, character in enumerate(text):
        depth += _BRACKETS.get(character, 0)
        if character in separators and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for at, character in enumerate(text):
        depth += _BRACKETS.get(character, 0)
        if depth == 0:
            return at == len(text) - 1
    return False


def _equation(text: str) -> _Equation:
    left, *rest = text.split("=")
    if len(rest) != 1:
        raise Unreadable
    name = left if _NAME.fullmatch(left) else None
    return _Equation(None if name and "(" in name else polynomial(left), polynomial(rest[0]), name)


def _region(text: str) -> _Region:
    """`x∈[1,2]∪(3,∞)`, `1<x≤2`, `x<1∨x>3`, `x≠2`."""
    variable, found = None, []
    if "∈" in text:
        variable, text = text.split("∈", 1)
        if not _NAME.fullmatch(variable):
            raise Unreadable
    for part in _split_at(text, "∨∪"):
        if _RELATION.search(part):
            name, intervals = _solved(part)
            if variable not in (None, name):
                raise Unreadable
            variable = name
            found += intervals
        else:
            found.append(_interval(part))
    return _Region(_merged(found), variable)


def _interval(text: str) -> tuple[_End, _End]:
    parts = _split_at(text[1:-1], ",;")
    if len(parts) != 2 or text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        raise Unreadable
    return _end(parts[0], text[0] == "[", below=True), _end(parts[1], text[-1] == "]", below=False)


def _end(text: str, closed: bool, *, below: bool) -> _End:
    if text in _INFINITY:
        if closed or (_INFINITY[text] < 0) != below:
            raise Unreadable
        return _End(None)
    value = polynomial(text)
    if value.symbols:
        raise Unreadable
    return _End(value, closed)


def _solved(text: str) -> tuple[str, list[tuple[_End, _End]]]:
    """The name and the intervals of `1<x≤2`, or of one relation that is linear in one name."""
    signs, sides = _RELATION.findall(text), _RELATION.split(text)
    if len(signs) == 1:
        return _linear(sides[0], signs[0], sides[1])
    if len(signs) != 2 or not _NAME.fullmatch(sides[1]) or "≠" in signs:
        raise Unreadable
    if signs[0] in ">≥" and signs[1] in ">≥":
        signs, sides = ["≤" if sign == "≥" else "<" for sign in reversed(signs)], sides[::-1]
    if signs[0] not in "<≤" or signs[1] not in "<≤":
        raise Unreadable
    return sides[1], [(_end(sides[0], signs[0] == "≤", below=True), _end(sides[2], signs[1] == "≤", below=False))]


def _linear(left: str, sign: str, right: str) -> tuple[str, list[tuple[_End, _End]]]:
    if _NAME.fullmatch(left) and "(" in left:
        name, bound, positive = left, polynomial(right), True
    else:
        difference = polynomial(left) - polynomial(right)
        if len(difference.symbols) != 1:
            raise Unreadable
        (name,) = difference.symbols
        slope = Polynomial({term: c for term, c in difference.terms.items() if term[1]}, difference.decimal)
        if slope.terms.keys() != {(1, ((name, 1),))}:
            raise Unreadable
        variable = Polynomial({(1, ((name, 1),)): next(iter(slope.terms.values()))})
        bound = (slope - difference) * polynomial(name) / variable
        positive = next(iter(slope.terms.values())) > 0
    if bound.symbols:
        raise Unreadable
    if sign == "≠":
        return name, [(_End(None), _End(bound)), (_End(bound), _End(None))]
    end = _End(bound, closed=sign in "≤≥")
    return name, [(_End(None), end)] if (sign in "<≤") == positive else [(end, _End(None))]


def _merged(intervals: Sequence[tuple[_End, _End]]) -> tuple[tuple[_End, _End], ...]:
    """Intervals in order; two that meet or touch are refused rather than joined."""

    def low(each: tuple[_End, _End]) -> float:
        return float("-inf") if each[0].value is None else each[0].value.value

    def high(each: tuple[_End, _End]) -> float:
        return float("inf") if each[1].value is None else each[1].value.value

    found = sorted(intervals, key=low)
    if any(low(each) >= high(each) for each in found):
        raise Unreadable
    for one, other in pairwise(found):
        touching = one[1].value is not None and other[0].value is not None and one[1].value.same(other[0].value)
        if (touching and (one[1].closed or other[0].closed)) or (not touching and high(one) >= low(other)):
            raise Unreadable
    return tuple(found)


def _same(gold: _Thing, answer: _Thing) -> bool | None:
    if isinstance(gold, Polynomial) and isinstance(answer, Polynomial):
        return _same_value(gold, answer)
    if isinstance(gold, _Equation) and isinstance(answer, _Equation):
        return _same_equation(gold, answer)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, _List) and not one.brackets and isinstance(other, Polynomial):
            return _same_list(one, _List((other,), ""))
        if isinstance(one, _Equation) and one.name and isinstance(other, Polynomial):
            return _same_value(one.right, other)
        if isinstance(one, _Region) and (region := _as_region(other)):
            return _same_region(one, region)
    if isinstance(gold, _List) and isinstance(answer, _List):
        return _same_list(gold, answer)
    return None


def _same_value(gold: Polynomial, answer: Polynomial) -> bool | None:
    if gold.same(answer):
        return True
    if gold.decimal or answer.decimal or gold.symbols != answer.symbols or gold.symbols & _AMBIGUOUS:
        return None  # it may be a rounded number, a unit, 2.718... or the imaginary one
    return False


def _same_equation(gold: _Equation, answer: _Equation) -> bool | None:
    if gold.name and gold.name == answer.name:
        return _same_value(gold.right, answer.right)
    if gold.left is None or answer.left is None:
        return None
    first, second = gold.left - gold.right, answer.left - answer.right
    if first.terms and first.proportional(second):
        return True
    linear = all(sum(power for _, power in powers) <= 1 for each in (first, second) for _, powers in each.terms)
    exact = not (first.decimal or second.decimal)
    positive = all(power > 0 for each in (first, second) for _, powers in each.terms for _, power in powers)
    return False if linear and exact and positive and first.symbols and second.symbols else None


def _as_region(thing: _Thing) -> _Region | None:
    if isinstance(thing, _Region):
        return thing
    if not (isinstance(thing, _List) and len(thing.items) == 2 and thing.brackets in _INTERVALS):
        return None
    low, high = thing.items
    if not (isinstance(low, Polynomial) and isinstance(high, Polynomial)) or low.symbols or high.symbols:
        return None
    if low.value >= high.value:
        return None
    return _Region(((_End(low, thing.brackets[0] == "["), _End(high, thing.brackets[1] == "]")),))


def _same_region(gold: _Region, answer: _Region) -> bool | None:
    if gold.variable and answer.variable and gold.variable != answer.variable:
        return None
    pairs = [
        (one, other)
        for first, second in zip(gold.intervals, answer.intervals, strict=False)
        for one, other in zip(first, second, strict=True)
    ]
    found = [_same_end(one, other) for one, other in pairs]
    if None in found:
        return None
    return len(gold.intervals) == len(answer.intervals) and all(found)


def _same_end(one: _End, other: _End) -> bool | None:
    if one.value is None or other.value is None:
        return one.value is other.value
    return _same_value(one.value, other.value) if one.closed == other.closed else False


def _same_list(gold: _List, answer: _List) -> bool | None:
    if gold.brackets and answer.brackets:
        if gold.brackets != answer.brackets:
            one, other = _as_region(gold), _as_region(answer)
            return _same_region(one, other) if one and other else None
        if len(gold.items) != len(answer.items):
            return False
        found = [_same(one, other) for one, other in zip(gold.items, answer.items, strict=True)]
        return False if False in found else None if None in found else True
    if gold.brackets or answer.brackets:
        return None
    table = [[_same(one, other) for other in answer.items] for one in gold.items]
    if all(any(row) for row in table) and all(any(column) for column in zip(*table, strict=True)):
        return True
    return False if all(each is not None for row in table for each in row) else None
