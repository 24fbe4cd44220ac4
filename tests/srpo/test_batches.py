"""Does every event meet the optimiser whole, once in every pass?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.batches import mini_batches
from srpo_env.trainers.srpo.metrics import Step, event_completeness


def bare(episodes: list[int], members: list[int]) -> EventBatch:
    """Events with this many members each, in episodes of this many events; every row has one sampled token."""
    events = [code for code, number in enumerate(episodes) for _ in range(number)]
    members = [members[i % len(members)] for i in range(len(events))]
    rows = [event for event, number in enumerate(members) for _ in range(number)]
    E, M = len(events), len(rows)
    of_events = {name: torch.zeros(E, dtype=torch.int64) for name in ("group", "task", "node", "step", "visit")}
    of_rows = {
        name: torch.zeros(M, dtype=torch.int64)
        for name in ("agent", "policy", "finish_reason", "index", "turn", "policy_version", "tool_calls")
    }
    names = dict.fromkeys(("group", "task", "node", "agent", "policy", "finish_reason"), ("x",))
    return EventBatch(
        **of_events,
        **of_rows,
        episode=torch.tensor(events, dtype=torch.int64),
        reward=torch.zeros(E, dtype=torch.float64),
        terminated=torch.zeros(E, dtype=torch.bool),
        truncated=torch.zeros(E, dtype=torch.bool),
        event=torch.tensor(rows, dtype=torch.int64),
        temperature=torch.ones(M),
        parse_ok=torch.ones(M, dtype=torch.bool),
        has_ids=torch.ones(M, dtype=torch.bool),
        processed=torch.ones(M, dtype=torch.bool),
        full_support=torch.ones(M, dtype=torch.bool),
        length=torch.full((M,), 2),
        ids=torch.zeros(M, 2, dtype=torch.int64),
        mask=torch.tensor([[False, True]]).repeat(M, 1),
        sampler_logprobs=torch.zeros(M, 2),
        names=names | {"episode": tuple(map(str, range(len(episodes))))},
        event_ids=tuple(map(str, range(E))),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def step(batch: EventBatch, rows: torch.Tensor) -> Step:
    return Step(batch=batch, rows=rows, on_policy=True, loss=0.0, found=None, new_logprobs=torch.zeros(0))


def row_shuffled_control(batch: EventBatch, number: int, seed: int) -> list[Step]:
    """What a batcher that knows rows and not events would do."""
    order = torch.randperm(batch.num_members, generator=generator(seed))
    return [step(batch, part) for part in torch.tensor_split(order, number)]


_shapes: Any = st.tuples(
    st.lists(st.integers(1, 5), min_size=0, max_size=12),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**31),
)


@given(_shapes)
def test_every_event_is_whole_in_one_step_of_each_epoch(shape: Any) -> None:
    episodes, members, number, epochs, whole, seed = shape
    batch = bare(episodes, members)
    draw = generator(seed)
    steps = []
    for _ in range(epochs):
        parts = list(mini_batches(batch, number, draw, whole_episodes=whole))
        assert Counter(event for part in parts for event in part.tolist()) == Counter(range(batch.num_events))
        assert all(len(part) for part in parts)
        units = len(episodes) if whole else batch.num_events
        assert len(parts) == min(number, units)
        if whole:
            homes = [set(batch.episode[part].tolist()) for part in parts]
            assert sum(map(len, homes)) == len(episodes)  # no episode in two steps
            sizes = sorted(len(part) for part in parts)
            assert not sizes or sizes[-1] - sizes[0] <= max(episodes)
        else:
            sizes = sorted(len(part) for part in parts)
            assert not sizes or sizes[-1] - sizes[0] <= 1
        steps += [step(batch.select(part), batch.rows_of(part)) for part in parts]
    found = event_completeness(steps, batch, epochs)
    assert found == 1.0 or batch.num_members == 0


def test_a_row_shuffled_control_is_not_complete() -> None:
    batch = bare([1] * 40, [3])
    assert event_completeness(row_shuffled_control(batch, 2, 0), batch) < 0.5


def test_an_event_that_is_missed_doubled_or_halved_is_not_complete() -> None:
    batch = bare([1, 1], [2])  # rows 0, 1 and 2, 3
    rows = torch.tensor
    assert event_completeness([step(batch, rows([0, 1, 2, 3]))], batch) == 1.0
    assert event_completeness([step(batch, rows([0, 1]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2, 2]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2, 3, 3]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2, 3])), step(batch, rows([0]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2, 3])), step(batch, rows([0, 1]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2])), step(batch, rows([3]))], batch) == 0.5
    assert event_completeness([step(batch, rows([0, 1, 2, 3]))] * 2, batch, 2) == 1.0


def test_the_generator_decides_and_another_pass_is_cut_otherwise() -> None:
    batch = bare([1] * 20, [1])
    first, again = ([part.tolist() for part in mini_batches(batch, 3, generator(5))] for _ in range(2))
    draw = generator(5)
    two = [[part.tolist() for part in mini_batches(batch, 3, draw)] for _ in range(2)]
    assert first == again == two[0]
    assert two[1] != two[0]


def test_episodes_of_very_different_lengths_are_spread() -> None:
    batch = bare([6, 1, 1, 1, 1, 1, 1], [1])
    parts = list(mini_batches(batch, 2, generator(), whole_episodes=True))
    assert sorted(len(part) for part in parts) == [6, 6]
