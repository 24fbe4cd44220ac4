"""Is an answer right, wrong or unscorable, and nothing in between?"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.records import Event
from srpo_env.rewards import Score, exact_match, less_extra_members, plain_answer
from srpo_env.tasks import Task


def score(gold: str | tuple[str, ...], answer: str | None) -> tuple[float | None, str]:
    task = Task(id="t", problem="?", answers=(gold,) if isinstance(gold, str) else gold)
    found = exact_match(task, answer, ())
    return found.value, found.reason


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4", "4"),
        ("4", " 4\n"),
        ("4", "4.0"),
        ("4", "+4"),
        ("-4", "-4.00"),
        ("0.5", ".5"),
        ("1000", "1,000"),
        ("007", "7"),
        ("1,000", "1000.0"),
        ("64,250", "64250"),
        ("1,234,567.5", "1234567.50"),
        ("4", r"so \boxed{4}."),
        ("4", r"<think>\boxed{5}</think>\boxed{4}"),
        ("4", r"\boxed{3} no, \boxed{4}"),
        ("Oslo", "Oslo"),
        ("see figure", "see figure"),
        (("5", "4"), "4"),
        (("", "4"), "4"),
        ("0,7", "0,7"),
    ],
)
def test_right(gold: str | tuple[str, ...], answer: str) -> None:
    assert score(gold, answer) == (1.0, "right")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1", "21"),
        ("1", "31"),
        ("1", "1.5"),
        ("1", "10"),
        ("1", "1 2"),
        ("Oslo", "not Oslo"),
        ("Oslo", "oslo"),
        ("A", "BANANA"),
        ("4", "-4"),
        ("4", r"\boxed{5} or 4"),
        ("4", r"\boxed{}"),
        ("0,7", "07"),
        ("23,45", "2345"),
        ("2,4,6", "246"),
        ("1,0000", "10000"),
        ("0.1", "0.10000000000000001"),
    ],
)
def test_wrong(gold: str, answer: str) -> None:
    assert score(gold, answer) == (0.0, "wrong")


@pytest.mark.parametrize("answer", [None, "", "  \n"])
def test_no_answer_is_wrong_and_says_so(answer: str | None) -> None:
    assert score("4", answer) == (0.0, "no answer")


@pytest.mark.parametrize("gold", ["", "  ", (), ("", " ")], ids=repr)
@pytest.mark.parametrize("answer", [None, "", "4"])
def test_without_a_reference_answer_nothing_can_be_scored(gold: str | tuple[str, ...], answer: str | None) -> None:
    assert score(gold, answer) == (None, "no reference answer")


@pytest.mark.parametrize(
    "digits", ["9" * 5000, "1" + ",000" * 2000, "0." + "3" * 5000], ids=["plain", "thousands", "fraction"]
)
def test_a_number_of_any_length_is_scored(digits: str) -> None:
    assert score("4", digits) == (0.0, "wrong")


@given(st.integers(-(10**12), 10**12))
def test_a_number_equals_itself_with_thousands_separators(number: int) -> None:
    assert score(str(number), f"{number:,}")[0] == 1.0


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_two_whole_numbers_match_only_where_they_are_equal(first: int, second: int) -> None:
    assert score(str(first), f"\\boxed{{{second}}}")[0] == float(first == second)


@given(st.text(), st.text())
def test_a_score_is_one_zero_or_none(gold: str, answer: str) -> None:
    assert score(gold, answer)[0] in (0.0, 1.0, None)


def test_the_plain_answer_of_a_text_without_a_box_is_the_text() -> None:
    assert plain_answer(" 1 + 1 = 2 ") == "1 + 1 = 2"


# What extra members cost.

TASK = Task(id="t", problem="2+2=", answers=("4",))
Make = Callable[..., Any]


def less(sizes: Sequence[int], answer: str | None, event: Make, member: Make, task: Task = TASK) -> Score:
    """Scores an episode whose sets have these sizes, at 0.05 for an extra member."""
    events = [event([member()] * size, step=step) for step, size in enumerate(sizes)]
    found = less_extra_members(exact_match, 0.05)(task, answer, events)
    assert not isinstance(found, Score)
    return asyncio.run(found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "answer", "value", "reason"),
    [
        ([1, 1], "4", 1.0, "right"),
        ([1, 5], "4", 0.8, "right, 4 extra members"),  # 1 - 4 * 0.05
        ([1, 2], "4", 0.95, "right, 1 extra member"),
        ([3, 3, 1], "4", 0.8, "right, 4 extra members"),  # two in each of the first sets
        ([1, 5], "5", -0.2, "wrong, 4 extra members"),
        ([3], None, -0.1, "no answer, 2 extra members"),
    ],
)
def test_each_member_beyond_the_first_of_its_set_costs(
    sizes: list[int], answer: str | None, value: float, reason: str, event: Make, member: Make
) -> None:
    found = less(sizes, answer, event, member)
    assert (found.value, found.reason) == (pytest.approx(value), reason)


def test_what_can_not_be_scored_stays_so_at_any_cost(event: Make, member: Make) -> None:
    without = Task(id="t", problem="?", answers=())
    assert less([5], "4", event, member, without) == Score(value=None, reason="no reference answer")


def test_a_reward_that_takes_time_costs_as_much(event: Make, member: Make) -> None:
    async def slow(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
        await asyncio.sleep(0)
        return Score(value=0.5, reason="half", measures={"f1": 0.75})

    found = asyncio.run(less_extra_members(slow, 0.125)(TASK, "4", [event([member()] * 3)]))  # type: ignore[arg-type]
    assert found == Score(value=0.25, reason="half, 2 extra members", measures={"f1": 0.75})
