"""Does a trained output that could not be parsed cost what the settings say, and whom they say?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srpo_env.batch import EventBatch
from srpo_env.records import Parse
from srpo_env.trainers.srpo.batch_advantage import estimate, signal
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner

BAD = Parse(ok=False)


def three_episodes(make: Any) -> EventBatch:
    """Returns 1, 0 and 0.5; of the first, a solver fails to parse in step 0, and two critics in step 1."""

    def pair(step: int, **values: Any) -> list[Any]:
        good, bad = Parse(ok=True), BAD
        first = values.get("bad") and step == 0
        second = values.get("bad") and step == 1
        return [
            make.member(agent="solver", turn=step, parse=bad if first else good),
            make.member(agent="critic", turn=step, parse=bad if second else good),
            make.member(agent="critic", turn=step, parse=bad if second else good),
        ]

    return EventBatch.from_events(
        make.event(
            pair(step, bad=episode == 0), episode=f"g/{episode}", step=step, reward=R * step, terminated=step == 1
        )
        for episode, R in enumerate([1.0, 0.0, 0.5])
        for step in range(2)
    )


@pytest.mark.parametrize(("gamma", "penalty"), [(1.0, 0.3), (0.5, 0.1 + 2 * 0.5 * 0.1)])
def test_an_episode_pays_for_each_of_its_members_at_every_event(make: Any, gamma: float, penalty: float) -> None:
    """Returns gamma - penalty, 0 and gamma / 2: less their mean."""
    config = SRPOConfig(clip=0.2, estimator="group_no_std", invalid_penalty=0.1, gamma=gamma)
    found = estimate(three_episodes(make), config)
    returns = [gamma - penalty, 0.0, gamma / 2]
    expected = [R - sum(returns) / 3 for R in returns for _ in range(2)]
    assert found.advantage.tolist() == pytest.approx(expected)


def test_under_agent_a_member_pays_for_itself_alone(make: Any) -> None:
    """Solvers' returns are 0.9, 1, 0, 0, 0.5, 0.5; the other solver of the episode keeps its 1."""
    config = SRPOConfig(clip=0.2, ratio_level="member", estimator="agent", invalid_penalty=0.1)
    batch = three_episodes(make)
    found = estimate(batch, config).advantage
    solver = found[batch.agent == batch.names["agent"].index("solver")].tolist()
    mean, std = 2.9 / 6, (sum((x - 2.9 / 6) ** 2 for x in (0.9, 1, 0, 0, 0.5, 0.5)) / 6) ** 0.5
    assert solver == pytest.approx([(x - mean) / std for x in (0.9, 1, 0, 0, 0.5, 0.5)])


def test_a_group_that_only_penalties_tell_apart_has_a_signal(make: Any) -> None:
    batch = replace(three_episodes(make), reward=three_episodes(make).reward * 0)
    config = SRPOConfig(clip=0.2, invalid_penalty=0.1)
    found = signal(batch, config)
    assert found is not None
    assert found.groups_without_signal == 0
    assert estimate(batch, config).advantage[0] < 0


def test_an_own_estimator_sees_rewards_less_penalties(make: Any, tmp_path: Path) -> None:
    config = SRPOConfig(clip=0.2, estimator="mine:returns", invalid_penalty=0.1)
    found = estimate(three_episodes(make), config, lambda batch: batch.returns())
    assert found.advantage.tolist() == pytest.approx([0.7, 0.7, 0, 0, 0.5, 0.5])


def test_frozen_members_and_empty_outputs_cost_nothing(make: Any) -> None:
    members = [make.member(agent="a"), make.member(parse=BAD, policy="frozen"), make.member([], parse=BAD)]
    events = [make.event(members, episode="g/0"), make.event([make.member()], episode="g/1", reward=0.0)]
    config = SRPOConfig(clip=0.2, estimator="group_no_std", invalid_penalty=0.3)
    learner = SRPOLearner(config, make.policy(make.gpt2()))
    assert learner.update(EventBatch.from_events(events))["advantage/agent=a"] == pytest.approx(0.5)
    paid = [make.event([make.member(agent="a", parse=BAD)], episode="g/0"), events[1]]
    metrics = learner.update(EventBatch.from_events(paid))
    assert metrics["advantage/agent=a"] == pytest.approx(0.35)
    assert metrics["reward_mean"] == 0.5  # what the task gave
