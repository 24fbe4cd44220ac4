"""Do records keep what they are given, and compare what matters?"""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from srpo_env.records import Event, Member, Message, Output, Parse, Sampling, ToolCall

Make = Callable[..., Any]
ANY_TEXT = st.text(st.characters(codec=None))


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert Output(text="x\ud835y").text == "x\ufffdy"


def test_two_halves_of_a_surrogate_pair_become_the_character_they_mean() -> None:
    assert Output(text="\ud835\udc9c").text == "\U0001d49c"


@given(ANY_TEXT)
def test_any_text_can_be_written_as_utf8(text: str) -> None:
    Message(role="user", content=text).content.encode()


@given(st.text())
def test_well_formed_text_is_kept_as_it_is(text: str) -> None:
    assert Output(text=text).text == text


@pytest.mark.parametrize("value", [math.nan, object(), 1j, {"a": (1, {2: "\ud835"})}, {1, 2}, b"x"])
def test_any_value_that_a_parser_gives_survives_a_round_trip(value: object) -> None:
    parse = Parse(ok=True, value=value)
    assert Parse.model_validate_json(parse.model_dump_json()) == parse


@pytest.mark.parametrize("value", [None, True, 3, 1.5, "text", [1, "a"], {"a": [None]}, 10**300])
def test_plain_data_is_kept_as_it_is(value: object) -> None:
    assert Parse(ok=True, value=value).value == value


def test_arguments_of_a_tool_call_can_hold_a_lone_surrogate() -> None:
    call = ToolCall(tool="search", arguments={"query\udc00": "\ud835"}, result="none")
    assert json.loads(call.model_dump_json())["arguments"] == {"query\ufffd": "\ufffd"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_valid_json_and_comes_back(event: Make, value: float) -> None:
    text = event(reward=value).model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    reward = Event.model_validate_json(text).reward
    assert reward == value or (math.isnan(value) and math.isnan(reward or 0))


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"started": 5.0}, {"ended": 5.0}], ids=["the run", "the start", "the end"]
)
def test_equality_leaves_out(event: Make, change: dict[str, Any]) -> None:
    assert event() == event(**change)


@pytest.mark.parametrize("change", [{"seconds": 3.0}, {"attempts": 2}], ids=["seconds", "attempts"])
def test_equality_leaves_out_of_an_output(event: Make, member: Make, change: dict[str, Any]) -> None:
    assert event([member()]) == event([member(**change)])


def test_equality_leaves_out_the_seconds_of_a_tool_call(event: Make, member: Make) -> None:
    call = ToolCall(tool="calculator", arguments={"x": "1+1"}, result="2")
    slow = call.model_copy(update={"seconds": 9.0})
    assert event([member(tool_calls=(call,))]) == event([member(tool_calls=(slow,))])


@pytest.mark.parametrize(
    "change",
    [{"task": "u"}, {"episode": "g/1"}, {"reward": None}, {"reward": 0.0}, {"state_after": "c"}, {"value": 4}],
    ids=lambda change: next(iter(change)),
)
def test_events_differ_by(event: Make, change: dict[str, Any]) -> None:
    assert event() != event(**change)


def test_events_differ_by_the_log_probs_of_an_output(event: Make, member: Make) -> None:
    def made(logprob: float) -> Event:
        return event([member(prompt_ids=(1,), output_ids=(2,), logprobs=(logprob,))])

    assert made(-0.5) != made(-0.25)


def test_nan_equals_nan_in_events(event: Make) -> None:
    assert event(reward=math.nan) == event(reward=float("nan"))


def test_an_event_is_no_equal_of_something_else(event: Make) -> None:
    assert event() != event().comparable()


def test_equal_events_have_equal_hashes(event: Make) -> None:
    assert len({event(run="a"), event(run="b")}) == 1


def test_the_id_of_an_event_is_its_episode_and_step(event: Make) -> None:
    assert event(episode="g/3", step=2).id == "g/3/2"


def test_a_record_refuses_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        Sampling(temprature=1.0)  # type: ignore[call-arg]


def test_a_record_does_not_change(member: Callable[..., Member]) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        member().agent = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"max_tokens": 0}], ids=str
)
def test_sampling_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_the_json_schema_of_an_event_names_the_fields_of_its_members() -> None:
    schema = Event.model_json_schema()
    assert {"agent", "output", "parse", "tool_calls"} <= schema["$defs"]["Member"]["properties"].keys()
