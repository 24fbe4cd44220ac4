"""The whole algorithm by hand: what `SRPOLearner` does with a batch of events, without settings, metrics and checks.

python examples/by_hand.py

Three proposers answer each sum and a vote decides; the three answers are one active set, with one ratio and one clip.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

import srpo_env
from srpo_env.agents import LocalPolicy
from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo import advantages, srpo_loss
from srpo_env.trainers.srpo.batches import mini_batches
from srpo_env.trainers.srpo.scoring import Scorer

CLIP = 0.2
MICRO_BATCH_TOKENS = 2048  # memory and speed; no result depends on it


def sampled_rows(batch: EventBatch) -> Tensor:
    """Members with at least one sampled token."""
    return torch.nonzero(batch.mask.any(1)).flatten()


@torch.no_grad()
def logprobs_of(scorer: Scorer, batch: EventBatch) -> Tensor:
    """[M, T]: log π(token | all tokens before it) of each sampled token, 0 elsewhere; what is shared, once."""
    grid_MT = torch.zeros(batch.mask.shape)
    for micro in scorer.score(batch, sampled_rows(batch)):
        grid_MT[micro.rows, : micro.logprobs.shape[1]] = micro.logprobs
    return grid_MT


def gradient_of_loss(leaf_MT: Tensor, batch: EventBatch, advantage_E: Tensor) -> Tensor:
    """[M, T]: the derivative of the loss by each token's log-prob.

    l_i = Σ_t (log π - log π_old)     L_e = K_e^(-1/2) Σ_{i in e} l_i     ρ_e = exp(L_e)
    loss = - mean over events of min(ρ_e A_e, clip(ρ_e, 1 - 0.2, 1 + 0.2) A_e)
    """
    assert batch.old_logprobs is not None
    leaf_MT = leaf_MT.clone().requires_grad_()
    found = srpo_loss(
        leaf_MT,
        batch.old_logprobs,
        batch.mask,
        batch.event,
        advantage_E,
        clip_low=CLIP,
        clip_high=CLIP,
        length_norm="sum",
    )
    (gradient_MT,) = torch.autograd.grad(found.loss, leaf_MT)
    return gradient_MT


def back_propagate(scorer: Scorer, batch: EventBatch, gradient_MT: Tensor) -> None:
    """Adds d loss / d weights to the weights' gradients.

    The loss is a function of the log-probs, so its gradient is Σ g(t) d log π(t) / d weights, whatever the
    micro-batches: no set needs one forward pass, and the sum is exact.
    """
    moved = torch.nonzero((gradient_MT != 0).any(1)).flatten()  # clipped sets and those with A = 0 cost nothing
    for micro in scorer.score(batch, moved):
        micro.logprobs.backward(gradient_MT[micro.rows, : micro.logprobs.shape[1]])


def update(
    model: PreTrainedModel, optimiser: torch.optim.Optimizer, batch: EventBatch, generator: torch.Generator
) -> Iterator[Tensor]:
    """Two optimiser steps from a batch; no event is split over them.

    Yields:
        The norm of each step's gradient.
    """
    model.eval()  # dropout off: the ratio of unchanged weights is 1
    scorer = Scorer(model, MICRO_BATCH_TOKENS)
    # How much better than the other episodes of its task was each? (R - mean) / std, the same for all their events.
    advantage_E = advantages(batch.returns(), batch.group, episode=batch.episode)
    batch = replace(batch, old_logprobs=logprobs_of(scorer, batch))
    for number, events in enumerate(mini_batches(batch, 2, generator)):
        part = batch.select(events)
        assert part.old_logprobs is not None
        new_MT = part.old_logprobs if number == 0 else logprobs_of(scorer, part)
        back_propagate(scorer, part, gradient_of_loss(new_MT, part, advantage_E[events]))
        yield torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()


def main() -> None:
    """Learns from three batches."""
    policy = LocalPolicy("tiny_arithmetic")
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    for seed in range(3):
        log = srpo_env.rollout("tiny/parallel_proposers", policies=policy, episodes=128, group_size=8, seed=seed)
        batch = log.batch()
        norms = [f"{float(norm):.2f}" for norm in update(policy.model, optimiser, batch, generator)]
        policy.load_weights(None, version=seed + 1)  # they were changed in place
        print(f"batch {seed}: mean return {float(batch.returns().mean()):.2f}, gradient norms {', '.join(norms)}")


if __name__ == "__main__":
    main()
