"""Which rule is learned by? Estimators, presets, counts per policy, and functions of one's own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from srpo_env.batch import EventBatch
from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.batch_advantage import Estimate
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.mini_batch_loss import mini_batch_loss
from tests.srpo.learning import (
    difference,
    learner_of,
    one_update,
    two_agents,
    unmoved,
)


@pytest.mark.parametrize("level", ["set", "trajectory"])
def test_members_of_a_unit_must_have_one_advantage(make: Any, own: Any, level: str) -> None:
    reference = own("return torch.arange(args[0].num_members).double()")
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, ratio_level=level, estimator=reference))
    with pytest.raises(
        InvalidInput, match=r"estimator '.*own_0.py:mine': (event g/0/0|episode g/0) has the advantages 0"
    ):
        learner.update(two_agents(make))


def test_a_member_that_is_unscored_beside_others_is_no_unit(make: Any, own: Any) -> None:
    reference = own("return torch.where(torch.arange(args[0].num_members) == 1, torch.nan, 1.0)")
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, estimator=reference))
    with pytest.raises(InvalidInput, match=r"event g/0/0 has the advantages 1 and inf \(inf: unscored\)"):
        learner.update(two_agents(make))


@pytest.mark.parametrize(
    ("level", "estimator", "unit"), [("set", "agent", "event g/0/0"), ("trajectory", "decision", "episode g/0")]
)
def test_an_estimator_that_ships_is_named_where_its_advantages_do_not_fit(
    make: Any, level: str, estimator: str, unit: str
) -> None:
    """The critic is met in two of three episodes, and so is the second node: others are their peers there."""
    solver, critic = make.member([5]), make.member([6], agent="critic")
    events = [
        make.event([solver, critic], episode="g/0", reward=0.0, terminated=False),
        make.event([solver], episode="g/0", step=1, node="n1", reward=1.0),
        make.event([solver, critic], episode="g/1", reward=0.0, terminated=False),
        make.event([solver], episode="g/1", step=1, node="n1", reward=2.0),
        make.event([solver], episode="g/2", reward=7.0),
    ]
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, ratio_level=level, estimator=estimator))
    with pytest.raises(InvalidInput, match=f"estimator '{estimator}': {unit} has the advantages"):
        learner.update(EventBatch.from_events(events))


def test_agents_with_equal_peers_have_equal_advantages_and_are_a_unit(make: Any) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, estimator="agent"))
    events = [
        make.event([make.member([5, i], agent=a) for a in "xy"], episode=f"g/{i}", reward=float(i)) for i in range(2)
    ]
    assert learner.update(EventBatch.from_events(events))["steps"] == 2


def test_advantages_of_members_that_agree_are_those_of_the_event(make: Any, own: Any) -> None:
    batch = two_agents(make)
    per_event, per_member = own("return args[0].step - 0.5"), own("return (args[0].step - 0.5)[args[0].event]")
    found = [
        one_update(
            learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, mini_batches=1, estimator=reference)), batch
        )
        for reference in (per_event, per_member)
    ]
    assert difference(*found) == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "it returned a list; it returns a tensor with an advantage for each of the 6 events"),
        ("return torch.zeros(4)", r"it returned a tensor of \[4\]"),
        ("return torch.full((6,), float('inf'))", "an advantage is infinite"),
    ],
)
def test_an_own_estimator_must_return_advantages(make: Any, own: Any, body: str, message: str) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, estimator=own(body)))
    with pytest.raises(InvalidInput, match=message):
        learner.update(two_agents(make))


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "gspo", "dr_mas", "at_grpo", "rloo"])
def test_every_peers_rule_trains_on_the_same_events(make: Any, preset: str) -> None:
    policy = make.policy(make.qwen3())
    before = policy.parameters()
    config = SRPOConfig.checked({"preset": preset, "constant_length": 5})
    metrics = learner_of(policy, config).update(make.batch(3))
    assert metrics["steps"] == 2
    assert metrics["event_completeness"] == 1
    assert not unmoved(policy, before)


def test_dr_mas_leaves_a_lone_row_its_return_and_others_give_it_0(make: Any) -> None:
    batch = EventBatch.from_events([make.event([make.member([5])], reward=0.7)])
    found = [
        learner_of(make.policy(make.gpt2()), SRPOConfig(preset=preset)).update(batch)["advantage/agent=solver"]
        for preset in ("dr_mas", "at_grpo")
    ]
    assert found == [0.7, 0.0]


def test_rows_of_one_member_do_not_confuse_the_token_level(make: Any) -> None:
    """As many events as rows: [M, T] units are not [E] units."""
    metrics = learner_of(make.policy(make.qwen3()), SRPOConfig(preset="grpo")).update(make.batch(3, members=1))
    assert metrics["clip_fraction_high/K=1"] >= 0


def test_dr_mas_steps_each_policy_as_if_it_had_been_trained_alone(make: Any) -> None:
    """Its units are tokens and its counts are a policy's own, so what others sampled does not enter."""
    batch, config = make.batch(9, policies=("a", "b")), SRPOConfig(preset="dr_mas", mini_batches=1)
    both = one_update(learner_of({label: make.policy(make.gpt2(i)) for i, label in enumerate("ab")}, config), batch)
    for i, label in enumerate("ab"):
        alone = one_update(learner_of({label: make.policy(make.gpt2(i))}, config), batch)
        assert difference({name: both[name] for name in alone}, alone) < 1e-12
    config = config.model_copy(update={"per_policy": False})
    pooled = one_update(learner_of({label: make.policy(make.gpt2(i)) for i, label in enumerate("ab")}, config), batch)
    assert difference(pooled, both) > 0.1


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_counts_per_policy_by_hand(make: Any, kl: float) -> None:
    """One event, A = 1, ratio 1: policy a sampled 4 tokens in two rows, b 2 in one; 1/4 and 1/2 are their weights."""
    members = [make.member([5, 6, 7], policy="a"), make.member([5], policy="a"), make.member([8, 9], policy="b")]
    batch = EventBatch.from_events([make.event(members)])
    new = torch.where(batch.mask, -1.0, 0.0).requires_grad_()
    batch = replace(batch, old_logprobs=new.detach(), ref_logprobs=new.detach() + batch.mask * math.log(2))
    config = SRPOConfig(preset="dr_mas", kl_coefficient=kl)
    loss, _ = mini_batch_loss(new, batch, Estimate(torch.ones(3), per_member=True), config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-2 + kl * 2 * (1 - math.log(2)))
    slope = -1 + kl * -1  # k3 falls by exp(d) - 1 where d = log 2
    assert new.grad is not None
    assert new.grad[:, 2:].tolist() == [
        pytest.approx([slope / 4] * 3),
        pytest.approx([slope / 4, 0, 0]),
        pytest.approx([slope / 2] * 2 + [0]),
    ]


