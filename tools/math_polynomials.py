r"""What does a formula say as a polynomial with roots and π, exactly? Two are equal where their terms are.

Square roots of different square-free numbers and the powers of π are linearly independent over the rational numbers,
and so are different monomials: 2√3 + π/2 and x² - 1 have one form each, and comparing two takes no algebra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from math import factorial, gcd, isqrt, pi, prod, sqrt
from typing import NoReturn

_Term = tuple[int, tuple[tuple[str, int], ...]]
_PI = "π"
_MOST_TERMS = 40
_MOST_BITS = 4000
_LARGEST_EXPONENT = 40
_LARGEST_RADICAND = 10**9
_DEEPEST = 20
_NUMBER = re.compile(r"\d{1,400}(?:\.\d{0,400})?|\.\d{1,400}")
_SYMBOL = re.compile(r"[A-Za-z](?:_(?:\{\w{1,3}\}|\w))?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SUM = re.compile(r"[-+]")
_PRODUCT = re.compile(r"\*|/|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\\div(?![A-Za-z])")
_FACTOR = re.compile(r"[A-Za-z({]|\\(?:frac|sqrt|pi)(?![A-Za-z])")
_DEGREE = re.compile(r"\[([2-9])\]")
_EXPONENT = re.compile(r"\{(-?\d{1,3})\}|(\d|[A-Za-z])(?!\d)|\{\((-?\d{1,3})\)\}")
_MIXED = re.compile(r"\\frac(?:\{(\d{1,20})\}|(\d))(?:\{(\d{1,20})\}|(\d))(?![\^!])")
_FUNCTIONS = frozenset("fghFGHPCST")
_NO_SYMBOLS: tuple[tuple[str, int], ...] = ()


class Unreadable(ValueError):
    """The text is no such formula, or a large one."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of terms c · √r · π^k · x^m ...

    Attributes:
        terms: The coefficient c of each (square-free r, powers of π and of symbols by name); none is 0.
        decimal: Whether a number in it is written with a decimal point, so that it may be a rounded one.
    """

    terms: dict[_Term, Fraction] = field(default_factory=dict)
    decimal: bool = False

    @property
    def symbols(self) -> set[str]:
        """The names in it; π is none."""
        return {name for _, powers in self.terms for name, _ in powers} - {_PI}

    @property
    def value(self) -> float:
        """The approximate value of one without symbols."""
        return sum(float(c) * sqrt(root) * prod(pi**k for _, k in powers) for (root, powers), c in self.terms.items())

    def __neg__(self) -> Polynomial:
        return Polynomial({term: -c for term, c in self.terms.items()}, self.decimal)

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for term, c in other.terms.items():
            terms[term] = terms.get(term, Fraction(0)) + c
        return _bounded(terms, decimal=self.decimal or other.decimal)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        if len(self.terms) * len(other.terms) > _MOST_TERMS**2:
            raise Unreadable
        terms: dict[_Term, Fraction] = {}
        for (root, powers), c in self.terms.items():
            for (other_root, other_powers), d in other.terms.items():
                common = gcd(root, other_root)
                term = root * other_root // common**2, _merged(powers, other_powers)
                terms[term] = terms.get(term, Fraction(0)) + c * d * common
        return _bounded(terms, decimal=self.decimal or other.decimal)

    def __truediv__(self, other: Polynomial) -> Polynomial:
        """Divides by one term: 1 / (c √r) is √r / (c r)."""
        if len(other.terms) != 1:
            raise Unreadable
        (((root, powers), c),) = other.terms.items()
        inverse = {(root, tuple((name, -power) for name, power in powers)): 1 / (c * root)}
        return self * Polynomial(inverse, other.decimal)

    def power(self, exponent: int) -> Polynomial:
        """The product of `exponent` of these; of inverses where that is below 0."""
        if not self.terms and exponent <= 0:
            raise Unreadable
        result = number(1)
        for _ in range(abs(exponent)):
            result = result * self
        return number(1) / result if exponent < 0 else result

    def same(self, other: Polynomial) -> bool:
        """Whether the two have the same terms."""
        return self.terms == other.terms

    def proportional(self, other: Polynomial) -> bool:
        """Whether one is the other times a number, which is not 0."""
        if self.terms.keys() != other.terms.keys():
            return False
        return len({c / other.terms[term] for term, c in self.terms.items()}) <= 1


def number(value: Fraction | int, *, decimal: bool = False) -> Polynomial:
    """Returns the polynomial that is a number."""
    return Polynomial({(1, _NO_SYMBOLS): Fraction(value)} if value else {}, decimal)


def _bounded(terms: dict[_Term, Fraction], *, decimal: bool) -> Polynomial:
    kept = {term: c for term, c in terms.items() if c}
    if len(kept) > _MOST_TERMS or any(
        c.numerator.bit_length() > _MOST_BITS or c.denominator.bit_length() > _MOST_BITS for c in kept.values()
    ):
        raise Unreadable
    return Polynomial(kept, decimal)


def _merged(first: tuple[tuple[str, int], ...], second: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    if not (first and second):
        return first or second
    powers = dict(first)
    for name, power in second:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _root(value: Fraction, degree: int) -> Polynomial:
    """√(a/b) is √(ab) / b, the squares taken out of it; a higher root only where it is a rational number."""
    if value == 0:
        return number(0)
    if value < 0 or value.numerator * value.denominator > _LARGEST_RADICAND:
        raise Unreadable
    if degree != 2:
        roots = [round(part ** (1 / degree)) for part in (value.numerator, value.denominator)]
        if Fraction(roots[0], roots[1]) ** degree != value:
            raise Unreadable
        return number(Fraction(roots[0], roots[1]))
    left, outside, root, factor = value.numerator * value.denominator, 1, 1, 2
    while factor**3 <= left:  # after that `left` is a prime, a prime squared or two primes
        while left % factor**2 == 0:
            left, outside = left // factor**2, outside * factor
        if left % factor == 0:
            left, root = left // factor, root * factor
        factor += 1
    if isqrt(left) ** 2 == left:
        left, outside = 1, outside * isqrt(left)
    return Polynomial({(root * left, _NO_SYMBOLS): Fraction(outside, value.denominator)})


def polynomial(text: str) -> Polynomial:
    r"""Reads a formula without white-space.

    Raises:
        Unreadable: It is anything else, says two things at once (`1/2x`), or is large.

    >>> polynomial(r"(x-\frac{\sqrt8}{2})(x+\sqrt2)").same(polynomial("x^2-2"))
    True
    """
    reader = _Reader(text)
    found = reader.sum()
    if reader.at != len(text):
        raise Unreadable
    return found


class _Reader:
    """Reads a formula from left to right; what it does not know is unreadable, never skipped."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def sum(self) -> Polynomial:
        """Reads [+-] product [+-] product ..."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable
        sign = self._take(_SUM)
        total = self._product() if sign != "-" else -self._product()
        while sign := self._take(_SUM):
            product = self._product()
            total = total + product if sign == "+" else total - product
        self.depth -= 1
        return total

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def _is(self, start: str) -> bool:
        return self.text.startswith(start, self.at)

    def _fail(self) -> NoReturn:
        raise Unreadable(f"at {self.at} of {self.text[:100]!r}")

    def _product(self) -> Polynomial:
        result, divided = self._factor(), False
        while True:
            sign = self._take(_PRODUCT)
            if sign in {"/", r"\div"}:
                divided = True
                result = result / self._factor()
            elif sign:
                divided = False
                result = result * self._factor()
            elif self._begins_a_factor():
                if divided:
                    self._fail()  # 1/2x is (1/2)x for some and 1/(2x) for others
                result = result * self._factor()
            else:
                return result

    def _begins_a_factor(self) -> bool:
        return _FACTOR.match(self.text, self.at) is not None

    def _factor(self) -> Polynomial:
        base = self._base()
        if self._is("!"):
            self.at += 1
            base = self._factorial(base)
        if not self._is("^"):
            return base
        self.at += 1
        match = _EXPONENT.match(self.text, self.at)
        if match is None or (match[2] and not match[2].isdigit()):
            self._fail()
        self.at = match.end()
        exponent = int(match[1] or match[2] or match[3])
        if abs(exponent) > (_LARGEST_EXPONENT if len(base.terms) == 1 else 6) and base.symbols:
            self._fail()
        if self._is("^") or abs(exponent) > 10 * _LARGEST_EXPONENT:
            self._fail()
        return base.power(exponent)

    def _factorial(self, base: Polynomial) -> Polynomial:
        value = base.terms.get((1, _NO_SYMBOLS), Fraction(0))
        if not base.same(number(value)) or value.denominator != 1 or not 0 <= value <= 100 or self._is("!"):
            self._fail()
        return number(factorial(int(value)))

    def _base(self) -> Polynomial:
        if written := self._take(_NUMBER):
            return self._mixed(written)
        for opening, closing in (("(", ")"), ("{", "}")):
            if self._is(opening):
                self.at += 1
                inner = self.sum()
                if not self._is(closing):
                    self._fail()
                self.at += 1
                return inner
        if command := self._take(_COMMAND):
            return self._of(command)
        name = self._take(_SYMBOL)
        if not name or (name in _FUNCTIONS and self._is("(")):
            self._fail()
        return Polynomial({(1, ((name.replace("{", "").replace("}", ""), 1),)): Fraction(1)})

    def _mixed(self, written: str) -> Polynomial:
        r"""A number, together with the fraction right behind it: 2\frac{1}{3} is 7/3."""
        value = Fraction(written if written[0] != "." else "0" + written)
        match = _MIXED.match(self.text, self.at) if written.isdigit() else None
        if match:
            above, below = int(match[1] or match[2]), int(match[3] or match[4])
            if not 0 < above < below:
                self._fail()
            self.at = match.end()
            value += Fraction(above, below)
        return number(value, decimal="." in written)

    def _of(self, command: str) -> Polynomial:
        if command == r"\pi":
            return Polynomial({(1, ((_PI, 1),)): Fraction(1)})
        if command == r"\frac":
            return self._argument() / self._argument()
        if command != r"\sqrt":
            self._fail()
        degree = _DEGREE.match(self.text, self.at)
        self.at = degree.end() if degree else self.at
        inner = self._argument()
        value = inner.terms.get((1, _NO_SYMBOLS), Fraction(0))
        if inner.decimal or not inner.same(number(value)):
            self._fail()
        return _root(value, int(degree[1]) if degree else 2)

    def _argument(self) -> Polynomial:
        r"""{...}, or one character as in \frac12."""
        if self._is("{"):
            return self._base()
        one = self.text[self.at : self.at + 1]
        if not (one.isascii() and one.isalnum()):
            self._fail()
        self.at += 1
        return polynomial(one)
