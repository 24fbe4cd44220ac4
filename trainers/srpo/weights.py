"""How much does each token weigh? The reductions of a mini-batch and their denominators."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.rows import Rows, episode_of_row, events_by_episode, lay_out, one_of

Reduction = Literal["event", "episode", "member", "token", "constant"]


class Counts(NamedTuple):
    """How much a mini-batch holds: the denominators E, N, M and T of the reductions.

    Only what is scored and sampled counts. Counts of parts that hold whole events (and, for
    `episodes`, whole episodes) add up field by field to those of the whole.
    """

    events: Tensor | int
    episodes: Tensor | int
    members: Tensor | int
    tokens: Tensor | int


def token_weights(
    mask: Tensor,
    event: Tensor,
    advantage: Tensor,
    *,
    reduction: Reduction = "event",
    constant_length: float | None = None,
    episode: Tensor | None = None,
    num_events: int | None = None,
    num_episodes: int | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """W_t, the weight of each token in the mini-batch's objective; 0 where it does not count.

        event: 1 / (E K_e n_i)    episode: 1 / (N E_ep K_e n_i)    member: 1 / (M n_i)
        token: 1 / T              constant: 1 / (M constant_length)

    SRPO.md, section 2. E, N, M and T come from `counts`; K_e, n_i and E_ep (the episode's scored
    events) from these rows. Arguments and errors are those of `srpo_loss`.

    Returns:
        [M, T] tensor in the advantage's precision, float32 at least.

    Example: events of one and of two members weigh the same, whatever their lengths.

        >>> mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
        >>> token_weights(mask, torch.tensor([0, 1, 1]), torch.tensor([1.0, -1.0]))
        tensor([[0.2500, 0.2500],
                [0.1250, 0.1250],
                [0.2500, 0.0000]])
    """
    rows = lay_out(mask, event, advantage, episode, num_events, num_episodes)
    dtype = torch.promote_types(advantage.dtype, torch.float32)
    return spread_weights(row_weights(rows, reduction, constant_length, counts or count_rows(rows), dtype), rows)


def count(
    mask: Tensor,
    event: Tensor,
    advantage: Tensor,
    *,
    episode: Tensor | None = None,
    num_events: int | None = None,
    num_episodes: int | None = None,
) -> Counts:
    """Denominators of a whole mini-batch, from the arguments that `srpo_loss` takes.

    Returns:
        0-dim int64 tensors on the mask's device: scored events with a sampled token, their
        episodes (`episode` None: each event is its own), members and tokens.

    Example:
        >>> mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
        >>> [int(n) for n in count(mask, torch.tensor([0, 0, 1]), torch.tensor([1.0, math.nan]))]
        [1, 1, 2, 3]
    """
    return count_rows(lay_out(mask, event, advantage, episode, num_events, num_episodes))


def count_rows(rows: Rows) -> Counts:
    """Denominators of rows that are laid out."""
    events = (rows.set_size > 0).sum()
    return Counts(
        events=events,
        episodes=events if rows.episode is None else (events_by_episode(rows) > 0).sum(),
        members=rows.counted.sum(),
        tokens=rows.tokens.sum(),
    )


def row_weights(
    rows: Rows,
    reduction: Reduction,
    constant_length: float | None,
    counts: Counts,
    dtype: torch.dtype,
) -> Tensor:
    """[M]: n_i W_t, the sum of each row's token weights."""
    one_of("reduction", reduction, get_args(Reduction))
    events, episodes, members, tokens = (
        torch.as_tensor(n, dtype=dtype, device=rows.tokens.device).clamp(min=1) for n in counts
    )
    one_M = rows.counted.to(dtype)
    tokens_M = rows.tokens.to(dtype)
    set_size_M = rows.set_size.clamp(min=1).index_select(0, rows.event)
    if reduction == "event":
        return one_M / (events * set_size_M)
    if reduction == "episode":
        events_M = events_by_episode(rows).clamp(min=1).index_select(0, episode_of_row(rows))
        return one_M / (episodes * events_M * set_size_M)
    if reduction == "member":
        return one_M / members
    if reduction == "token":
        return tokens_M / tokens
    if constant_length is None or not 0 < constant_length < math.inf:
        raise InvalidInput(
            f"constant_length: {constant_length} with reduction 'constant', which divides by it; "
            "it is a positive number of tokens. Set it to the longest output that you sample."
        )
    return tokens_M / (members * constant_length)


def spread_weights(weight_M: Tensor, rows: Rows) -> Tensor:
    """[M, T]: each row's weight in equal shares over its sampled tokens."""
    share_M = weight_M / rows.tokens  # NaN for a row without tokens, which is not chosen below
    return torch.where(rows.sampled, share_M.unsqueeze(1), 0.0)
