"""The task set `arithmetic`: problems made on the spot, from a seed, with no file."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from srpo_env.arithmetic_families import FAMILIES, SUMS, Problem
from srpo_env.errors import InvalidInput
from srpo_env.tasks import Task, TaskSet

TEST_SHARE = 0.2


def arithmetic(
    *,
    split: str = "train",
    seed: int = 0,
    size: int = 1024,
    terms: int | Sequence[int] = 2,
    low: int = 10,
    high: int = 99,
    operations: str = "+",
    template: str = "{sum}=",
    family: str = "sum",
    difficulty: int | None = None,
) -> TaskSet:
    """Sums such as `37+58=`, chains of operations, word problems and linear equations.

    Whether a problem belongs to the train or the test split is decided by a hash of what it asks, so that the splits
    never overlap, whatever the seeds, settings and names; `12+34=` and `34+12=` are in the same one.

    Args:
        split: `train` (80% of all problems) or `test`.
        seed: Decides which problems are drawn.
        size: Number of different tasks.
        terms: Numbers in a sum; those of a list, such as [2, 3], come in turn, so that each has an equal share.
        low, high: Range of each number, both included.
        operations: The signs to draw from, out of `+-*`.
        template: The problem's text; `{sum}` stands for the sum.
        family: `sum`, `chain`, `word` or `linear`; the four settings of numbers and the template are for sums.
        difficulty: 1 to 5; for sums it sets terms, range and operations.

    Raises:
        InvalidInput: A setting breaks a rule, or there are fewer than `size` different problems.

    >>> arithmetic(size=1, seed=3).tasks[0].problem
    '95+85='
    """
    _refuse_unknown(split, family, difficulty)
    if family == "sum" and difficulty is not None:
        terms, low, high, operations = SUMS[difficulty]
    counts = tuple(terms) if isinstance(terms, list | tuple) else (terms,)
    _refuse_wrong_numbers({"seed": seed, "size": size, "low": low, "high": high}, counts)
    if not operations or set(operations) - set("+-*") or "{sum}" not in template:
        raise InvalidInput(
            f"task set 'arithmetic': operations {operations!r}, template {template!r}; operations are out of '+-*', "
            "and the template holds `{sum}`."
        )
    draw = random.Random(f"arithmetic/{split}/{seed}")

    def problem(count: int) -> Problem:
        if family != "sum":
            return FAMILIES[family](draw, difficulty or 1)
        sum_ = str(draw.randint(low, high))
        for _ in range(count - 1):
            sum_ += draw.choice(operations) + str(draw.randint(low, high))
        return Problem(sum_, template.replace("{sum}", sum_), _value(sum_), count - 1)

    tasks: dict[str, Task] = {}
    misses = 0
    while len(tasks) < size:
        found = problem(counts[len(tasks) % len(counts)])
        if found.content in tasks or split_of(found.content) != split:
            misses += 1
            if misses > 1000 + 50 * size:
                raise InvalidInput(
                    f"task set 'arithmetic': size {size}, but only about {len(tasks)} different {family}s of split "
                    f"{split!r} exist with these settings; ask for fewer, or widen the range or the difficulty."
                )
            continue
        tasks[found.content] = Task(
            id=f"{split}-{found.content}",
            problem=found.text,
            answers=(str(found.answer),),
            meta={"operations": found.operations},
            set="arithmetic",
        )
    return TaskSet("arithmetic", tuple(tasks.values()))


def _refuse_unknown(split: str, family: str, difficulty: int | None) -> None:
    if split not in ("train", "test"):
        raise InvalidInput(f"task set 'arithmetic': split {split!r}; it has train and test.")
    if family not in ("sum", *FAMILIES) or difficulty not in (None, *SUMS):
        raise InvalidInput(
            f"task set 'arithmetic': family {family!r}, difficulty {difficulty!r}; families are sum, "
            f"{', '.join(FAMILIES)}, and the difficulty is 1 to 5."
        )


def _refuse_wrong_numbers(numbers: dict[str, int], terms: Sequence[int]) -> None:
    for name, value in (*numbers.items(), *(("terms", each) for each in terms)):
        if not isinstance(value, int):
            raise InvalidInput(f"task set 'arithmetic': {name} is {value!r}; it is a whole number.")
    if not 0 <= numbers["low"] <= numbers["high"] or numbers["size"] < 1 or min(terms, default=0) < 2:
        shown = ", ".join(map(str, terms)) or "none"
        raise InvalidInput(
            "task set 'arithmetic': size {size}, terms {terms}, low {low}, high {high}; at least one task and two "
            "terms, and 0 <= low <= high.".format(**numbers, terms=shown)
        )


def split_of(sum_: str) -> str:
    """The split of a sum; sums and products that differ in the order of their numbers only fall on the same side."""
    for sign in "+*":
        parts = sum_.split(sign)
        if all(part.isdigit() for part in parts):
            sum_ = sign.join(map(str, sorted(map(int, parts))))
    share = int.from_bytes(hashlib.sha256(sum_.encode()).digest()[:4], "big") / 2**32
    return "test" if share < TEST_SHARE else "train"


def _value(sum_: str) -> int:
    total, product, sign, number = 0, 1, 1, ""
    for character in sum_ + "+":
        if character.isdigit():
            number += character
            continue
        product *= int(number)
        number = ""
        if character != "*":
            total, product, sign = total + sign * product, 1, -1 if character == "-" else 1
    return total
