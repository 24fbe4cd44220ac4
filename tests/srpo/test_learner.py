"""Does an update do what one graph over the whole mini-batch would, and nothing where nothing can be learned?"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import srpo_env
from srpo_env.agents import LocalPolicy
from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput, TrainingDiverged, Untrainable
from srpo_env.records import Sampling
from srpo_env.trainers.srpo.batch_advantage import Estimate
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner
from srpo_env.trainers.srpo.mini_batch_loss import mini_batch_loss
from srpo_env.trainers.srpo.schedule import learning_rate
from srpo_env.trainers.srpo.scoring import Scorer

ONE_STEP = {"clip": 0.3, "mini_batches": 1, "old_logprobs": "sampler", "constant_length": 5.0}
SETTINGS = list(
    itertools.product(
        ("set", "member", "token", "trajectory"),
        ("event", "episode", "member", "token", "constant"),
        ("sqrt", "sum", "mean"),
        ("mean", "sum"),
    )
)


def config_of(level: str, reduction: str, set_norm: str, length_norm: str, **changes: Any) -> SRPOConfig:
    units = {"ratio_level": level, "reduction": reduction, "set_norm": set_norm, "length_norm": length_norm}
    return SRPOConfig.checked(ONE_STEP | units | changes)


def learner_of(policies: Any, config: SRPOConfig, **settings: Any) -> SRPOLearner:
    training = settings.pop("training", PolicyTraining(lr=1e-3, grad_clip=None))
    return SRPOLearner(config, policies, training=training, **settings)


def one_update(learner: SRPOLearner, batch: EventBatch) -> dict[str, Tensor]:
    """Updates once and returns the gradients that the optimisers saw, by policy and parameter."""
    seen: dict[str, Tensor] = {}
    handles = []
    for label, optimiser in learner._optimisers.items():

        def keep(*_: Any, label: str = label) -> None:
            for name, each in learner.policies[label].model.named_parameters():
                seen[f"{label}.{name}"] = torch.zeros_like(each) if each.grad is None else each.grad.clone()

        handles.append(optimiser.register_step_pre_hook(keep))
    learner.update(batch)
    for handle in handles:
        handle.remove()
    return seen


def reference_gradient(
    plain: Any, policies: Mapping[str, Any], batch: EventBatch, config: SRPOConfig, graph: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    new, mask = graph
    advantage = plain.advantage(batch)
    loss = plain.loss(new, batch.sampler_logprobs, mask, batch, advantage, config).loss
    named = {f"{label}.{name}": p for label, each in policies.items() for name, p in each.model.named_parameters()}
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference, relative to the largest entry."""
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0
    return max(float((found[name] - each).abs().max()) for name, each in expected.items()) / largest


# ------------------------------------------------------------------------- the gradient of one graph


@pytest.fixture(scope="module")
def exact(make: Any, plain: Any) -> tuple[Any, EventBatch, tuple[Tensor, Tensor]]:
    """A float64 policy, a ragged batch, and its log-probs with their graph."""
    policy = make.policy(make.gpt2())
    batch = make.batch(3, groups=1, size=4)
    return policy, batch, plain.graph({"main": policy}, batch)


@pytest.mark.parametrize("names", SETTINGS, ids=["-".join(names) for names in SETTINGS])
def test_the_gradient_is_that_of_one_graph(names: tuple[str, ...], make: Any, plain: Any, exact: Any) -> None:
    policy, batch, graph = exact
    config = config_of(*names, micro_batch_tokens=60)
    expected = reference_gradient(plain, {"main": policy}, batch, config, graph)
    learner = learner_of(make.policy(make.gpt2()), config)
    assert difference(one_update(learner, batch), expected) < 1e-10


@pytest.mark.parametrize("tokens", [1, 7, 23, 61, 10**6])
@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "own prompts"])
@pytest.mark.parametrize("level", ["set", "token"])
def test_no_micro_batch_cut_changes_the_gradient(make: Any, plain: Any, tokens: int, shared: bool, level: str) -> None:
    policy, batch = make.policy(make.gpt2()), make.batch(5, shared_prompts=shared)
    config = config_of(level, "event", "sqrt", "mean", micro_batch_tokens=tokens)
    expected = reference_gradient(plain, {"main": policy}, batch, config, plain.graph({"main": policy}, batch))
    assert difference(one_update(learner_of(policy, config), batch), expected) < 1e-10


