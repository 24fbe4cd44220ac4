"""What gradient do a policy's weights get from the loss's derivative by the log-probs?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.ranks import Ranks
from srpo_env.trainers.srpo.scoring import Scorer


def back_propagate(
    scorer: Scorer, ranks: Ranks, batch: EventBatch, rows: Tensor, gradient: Tensor, largest: float = math.inf
) -> float:
    """Sets the weights' gradients to Σ_t g(t) d log π(t) / d weights, over some rows and all ranks, and clips them.

    Args:
        scorer: The policy's.
        ranks: Each back-propagates through its share of the rows.
        batch: The mini-batch.
        rows: [m] rows of the policy.
        gradient: [M, T] g, the loss's derivative by the log-probs.
        largest: Norm that the gradient is clipped to.

    Returns:
        The norm before it was clipped.
    """
    parameters = trained(scorer.model)
    for each in parameters:
        each.grad = None
    for scored in scorer.score(batch, ranks.share(batch, rows)):
        weights = gradient[scored.rows, : scored.logprobs.shape[1]]
        scored.logprobs.backward(weights.to(scored.logprobs))
    ranks.add_gradients(parameters)
    length = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return float(getattr(length, "full_tensor", lambda: length)())  # of shards, it is one itself


def norms_by_set_size(
    scorers: Mapping[str, Scorer], ranks: Ranks, rows: Mapping[str, Tensor], batch: EventBatch, gradient: Tensor
) -> dict[int, float]:
    """Norm, over all policies, of the gradient that the events with K trained members bring; by K.

    Args:
        scorers: By policy; the gradients of their models change.
        ranks: See `back_propagate`.
        rows: Trained rows by policy.
        batch: The mini-batch.
        gradient: [M, T] the loss's derivative by the log-probs.
    """
    size = torch.bincount(batch.event[batch.mask.any(1)], minlength=batch.num_events)[batch.event]
    moving = (gradient != 0).any(1)
    norms = {}
    for k in size[moving].unique().tolist():
        those = {label: rows[label][((size == k) & moving)[rows[label]]] for label in scorers}
        moved = [label for label in scorers if len(those[label])]
        norms[k] = math.hypot(
            *(back_propagate(scorers[label], ranks, batch, those[label], gradient) for label in moved)
        )
    return norms


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What the optimiser may change: all weights, or those of the adapter."""
    return [each for each in model.parameters() if each.requires_grad]
