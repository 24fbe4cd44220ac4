"""How large is the learning rate of an update?"""

from __future__ import annotations

import math

from srpo_env.config import PolicyTraining


def learning_rate(how: PolicyTraining, update: int, total_updates: int | None) -> float:
    """Learning rate of an update.

        lr * min(1, (u + 1) / warmup_updates) * s(u / (U - 1))
        s(x) = 1    constant        1 - (1 - f) x    linear        f + (1 - f) (1 + cos(pi x)) / 2    cosine

    Args:
        how: The policy's settings; f is its `final_lr`.
        update: u, the updates before it.
        total_updates: U; None leaves the rate where warm-up brought it.

    Example:
        >>> how = PolicyTraining(lr=1.0, schedule="linear", final_lr=0.5)
        >>> [learning_rate(how, update, 3) for update in range(3)]
        [1.0, 0.75, 0.5]
    """
    rise = min(1.0, (update + 1) / how.warmup_updates) if how.warmup_updates else 1.0
    if total_updates is None or how.schedule == "constant":
        return how.lr * rise
    done = min(1.0, update / max(1, total_updates - 1))
    left = 1 - done if how.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return how.lr * rise * (how.final_lr + (1 - how.final_lr) * left)
