"""The control of `arithmetic_tiny`: the same run, with the advantages dealt out at random among the events.

What is learned must come from which event got which advantage; if the control gains, something else is at work. Exits
with 1 if its held-out accuracy rises by more than chance.

    OMP_NUM_THREADS=1 python benchmarks/shuffled_advantages.py [key=value ...]
"""

from __future__ import annotations

import sys

import torch

import srpo_env
from srpo_env import EventBatch
from srpo_env.trainers.srpo import advantages


def shuffled(batch: EventBatch) -> torch.Tensor:
    """Group advantages in an order of chance, decided by the batch's first event."""
    values = advantages(batch.returns(), batch.group, episode=batch.episode)
    draw = torch.Generator().manual_seed(sum(batch.event_ids[0].encode()))
    return values[torch.randperm(len(values), generator=draw)]


def main() -> int:
    """Runs the control and says whether it gained."""
    control = f"learner.estimator={__file__}:shuffled"
    result = srpo_env.train("arithmetic_tiny", [control, *sys.argv[1:]], say=print)
    assert result.gain_interval is not None
    gained = result.gain_interval[0] > 0
    low, high = result.gain_interval
    print(f"gain of the control: {result.gain:+.3f} [{low:.3f}, {high:.3f}]: {'GAINED' if gained else 'none'}")
    return int(gained)


if __name__ == "__main__":
    sys.exit(main())