@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 16])
def test_no_set_size_changes_the_gradient(make: Any, plain: Any, members: int) -> None:
    policy, batch = make.policy(make.gpt2()), make.batch(6, members=members, size=2, most_events=1)
    config = config_of("set", "event", "sqrt", "mean", micro_batch_tokens=50)
    expected = reference_gradient(plain, {"main": policy}, batch, config, plain.graph({"main": policy}, batch))
    assert difference(one_update(learner_of(policy, config), batch), expected) < 1e-10


@pytest.mark.parametrize(
    "names", [("set", "event"), ("member", "member"), ("token", "token"), ("trajectory", "episode")]
)
def test_float32_is_near_the_gradient_of_one_graph(make: Any, plain: Any, names: tuple[str, str]) -> None:
    policy, batch = make.policy(make.qwen3()), make.batch(7)
    config = config_of(*names, "sqrt", "mean", micro_batch_tokens=40)
    expected = reference_gradient(plain, {"main": policy}, batch, config, plain.graph({"main": policy}, batch))
    assert difference(one_update(learner_of(policy, config), batch), expected) < 1e-5


@pytest.mark.parametrize("level", ["set", "member", "token", "trajectory"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_events_and_of_members_does_not_matter(make: Any, level: str, seed: int) -> None:
    events = make.events(8)
    draw = torch.Generator().manual_seed(seed)

    def shuffled(items: Any) -> list[Any]:
        return [items[i] for i in torch.randperm(len(items), generator=draw).tolist()]

    others = [e.model_copy(update={"members": tuple(shuffled(e.members))}) for e in shuffled(events)]
    config = config_of(level, "event", "sqrt", "mean", micro_batch_tokens=33)
    found = [
        one_update(learner_of(make.policy(make.gpt2()), config), EventBatch.from_events(each))
        for each in (events, others)
    ]
    assert difference(found[1], found[0]) < 1e-10


@pytest.mark.parametrize("level", ["set", "member", "trajectory"])
@pytest.mark.parametrize("trained", [("a",), ("a", "b")], ids=["one trained, one frozen", "both trained"])
def test_a_set_of_two_policies_has_one_ratio(make: Any, plain: Any, trained: tuple[str, ...], level: str) -> None:
    batch = make.batch(9, policies=("a", "b"))
    policies = {label: make.policy(make.gpt2(seed)) for seed, label in enumerate(trained)}
    config = config_of(level, "event", "sqrt", "mean", micro_batch_tokens=40)
    expected = reference_gradient(plain, policies, batch, config, plain.graph(policies, batch))
    assert difference(one_update(learner_of(policies, config), batch), expected) < 1e-10


@pytest.mark.parametrize("names", ["a", "a b"])
def test_the_parameters_after_a_step_are_those_of_one_graph(make: Any, plain: Any, names: str) -> None:
    batch = make.batch(10, policies=("a", "b"))
    how = PolicyTraining(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95), grad_clip=0.05)
    made = [{label: make.policy(make.gpt2(seed)) for seed, label in enumerate(names.split())} for _ in range(2)]
    config = config_of("set", "event", "sqrt", "mean", micro_batch_tokens=40)
    learner_of(made[0], config, training=how).update(batch)
    gradient = reference_gradient(plain, made[1], batch, config, plain.graph(made[1], batch))
    for label, policy in made[1].items():
        for name, each in policy.model.named_parameters():
            each.grad = gradient[f"{label}.{name}"]
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)
        torch.optim.AdamW(policy.model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)).step()
        found = made[0][label].parameters()
        assert max(float((found[n] - p).abs().max()) for n, p in policy.parameters().items()) < 1e-10


def test_all_fresh_log_probs_come_before_any_step(make: Any, plain: Any) -> None:
    """Two steps of two policies: the second ratio holds both policies' weights after the first, and no later ones."""
    batch = make.batch(11, policies=("a", "b"))
    made = [{label: make.policy(make.gpt2(seed)) for seed, label in enumerate("ab")} for _ in range(2)]
    config = config_of("set", "event", "sqrt", "mean", epochs=2)
    learner_of(made[0], config).update(batch)
    optimisers = {k: torch.optim.AdamW(v.model.parameters(), lr=1e-3, weight_decay=0) for k, v in made[1].items()}
    for _ in range(2):
        gradient = reference_gradient(plain, made[1], batch, config, plain.graph(made[1], batch))
        for label, policy in made[1].items():
            for name, each in policy.model.named_parameters():
                each.grad = gradient[f"{label}.{name}"]
            optimisers[label].step()
    for label, policy in made[1].items():
        found = made[0][label].parameters()
        assert max(float((found[n] - p).abs().max()) for n, p in policy.parameters().items()) < 1e-9


