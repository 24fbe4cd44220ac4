"""An advantage of your own: the rank of an episode in its group, which no outlier among the rewards can stretch.

srpo-env train arithmetic_tiny learner.estimator=examples/own_advantage.py:rank learner.estimator_settings.power=2
"""

import torch

from srpo_env.batch import EventBatch


def rank(batch: EventBatch, *, power: float = 1.0) -> torch.Tensor:
    """Advantages in [-1, 1] by rank: the best of a group gets 1, the worst -1, equal returns their middle.

        a = (lower - higher) / (lower + higher)        A = sign(a) |a|^power

    Args:
        batch: Whole groups.
        power: Above 1, the middle of a group weighs less.

    Returns:
        [E], an entry for each event; NaN where its episode is unscored.
    """
    returns = batch.returns()
    _, first = torch.unique(batch.episode, return_inverse=True)
    episodes = torch.zeros(int(first.max()) + 1, dtype=torch.int64).scatter(0, first, torch.arange(len(first)))
    mates = batch.group.unsqueeze(1) == batch.group[episodes]  # [E, episodes]: each episode counts once
    lower = (mates & (returns.unsqueeze(1) > returns[episodes])).sum(1)
    higher = (mates & (returns.unsqueeze(1) < returns[episodes])).sum(1)
    share = (lower - higher) / (lower + higher).clamp(min=1)
    return torch.where(returns.isnan(), torch.nan, share.sign() * share.abs() ** power)
