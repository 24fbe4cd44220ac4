"""An objective of your own: no token's gradient is clipped away; the set's ratio, capped, weighs it instead.

srpo-env train arithmetic_tiny learner.objective=examples/own_objective.py:capped learner.objective_settings.cap=1.5
"""

import torch

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.objective import set_log_ratio
from srpo_env.trainers.srpo.weights import token_weights


def capped(new_logprobs: torch.Tensor, batch: EventBatch, advantage: torch.Tensor, *, cap: float = 2.0) -> torch.Tensor:
    """Loss of CISPO (MiniMax, 2025) with one ratio per active set; its gradient needs nothing more of you.

        loss = -Σ_t W_t min(ρ_e, cap) A_e log π(t)        ρ_e: the set's ratio, a constant; W_t: a mean over events

    Args:
        new_logprobs: [M, T] log-probs under the present weights; carries the gradient.
        batch: The mini-batch, with old log-probs.
        advantage: [E] of its events; NaN = unscored.
        cap: Largest ratio.
    """
    weight = token_weights(batch.mask, batch.event, advantage)  # 0 where a token does not count
    counted = weight > 0
    log_ratio = (new_logprobs.detach() - batch.old_logprobs).where(counted, 0).sum(1) / counted.sum(1).clamp(min=1)
    set_size = torch.bincount(batch.event[counted.any(1)], minlength=batch.num_events)
    ratio = set_log_ratio(log_ratio, batch.event, set_size).exp().clamp(max=cap)
    factor = (ratio * advantage.nan_to_num())[batch.event].unsqueeze(1)
    return -(weight * factor * torch.where(counted, new_logprobs, 0.0)).sum()
