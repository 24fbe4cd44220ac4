"""What is the loss of a mini-batch, as a function of its log-probs, by the settings?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.batch_advantage import Estimate
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.divergence import kl_penalty
from srpo_env.trainers.srpo.importance import truncated_importance
from srpo_env.trainers.srpo.objective import SRPOLoss, srpo_loss
from srpo_env.trainers.srpo.weights import token_weights

OwnObjective = Callable[[Tensor, EventBatch, Tensor], Tensor]


def mini_batch_loss(
    new_logprobs: Tensor, batch: EventBatch, estimated: Estimate, config: SRPOConfig, own: OwnObjective | None = None
) -> tuple[Tensor, SRPOLoss | None]:
    """Returns the loss, and what it found per unit (None for an own objective).

        loss = -J + β Σ_t W_t k(t)        β: kl_coefficient, k: kl_estimator, to the reference

    With `per_policy`, W_t counts the rows of the token's policy only.

    Args:
        new_logprobs: [M, T]; carries the gradient.
        batch: A whole mini-batch with old log-probs, and the reference's where β > 0.
        estimated: Its advantages.
        config: Settings.
        own: Takes the place of -J.

    Raises:
        InvalidInput: An own objective returns no loss.
    """
    advantage = estimated.advantage
    rows: dict[str, Any] = {
        "reduction": config.reduction,
        "constant_length": config.constant_length,
        "episode": batch.episode,
        "num_events": batch.num_events if estimated.per_member else None,
        "num_episodes": len(batch.names["episode"]),
    }

    def surrogate(mask: Tensor) -> SRPOLoss:
        assert batch.old_logprobs is not None
        weigh = config.tis_cap is not None
        return srpo_loss(
            new_logprobs,
            batch.old_logprobs,
            mask,
            batch.event,
            advantage,
            clip_low=config.clip[0],
            clip_high=config.clip[1],
            set_norm=config.set_norm,
            length_norm=config.length_norm,
            ratio_level=config.ratio_level,
            importance=truncated_importance(batch, estimated.by_row(batch), config).weight if weigh else None,
            **rows,
        )

    masks = _masks(batch) if config.per_policy else [batch.mask]
    if own is None:
        found = surrogate(batch.mask)
        loss = found.loss if len(masks) == 1 else torch.stack([surrogate(mask).loss for mask in masks]).sum()
    else:
        found, loss = None, _checked(own(new_logprobs, batch, advantage), config)
    if config.kl_coefficient:
        assert batch.ref_logprobs is not None
        weight_MT = torch.stack([token_weights(mask, batch.event, advantage, **rows) for mask in masks]).sum(0)
        kl = kl_penalty(new_logprobs, batch.ref_logprobs, weight_MT, config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    return loss, found


def _masks(batch: EventBatch) -> list[Tensor]:
    """[M, T] the sampled tokens of each policy: its rows alone are counted in its weights."""
    policies = batch.policy[batch.mask.any(1)].unique()
    return [batch.mask & (batch.policy == each).unsqueeze(1) for each in policies] or [batch.mask]


def _checked(loss: Any, config: SRPOConfig) -> Tensor:
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise InvalidInput(
        f"objective {config.objective!r}: it returned {got}; it returns the loss of the mini-batch, a tensor without "
        "dimensions."
    )
