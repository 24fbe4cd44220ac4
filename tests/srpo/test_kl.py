"""Is a policy held to the weights that training began from, by the KL that the settings ask for, and no others?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env import train
from srpo_env.adapters import add_adapter, transformer
from srpo_env.batch import EventBatch
from srpo_env.config import Lora, PolicyTraining
from srpo_env.errors import InvalidInput, InvalidRecipe
from srpo_env.trainers.srpo.batch_advantage import Estimate
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner
from srpo_env.trainers.srpo.mini_batch_loss import mini_batch_loss
from srpo_env.trainers.srpo.reference import reference_scorers
from srpo_env.trainers.srpo.scoring import Scorer

HOW = PolicyTraining(lr=1e-3, grad_clip=None)


def one_token(make: Any, **changes: Any) -> EventBatch:
    batch = EventBatch.from_events([make.event([make.member([5])], reward=0.0)])
    return replace(batch, **changes)


@pytest.mark.parametrize(("kind", "loss", "slope"), [("k3", 0.0367879, 0.0632121), ("k2", 0.05, 0.1)])
def test_a_token_more_likely_than_in_the_reference_is_pulled_back(
    make: Any, kind: Any, loss: float, slope: float
) -> None:  # B021
    new = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    batch = one_token(make, old_logprobs=torch.full((1, 3), -1.0), ref_logprobs=torch.full((1, 3), -2.0))
    config = SRPOConfig(clip=0.2, kl_coefficient=0.1, kl_estimator=kind)
    found, _ = mini_batch_loss(new, batch, Estimate(torch.zeros(1), per_member=False), config)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, abs=1e-6)
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([0, 0, slope], abs=1e-6)


WEIGHTS = {  # of a token of event e with K members, in a row of n tokens; E events, M members, T tokens
    "event": lambda E, M, T, K, n: 1 / (E * K * n),
    "member": lambda E, M, T, K, n: 1 / (M * n),
    "token": lambda E, M, T, K, n: 1 / T,
}


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize(("level", "reduction"), [("set", "event"), ("member", "member"), ("token", "token")])
def test_the_gradient_with_kl_is_that_of_one_graph(
    make: Any, plain: Any, level: str, reduction: str, kind: str
) -> None:
    batch = make.batch(3, groups=1, size=4)
    policy, start = make.policy(make.gpt2(1)), make.policy(make.gpt2(0))
    settings = {"ratio_level": level, "reduction": reduction, "kl_coefficient": 0.3, "kl_estimator": kind}
    given = {"clip": 0.3, "mini_batches": 1, "old_logprobs": "sampler", "micro_batch_tokens": 60}
    config = SRPOConfig.checked(given | settings)
    new, mask = plain.graph({"main": policy}, batch)
    ref = plain.graph({"main": start}, batch)[0].detach()
    loss = plain.loss(new, batch.sampler_logprobs, mask, batch, plain.advantage(batch), config).loss
    tokens = mask.sum(1).tolist()
    size = torch.bincount(batch.event[mask.any(1)], minlength=batch.num_events).tolist()
    E, M, T = sum(k > 0 for k in size), sum(n > 0 for n in tokens), sum(tokens)
    for row, n in enumerate(tokens):
        for at in torch.nonzero(mask[row]).flatten().tolist():
            d = ref[row, at] - new[row, at]
            k = d * d / 2 if kind == "k2" else d.exp() - 1 - d
            loss = loss + 0.3 * k * WEIGHTS[reduction](E, M, T, size[int(batch.event[row])], n)
    expected = torch.autograd.grad(loss, list(policy.model.parameters()), allow_unused=True)

    learner = SRPOLearner(config, start, training=HOW)
    start.model.load_state_dict(policy.model.state_dict())  # training has moved the weights since
    seen: list[Tensor | None] = []
    learner._optimisers["main"].register_step_pre_hook(
        lambda *_: seen.extend(None if p.grad is None else p.grad.clone() for p in start.model.parameters())
    )
    learner.update(batch)
    pairs = [(f, e) for f, e in zip(seen, expected, strict=True) if e is not None]
    largest = max(float(e.abs().max()) for _, e in pairs)
    assert all(f is not None and float((f - e).abs().max()) < 1e-10 * largest for f, e in pairs)


def test_the_reference_stays_where_training_began(make: Any) -> None:
    learner = SRPOLearner(
        SRPOConfig(clip=0.2, kl_coefficient=0.01, mini_batches=1), make.policy(make.qwen3()), training=HOW
    )
    batch = make.batch(3)
    first, second, third = (learner.update(batch) for _ in range(3))
    assert first["kl_to_reference"] == first["kl_to_reference_k1"] == 0
    assert 0 < second["kl_to_reference"] < third["kl_to_reference"]
    assert second["approx_kl"] != second["approx_kl"]  # one step: the old weights are the new ones


def test_a_group_without_signal_is_pulled_to_the_reference(make: Any) -> None:
    """A = 0 takes the surrogate's gradient away, and not the KL's."""
    policy = make.policy(make.qwen3())
    learner = SRPOLearner(SRPOConfig(clip=0.2, kl_coefficient=1.0, mini_batches=1), policy, training=HOW)
    policy.model.load_state_dict(make.qwen3(1).state_dict())
    events = [make.event([make.member([5, 6])], episode=f"g/{i}", reward=1.0) for i in range(2)]
    found = [learner.update(EventBatch.from_events(events))["kl_to_reference"] for _ in range(8)]
    assert found[-1] < found[0] / 2


def test_the_reference_of_an_adapter_is_what_lies_below_it_and_not_copied(make: Any) -> None:
    """While another adapter is on the trained one, the reference still is the model that it began from."""
    batch = make.batch(3)
    policy = make.policy(add_adapter(make.gpt2().eval(), Lora(rank=2, alpha=4), seed=0))
    (scorer,) = reference_scorers({"main": policy}, lambda label, model: Scorer(transformer(model))).values()
    with torch.no_grad():
        for name, each in policy.model.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.5)
    rows = torch.nonzero(batch.mask.any(1)).flatten()
    with torch.no_grad():
        found, plain, trained = (
            next(each.score(batch, rows)).logprobs
            for each in (scorer, Scorer(make.gpt2().eval()), Scorer(transformer(policy.model)))
        )
    assert torch.allclose(found, plain, atol=1e-12)
    assert not torch.allclose(found, trained)
    own = {each.data_ptr() for each in policy.model.parameters()}
    assert {each.data_ptr() for each in scorer.model.parameters()} <= own


def test_kl_is_added_to_an_own_objective_too(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def zero(new, batch, advantage):\n    return (new * 0).sum()\n")
    policy = make.policy(make.qwen3())
    config = SRPOConfig(clip=0.2, objective=f"{file}:zero", kl_coefficient=1.0, mini_batches=1)
    learner = SRPOLearner(config, policy, training=HOW)
    policy.model.load_state_dict(make.qwen3(1).state_dict())
    found = learner.update(make.batch(3))
    assert found["loss"] > 0
    assert found["grad_norm"] > 0


def test_without_a_coefficient_there_is_no_reference(make: Any) -> None:
    found = SRPOLearner(SRPOConfig(clip=0.2), make.policy(make.qwen3()), training=HOW).update(make.batch(3))
    assert "kl_to_reference" not in found


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_a_coefficient_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InvalidRecipe, match="learner: kl_coefficient"):
        SRPOConfig.checked({"clip": 0.2, "kl_coefficient": value})


def test_k1_is_no_estimator_to_learn_from() -> None:
    with pytest.raises(InvalidRecipe, match=r"learner: kl_estimator: .* it is 'k1'"):
        SRPOConfig.checked({"clip": 0.2, "kl_estimator": "k1"})


def test_a_resumed_run_keeps_the_reference_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KL to the resumed weights instead, the last update would go elsewhere."""
    settings = ["tasks.eval.size=4", "rollout.tasks_per_batch=4", "updates=3", "log.checkpoint_every_updates=1"]
    settings += ["learner.kl_coefficient=1.0", "policies.main.train.lr=1e-3"]
    whole = train("arithmetic_tiny", [*settings, f"run={tmp_path / 'whole'}"])
    broken, update = tmp_path / "broken", SRPOLearner.update

    def breaks_off(self: SRPOLearner, batch: EventBatch) -> dict[str, float]:
        if self.updates == 2:
            raise RuntimeError("no power")
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SRPOLearner, "update", breaks_off)
        with pytest.raises(RuntimeError, match="no power"):
            train("arithmetic_tiny", [*settings, f"run={broken}"])
    resumed = train(broken, resume=True)
    weights = [(Path(each.checkpoint) / "main" / "model.safetensors").read_bytes() for each in (whole, resumed)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_checkpoint_is_refused_where_the_reference_is_another_now(make: Any, tmp_path: Path, lora: bool) -> None:
    """One weight has moved since; an adapter's own weights may, since KL is to what lies below it."""

    def learner(*, moved: float, adapter: int = 0, kl: float = 0.1) -> SRPOLearner:
        model = make.gpt2().eval()
        with torch.no_grad():
            model.transformer.h[1].mlp.c_proj.bias[3] += moved
        model = add_adapter(model, Lora(rank=2, alpha=4), seed=adapter) if lora else model
        return SRPOLearner(SRPOConfig(clip=0.2, kl_coefficient=kl), make.policy(model), training=HOW)

    begun = learner(moved=0.0)
    begun.update(make.batch(3))
    begun.save(tmp_path)
    learner(moved=0.0, adapter=1).load(tmp_path)
    other = learner(moved=1e-6)
    with pytest.raises(InvalidInput, match=r"those of policy 'main' are others now \(checksum \w{8}, not \w{8}\)"):
        other.load(tmp_path)
    assert other.updates == 0
    learner(moved=1e-6, kl=0.0).load(tmp_path)


def test_a_checkpoint_without_a_reference_may_get_one(make: Any, tmp_path: Path) -> None:
    SRPOLearner(SRPOConfig(clip=0.2), make.policy(make.gpt2()), training=HOW).save(tmp_path)
    SRPOLearner(SRPOConfig(clip=0.2, kl_coefficient=0.1), make.policy(make.gpt2(1)), training=HOW).load(tmp_path)
