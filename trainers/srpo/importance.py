"""How much does a unit weigh that another distribution than the learner's old one has sampled?"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.objective import srpo_loss


class Importance(NamedTuple):
    """Truncated importance weights, per unit of the ratio's level."""

    weight: Tensor  # of no meaning for a unit that does not count
    capped: Tensor  # bool
    counted: Tensor  # bool


def truncated_importance(batch: EventBatch, advantage: Tensor, config: SRPOConfig) -> Importance:
    """Weights of what the sampler gave another probability than the learner, such as one of another precision.

        w_u = min(exp(f(K_u) Σ_i l_i), cap)        l_i: π_old against π_sampler; f, l_i as in the ratio

    SRPO.md, section 5; after Yao et al. (2025), one weight per unit.

    Args:
        batch: With old and sampler's log-probs.
        advantage: [M]; NaN = unscored.
        config: Settings; `tis_cap` is the cap.
    """
    assert batch.old_logprobs is not None
    assert config.tis_cap is not None
    found = srpo_loss(
        batch.old_logprobs,
        batch.sampler_logprobs,
        batch.mask,
        batch.event,
        advantage,
        clip_low=math.inf,
        clip_high=math.inf,
        set_norm=config.set_norm,
        length_norm=config.length_norm,
        ratio_level=config.ratio_level,
        episode=batch.episode,
        num_events=batch.num_events,
        num_episodes=len(batch.names["episode"]),
    )
    limit = math.log(config.tis_cap)
    return Importance(found.log_ratio.clamp(max=limit).exp(), found.counted & (found.log_ratio > limit), found.counted)
