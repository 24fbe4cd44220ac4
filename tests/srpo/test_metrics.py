"""Do the figures say what happened? Small batches, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.records import Parse
from srpo_env.trainers.srpo.batch_advantage import estimate, signal
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.estimators import GroupCount
from srpo_env.trainers.srpo.metrics import Step, batch_metrics, step_metrics
from srpo_env.trainers.srpo.objective import srpo_loss

NAN = math.nan


def three(make: Any) -> EventBatch:
    """Events of 2, 1 and 1 members; a solver and a critic, at two nodes; one sampled token a row."""
    rows = [("solver", "critic"), ("solver",), ("critic",)]
    return EventBatch.from_events(
        [
            make.event(
                [make.member([5], agent=agent, logprobs=[-1.0]) for agent in agents],
                episode=f"g/{i}",
                node="solve" if i < 2 else "judge",
                reward=float(i),
            )
            for i, agents in enumerate(rows)
        ]
    )


def step_of(
    batch: EventBatch, log_ratios: list[float], advantage: list[float], config: SRPOConfig, *, on_policy: bool = False
) -> Step:
    old = torch.where(batch.mask, -1.0, 0.0)
    new = old + torch.tensor(log_ratios).unsqueeze(1) * batch.mask
    values = torch.tensor(advantage)
    found = srpo_loss(
        new,
        old,
        batch.mask,
        batch.event,
        values,
        clip_low=config.clip[0],
        clip_high=config.clip[1],
        ratio_level=config.ratio_level,
        episode=batch.episode,
        num_episodes=len(batch.names["episode"]),
    )
    return Step(
        batch=replace(batch, old_logprobs=old),
        rows=torch.arange(batch.num_members),
        on_policy=on_policy,
        loss=float(found.loss),
        found=found,
        new_logprobs=new,
        grad_norm={"main": 3.0},
    )


def test_clips_by_k_node_and_agent(make: Any) -> None:
    """L = 0.6 / sqrt 2 = 0.424, 0.5, -0.5; A = 1, 1, -1; bounds ln 1.2 = 0.18 and ln 0.8 = -0.22: all clipped."""
    batch, config = three(make), SRPOConfig(clip=0.2)
    found = step_metrics([step_of(batch, [0.3, 0.3, 0.5, -0.5], [1, 1, -1], config)], batch, config)
    expected = {
        "clip_fraction": 1.0,
        "clip_fraction_low": 1 / 3,
        "clip_fraction_high": 2 / 3,
        "clip_fraction_off_policy": 1.0,
        "clip_fraction_high/K=2": 1.0,
        "clip_fraction_low/K=2": 0.0,
        "clip_fraction_high/K=1": 0.5,
        "clip_fraction_low/K=1": 0.5,
        "clip_fraction_high/node=solve": 1.0,
        "clip_fraction_low/node=judge": 1.0,
        "clip_fraction_high/agent=solver": 1.0,
        "clip_fraction_high/agent=critic": 0.5,
        "clip_fraction_low/agent=critic": 0.5,
        "log_ratio_variance/K=1": 0.25,
        "log_ratio_variance/K=2": 0.0,
        "ratio_min": math.exp(-0.5),
        "ratio_max": math.exp(0.5),
        "ratio_mean": (math.exp(0.6 / math.sqrt(2)) + math.exp(0.5) + math.exp(-0.5)) / 3,
        "ratio_clamped": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_units_without_an_advantage_have_no_clip_and_unscored_ones_no_ratio(make: Any) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2)
    found = step_metrics([step_of(batch, [0.3, 0.3, 0.5, 9.0], [1, 0, NAN], config)], batch, config)
    assert found["clip_fraction"] == 1.0  # of the one with A != 0
    assert "clip_fraction_high/node=judge" not in found
    assert "clip_fraction_high/K=1" not in found
    assert found["ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["log_ratio_std"] == pytest.approx(abs(0.6 / math.sqrt(2) - 0.5) / 2, abs=1e-6)


def test_steps_with_the_old_weights_are_not_off_policy(make: Any) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2)
    steps = [
        step_of(batch, [0.0] * 4, [1, 1, -1], config, on_policy=True),
        step_of(batch, [0.3, 0.3, 0.5, -0.5], [1, 1, -1], config),
    ]
    found = step_metrics(steps, batch, config)
    assert (found["clip_fraction"], found["clip_fraction_off_policy"]) == (0.5, 1.0)
    only = step_metrics(steps[:1], batch, config)
    assert math.isnan(only["clip_fraction_off_policy"])
    assert math.isnan(only["approx_kl"])
    assert not any("/K=" in name for name in only)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (
            "member",
            {"high/K=2": 1.0, "high/K=1": 0.5, "low/K=1": 0.5, "high/agent=critic": 0.5, "low/agent=critic": 0.5},
        ),
        ("token", {"high/K=2": 1.0, "high/K=1": 0.5, "low/K=1": 0.5, "high/agent=solver": 1.0, "low/node=judge": 1.0}),
        (
            "trajectory",
            {"high/K=2": 1.0, "high/K=1": 0.5, "low/K=1": 0.5, "high/node=solve": 1.0, "low/node=judge": 1.0},
        ),
    ],
)
def test_units_of_other_levels_have_a_k_a_node_and_an_agent(make: Any, level: Any, expected: dict[str, float]) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2, ratio_level=level)
    found = step_metrics([step_of(batch, [0.3, 0.3, 0.5, -0.5], [1, 1, -1], config)], batch, config)
    assert {name: found[f"clip_fraction_{name}"] for name in expected} == expected


def test_a_trajectorys_k_counts_the_members_of_the_episode(make: Any) -> None:
    events = [make.event([make.member([5])] * 2, step=i, terminated=i == 1) for i in range(2)]
    batch, config = EventBatch.from_events(events), SRPOConfig(clip=0.2, ratio_level="trajectory")
    found = step_metrics([step_of(batch, [0.1] * 4, [1, 1], config)], batch, config)
    assert [name for name in found if name.startswith("log_ratio_variance")] == ["log_ratio_variance/K=4"]


def test_ratios_beyond_the_limit_are_counted(make: Any) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2)
    found = step_metrics([step_of(batch, [30.0, 30.0, 0.0, 25.0], [1, 1, -1], config)], batch, config)
    assert found["ratio_clamped"] == 2
    assert found["ratio_max"] == pytest.approx(math.exp(20), rel=1e-5)


def test_approx_kl_is_of_old_against_new_over_tokens(make: Any) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2)
    found = step_metrics([step_of(batch, [0.5, -0.2, 0.0, 0.0], [1, 1, 1], config)], batch, config)
    assert found["approx_kl"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.2) - 0.8) / 4, abs=1e-6)


def test_norms_are_over_the_steps_that_were_taken(make: Any) -> None:
    batch, config = three(make), SRPOConfig(clip=0.2, epochs=3)
    steps = [step_of(batch, [0.0] * 4, [1, 1, 1], config) for _ in range(3)]
    steps[0].grad_norm.update(main=3.0, other=4.0)
    steps[1].grad_norm.update(main=1.0)
    steps[2].grad_norm.clear()
    found = step_metrics(steps, batch, config)
    assert (found["grad_norm"], found["grad_norm_max"], found["steps"]) == (3.0, 5.0, 2)
    assert (found["grad_norm/policy=main"], found["grad_norm/policy=other"]) == (2.0, 4.0)
    assert (found["grad_share/policy=main"], found["grad_share/policy=other"]) == pytest.approx((0.68, 0.32))
    assert found["event_completeness"] == 1.0


# ---------------------------------------------------------------------------------------- the batch


def of_batch(batch: EventBatch, config: SRPOConfig, old: Tensor | None = None, entropy: Tensor | None = None) -> Any:
    filled = replace(batch, old_logprobs=batch.sampler_logprobs if old is None else old)
    advantage = estimate(batch, config).by_row(batch)
    return batch_metrics(filled, batch, advantage, entropy, signal(batch, config), config)


def test_sets_and_tokens(make: Any) -> None:
    found = of_batch(three(make), SRPOConfig(clip=0.2))
    assert (found["sets/K=1"], found["sets/K=2"], found["events"]) == (2, 1, 3)
    assert found["set_size_mean"] == pytest.approx(4 / 3)
    assert found["share_of_sets_over_1"] == pytest.approx(1 / 3)
    assert found["tokens_trained"] == 4


def test_an_empty_output_is_no_member_of_a_set(make: Any) -> None:
    batch = EventBatch.from_events(
        [make.event([make.member([5]), make.member([])]), make.event([make.member([])], step=1)]
    )
    found = of_batch(batch, SRPOConfig(clip=0.2))
    assert (found["sets/K=1"], found["set_size_mean"]) == (1, 1)


def test_rewards_are_one_per_episode_and_unscored_ones_are_left_out(make: Any) -> None:
    events = [make.event([make.member()], episode="g/0", step=i, reward=0.5, terminated=i == 1) for i in range(2)]
    events += [make.event([make.member()], episode=f"g/{1 + i}", reward=reward) for i, reward in enumerate((0.0, None))]
    found = of_batch(EventBatch.from_events(events), SRPOConfig(clip=0.2))
    assert (found["reward_mean"], found["reward_std"], found["unscored"]) == (0.5, 0.5, 1)


def test_advantages_by_agent_and_node(make: Any) -> None:
    found = of_batch(three(make), SRPOConfig(clip=0.2))  # R = 0, 1, 2: A = -1.2247, 0, 1.2247
    assert found["advantage/agent=solver"] == pytest.approx(-1.2247 / 2, abs=1e-4)
    assert found["advantage/agent=critic"] == pytest.approx(0, abs=1e-4)
    assert found["advantage/node=judge"] == pytest.approx(1.2247, abs=1e-4)
    assert found["advantage/node=solve"] == pytest.approx(-1.2247 * 2 / 3, abs=1e-4)  # over rows


def test_outputs_by_agent_frozen_ones_and_failures_among_them(make: Any) -> None:
    rows = [
        make.member([5, 6, 7], agent="solver", finish_reason="stop"),
        make.member([5], agent="solver", finish_reason="length", parse=Parse(ok=False)),
        make.member([5, 6], agent="judge", policy="frozen", finish_reason="length"),
        make.member([], agent="silent", parse=Parse(ok=False)),
    ]
    sampled = EventBatch.from_events([make.event(rows)])
    trained = replace(
        sampled, mask=sampled.mask & (sampled.policy == 0).unsqueeze(1), old_logprobs=sampled.sampler_logprobs
    )
    found = batch_metrics(trained, sampled, torch.ones(4), None, None, SRPOConfig(clip=0.2))
    for name, values in {
        "output_tokens": (2, 2, 0),
        "truncation_rate": (0.5, 1, 0),
        "parse_failure_rate": (0.5, 0, 1),
        "advantage": (1, NAN, NAN),
    }.items():
        got = [found[f"{name}/agent={agent}"] for agent in ("solver", "judge", "silent")]
        assert got == pytest.approx(values, nan_ok=True), name
    assert found["tokens_trained"] == 4
    assert math.isnan(found["groups_without_signal"])


@pytest.mark.parametrize(
    ("estimator", "level", "expected"),
    [
        ("group", "set", GroupCount(1, 2)),  # a: 0, 1; b: 1, 1
        ("decision", "set", GroupCount(3, 4)),  # (a, n0), (a, n1) of one event, (b, n0) flat, (b, n1) of one
        ("agent", "member", GroupCount(2, 3)),  # (a, x) 0, 1; (a, y) once; (b, x) flat
    ],
)
def test_groups_without_signal_are_those_of_the_estimator(
    make: Any, estimator: str, level: Any, expected: GroupCount
) -> None:
    def event(episode: str, step: int, reward: float, agent: str = "x", *, last: bool) -> Any:
        return make.event(
            [make.member([5], agent=agent)], episode=episode, step=step, node=f"n{step}", reward=reward, terminated=last
        )

    events = [
        event("a/0", 0, 0.0, last=True),
        event("a/1", 0, 0.0, last=False),
        event("a/1", 1, 1.0, "y", last=True),
        event("b/0", 0, 1.0, last=True),
        event("b/1", 0, 0.0, last=False),
        event("b/1", 1, 1.0, last=True),
    ]
    config = SRPOConfig(clip=0.2, estimator=estimator, ratio_level=level)
    batch = EventBatch.from_events(events)
    assert signal(batch, config) == expected
    share = expected.groups_without_signal / expected.groups
    assert of_batch(batch, config)["groups_without_signal"] == share


def test_sets_of_mixed_versions_are_counted_once_each(make: Any) -> None:
    def event(i: int, *versions: tuple[str, int]) -> Any:
        rows = [make.member([5], policy=policy, policy_version=version) for policy, version in versions]
        return make.event([*rows, make.member([], policy_version=99)], episode=f"g/{i}")

    events = [
        event(0, ("a", 1), ("a", 1), ("b", 2)),  # two policies, each of one version
        event(1, ("a", 1), ("a", 2), ("b", 1), ("b", 2)),
        event(2, ("a", 3), ("a", 1)),
    ]
    assert of_batch(EventBatch.from_events(events), SRPOConfig(clip=0.2))["sets_of_mixed_versions"] == 2


def test_the_mismatch_with_the_sampler_per_token_member_and_set(make: Any) -> None:
    """Differences +0.2, -0.2 and +0.3 | +0.1: tokens 0.2, members (0, 0.3, 0.1), sets 0.3 / sqrt 2 and 0.1."""
    rows = [make.member([5, 6], logprobs=[-1.0, -1.0]), make.member([7], logprobs=[-1.0]), make.member([8])]
    single = make.member([9], logprobs=[-1.0])
    batch = EventBatch.from_events([make.event(rows), make.event([single], episode="g/1")])
    old = torch.where(batch.mask, -1.0, 0.0)
    for row, place, value in ((0, 2, 0.2), (0, 3, -0.2), (1, 2, 0.3), (2, 2, 7.0), (3, 2, 0.1)):
        old[row, place] += value
    found = of_batch(batch, SRPOConfig(clip=0.2), old=old)
    assert found["sampler_mismatch_token"] == pytest.approx(0.2, abs=1e-6)
    assert found["sampler_mismatch_member"] == pytest.approx(0.4 / 3, abs=1e-6)
    assert found["sampler_mismatch_set"] == pytest.approx((0.3 / math.sqrt(2) + 0.1) / 2, abs=1e-6)
    assert "sampler_mismatch_set" not in of_batch(batch, SRPOConfig(clip=0.2, old_logprobs="sampler"))


def test_entropy_is_the_mean_over_trained_tokens(make: Any) -> None:
    batch = three(make)
    entropy = torch.where(batch.mask, torch.tensor([[1.0], [2.0], [3.0], [6.0]]), 99.0)
    assert of_batch(batch, SRPOConfig(clip=0.2), entropy=entropy)["entropy"] == 3.0


def test_entropy_is_estimated_from_the_samplers_log_probs_where_nothing_was_recomputed(make: Any) -> None:
    rows = [make.member([5, 6], logprobs=[-1.0, -2.0]), make.member([7], logprobs=[-6.0])]
    batch = EventBatch.from_events([make.event(rows)])
    assert of_batch(batch, SRPOConfig(clip=0.2, old_logprobs="sampler"))["entropy"] == 3.0


def test_a_batch_of_nothing_has_figures(make: Any) -> None:
    batch, config = EventBatch.from_events([]), SRPOConfig(clip=0.2)
    found = of_batch(batch, config) | step_metrics([], batch, config)
    assert found["events"] == 0
    assert math.isnan(found["event_completeness"])