def test_an_own_objective_is_descended(make: Any, own: Any) -> None:
    reference = own("return -(args[0] * args[1].mask * args[2][args[1].event].unsqueeze(1)).sum()")
    policy, batch = make.policy(make.gpt2()), two_agents(make)
    metrics = learner_of(policy, SRPOConfig(clip=0.2, objective=reference, mini_batches=1)).update(batch)
    assert metrics["grad_norm"] > 0
    assert "ratio_mean" not in metrics


def test_an_own_objective_without_a_gradient_steps_nothing(
    make: Any, own: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make.policy(make.gpt2())
    before = policy.parameters()
    config = SRPOConfig(clip=0.2, objective=own("return torch.tensor(1.0)"))
    assert learner_of(policy, config).update(two_agents(make))["loss"] == 1
    assert unmoved(policy, before)
    assert "the objective's gradient is 0" in caplog.text


def test_an_own_estimator_and_objective_get_their_settings(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def advantage(batch, *, factor): return torch.full((batch.num_events,), float(factor))\n"
        "def objective(new, batch, advantage, *, power=1): return (new.sum() * 0 + advantage.sum()) ** power\n"
    )
    config = SRPOConfig(
        clip=0.2,
        mini_batches=1,
        estimator=f"{file}:advantage",
        estimator_settings={"factor": 2},
        objective=f"{file}:objective",
        objective_settings={"power": 3},
    )
    batch = EventBatch.from_events([make.event([make.member([5])], episode=f"g/{i}") for i in range(2)])
    assert learner_of(make.policy(make.gpt2()), config).update(batch)["loss"] == 64


@pytest.mark.parametrize(
    ("key", "settings", "message"),
    [
        (
            "estimator",
            {},
            r"estimator '.*mine' can't be called with \(batch\) and estimator_settings {}: missing a required",
        ),
        ("estimator", {"factr": 2, "factor": 1}, "unexpected keyword argument 'factr'"),
        ("objective", {"factor": 1}, r"can't be called with \(new_logprobs, batch, advantage\)"),
    ],
)
def test_settings_that_do_not_fit_an_own_function_are_refused_before_anything_is_sampled(
    make: Any, tmp_path: Path, key: str, settings: dict[str, Any], message: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def mine(batch, *, factor): ...\n")
    config = SRPOConfig(clip=0.2, **{key: f"{file}:mine", f"{key}_settings": settings})
    with pytest.raises(InvalidInput, match=message):
        learner_of(make.policy(make.gpt2()), config)


@pytest.mark.parametrize(
    ("body", "message"),
    [("return 1.0", "it returned a float; it returns the loss"), ("return args[0].sum(1)", r"a tensor of \[6\]")],
)
def test_an_own_objective_must_return_a_loss(make: Any, own: Any, body: str, message: str) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2, mini_batches=1, objective=own(body)))
    with pytest.raises(InvalidInput, match=message):
        learner.update(EventBatch.from_events([make.event([make.member([5])] * 3, episode=f"g/{i}") for i in range(2)]))
