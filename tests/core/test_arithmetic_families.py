"""Are chains, word problems and equations solvable as told, harder step by step, and never in both splits?"""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.arithmetic import arithmetic
from srpo_env.errors import InvalidInput

FAMILIES = ("chain", "word", "linear")
DIFFICULTIES = st.integers(1, 5)


@pytest.mark.parametrize("family", FAMILIES)
@given(first=DIFFICULTIES, second=DIFFICULTIES, seed=st.integers(0, 9))
def test_what_a_problem_asks_is_in_one_split_only(family: str, first: int, second: int, seed: int) -> None:
    train = arithmetic(family=family, difficulty=first, size=15, seed=seed)
    test = arithmetic(family=family, difficulty=second, size=15, seed=seed + 1, split="test")
    contents = [{task.id.partition("-")[2] for task in each.tasks} for each in (train, test)]
    assert not contents[0] & contents[1]


@given(difficulty=DIFFICULTIES, seed=st.integers(0, 9))
def test_x_solves_its_equation(difficulty: int, seed: int) -> None:
    for task in arithmetic(family="linear", difficulty=difficulty, size=10, seed=seed).tasks:
        left, right = task.problem.removeprefix("Solve for x: ").split(" = ")
        sides = [re.sub(r"(\d)(?=[x(])", r"\1*", side) for side in (left, right)]
        values = [eval(side, {"x": Fraction(task.answers[0])}) for side in sides]
        assert values[0] == values[1], task.problem


@pytest.mark.parametrize("family", ["chain", "word"])
@given(difficulty=DIFFICULTIES, seed=st.integers(0, 9))
def test_doing_what_is_told_gives_the_answer(family: str, difficulty: int, seed: int) -> None:
    acts = {"Add": "+", "buys": "+", "Subtract": "-", "gives": "-", "Multiply": "*", "times": "*"}
    for task in arithmetic(family=family, difficulty=difficulty, size=10, seed=seed).tasks:
        first, *told, _ = re.split(r"(?<=[.]) ", task.problem)
        value = int(re.findall(r"\d+", first)[0])
        for sentence in told:
            (number,) = re.findall(r"\d+", sentence)
            (sign,) = {acts[each] for each in acts if each in sentence}
            value = int(eval(f"{value}{sign}{number}"))
        assert task.answers == (str(value),), task.problem


@pytest.mark.parametrize("family", ["sum", *FAMILIES])
def test_the_operations_grow_with_the_difficulty(family: str) -> None:
    most = [
        max(task.meta["operations"] for task in arithmetic(family=family, difficulty=each, size=20).tasks)
        for each in range(1, 6)
    ]
    assert most == sorted(most)
    assert most[0] < most[-1]


def test_nobody_gives_away_more_than_they_have() -> None:
    for task in arithmetic(family="word", difficulty=5, size=200).tasks:
        assert int(task.answers[0]) >= 0


@pytest.mark.parametrize("wrong", [{"family": "sudoku"}, {"difficulty": 6}, {"difficulty": 0, "family": "word"}])
def test_a_family_or_difficulty_that_is_not_there_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=r"families are sum, chain, word, linear, and the difficulty is 1 to 5"):
        arithmetic(**wrong)  # type: ignore[arg-type]
