"""Does an update do what one graph over the whole mini-batch would, and nothing where nothing can be learned?"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.errors import TrainingDiverged
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.scoring import Scorer
from tests.srpo.learning import (
    config_of,
    difference,
    flat,
    learner_of,
    one_update,
    reference_gradient,
    two_agents,
    unmoved,
)

SETTINGS = list(
    itertools.product(
        ("set", "member", "token", "trajectory"),
        ("event", "episode", "member", "token", "constant"),
        ("sqrt", "sum", "mean"),
        ("mean", "sum"),
    )
)


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
