"""The task set `arithmetic`: sums made on the spot, from a seed, with no file."""

from __future__ import annotations

import hashlib
import random

from srpo_env.errors import InvalidInput
from srpo_env.tasks import Task, TaskSet

TEST_SHARE = 0.2


def arithmetic(
    *,
    split: str = "train",
    seed: int = 0,
    size: int = 1024,
    terms: int = 2,
    low: int = 10,
    high: int = 99,
    operations: str = "+",
    template: str = "{sum}=",
) -> TaskSet:
    """Sums such as `37+58=`.

    Whether a sum belongs to the train or the test split is decided by a hash of the sum itself, so that the splits
    never overlap, whatever the seeds and settings; `12+34=` and `34+12=` are in the same one.

    Args:
        split: `train` (80% of all sums) or `test`.
        seed: Decides which sums are drawn.
        size: Number of different tasks.
        terms: Numbers in a sum.
        low, high: Range of each number, both included.
        operations: The signs to draw from, out of `+-*`.
        template: The problem's text; `{sum}` stands for the sum.

    Raises:
        InvalidInput: A setting breaks a rule, or there are fewer than `size` different sums.

    >>> arithmetic(size=1, seed=3).tasks[0].problem
    '39+56='
    """
    if split not in ("train", "test"):
        raise InvalidInput(f"task set 'arithmetic': split {split!r}; it has train and test.")
    numbers = {"seed": seed, "size": size, "terms": terms, "low": low, "high": high}
    for name, value in numbers.items():
        if not isinstance(value, int):
            raise InvalidInput(f"task set 'arithmetic': {name} is {value!r}; it is a whole number.")
    if not 0 <= low <= high or size < 1 or terms < 2:
        raise InvalidInput(
            f"task set 'arithmetic': size {size}, terms {terms}, low {low}, high {high}; at least one task and two "
            "terms, and 0 <= low <= high."
        )
    if not operations or set(operations) - set("+-*") or "{sum}" not in template:
        raise InvalidInput(
            f"task set 'arithmetic': operations {operations!r}, template {template!r}; operations are out of '+-*', "
            "and the template holds `{sum}`."
        )
    draw = random.Random(f"arithmetic/{split}/{seed}")
    tasks: dict[str, Task] = {}
    misses = 0
    while len(tasks) < size:
        sum_ = str(draw.randint(low, high))
        for _ in range(terms - 1):
            sum_ += draw.choice(operations) + str(draw.randint(low, high))
        if sum_ in tasks or split_of(sum_) != split:
            misses += 1
            if misses > 1000 + 50 * size:
                raise InvalidInput(
                    f"task set 'arithmetic': size {size}, but only about {len(tasks)} different sums of split "
                    f"{split!r} exist with these settings; ask for fewer, or widen low..high."
                )
            continue
        tasks[sum_] = Task(
            id=f"{split}-{sum_}",
            problem=template.replace("{sum}", sum_),
            answers=(str(_value(sum_)),),
            meta={"operations": terms - 1},
            set="arithmetic",
        )
    return TaskSet("arithmetic", tuple(tasks.values()))


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