# -------------------------------------------------------------------------------------------- ratios


def test_one_optimiser_step_per_batch_has_ratio_1(make: Any) -> None:
    config = SRPOConfig(clip=0.0, mini_batches=1)
    metrics = learner_of(make.policy(make.qwen3()), config).update(make.batch(1))
    assert (metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]) == (1, 1, 1)
    assert metrics["clip_fraction"] == 0
    assert math.isnan(metrics["clip_fraction_off_policy"])


def test_a_set_of_one_member_is_gspo(make: Any) -> None:
    batch = make.batch(2, members=1)
    found = [
        one_update(learner_of(make.policy(make.gpt2()), config_of(*names, "sqrt", "mean")), batch)
        for names in (("set", "event"), ("member", "member"))
    ]
    assert difference(*found) < 1e-12


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"mini_batches": 1}, 2),  # old log-probs, gradient
        ({"mini_batches": 1, "epochs": 2}, 4),  # and the second epoch's fresh ones and gradient
        ({"mini_batches": 1, "old_logprobs": "sampler"}, 2),  # fresh ones, gradient
    ],
)
def test_fresh_log_probs_are_skipped_only_where_the_old_ones_are_they(
    make: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], passes: int
) -> None:
    calls = []
    score = Scorer.score

    def counted(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return score(self, *args, **kwargs)

    monkeypatch.setattr(Scorer, "score", counted)
    config = SRPOConfig(clip=0.3, **settings)
    learner_of(make.policy(make.qwen3()), config).update(make.batch(1))
    assert len(calls) == passes


def test_dropout_is_off_even_where_it_was_turned_on(make: Any) -> None:
    policy = make.policy(make.gpt2(resid_pdrop=0.5))
    learner = learner_of(policy, SRPOConfig(clip=0.2, mini_batches=1, epochs=2), training=PolicyTraining(lr=1e-12))
    policy.model.train()
    metrics = learner.update(make.batch(1))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-6)


# ------------------------------------------------------------------------------ nothing to learn from


def flat(make: Any, reward: float | None, **values: Any) -> EventBatch:
    """Two episodes of two members with the same reward."""
    return EventBatch.from_events(
        [
            make.event([make.member([5, 6], **values), make.member([7], **values)], episode=f"g/{i}", reward=reward)
            for i in range(2)
        ]
    )


def unmoved(policy: Any, before: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(each, before[name]) for name, each in policy.parameters().items())


@pytest.mark.parametrize(
    ("reward", "why"), [(0.5, "every advantage is 0"), (None, "no event counts, since none is scored")]
)
def test_without_a_signal_nothing_moves_though_adam_has_momentum(
    make: Any, caplog: pytest.LogCaptureFixture, reward: float | None, why: str
) -> None:
    policy = make.policy(make.gpt2())
    learner = learner_of(policy, SRPOConfig(clip=0.2), training=PolicyTraining(weight_decay=0.1))
    learner.update(make.batch(3))
    assert policy.version == 1
    before = policy.parameters()
    with caplog.at_level(logging.WARNING, "srpo_env"):
        metrics = learner.update(flat(make, reward))
    assert unmoved(policy, before)
    assert policy.version == 1
    assert metrics["steps"] == 0
    assert f"update 2: policy 'main' is not stepped: {why}" in caplog.text
    assert "g/0/0" in caplog.text
    learner.update(make.batch(4))
    assert policy.version == 2


def test_where_all_is_clipped_nothing_moves(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = make.policy(make.gpt2())
    low, high = (make.member([5, 6], logprobs=[value] * 2) for value in (0.0, -20.0))  # ratios near 0 and above 1
    batch = EventBatch.from_events([make.event([low], episode="g/0", reward=0.0), make.event([high], episode="g/1")])
    before = policy.parameters()
    metrics = learner_of(policy, SRPOConfig(clip=0.2, mini_batches=1, old_logprobs="sampler")).update(batch)
    assert unmoved(policy, before)
    assert policy.version == 0
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.5, 0.5)
    assert "not stepped: all units with an advantage are clipped (events g/0/0, g/1/0)" in caplog.text


