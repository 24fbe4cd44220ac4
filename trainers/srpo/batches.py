"""Which events belong to which optimiser step: all members of an event to the same one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from srpo_env.batch import EventBatch


def mini_batches(
    batch: EventBatch, number: int, generator: torch.Generator, *, whole_episodes: bool = False
) -> Iterator[Tensor]:
    """Splits the events of a batch at random into optimiser steps.

    Sizes differ by at most one event; with `whole_episodes` (level "trajectory") the cuts lie between episodes, and
    sizes are as equal as that allows. Fewer events than steps give fewer steps.

    Args:
        batch: The events.
        number: Optimiser steps.
        generator: Decides the order.
        whole_episodes: Never separates the events of an episode.

    Yields:
        [n] indices of events; every event in exactly one.
    """
    if whole_episodes:
        yield from _by_episode(batch.episode, number, generator)
        return
    order = torch.randperm(batch.num_events, generator=generator)
    for part in torch.tensor_split(order, number):
        if len(part):
            yield part.sort().values


def _by_episode(episode: Tensor, number: int, generator: torch.Generator) -> Iterator[Tensor]:
    size = torch.bincount(episode)
    order = torch.randperm(len(size), generator=generator)
    order = order[torch.argsort(size[order], descending=True, stable=True)]
    loads = [0] * number
    step_of = torch.zeros(len(size), dtype=torch.int64)
    for each in order.tolist():  # longest first, each to the emptiest step
        at = min(range(number), key=loads.__getitem__)
        step_of[each] = at
        loads[at] += int(size[each])
    for at in range(number):
        part = torch.nonzero(step_of[episode] == at).flatten()
        if len(part):
            yield part
