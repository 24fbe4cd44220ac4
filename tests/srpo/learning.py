"""What the learner's tests share: learners, one update's gradients, and small batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner

ONE_STEP = {"clip": 0.3, "mini_batches": 1, "old_logprobs": "sampler", "constant_length": 5.0}


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
