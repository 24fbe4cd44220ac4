"""Does a set become the value that its reducer names?"""

from typing import Any

import pytest

from srpo_env.reducers import concat, first_valid, majority
from srpo_env.views import MemberView


def views(*parsed: Any) -> list[MemberView]:
    """One member for each value; None: it could not be read."""
    return [
        MemberView("a", i, len(parsed), text=f"text {i}", parsed=value, ok=value is not None)
        for i, value in enumerate(parsed)
    ]


@pytest.mark.parametrize(
    ("parsed", "value", "text"),
    [
        (("1", "2", "2"), "2", "text 1"),
        (("1", "2"), "1", "text 0"),
        (("1", "2", "2", "1"), "1", "text 0"),
        ((None, None, "3"), "3", "text 2"),
        ((None, None), None, ""),
        ((["x"], ["y"], ["y"]), ["y"], "text 1"),
    ],
)
def test_majority_of(parsed: tuple[Any, ...], value: Any, text: str) -> None:
    assert majority(views(*parsed)) == (value, text)


def test_a_fallback_has_no_vote() -> None:
    unread = MemberView("a", 0, 3, text="?", parsed="1", ok=False)
    assert majority([unread, unread, *views("2")]) == ("2", "text 0")


@pytest.mark.parametrize(("parsed", "value", "text"), [((None, "2", "3"), "2", "text 1"), ((None,), None, "")], ids=str)
def test_first_valid_of(parsed: tuple[Any, ...], value: Any, text: str) -> None:
    assert first_valid(views(*parsed)) == (value, text)


def test_concat_joins_all_texts_in_order() -> None:
    assert concat(views(None, "2")) == ("text 0\n\ntext 1", "text 0\n\ntext 1")
