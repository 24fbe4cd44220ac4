"""Do the writes of several members meet by the declared rule, in declared order?"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.errors import InvalidInput
from srpo_env.merging import merge


@pytest.mark.parametrize(
    ("rule", "old", "values", "new"),
    [
        (None, "old", ["new"], "new"),
        ("append", None, ["A", "B"], ["A", "B"]),
        ("append", ["x"], ["A"], ["x", "A"]),
        ("extend", ["x"], [["A"], [], ["B", "C"]], ["x", "A", "B", "C"]),
        ("any", True, [False, False], False),
        ("any", None, [False, True], True),
        ("all", None, [True, False], False),
        ("all", None, [True, True], True),
        ("sum", None, [1, 2], 3),
        ("sum", 10, [1, 2], 13),
        ("min", None, [3, 2], 2),
        ("min", 1, [3, 2], 1),
        ("max", 5, [3, 2], 5),
        ("first", "old", ["A", "B"], "A"),
        ("last", "old", ["A", "B"], "B"),
    ],
)
def test_merge(rule: str | None, old: Any, values: list[Any], new: Any) -> None:
    assert merge(rule, old, values) == new


def test_a_rule_of_a_users_own_gets_the_old_value_and_the_new_ones() -> None:
    assert merge("operator:contains", ["x", ["A"]], ["A"]) is True


def test_a_rule_that_can_not_be_imported_is_named() -> None:
    with pytest.raises(InvalidInput, match="no_such_module:merge"):
        merge("no_such_module:merge", None, [1])


@given(st.lists(st.integers()), st.lists(st.integers(), min_size=1), st.lists(st.integers(), min_size=1))
def test_appending_two_sets_in_turn_is_appending_both(old: list[int], first: list[int], second: list[int]) -> None:
    assert merge("append", merge("append", old, first), second) == merge("append", old, first + second)


@given(st.lists(st.integers()))
def test_a_merge_leaves_the_old_value_as_it_was(old: list[int]) -> None:
    before = list(old)
    merge("append", old, [1])
    assert old == before


@given(st.sampled_from(["sum", "min", "max", "any", "all"]), st.permutations([3, 0, -2, 7]))
def test_rules_without_an_order_do_not_depend_on_it(rule: str, values: list[int]) -> None:
    assert merge(rule, None, values) == merge(rule, None, sorted(values))
