"""At what rate does each policy step, and how is its gradient clipped and measured?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import srpo_env
from srpo_env.agents import LocalPolicy
from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput
from srpo_env.records import Sampling
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner
from srpo_env.trainers.srpo.schedule import learning_rate
from tests.srpo.learning import (
    config_of,
    learner_of,
    one_update,
)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [2, 2, 2, 2, 2]),
        ({"warmup_updates": 4}, [0.5, 1, 1.5, 2, 2]),
        ({"schedule": "linear"}, [2, 1.5, 1, 0.5, 0]),
        ({"schedule": "linear", "final_lr": 0.5}, [2, 1.75, 1.5, 1.25, 1]),
        ({"schedule": "cosine"}, [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]),
        (
            {"schedule": "cosine", "final_lr": 0.1, "warmup_updates": 2},
            [1, 1.1 + 0.9 * math.sqrt(0.5), 1.1, 0.4636, 0.2],
        ),
    ],
)
def test_the_learning_rate_by_hand(settings: dict[str, Any], rates: list[float]) -> None:
    how = PolicyTraining(lr=2.0, **settings)
    assert [learning_rate(how, update, 5) for update in range(5)] == pytest.approx(rates, abs=1e-4)


def test_without_a_length_of_the_run_the_rate_stays() -> None:
    how = PolicyTraining(lr=2.0, schedule="linear", warmup_updates=2)
    assert [learning_rate(how, update, None) for update in range(3)] == [1, 2, 2]


def test_each_update_steps_at_its_rate(make: Any) -> None:
    how = PolicyTraining(lr=1e-3, schedule="linear")
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2), training=how, total_updates=3)
    seen = []
    learner._optimisers["main"].register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    logged = [learner.update(make.batch(3))["lr"] for _ in range(3)]
    assert logged == pytest.approx([1e-3, 5e-4, 0])
    assert seen == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 0, 0])


def test_each_policys_gradient_is_clipped_on_its_own(make: Any) -> None:
    batch = make.batch(9, policies=("a", "b"))
    config = config_of("set", "event", "sqrt", "mean")

    def norms(**clips: float | None) -> dict[str, float]:
        policies = {label: make.policy(make.gpt2(seed)) for seed, label in enumerate("ab")}
        how = {label: PolicyTraining(grad_clip=clip) for label, clip in clips.items()}
        found = one_update(learner_of(policies, config, training=how), batch)
        return {
            label: math.sqrt(sum(float(each.square().sum()) for n, each in found.items() if n.startswith(label)))
            for label in "ab"
        }

    free = norms(a=None, b=None)
    clipped = norms(a=free["a"] / 10, b=free["b"] * 10)
    assert clipped == pytest.approx({"a": free["a"] / 10, "b": free["b"]}, rel=1e-5)


def test_the_gradients_norm_by_set_size_is_that_of_their_events_alone(make: Any) -> None:
    """One graph for the events of each size, with the weights of the whole mini-batch; and only every second update."""
    batch, config = (
        make.batch(9, policies=("a", "b")),
        config_of("set", "event", "sqrt", "mean", grad_norm_by_k_every=2, clip=99.0),
    )

    def made(**changes: Any) -> SRPOLearner:
        policies = {label: make.policy(make.gpt2(i)) for i, label in enumerate("ab")}
        return learner_of(
            policies, config.model_copy(update=changes), training=PolicyTraining(lr=1e-30, grad_clip=None)
        )

    learner = made()
    assert not any("grad_norm/K" in name for name in learner.update(batch))
    found = learner.update(batch)
    size = torch.bincount(batch.event[batch.mask.any(1)], minlength=batch.num_events)
    for k in (1, 2, 3):
        own = replace(batch, mask=batch.mask & (size == k)[batch.event].unsqueeze(1))
        share = int((size == k).sum()) / int((size > 0).sum())  # its own mean over events is over fewer of them
        alone = made().update(own)["grad_norm"]
        assert found[f"grad_norm/K={k}"] == pytest.approx(alone * share, rel=1e-9)
    assert found["grad_norm"] == pytest.approx(made().update(batch)["grad_norm"], rel=1e-9)


def test_a_tempered_sample_has_ratio_1_under_the_weights_that_sampled_it() -> None:  # B024
    policy = LocalPolicy("tiny_arithmetic")
    sampling = Sampling(temperature=0.5, max_tokens=6)
    log = srpo_env.rollout("tiny/parallel_proposers", policies=policy, episodes=16, group_size=8, sampling=sampling)
    config = SRPOConfig(clip=0.2, length_norm="sum", mini_batches=1, old_logprobs="sampler")
    found = SRPOLearner(config, policy).update(log.batch())
    assert (found["ratio_min"], found["ratio_max"]) == pytest.approx((1, 1), abs=1e-4)


def test_one_model_under_two_labels_is_refused(make: Any) -> None:
    policy = make.policy(make.gpt2())
    with pytest.raises(InvalidInput, match="some of a, b are one model"):
        learner_of({"a": policy, "b": policy}, SRPOConfig(clip=0.2))


def test_a_trained_policy_without_settings_or_no_policy_at_all_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match="policies is empty"):
        learner_of({}, SRPOConfig(clip=0.2))
    with pytest.raises(InvalidInput, match="policy 'a' has no settings"):
        learner_of({"a": make.policy(make.gpt2())}, SRPOConfig(clip=0.2), training={"b": PolicyTraining()})
