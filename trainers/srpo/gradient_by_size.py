"""How large is the gradient that the sets of each size bring? An extra backward pass over a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.scoring import Scorer


def norms_by_set_size(
    scorers: Mapping[str, Scorer], rows: Mapping[str, Tensor], batch: EventBatch, gradient: Tensor
) -> dict[int, float]:
    """Norm, over all policies, of the gradient that the events with K trained members bring; by K.

    Args:
        scorers: By policy. The gradients of their models are cleared.
        rows: Trained rows by policy.
        batch: The mini-batch.
        gradient: [M, T] the loss's derivative by the log-probs.
    """
    size = torch.bincount(batch.event[batch.mask.any(1)], minlength=batch.num_events)[batch.event]
    moving = (gradient != 0).any(1)
    norms = {}
    for k in size[moving].unique().tolist():
        squares = 0.0
        for label, scorer in scorers.items():
            scorer.model.zero_grad(set_to_none=True)
            those = rows[label][((size == k) & moving)[rows[label]]]
            for scored in scorer.score(batch, those):
                weights = gradient[scored.rows, : scored.logprobs.shape[1]]
                scored.logprobs.backward(weights.to(scored.logprobs))
            found = (each.grad for each in scorer.model.parameters() if each.grad is not None)
            squares += sum(float(each.double().square().sum()) for each in found)
            scorer.model.zero_grad(set_to_none=True)
        norms[k] = squares**0.5
    return norms
