"""May the learner train on these outputs? Its log-probs must be those of the distribution that was sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.errors import Untrainable


def admit(
    batch: EventBatch, trained: Collection[str], *, needs_logprobs: bool = False, needs_whole_episodes: bool = False
) -> EventBatch:
    """Returns the batch with the outputs of frozen policies masked: they are no rows.

    Args:
        batch: The events.
        trained: Labels of the policies that are trained.
        needs_logprobs: Whether the sampler's log-probs are used.
        needs_whole_episodes: Whether an episode is one unit.

    Raises:
        Untrainable: An output of a trained policy can't be used, or an episode is not whole; names which.
    """
    known = torch.tensor([name in trained for name in batch.names["policy"]], dtype=torch.bool)
    mine = known[batch.policy]
    for broken, rule in _rules(batch, needs_logprobs):
        if bool((mine & broken).any()):
            raise Untrainable(f"{_place(batch, int(torch.nonzero(mine & broken)[0]))} {rule}.")
    if needs_whole_episodes:
        _check_episodes(batch)
    return replace(batch, mask=batch.mask & mine.unsqueeze(1))


def _rules(batch: EventBatch, needs_logprobs: bool) -> Iterator[tuple[Tensor, str]]:
    """Rows that break a rule, and the rule."""
    sampled = batch.mask.any(1)
    yield (
        ~batch.has_ids,
        "has no token ids; they come from the sampler and are never re-tokenised. Use a backend that gives them: "
        "local, or server with the policy's `model`",
    )
    yield batch.mask[:, :1].any(1), "follows an empty prompt, so nothing predicts its first token. Give it a prompt"
    yield (
        sampled & ~batch.full_support,
        "was sampled with top_p or top_k; the learner's log-probs could not match. Sample with top_p 1 and top_k 0",
    )
    yield (
        sampled & (batch.temperature == 0),
        "was sampled at temperature 0, which has no ratio. Sample at a positive temperature",
    )
    if needs_logprobs:
        yield (
            batch.sampler_logprobs.isnan().any(1),
            "has no log-probs, which old_logprobs: sampler needs. Use old_logprobs: recompute",
        )
        yield (
            sampled & ~batch.processed & (batch.temperature != 1),
            "has log-probs from before the temperature. Use old_logprobs: recompute, or a server that gives processed "
            "ones",
        )


def _place(batch: EventBatch, row: int) -> str:
    agent = batch.names["agent"][int(batch.agent[row])]
    return f"event {batch.event_ids[int(batch.event[row])]}: the output of {agent}[{int(batch.index[row])}]"


def _check_episodes(batch: EventBatch) -> None:
    """Whether the steps of each episode run from 0 to one that ended it."""
    number = len(batch.names["episode"])
    events = torch.bincount(batch.episode, minlength=number)
    last = torch.full((number,), -1).scatter_reduce(0, batch.episode, batch.step, "amax")
    ends = torch.bincount(batch.episode[batch.terminated | batch.truncated], minlength=number)
    broken = (events > 0) & ((last + 1 != events) | (ends != 1))
    if bool(broken.any()):
        name = batch.names["episode"][int(torch.nonzero(broken)[0])]
        raise Untrainable(
            f"episode {name}: it has {int(events[broken][0])} events in this batch and is not whole, from its first "
            "step to its end; ratio_level 'trajectory' makes one unit of it. Give all of its events, or use 'set'."
        )