def test_an_event_without_a_sampled_token_steps_nothing_and_is_named(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:  # B032
    policy = make.policy(make.gpt2())
    before = policy.parameters()
    batch = EventBatch.from_events([make.event([make.member([])], episode="full/0")])
    metrics = learner_of(policy, SRPOConfig(clip=0.2)).update(batch)
    assert metrics["loss"] == 0
    assert unmoved(policy, before)
    assert "no event counts" in caplog.text
    assert "full/0/0" in caplog.text
    assert not any(math.isinf(value) for value in metrics.values())


def test_an_empty_member_beside_others_counts_for_nothing(make: Any) -> None:  # B032
    def batch(*extra: Any) -> EventBatch:
        first = make.event([make.member([5, 6]), make.member([7]), *extra], episode="g/0", reward=0.0)
        return EventBatch.from_events([first, make.event([make.member([8])], episode="g/1")])

    config = SRPOConfig(clip=0.2, mini_batches=1)
    found = [
        one_update(learner_of(make.policy(make.gpt2()), config), each) for each in (batch(make.member([])), batch())
    ]
    assert difference(*found) < 1e-12


def test_nothing_at_all_is_no_update(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = make.policy(make.gpt2())
    before = policy.parameters()
    metrics = learner_of(policy, SRPOConfig(clip=0.2)).update(EventBatch.from_events([]))
    assert unmoved(policy, before)
    assert metrics["steps"] == 0
    assert policy.version == 0


def test_rows_of_policies_that_are_not_trained_are_named_as_the_reason(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2)).update(flat(make, 1.0, policy="other"))
    assert "no event counts, since it sampled none of their tokens" in caplog.text


def test_unscored_episodes_are_as_if_they_were_not_there(make: Any) -> None:
    events = make.events(12, size=4)
    gone = {"g0/2", "g1/0"}
    unscored = [e.model_copy(update={"reward": None}) if e.episode in gone and e.terminated else e for e in events]
    without = [e for e in events if e.episode not in gone]
    for level, reduction in (("set", "event"), ("token", "token"), ("trajectory", "episode"), ("member", "member")):
        config = config_of(level, reduction, "sqrt", "mean")
        found = [
            one_update(learner_of(make.policy(make.gpt2()), config), EventBatch.from_events(each))
            for each in (unscored, without)
        ]
        assert difference(*found) < 1e-12


def test_an_unscored_sibling_does_not_move_the_baseline(make: Any) -> None:  # B009
    events = [
        make.event([make.member([5], agent=f"a{i}")], episode=f"g/{i}", reward=reward)
        for i, reward in enumerate((1.0, 0.0, None, 1.0))
    ]
    metrics = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.2)).update(EventBatch.from_events(events))
    found = [metrics[f"advantage/agent=a{i}"] for i in range(4)]
    assert found == pytest.approx([0.7071, -1.4142, math.nan, 0.7071], abs=1e-4, nan_ok=True)
    assert metrics["unscored"] == 1


# ---------------------------------------------------------------------------------------- untrainable


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


