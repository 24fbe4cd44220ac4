"""Does a unit weigh by how its sampler's log-probs differ from the learner's old ones, and never above the cap?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput, InvalidRecipe, Untrainable
from srpo_env.records import Sampling
from srpo_env.trainers.srpo.batch_advantage import Estimate
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.importance import truncated_importance
from srpo_env.trainers.srpo.learner import SRPOLearner
from srpo_env.trainers.srpo.mini_batch_loss import mini_batch_loss
from srpo_env.trainers.srpo.objective import srpo_loss
from srpo_env.trainers.srpo.scoring import Scorer

A, B = math.exp(0.25), math.exp(0.1)


def two_sets(make: Any) -> EventBatch:
    """Old log-probs -1 everywhere.

    A set of one token and of two, which the sampler held for less probable by 0.25 and 0.1 a token; in the same episode
    a token that it held for more probable by 0.3.
    """
    events = [
        make.event([make.member([5], logprobs=[-1.25]), make.member([6, 7], logprobs=[-1.1, -1.1])], terminated=False),
        make.event([make.member([5], logprobs=[-0.7])], step=1),
    ]
    batch = EventBatch.from_events(events)
    return replace(batch, old_logprobs=torch.where(batch.mask, -1.0, 0.0))


@pytest.mark.parametrize(
    ("level", "set_norm", "length_norm", "expected"),
    [
        ("set", "sqrt", "mean", [math.exp(0.35 / math.sqrt(2)), math.exp(-0.3)]),
        ("set", "sum", "mean", [1.4, math.exp(-0.3)]),  # exp(0.35) = 1.419 is above the cap
        ("set", "mean", "sum", [math.exp(0.225), math.exp(-0.3)]),
        ("member", "sqrt", "mean", [A, B, math.exp(-0.3)]),
        ("member", "sqrt", "sum", [A, math.exp(0.2), math.exp(-0.3)]),
        ("token", "sqrt", "mean", [A, B, B, math.exp(-0.3)]),
        ("trajectory", "sqrt", "mean", [math.exp(0.05 / math.sqrt(3))]),
    ],
)
def test_each_level_gives_the_weights_worked_out_by_hand(
    make: Any, level: Any, set_norm: Any, length_norm: Any, expected: list[float]
) -> None:
    batch = two_sets(make)
    config = SRPOConfig(clip=9.0, tis_cap=1.4, ratio_level=level, set_norm=set_norm, length_norm=length_norm)
    found = truncated_importance(batch, torch.ones(3), config)
    assert found.weight[found.counted].tolist() == pytest.approx(expected, rel=1e-6)
    assert found.capped[found.counted].tolist() == [each == 1.4 for each in expected]


def test_an_unscored_event_is_no_unit(make: Any) -> None:
    config = SRPOConfig(clip=0.2, tis_cap=1.01)
    found = truncated_importance(two_sets(make), torch.tensor([math.nan, math.nan, 1.0]), config)
    assert found.counted.tolist() == [False, True]
    assert not found.capped.any()


def test_a_log_ratio_without_bounds_weighs_the_cap(make: Any) -> None:
    batch = two_sets(make)
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs * 400)
    found = truncated_importance(batch, torch.ones(3), SRPOConfig(clip=0.2, tis_cap=3.0))
    assert found.weight.tolist() == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize(("new", "surrogate"), [(-1.0, 1.0), (0.0, 1.2)], ids=["ratio 1", "clipped"])
@pytest.mark.parametrize("advantage", [2.0, 0.0])
def test_the_weight_multiplies_the_advantage_and_not_the_ratio(
    make: Any, new: float, surrogate: float, advantage: float
) -> None:
    batch = two_sets(make).select(torch.tensor([0]))
    config = SRPOConfig(clip=0.2, tis_cap=1.1)
    estimated = Estimate(torch.tensor([advantage]), per_member=False)
    loss, found = mini_batch_loss(torch.full(batch.mask.shape, new), batch, estimated, config)
    assert float(loss) == pytest.approx(-1.1 * advantage * surrogate, rel=1e-6)
    assert found is not None
    assert found.advantage.tolist() == pytest.approx([1.1 * advantage])


@pytest.mark.parametrize("level", ["set", "member", "trajectory"])
def test_the_gradient_is_that_of_a_weighed_advantage(make: Any, plain: Any, level: str) -> None:
    batch = make.batch(3, groups=1, size=4, spread=0.2)
    units = {"ratio_level": level, "length_norm": "sum", "tis_cap": 0.1, "micro_batch_tokens": 60, "mini_batches": 1}
    config, policy = SRPOConfig.checked({"clip": 0.3} | units), make.policy(make.gpt2())
    new, mask = plain.graph({"main": policy}, batch)
    old = new.detach()
    tokens = torch.where(mask, old - batch.sampler_logprobs, 0.0).sum(1)
    unit = {"set": batch.event, "member": torch.arange(len(tokens)), "trajectory": batch.episode[batch.event]}[level]
    weight = []
    for row in range(len(tokens)):
        mates = [at for at in range(len(tokens)) if unit[at] == unit[row] and bool(mask[at].any())]
        weight.append(min(math.exp(sum(float(tokens[at]) for at in mates) / math.sqrt(max(1, len(mates)))), 0.1))
    assert {0.1} < set(weight)
    advantage = plain.advantage(batch)[batch.event] * torch.tensor(weight, dtype=torch.float64)
    loss = plain.loss(new, old, mask, batch, advantage, config).loss
    expected = torch.autograd.grad(loss, list(policy.model.parameters()), allow_unused=True)
    learner = SRPOLearner(config, policy, training=PolicyTraining(grad_clip=None))
    seen: list[Tensor | None] = []
    learner._optimisers["main"].register_step_pre_hook(
        lambda *_: seen.extend(None if p.grad is None else p.grad.clone() for p in policy.model.parameters())
    )
    learner.update(batch)
    pairs = [(f, e) for f, e in zip(seen, expected, strict=True) if e is not None]
    largest = max(float(e.abs().max()) for _, e in pairs)
    assert all(f is not None and float((f - e).abs().max()) < 1e-10 * largest for f, e in pairs)


def test_the_first_step_takes_fresh_log_probs_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, score = [], Scorer.score

    def counted(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return score(self, *args, **kwargs)

    monkeypatch.setattr(Scorer, "score", counted)
    SRPOLearner(SRPOConfig(clip=0.3, mini_batches=1, tis_cap=2.0), make.policy(make.qwen3())).update(make.batch(1))
    assert len(calls) == 3  # old log-probs, fresh ones, gradient


def test_mean_and_share_of_the_weights_are_logged(make: Any) -> None:
    batch = make.batch(3, groups=1, spread=3.0)
    policy = make.policy(make.gpt2())
    both = [SRPOLearner(SRPOConfig(clip=0.3, tis_cap=cap), policy).update(batch) for cap in (1e-6, 1e6)]
    assert both[0]["tis_weight_mean"] == pytest.approx(1e-6)
    assert [each["tis_capped"] for each in both] == [1, 0]
    assert "tis_capped" not in SRPOLearner(SRPOConfig(clip=0.3), policy).update(batch)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({}, "has no log-probs, which old_logprobs: sampler and tis_cap need"),
        (
            {"logprobs": (-1.0,), "logprobs_mode": "raw", "sampling": Sampling(temperature=0.5)},
            "has log-probs from before the temperature",
        ),
    ],
)
def test_an_output_whose_sampler_log_probs_cannot_be_used_is_refused_only_with_a_cap(
    make: Any, values: dict[str, Any], rule: str
) -> None:
    batch = EventBatch.from_events([make.event([make.member([5], **values)])])
    policy = make.policy(make.gpt2())
    SRPOLearner(SRPOConfig(clip=0.2), policy).update(batch)
    with pytest.raises(Untrainable, match=f"event g/0/0: the output of solver.0. {rule}"):
        SRPOLearner(SRPOConfig(clip=0.2, tis_cap=2.0), policy).update(batch)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"old_logprobs": "sampler"}, "tis_cap weighs recomputed log-probs"),
        ({"objective": "mine:loss"}, "tis_cap belongs to the objective that ships"),
        ({"tis_cap": 0.0}, "learner: tis_cap"),
    ],
)
def test_a_cap_that_could_do_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        SRPOConfig.checked({"clip": 0.2, "tis_cap": 2.0} | values)


def test_weights_of_another_level_are_refused() -> None:
    logprobs, event = torch.zeros(2, 1), torch.tensor([0, 0])
    with pytest.raises(InvalidInput, match=r"importance: shape \[2\] beside units of \[1\]"):
        srpo_loss(
            logprobs,
            logprobs,
            torch.ones(2, 1),
            event,
            torch.ones(1),
            clip_low=0.2,
            clip_high=0.2,
            importance=torch.ones(2),
        )
