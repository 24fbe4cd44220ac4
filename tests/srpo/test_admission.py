"""Which outputs can't be trained on, and is the one that can't named?"""

from __future__ import annotations

from typing import Any

import pytest

from srpo_env.batch import EventBatch
from srpo_env.errors import Untrainable
from srpo_env.records import Sampling
from srpo_env.trainers.srpo.config import SRPOConfig
from tests.srpo.learning import (
    learner_of,
    unmoved,
)


@pytest.mark.parametrize(
    ("values", "old", "rule"),
    [
        ({"output": None}, "recompute", "has no token ids"),
        ({"prompt": None}, "recompute", "has no token ids"),
        ({"prompt": []}, "recompute", "follows an empty prompt"),
        ({"sampling": Sampling(top_p=0.9)}, "recompute", "was sampled with top_p or top_k"),
        ({"sampling": Sampling(top_k=5)}, "recompute", "was sampled with top_p or top_k"),
        ({"sampling": Sampling(temperature=0)}, "recompute", "was sampled at temperature 0"),
        ({}, "sampler", "has no log-probs, which old_logprobs: sampler and tis_cap need"),
        (
            {"sampling": Sampling(temperature=0.5), "logprobs": (-1, -1), "logprobs_mode": "raw"},
            "sampler",
            "has log-probs from before the temperature",
        ),
    ],
)
def test_an_output_that_cannot_be_trained_on_is_named(make: Any, values: dict[str, Any], old: str, rule: str) -> None:
    good = make.member(logprobs=(-1.0, -1.0))
    events = [
        make.event([good], episode="g/0"),
        make.event([good, make.member(agent="critic", **values)], episode="g/7"),
    ]
    policy = make.policy(make.gpt2())
    before = policy.parameters()
    learner = learner_of(policy, SRPOConfig(clip=0.2, old_logprobs=old))
    with pytest.raises(Untrainable, match=rf"event g/7/0: the output of critic\[1\] {rule}"):
        learner.update(EventBatch.from_events(events))
    assert unmoved(policy, before)


def test_frozen_and_failed_outputs_may_be_anything(make: Any) -> None:
    frozen = make.member(None, policy="judge", sampling=Sampling(temperature=0, top_p=0.5))
    failed = make.member([], [], sampling=Sampling(temperature=0))
    events = [make.event([make.member([5, i]), frozen, failed], episode=f"g/{i}", reward=float(i)) for i in range(2)]
    assert (
        learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2)).update(EventBatch.from_events(events))["steps"] == 2
    )


def test_raw_log_probs_at_temperature_1_are_those_that_were_sampled(make: Any) -> None:
    member = make.member(logprobs=(-1, -1), logprobs_mode="raw")
    batch = EventBatch.from_events([make.event([member], episode=f"g/{i}", reward=float(i)) for i in range(2)])
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=9, old_logprobs="sampler"))
    assert learner.update(batch)["steps"] == 2


@pytest.mark.parametrize("lost", [0, -1], ids=["its first event", "its last event"])
def test_a_trajectory_needs_its_whole_episode(make: Any, lost: int) -> None:
    events = [
        make.event([make.member()], episode="g/3", step=i, reward=float(i == 2), terminated=i == 2) for i in range(3)
    ]
    del events[lost]
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, ratio_level="trajectory"))
    with pytest.raises(Untrainable, match="episode g/3: it has 2 events in this batch and is not whole"):
        learner.update(EventBatch.from_events(events))
