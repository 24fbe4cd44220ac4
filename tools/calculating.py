"""Arithmetic for agents: exact, rational, bounded.

An expression is split into numbers, names and operators, parsed to a syntax tree, and evaluated over the few kinds of
node that are arithmetic; everything else is refused. No text is ever run as code.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction

from srpo_env.errors import ToolError, nearest
from srpo_env.function_tools import tool

MOST_CHARS = 1000
MOST_DEPTH = 100
MOST_BITS = 3400
"""Longest numerator or denominator: some 1,000 decimal digits."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<name>[a-z]+)|(?P<operator>\*\*|//|[-+*/%^(),]))"
)
_WRITTEN = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\u00a0": " "})
_MOST_DECIMALS = 20


@tool
async def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly, such as (17 + 3) * 24 / 7."""
    return written(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of an expression.

    Numbers, `+ - * / // % ** ^`, parentheses, and abs, ceil, floor, max, min, round, sqrt; a final `=` is ignored.

    Raises:
        ToolError: It is no arithmetic, has no value, or its value is too large.

    >>> evaluate("0.1 + 0.2") == Fraction(3, 10)
    True
    """
    if len(expression) > MOST_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MOST_CHARS} are computed.")
    source = " ".join(_tokens(expression.translate(_WRITTEN).strip().removesuffix("=").rstrip()))
    if not source:
        raise ToolError("the expression is empty; write one, such as 17 * 24.")
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ToolError(f"{_short(expression)} is not an arithmetic expression; write one, such as 17 * 24.") from error
    return _value(tree.body, source, 0)


def written(value: Fraction) -> str:
    """Returns a value as text: whole, as a decimal where that is exact, else as a fraction with its decimals.

    >>> written(Fraction(6, 2)), written(Fraction(3, 10)), written(Fraction(1, 3))
    ('3', '0.3', '1/3 (about 0.333333)')
    """
    if value.denominator == 1:
        return str(value.numerator)
    places = _decimal_places(value.denominator)
    if places is None:
        return f"{value} (about {_about(value)})"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ToolError(
                f"{text[at:].strip()[:1]!r} is not arithmetic; an expression has numbers, + - * / // % ** and "
                f"parentheses, and the functions {', '.join(FUNCTIONS)}."
            )
        token = found.group().strip()
        if found["number"]:
            token = token.lstrip("0") or "0"
            token = f"0{token}" if token.startswith(".") else token
        tokens.append("**" if token == "^" else token)
        at = found.end()
    return tokens


def _value(node: ast.expr, source: str, depth: int) -> Fraction:
    if depth > MOST_DEPTH:
        raise ToolError(f"the expression is nested too deeply; at most {MOST_DEPTH} levels are computed.")
    match node:
        case ast.Constant():
            return Fraction(source[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _value(node.operand, source, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _value(node.left, source, depth + 1), _value(node.right, source, depth + 1)
            return _bounded(_applied(_OPERATORS[type(node.op)], left, right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _bounded(_called(name, [_value(each, source, depth + 1) for each in arguments]))
        case ast.Tuple():
            raise ToolError("a comma stands only between the arguments of a function; write 1234567, not 1,234,567.")
        case ast.Call():
            raise ToolError("a number stands right before a parenthesis; write * between them.")
        case ast.Name(id=name):
            raise ToolError(f"{name!r} has no value; write numbers.{nearest(name, FUNCTIONS)}")
    raise ToolError("this is not arithmetic; write an expression such as 17 * 24.")


def _applied(
    operation: Callable[[Fraction, Fraction], Fraction | int], left: Fraction, right: Fraction
) -> Fraction | int:
    try:
        return operation(left, right)
    except ZeroDivisionError as error:
        raise ToolError("a division by zero has no value.") from error


def _called(name: str, values: Sequence[Fraction]) -> Fraction | int:
    if name not in FUNCTIONS:
        raise ToolError(f"no function {name!r}; known are {', '.join(FUNCTIONS)}.{nearest(name, FUNCTIONS)}")
    function, least, most = FUNCTIONS[name]
    if not least <= len(values) <= most:
        raise ToolError(f"{name} takes {least if least == most else f'{least} or more'} numbers, not {len(values)}.")
    return function(*values)


def _power(base: Fraction, exponent: Fraction) -> Fraction | int:
    if exponent.denominator != 1:
        raise ToolError("an exponent is a whole number; for a square root write sqrt(...).")
    if abs(base) == 1 or base == 0:
        return base ** (int(exponent) % 2 if base else int(exponent))
    if (max(base.numerator.bit_length(), base.denominator.bit_length()) - 1) * abs(exponent) > MOST_BITS:
        raise _too_large()
    return base ** int(exponent)


def _sqrt(value: Fraction) -> Fraction:
    if value < 0:
        raise ToolError("a negative number has no square root here.")
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        about = Context(prec=12).sqrt(Context(prec=30).divide(Decimal(value.numerator), Decimal(value.denominator)))
        raise ToolError(f"the square root of {_short(str(value))} is not rational; it is about {about:g}.")
    return root


def _rounded(value: Fraction, places: Fraction = Fraction(0)) -> Fraction | int:
    """Half away from zero, as in school."""
    if places.denominator != 1 or not 0 <= places <= _MOST_DECIMALS:
        raise ToolError(f"round takes a number of decimal places from 0 to {_MOST_DECIMALS}.")
    scale = 10 ** int(places)
    size = Fraction(math.floor(abs(value) * scale + Fraction(1, 2)), scale)
    return size if value >= 0 else -size


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}

FUNCTIONS: dict[str, tuple[Callable[..., Fraction | int], int, int]] = {
    "abs": (abs, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "floor": (math.floor, 1, 1),
    "max": (max, 1, MOST_CHARS),
    "min": (min, 1, MOST_CHARS),
    "round": (_rounded, 1, 2),
    "sqrt": (_sqrt, 1, 1),
}
"""What may be called, with the smallest and largest number of arguments."""


def _bounded(value: Fraction | int) -> Fraction:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError("the value is too large; at most some 1,000 digits are computed.")


def _decimal_places(denominator: int) -> int | None:
    """Digits after the point of a fraction in lowest terms; None where they do not end or are too many."""
    return next((n for n in range(1, _MOST_DECIMALS + 1) if 10**n % denominator == 0), None)


def _about(value: Fraction) -> str:
    return f"{Context(prec=6).divide(Decimal(value.numerator), Decimal(value.denominator)):g}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
