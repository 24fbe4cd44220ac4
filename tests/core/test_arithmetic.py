"""Are the sums right, different, and never in both splits?"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_env.arithmetic import arithmetic, split_of
from srpo_env.errors import InvalidInput
from srpo_env.tasks import load_tasks

FEW = settings(max_examples=settings.default.max_examples // 4)
SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "size": st.integers(1, 40),
        "terms": st.integers(2, 4),
        "low": st.integers(0, 50),
        "high": st.integers(60, 999),
        "operations": st.sampled_from(["+", "-", "*", "+-", "+-*"]),
    }
)


@FEW
@given(SETTINGS, SETTINGS)
def test_the_splits_never_overlap_whatever_the_settings(first: dict[str, int], second: dict[str, int]) -> None:
    train = arithmetic(split="train", **first)  # type: ignore[arg-type]
    test = arithmetic(split="test", **second)  # type: ignore[arg-type]
    assert not {task.problem for task in train.tasks} & {task.problem for task in test.tasks}


@FEW
@given(SETTINGS, st.sampled_from(["train", "test"]), st.sampled_from(["{sum}=", "What is {sum}?"]))
def test_a_sum_is_on_the_side_that_the_sum_alone_decides(values: dict[str, int], split: str, template: str) -> None:
    before, after = template.split("{sum}")
    for task in arithmetic(split=split, template=template, **values).tasks:  # type: ignore[arg-type]
        assert split_of(task.problem.removeprefix(before).removesuffix(after)) == split


@given(st.permutations([3, 14, 15, 92]), st.sampled_from("+*"))
def test_sums_that_differ_in_order_only_are_on_the_same_side(numbers: list[int], sign: str) -> None:
    assert split_of(sign.join(map(str, numbers))) == split_of(sign.join(["3", "14", "15", "92"]))


def test_about_a_fifth_of_all_sums_is_held_out() -> None:
    sides = [split_of(f"{a}+{b}") for a in range(10, 100) for b in range(a, 100)]
    assert 0.18 < sides.count("test") / len(sides) < 0.22


@FEW
@given(SETTINGS)
def test_every_answer_is_what_python_computes(values: dict[str, int]) -> None:
    for task in arithmetic(**values).tasks:  # type: ignore[arg-type]
        assert task.answers == (str(eval(task.problem.removesuffix("="))),)


@FEW
@given(SETTINGS)
def test_the_sums_of_a_set_differ(values: dict[str, int]) -> None:
    tasks = arithmetic(**values).tasks  # type: ignore[arg-type]
    assert len({task.problem for task in tasks}) == len({task.id for task in tasks}) == values["size"]


def test_the_same_settings_give_the_same_sums() -> None:
    assert arithmetic(size=20, seed=1) == arithmetic(size=20, seed=1)


def test_another_seed_gives_other_sums() -> None:
    assert arithmetic(size=20, seed=1) != arithmetic(size=20, seed=2)


def test_all_sums_of_a_small_range_can_be_had_and_the_splits_share_them_out() -> None:
    every = {f"{a}+{b}=" for a, b in itertools.product(range(10, 20), repeat=2)}
    with pytest.raises(InvalidInput, match=r"only about (\d+) different sums of split 'test'") as error:
        arithmetic(split="test", size=100, low=10, high=19)
    count = int(str(error.value).split("about ")[1].split()[0])
    test = arithmetic(split="test", size=count, low=10, high=19)
    train = arithmetic(split="train", size=100 - count, low=10, high=19)
    assert {task.problem for task in (*test.tasks, *train.tasks)} == every
    assert 10 <= count <= 30


@pytest.mark.parametrize(("low", "high", "terms"), [(0, 9, 2), (100, 999, 2), (1, 9, 4)])
def test_numbers_stay_in_their_range(low: int, high: int, terms: int) -> None:
    for task in arithmetic(size=30, low=low, high=high, terms=terms).tasks:
        numbers = [int(number) for number in task.problem.removesuffix("=").split("+")]
        assert len(numbers) == terms
        assert all(low <= number <= high for number in numbers)


def test_several_numbers_of_terms_have_equal_shares() -> None:
    tasks = arithmetic(size=9, terms=[2, 3, 5]).tasks
    assert [task.problem.count("+") for task in tasks] == [1, 2, 4] * 3
    assert [task.meta["operations"] for task in tasks] == [1, 2, 4] * 3


def test_a_list_of_one_gives_the_sums_of_that_one() -> None:
    assert arithmetic(size=20, terms=[3]) == arithmetic(size=20, terms=3)


def test_a_template_may_hold_braces() -> None:
    task = arithmetic(size=1, template=r"What is {sum}? Answer in \boxed{}.").tasks[0]
    assert task.problem.startswith("What is ")
    assert task.problem.endswith(r"? Answer in \boxed{}.")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"split": "dev"}, "split 'dev'; it has train and test"),
        ({"low": 9, "high": 1}, "low 9, high 1"),
        ({"low": -5}, "low -5"),
        ({"terms": 1}, "terms 1"),
        ({"terms": [2, 1]}, "terms 2, 1,"),
        ({"terms": []}, "terms none"),
        ({"terms": [2, "3"]}, "terms is '3'; it is a whole number"),
        ({"size": 0}, "size 0"),
        ({"operations": ""}, "operations ''"),
        ({"operations": "+/"}, "operations '[+]/'"),
        ({"template": "sum"}, "template 'sum'"),
        ({"high": "many"}, "high is 'many'; it is a whole number"),
        ({"low": 1.5}, "low is 1.5; it is a whole number"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        arithmetic(**wrong)  # type: ignore[arg-type]


def test_settings_come_through_load_tasks() -> None:
    assert load_tasks("arithmetic", size=3, terms=5).tasks[0].problem.count("+") == 4
