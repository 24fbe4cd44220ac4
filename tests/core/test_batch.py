"""Do the tensors hold what the events say, each token at its place?"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.batch import EventBatch
from srpo_env.errors import Untrainable
from srpo_env.records import Event, Parse, Sampling, ToolCall

Make = Callable[..., Any]


@pytest.fixture
def two(event: Make, member: Make) -> EventBatch:
    """Event 0 with two members, of 2 + 3 and 1 + 1 tokens; event 1 with one, of 2 + 1 tokens."""
    a = member(agent="a", prompt_ids=(7, 2), output_ids=(5, 6, 2), logprobs=(-1.0, -2.0, -3.0), finish_reason="stop")
    b = member(agent="b", index=1, prompt_ids=(8,), output_ids=(9,), policy="judge", finish_reason="length")
    c = member(
        agent="a",
        turn=1,
        prompt_ids=(7, 5),
        output_ids=(2,),
        logprobs=(-0.5,),
        policy_version=4,
        logprobs_mode="raw",
        sampling=Sampling(temperature=0.5, top_p=0.9),
        parse=Parse(ok=False),
        tool_calls=(ToolCall(tool="x", arguments={}, result=""),) * 2,
    )
    first = event([a, b], terminated=False, reward=0.0)
    return EventBatch.from_events([first, event([c], step=1, node="verify", visit=3, reward=None)])


def names(batch: EventBatch, field: str) -> list[str]:
    return [batch.names[field][code] for code in getattr(batch, field).tolist()]


def test_ids_stand_in_rows_padded_on_the_right(two: EventBatch) -> None:
    assert two.ids.tolist() == [[7, 2, 5, 6, 2], [8, 9, 0, 0, 0], [7, 5, 2, 0, 0]]


def test_the_mask_marks_what_was_sampled_the_stop_token_included(two: EventBatch) -> None:
    assert two.mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]


def test_a_stop_token_that_equals_the_padding_counts_and_padding_does_not(event: Make, member: Make) -> None:
    stopped = member(prompt_ids=(2,), output_ids=(5, 6, 2))
    cut = member(prompt_ids=(2,), output_ids=(5, 6, 7, 8, 9))
    assert EventBatch.from_events([event([stopped, cut])]).mask.sum(1).tolist() == [3, 5]


def test_log_probs_stand_with_their_own_tokens(two: EventBatch) -> None:
    assert two.sampler_logprobs[0].tolist() == [0, 0, -1, -2, -3]
    assert two.sampler_logprobs[2].tolist() == [0, 0, -0.5, 0, 0]


def test_unknown_log_probs_are_nan_and_only_where_tokens_were_sampled(two: EventBatch) -> None:
    assert two.sampler_logprobs[1].isnan().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("event", [0, 0, 1]),
        ("index", [0, 1, 0]),
        ("turn", [0, 0, 1]),
        ("policy_version", [0, 0, 4]),
        ("temperature", [1.0, 1.0, 0.5]),
        ("parse_ok", [True, True, False]),
        ("has_ids", [True, True, True]),
        ("processed", [True, True, False]),
        ("full_support", [True, True, False]),
        ("tool_calls", [0, 0, 2]),
        ("length", [5, 2, 3]),
        ("step", [0, 1]),
        ("visit", [0, 3]),
        ("terminated", [False, True]),
        ("truncated", [False, False]),
    ],
)
def test_field(two: EventBatch, field: str, expected: list[Any]) -> None:
    assert getattr(two, field).tolist() == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("agent", ["a", "b", "a"]),
        ("policy", ["main", "judge", "main"]),
        ("finish_reason", ["stop", "length", ""]),
        ("node", ["solve", "verify"]),
        ("group", ["g", "g"]),
        ("episode", ["g/0", "g/0"]),
        ("task", ["t", "t"]),
    ],
)
def test_codes_turn_back_into_names(two: EventBatch, field: str, expected: list[str]) -> None:
    assert names(two, field) == expected


def test_an_unscored_reward_is_nan(two: EventBatch) -> None:
    assert two.reward[0] == 0
    assert two.reward[1].isnan()


def test_a_member_without_ids_is_a_row_of_no_length_and_widens_nothing(event: Make, member: Make) -> None:
    hidden = member(prompt_ids=(1, 2, 3, 4, 5, 6), output_ids=None)
    batch = EventBatch.from_events([event([hidden, member(prompt_ids=(1,), output_ids=(2,))])])
    assert batch.length.tolist() == [0, 2]
    assert batch.has_ids.tolist() == [False, True]
    assert batch.ids.shape == (2, 2)


def test_ids_and_log_probs_of_different_number_are_refused_and_the_event_is_named(event: Make, member: Make) -> None:
    wrong = event([member(prompt_ids=(1,), output_ids=(2, 3), logprobs=(-1.0,))], episode="g/5", step=2)
    with pytest.raises(Untrainable, match=r"event g/5/2, member solver\[0\]: 2 token ids and 1 log-probs"):
        EventBatch.from_events([wrong])


def test_a_batch_of_nothing_has_no_rows() -> None:
    batch = EventBatch.from_events([])
    assert (batch.num_events, batch.num_members, batch.ids.shape) == (0, 0, (0, 0))


def test_an_event_without_members_has_no_rows(event: Make, member: Make) -> None:
    batch = EventBatch.from_events([event([]), event([member()], step=1)])
    assert (batch.num_events, batch.event.tolist()) == (2, [1])


# Selecting whole events.


def test_selected_events_bring_all_their_rows_and_are_trimmed(two: EventBatch) -> None:
    part = two.select(torch.tensor([1]))
    assert part.ids.tolist() == [[7, 5, 2]]
    assert (part.event.tolist(), part.event_ids) == ([0], ("g/0/1",))


def test_selected_events_stand_in_the_order_asked_for(two: EventBatch) -> None:
    part = two.select(torch.tensor([1, 0]))
    assert part.event.tolist() == [0, 1, 1]
    assert names(part, "node") == ["verify", "solve"]
    assert names(part, "agent") == ["a", "a", "b"]


def test_rows_of_events_stand_in_the_order_of_the_events(two: EventBatch) -> None:
    assert two.rows_of(torch.tensor([1, 0])).tolist() == [2, 0, 1]


def test_no_selected_events_make_a_batch_of_nothing(two: EventBatch) -> None:
    part = two.select(torch.zeros(0, dtype=torch.int64))
    assert (part.num_events, part.num_members) == (0, 0)


@given(st.permutations(range(5)))
def test_selecting_a_permutation_and_its_inverse_gives_the_batch_back(order: list[int]) -> None:
    batch = EventBatch.from_events(_some_events())
    there = torch.tensor(order)
    back = batch.select(there).select(torch.argsort(there))
    assert torch.equal(back.ids, batch.ids)
    assert torch.equal(back.event, batch.event)
    assert torch.equal(back.step, batch.step)


def _some_events() -> list[Event]:
    plain = {"run": "", "task": "t", "group": "g", "episode": "e", "node": "n", "visit": 0, "next_node": "n"}
    member = {"agent": "a", "turn": 0, "policy": "main", "messages": (), "sampling": None, "parse": {"ok": True}}
    return [
        Event.model_validate(
            plain
            | {"step": step, "state_before": "", "state_after": "", "reward": 0, "terminated": 0, "truncated": 0}
            | {
                "members": [
                    member | {"index": i, "output": {"text": "", "prompt_ids": [step], "output_ids": [i] * (step + 1)}}
                    for i in range(step % 3)
                ]
            }
        )
        for step in range(5)
    ]


# Returns.


def test_the_return_is_the_sum_of_an_episodes_rewards_at_each_of_its_events(event: Make) -> None:
    events = [
        event(episode="a", step=0, reward=0.5),
        event(episode="b", step=0, reward=3.0),
        event(episode="a", step=1, reward=0.25),
    ]
    assert EventBatch.from_events(events).returns().tolist() == [0.75, 3.0, 0.75]


def test_a_discount_weighs_rewards_by_their_step(event: Make) -> None:
    events = [event(step=0, reward=1.0), event(step=1, reward=4.0), event(step=2, reward=8.0)]
    assert EventBatch.from_events(events).returns(0.5).tolist() == [5.0, 5.0, 5.0]  # 1 + 4/2 + 8/4


def test_an_unscored_episode_has_no_return_and_leaves_others_alone(event: Make) -> None:
    events = [event(reward=0.0), event(step=1, reward=None), event(episode="b", reward=1.0)]
    first, second, other = EventBatch.from_events(events).returns().tolist()
    assert math.isnan(first)
    assert math.isnan(second)
    assert other == 1.0
