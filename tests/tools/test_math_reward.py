"""Does the reward `math_verify` give one, zero or nothing, and hold no loop up?"""

from __future__ import annotations

import asyncio

import pytest

from srpo_env.rewards import Score
from srpo_env.tasks import Task, load_tasks
from srpo_env.tools.math_verification import math_verify


def score(answer: str | None, *golds: str, **meta: object) -> Score:
    return asyncio.run(math_verify(Task(id="t", problem="?", answers=golds, meta=meta), answer, ()))


@pytest.mark.parametrize(
    ("answer", "golds", "value"),
    [
        (r"\boxed{0.5}", ("1/2",), 1.0),
        ("3", ("1/2",), 0.0),
        ("3", ("2", "3"), 1.0),
        ("3", ("see figure", "3"), 1.0),
        ("4", ("see figure", "3"), None),
        ("4", ("see figure",), None),
        ("4", ("",), None),
        (None, ("4",), 0.0),
        (" ", ("4",), 0.0),
    ],
)
def test_the_value_of(answer: str | None, golds: tuple[str, ...], value: float | None) -> None:
    assert score(answer, *golds).value == value


def test_a_task_may_bring_its_tolerance() -> None:
    assert [score("4.15", "4.2", error_tolerance=each).value for each in ("1e-1", "1e-2", None)] == [1.0, 0.0, 0.0]


def test_what_can_not_be_scored_says_why() -> None:
    assert score("4", "see figure").reason.startswith("the reference answer is prose")
    assert (score(None, "4").reason, score("4", "").reason) == ("no answer", "no reference answer")


def test_a_task_set_takes_it_by_name() -> None:
    tasks = load_tasks(
        [Task(id="t", problem="?", answers=("1/2",))], reward="srpo_env.tools.math_verification:math_verify"
    )
    assert asyncio.run(tasks.score(tasks.tasks[0], "0.5", ())).value == 1.0
