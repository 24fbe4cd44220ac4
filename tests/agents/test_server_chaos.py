"""What is left of 256 episodes when three replies in ten are something else?"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from srpo_env.agents.server import ServerPolicy
from srpo_env.eventlog import EventLog
from srpo_env.protocols import RequestKey
from srpo_env.records import Event, Sampling
from srpo_env.rollouts import rollout, seed_of

EPISODES, ATTEMPTS, SHARE = 256, 4, 0.3


def events_by_episode(log: EventLog) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in log:
        found.setdefault(event.episode, []).append(event)
    return found


@pytest.fixture(scope="module")
def faults(fake: ModuleType) -> list[str]:
    missing = [f"missing {key}" for key in fake.MISSING]
    status, connection = ["429", "500", "503"], ["stall", "reset", "cut", "no HTTP", "twice"]
    body = ["half", "bytes", "NaN", "fewer", "null finish_reason", "other prompt", "duplicate", "repeated"]
    return [*status, *connection, *body, *missing]


def test_every_episode_ends_once_with_its_own_outputs(
    serve: Callable[..., Any], folder: Path, tmp_path: Path, faults: list[str], quick: None
) -> None:
    chance, seen = random.Random(0), Counter[str]()

    def fault(number: int, body: Any) -> str | None:
        if chance.random() >= SHARE:
            return None
        chosen = chance.choice(faults)
        seen[chosen] += body["logprobs"] == 0
        return chosen

    server = serve(fault=fault)
    policy = ServerPolicy(
        [server.url],
        model=folder,
        context_length=4096,
        timeout_s=1.0,
        attempts=ATTEMPTS,
        max_in_flight=64,
    )
    log = rollout(
        "solver_verifier",
        policies=policy,
        episodes=EPISODES,
        group_size=8,
        sampling=Sampling(max_tokens=6),
        run_folder=tmp_path / "run",
    )
    found = events_by_episode(EventLog(tmp_path / "run"))
    assert len(found) == EPISODES
    assert [event.id for event in log] == list(dict.fromkeys(event.id for event in log))
    calls, failed = 0, 0
    for events in found.values():
        assert [event.step for event in events] == list(range(len(events)))
        assert [event.terminated or event.truncated for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].terminated or events[-1].truncated_by == "policy_error"
        for event in events:
            (member,) = event.members
            if member.error is not None:
                assert event.truncated_by == "policy_error"
                assert f"all {ATTEMPTS} attempts failed" in member.error
                failed, calls = failed + 1, calls + ATTEMPTS
                continue
            place = RequestKey(0, int(event.episode.rpartition("/")[2]), event.step, 0)
            own = server.draw(None, 1.0, 6, seed_of(0, event.group, place))
            assert (list(member.output.output_ids or ()), list(member.output.logprobs or ())) == own
            calls += member.output.attempts
    assert calls >= len(server.bodies())  # some never reach it: what is left of a fault ends their connection
    assert set(seen) == set(faults)
    assert 0 < failed < EPISODES / 2