# ----------------------------------------------------------------------------------------- estimators


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Writes a module and returns the reference of its `mine`."""
    numbers = itertools.count()

    def own(body: str) -> str:
        file = tmp_path / f"own_{next(numbers)}.py"
        file.write_text(f"import torch\ndef mine(*args):\n    {body}\n")
        return f"{file}:mine"

    return own


def two_agents(make: Any) -> EventBatch:
    """Two episodes of two events, a solver with a critic and then a solver alone; rewards on both events."""
    return EventBatch.from_events(
        [
            make.event(
                [make.member([5 + i]), make.member([7], agent="critic")][: 2 - step],
                episode=f"g/{i}",
                step=step,
                node=f"n{step}",
                reward=float(i) * step,
                terminated=step == 1,
            )
            for i in range(3)
            for step in range(2)
        ]
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


# ------------------------------------------------------------------------------------------ divergence


def test_weights_that_are_not_finite_stop_the_training_and_step_nothing(make: Any) -> None:
    policies = {label: make.policy(make.gpt2()) for label in "ab"}
    with torch.no_grad():
        policies["b"].model.transformer.h[1].mlp.c_proj.bias[0] = torch.nan
    before = policies["a"].parameters()
    learner = learner_of(policies, SRPOConfig(clip=0.2, mini_batches=1))
    with pytest.raises(
        TrainingDiverged, match=r"update 1: the loss is nan, .* for events g0/0/0, .*, \.\.\.\. Look at"
    ):
        learner.update(make.batch(3, policies=("a", "b"), groups=4))
    assert unmoved(policies["a"], before)
    assert policies["a"].version == 0


def test_the_event_that_diverged_is_named_and_no_other(make: Any, own: Any) -> None:
    reference = own("return (args[0] * torch.where(args[1].event == 1, torch.inf, 1.0)[:, None] * args[1].mask).sum()")
    policy = make.policy(make.gpt2())
    before = policy.parameters()
    learner = learner_of(policy, SRPOConfig(clip=0.2, mini_batches=1, objective=reference))
    with pytest.raises(TrainingDiverged, match=r"not finite for event g/0/1\. Look"):
        learner.update(two_agents(make))
    assert unmoved(policy, before)


def test_a_gradient_that_overflows_in_the_model_steps_no_policy(make: Any) -> None:
    policies = {label: make.policy(make.gpt2()) for label in "ab"}
    policies["b"].model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [each.parameters() for each in policies.values()]
    learner = learner_of(policies, SRPOConfig(clip=0.2, mini_batches=1))
    with pytest.raises(
        TrainingDiverged, match=r"the gradient of policy 'b' has the norm (inf|nan).* came from events g0"
    ):
        learner.update(make.batch(3, policies=("a", "b")))
    assert all(unmoved(policy, old) for policy, old in zip(policies.values(), before, strict=True))


# --------------------------------------------------------------------------- rates, clips, checkpoints


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


def test_a_resumed_learner_goes_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    config = SRPOConfig(clip=0.2, length_norm="sum")
    how = PolicyTraining(lr=1e-3, schedule="cosine", weight_decay=0.1)

    def fresh(seed: int) -> tuple[dict[str, Any], SRPOLearner]:
        policies = {label: make.policy(make.qwen3(seed + i)) for i, label in enumerate("ab")}
        return policies, learner_of(policies, config, training=how, total_updates=5, seed=3)

    batches = [make.batch(seed, policies=("a", "b")) for seed in (1, 2, 3, 4)]
    batches[1] = flat(make, 1.0, policy="b")  # an update without a step: versions and updates part
    whole, learner = fresh(0)
    for batch in batches[:2]:
        learner.update(batch)
    learner.save(tmp_path)
    expected = [learner.update(batch)["loss"] for batch in batches[2:]]
    resumed, other = fresh(40)
    other.load(tmp_path)
    assert [policy.version for policy in resumed.values()] == [1, 1]
    assert [other.update(batch)["loss"] for batch in batches[2:]] == expected
    for label, policy in whole.items():
        assert unmoved(resumed[label], policy.parameters())
        assert resumed[label].version == policy.version == 3
    assert other.updates == learner.updates == 4


def test_plain_transformers_loads_a_checkpoint_and_saving_says_nothing(
    make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = make.policy(make.qwen3())
    learner = learner_of(policy, SRPOConfig(clip=0.2))
    learner.update(make.batch(3))
    learner.save(tmp_path)
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "main")
    assert all(torch.equal(each, policy.parameters()[name]) for name, each in model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "main").vocab_size == 30


def test_a_folder_that_is_no_checkpoint_is_refused_and_nothing_changes(make: Any, tmp_path: Path) -> None:
    policy = make.policy(make.gpt2())
    learner, before = learner_of(policy, SRPOConfig(clip=0.2)), policy.parameters()
    with pytest.raises(InvalidInput, match=r"checkpoint .*: trainer.pt can't be read \(FileNotFoundError\)"):
        learner.load(tmp_path)
    (tmp_path / "trainer.pt").write_text("no")
    with pytest.raises(InvalidInput, match=r"trainer\.pt can't be read"):
        learner.load(tmp_path)
    learner_of({"other": make.policy(make.gpt2(1))}, SRPOConfig(clip=0.2)).save(tmp_path)
    with pytest.raises(InvalidInput, match="it has no policy 'main', which is trained; it has other"):
        learner.load(tmp_path)
    assert unmoved(policy, before)


# -------------------------------------------------------------------------------- what the clip does


def test_a_clip_that_never_binds_is_told_of_after_ten_updates(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=9.0), training=PolicyTraining(lr=1e-9))
    batch = make.batch(3, groups=1)
    for _ in range(9):
        learner.update(batch)
    assert "clip" not in caplog.text
    learner.update(batch)
    assert "update 10: the clip has not bound for 10 updates" in caplog.text


def test_a_clip_that_binds_for_most_is_told_of_once_in_ten_updates(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.0, epochs=8), training=PolicyTraining(lr=1e-2))
    for _ in range(3):
        learner.update(make.batch(3))
    assert caplog.text.count("update 1: the clip binds for") == 1
    assert caplog.text.count("the clip binds for") == 1


def test_steps_with_unchanged_weights_say_nothing_of_the_clip(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=9.0, mini_batches=1))
    for _ in range(11):
        learner.update(make.batch(3, groups=1, size=2))
    assert "clip" not in caplog.text
