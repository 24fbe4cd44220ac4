"""Do policies with their own weights, their own adapters and none mix in one set, and is each stepped alone?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from srpo_env.adapters import add_adapter
from srpo_env.batch import EventBatch
from srpo_env.config import Lora, PolicyTraining
from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner

LABELS = ("whole", "other", "frozen", "adapter", "second")
TRAINED = ("whole", "other", "adapter", "second")
LORA = Lora(rank=4, alpha=8)


def adapted(make: Any, base: Any, seed: int) -> Any:
    """A policy with an adapter that says something; at first its B is 0, and so is the gradient of its A."""
    policy = make.policy(add_adapter(base, LORA, seed))
    draw = torch.Generator().manual_seed(seed)
    for each in trainable(policy).values():
        each.data.normal_(0, 0.2, generator=draw)
    return policy


def team(make: Any) -> dict[str, Any]:
    """Two models, and two adapters on a third; `frozen`, on the third as well, is not trained."""
    below = make.gpt2(2)
    return {
        "whole": make.policy(make.gpt2(0)),
        "other": make.policy(make.gpt2(1, n_layer=1, n_embd=16)),
        "adapter": adapted(make, below, 3),
        "second": adapted(make, below, 4),
    }


def batch_of_five(make: Any, seed: int = 21) -> EventBatch:
    batch: EventBatch = make.batch(seed, policies=LABELS, members=5, groups=2, size=4)
    return batch


def trainable(policy: Any) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in policy.model.named_parameters() if each.requires_grad}


def config(**changes: Any) -> SRPOConfig:
    settings = {"clip": 0.3, "mini_batches": 1, "old_logprobs": "sampler", "micro_batch_tokens": 60}
    return SRPOConfig.checked(settings | changes)


def one_graph(plain: Any, policies: Mapping[str, Any], batch: EventBatch, settings: SRPOConfig) -> dict[str, Tensor]:
    new, mask = plain.graph(policies, batch)
    loss = plain.loss(new, batch.sampler_logprobs, mask, batch, plain.advantage(batch), settings).loss
    named = {f"{label}/{name}": each for label, policy in policies.items() for name, each in trainable(policy).items()}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def gradients_seen(learner: SRPOLearner, batch: EventBatch) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        (label,) = (label for label, each in learner._optimisers.items() if each is optimiser)
        for name, each in trainable(learner.policies[label]).items():
            assert each.grad is not None
            seen[f"{label}/{name}"] = each.grad.clone()

    handles = [each.register_step_pre_hook(keep) for each in learner._optimisers.values()]
    learner.update(batch)
    for handle in handles:
        handle.remove()
    return seen


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0
    return max(float((found[name] - each).abs().max()) for name, each in expected.items()) / largest


@pytest.mark.parametrize("level", ["set", "member", "token", "trajectory"])
def test_the_gradient_of_every_policy_is_that_of_one_graph(make: Any, plain: Any, level: str) -> None:
    batch, settings = batch_of_five(make), config(ratio_level=level)
    expected = one_graph(plain, team(make), batch, settings)
    learner = SRPOLearner(settings, team(make), training=PolicyTraining(lr=1e-3, grad_clip=None))
    assert relative(gradients_seen(learner, batch), expected) < 1e-10
    assert {name.partition("/")[0] for name in expected} == set(TRAINED)


def test_every_policy_steps_by_its_own_settings_after_all_were_scored(make: Any, plain: Any) -> None:
    """Two steps; the second ratio of each set holds the weights of all policies after the first."""
    batch, settings = batch_of_five(make), config(epochs=2)
    training = {
        label: PolicyTraining(lr=1e-3 * (at + 1), weight_decay=0.1 * at, grad_clip=None)
        for at, label in enumerate(TRAINED)
    }
    found, expected = team(make), team(make)
    SRPOLearner(settings, found, training=training).update(batch)
    optimisers = {
        label: torch.optim.AdamW(trainable(policy).values(), lr=training[label].lr, weight_decay=0.1 * at)
        for at, (label, policy) in enumerate(expected.items())
    }
    for _ in range(2):
        gradient = one_graph(plain, expected, batch, settings)
        for label, policy in expected.items():
            for name, each in trainable(policy).items():
                each.grad = gradient[f"{label}/{name}"]
        for optimiser in optimisers.values():
            optimiser.step()
    for label, policy in expected.items():
        theirs = dict(found[label].model.named_parameters())
        assert max(float((theirs[n] - p).abs().max().detach()) for n, p in policy.model.named_parameters()) < 1e-9


def test_the_model_below_the_adapters_never_moves(make: Any) -> None:
    policies, before = team(make), make.gpt2(2).state_dict()
    SRPOLearner(config(epochs=2), policies, training=PolicyTraining(lr=0.1)).update(batch_of_five(make))
    for label in ("adapter", "second"):
        with policies[label].model.disable_adapter():
            logits = policies[label].model(torch.tensor([[1, 2, 3]])).logits
        expected = make.gpt2(2).eval()
        expected.load_state_dict(before)
        assert torch.equal(logits, expected(torch.tensor([[1, 2, 3]])).logits)


def test_the_shares_of_the_gradient_are_of_its_square_and_add_up(make: Any) -> None:
    batch = batch_of_five(make)
    metrics = SRPOLearner(config(), team(make), training=PolicyTraining(lr=1e-3)).update(batch)
    norms = {label: metrics[f"grad_norm/policy={label}"] for label in TRAINED}
    total = sum(norm**2 for norm in norms.values())
    for label, norm in norms.items():
        assert metrics[f"grad_share/policy={label}"] == pytest.approx(norm**2 / total, rel=1e-12)
    assert sum(metrics[f"grad_share/policy={label}"] for label in TRAINED) == pytest.approx(1)


def test_one_policy_has_no_share_to_log(make: Any) -> None:
    metrics = SRPOLearner(config(), make.policy(make.gpt2())).update(make.batch(1))
    assert not [name for name in metrics if name.startswith("grad_share")]


def test_a_policy_that_nothing_can_move_is_refused(make: Any) -> None:
    policy = make.policy(make.gpt2())
    policy.model.requires_grad_(requires_grad=False)
    with pytest.raises(InvalidInput, match=r"policies\.main: none of its parameters can be trained"):
        SRPOLearner(config(), policy)


def test_one_adapter_under_two_labels_is_refused(make: Any) -> None:
    policy = adapted(make, make.gpt2(), 0)
    with pytest.raises(InvalidInput, match=r"stepped twice.*`lora` of its own"):
        SRPOLearner(config(), {"a": policy, "b": policy})


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_checkpoint_holds_adapters_that_plain_peft_loads(make: Any, tmp_path: Path) -> None:
    learner = SRPOLearner(config(), team(make), training=PolicyTraining(lr=1e-2))
    learner.update(batch_of_five(make))
    learner.save(tmp_path)
    assert "model.safetensors" not in {path.name for path in (tmp_path / "adapter").iterdir()}
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == LORA.rank
    plain = peft.PeftModel.from_pretrained(make.gpt2(2), tmp_path / "adapter").eval()
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(plain(x).logits, learner.policies["adapter"].model(x).logits)


def test_adapters_resumed_from_a_checkpoint_go_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    def learner() -> SRPOLearner:
        return SRPOLearner(config(mini_batches=2), team(make), training=PolicyTraining(lr=1e-2), seed=4)

    straight, broken = learner(), learner()
    for each in (straight, broken):
        each.update(batch_of_five(make))
    broken.save(tmp_path)
    resumed = learner()
    resumed.load(tmp_path)
    for each in (straight, resumed):
        each.update(batch_of_five(make, 22))
    for label in TRAINED:
        theirs = resumed.policies[label].parameters()
        assert all(torch.equal(theirs[name], each) for name, each in straight.policies[label].parameters().items())
