"""Do the spaces hold what models say, and their own samples?"""

from collections.abc import Callable
from typing import Any

import pytest
from gymnasium.spaces import Space
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_env.records import Output
from srpo_env.spaces import AnyText, Members, Names, Outputs

MAKERS: dict[str, Callable[[], Space[Any]]] = {
    "text": AnyText,
    "names": lambda: Names(["solve", "verify"]),
    "members": lambda: Members(["solver", "verifier"], 3),
    "outputs": lambda: Outputs(3),
}
ASKED = ({"agent": "solver", "messages": ({"role": "user", "content": "2+2="},)},)
spaces = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@spaces
@settings(max_examples=settings.default.max_examples // 4)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_space_contains_its_samples(make: Callable[[], Space[Any]], seed: int) -> None:
    space = make()
    space.seed(seed)
    assert space.contains(space.sample())


@spaces
def test_a_seed_decides_the_samples(make: Callable[[], Space[Any]]) -> None:
    first, second = make(), make()
    first.seed(3)
    second.seed(3)
    assert [first.sample() for _ in range(5)] == [second.sample() for _ in range(5)]


@spaces
def test_a_space_equals_another_of_the_same_kind_and_no_other(make: Callable[[], Space[Any]]) -> None:
    assert make() == make()
    assert [other() == make() for other in MAKERS.values()].count(True) == 1


@spaces
def test_a_space_is_no_array(make: Callable[[], Space[Any]]) -> None:
    assert not make().is_np_flattenable


@pytest.mark.parametrize(
    "text", ["Café: x ≤ 3\n", "", "hello world", "é", "x" * 10_000, "\ud835", "\x00"], ids=lambda text: ascii(text[:20])
)
def test_text_of_any_kind_is_text(text: str) -> None:
    assert AnyText().contains(text)
    assert Outputs(1).contains((text,))


@pytest.mark.parametrize("other", [None, 4, b"x", ["x"]], ids=repr)
def test_nothing_else_is_text(other: object) -> None:
    assert not AnyText().contains(other)


@pytest.mark.parametrize(("name", "held"), [("solve", True), ("Solve", False), ("", False), (0, False)])
def test_names_hold_only_their_own(name: object, held: bool) -> None:
    assert MAKERS["names"]().contains(name) is held


@pytest.mark.parametrize(
    ("action", "held"),
    [
        (("a",), True),
        (["a", "b", "c"], True),
        ((Output(text="a"), "b"), True),
        ((), False),
        (("a",) * 4, False),
        (("a", 1), False),
        ("abc", False),
        (None, False),
    ],
)
def test_outputs_hold_one_to_k_max_outputs(action: object, held: bool) -> None:
    assert Outputs(3).contains(action) is held


@pytest.mark.parametrize(
    ("members", "held"),
    [
        ((), True),
        (ASKED, True),
        (ASKED * 3, True),
        (ASKED * 4, False),
        (list(ASKED), False),
        (({"agent": "judge", "messages": ()},), False),
        (({"agent": "solver"},), False),
        (({"agent": "solver", "messages": ({"role": "user", "content": None},)},), False),
        (({"agent": "solver", "messages": ({"role": "user"},)},), False),
        (("solver",), False),
    ],
)
def test_members_hold_what_a_set_is_asked(members: object, held: bool) -> None:
    assert MAKERS["members"]().contains(members) is held
