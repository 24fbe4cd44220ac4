"""What do chains, word problems and linear equations of a difficulty look like? Each is drawn with its answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

SUMS = {
    1: (2, 1, 9, "+"),
    2: (2, 10, 99, "+-"),
    3: (3, 10, 99, "+-"),
    4: (3, 2, 20, "+-*"),
    5: (4, 10, 99, "+-*"),
}
"""Terms, low, high and operations of sums by difficulty."""

_NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Farah")
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem; `content` is what it asks, whatever the words: it decides on the split."""

    content: str
    text: str
    answer: int
    operations: int


def chain(draw: random.Random, difficulty: int) -> Problem:
    """`Start with 7. Add 5. Multiply by 3.`: difficulty + 1 steps, one after the other."""
    start, steps = draw.randint(2, 10 * difficulty), _steps(draw, difficulty + 1, difficulty, "+-*")
    says = {"+": "Add {}.", "-": "Subtract {}.", "*": "Multiply by {}."}
    text = " ".join([f"Start with {start}.", *(says[sign].format(number) for sign, number in steps), "What is left?"])
    return Problem(_content("chain", start, steps), text, _walk(start, steps), len(steps))


def word(draw: random.Random, difficulty: int) -> Problem:
    """Someone has things, gets some, gives some away, multiplies them: as many steps as the difficulty says."""
    name, other = draw.sample(_NAMES, 2)
    things = draw.choice(_THINGS)
    start = draw.randint(2, 10 * difficulty)
    steps: list[tuple[str, int]] = []
    for _ in range(difficulty):
        (sign, number), have = _steps(draw, 1, difficulty, "+-*" if difficulty > 2 else "+-")[0], _walk(start, steps)
        steps.append(("+", number) if sign == "-" and number > have else (sign, number))
    says = {"+": "{n} buys {} more.", "-": "{n} gives {} to {o}.", "*": "Then {n} makes it {} times as many."}
    told = (says[sign].format(number, n=name, o=other) for sign, number in steps)
    text = " ".join([f"{name} has {start} {things}.", *told, f"How many {things} does {name} have now?"])
    return Problem(_content("word", start, steps), text, _walk(start, steps), len(steps))


def linear(draw: random.Random, difficulty: int) -> Problem:
    """`x + b = c`, then `ax + b = c`, `ax + b = cx + d`, `a(x + b) = cx + d`, `a(x + b) + d = c(x + e)`; x is whole."""
    x = draw.randint(-5 * difficulty, 10 * difficulty) if difficulty > 2 else draw.randint(1, 10)
    a, c = draw.sample(range(2, 6 + difficulty), 2)
    b, e = draw.randint(1, 10 * difficulty), draw.randint(1, 10)
    match difficulty:
        case 1:
            sides = f"x + {b}", f"{x + b}"
        case 2:
            sides = f"{a}x + {b}", f"{a * x + b}"
        case 3:
            sides = f"{a}x + {b}", f"{c}x{a * x + b - c * x:+}"
        case 4:
            sides = f"{a}(x + {b})", f"{c}x{a * (x + b) - c * x:+}"
        case _:
            sides = f"{a}(x + {b}){c * (x + e) - a * (x + b):+}", f"{c}(x + {e})"
    equation = " = ".join(side.replace("+", " + ").replace("-", " - ").replace("  ", " ") for side in sides)
    equation = equation.replace("  ", " ").replace("= - ", "= -")
    return Problem(f"linear:{equation}", f"Solve for x: {equation}", x, min(difficulty, 3) + difficulty // 4)


FAMILIES: dict[str, Callable[[random.Random, int], Problem]] = {"chain": chain, "word": word, "linear": linear}
"""Families by name, sums aside."""


def _steps(draw: random.Random, count: int, difficulty: int, signs: str) -> list[tuple[str, int]]:
    chosen = [draw.choice(signs) for _ in range(count)]
    return [(sign, draw.randint(2, 5) if sign == "*" else draw.randint(1, 10 * difficulty)) for sign in chosen]


def _walk(start: int, steps: list[tuple[str, int]]) -> int:
    for sign, number in steps:
        start = start * number if sign == "*" else start + number if sign == "+" else start - number
    return start


def _content(family: str, start: int, steps: list[tuple[str, int]]) -> str:
    return f"{family}:{start}" + "".join(f";{sign}{number}" for sign, number in steps)
