"""Which rows and tokens count? What mask, events and advantages say before any log-prob is seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from srpo_env.errors import InvalidInput

MAX_LOG_RATIO = 20.0  # nats: where every exp stops growing


class Rows(NamedTuple):
    """The rows of a mini-batch, M members of E events, as far as they count."""

    sampled: Tensor  # [M, T] bool: tokens that count
    tokens: Tensor  # [M] int64: n_i, 0 for a row that does not count
    counted: Tensor  # [M] bool: at least one sampled token, and an advantage that is not NaN
    advantage: Tensor  # [M]: of no meaning for a row that does not count
    event: Tensor  # [M] int64
    set_size: Tensor  # [E] int64: K_e
    episode: Tensor | None  # [E] int64
    num_episodes: int


def lay_out(
    mask: Tensor,
    event: Tensor,
    advantage: Tensor,
    episode: Tensor | None,
    num_events: int | None,
    num_episodes: int | None,
) -> Rows:
    """Says what counts; the arguments and their errors are those of `srpo_loss`."""
    size = len(advantage) if num_events is None else num_events
    if mask.dim() != 2 or event.shape != mask.shape[:1]:
        raise InvalidInput(
            f"event: shape {list(event.shape)} beside a mask of {list(mask.shape)}; "
            "it has one entry per row of a mask [M, T]. Give each member's event index."
        )
    if advantage.shape != ((size,) if num_events is None else event.shape):
        raise InvalidInput(
            f"advantage: shape {list(advantage.shape)} with num_events={num_events} and "
            f"{len(event)} rows; it is [E] without num_events and [M] with it. Pass one of the two."
        )
    if episode is not None and episode.shape != (size,):
        raise InvalidInput(
            f"episode: shape {list(episode.shape)} with {size} events; "
            "it has one entry per event. Give each event's episode index."
        )
    event = event.long()  # a uint8 index would be read as a mask
    advantage = advantage.detach()
    advantage = advantage.index_select(0, event) if num_events is None else advantage
    sampled = (mask != 0) & ~advantage.isnan().unsqueeze(1)
    tokens = sampled.sum(1)
    counted = tokens > 0
    if episode is not None and num_episodes is None:
        num_episodes = int(episode.max()) + 1 if size else 0
    return Rows(
        sampled=sampled,
        tokens=tokens,
        counted=counted,
        advantage=advantage,
        event=event,
        set_size=sum_by(event, counted.long(), size),
        episode=None if episode is None else episode.long(),
        num_episodes=num_episodes or 0,
    )


def episode_of_event(rows: Rows) -> Tensor:
    """[E] int64; refuses rows that were laid out without episodes."""
    if rows.episode is None:
        raise InvalidInput(
            "episode: None, with ratio_level 'trajectory' or reduction 'episode', which need it; "
            "it is [E], one index per event. Pass it, or choose another level or reduction."
        )
    return rows.episode


def episode_of_row(rows: Rows) -> Tensor:
    """[M] int64."""
    return episode_of_event(rows).index_select(0, rows.event)


def events_by_episode(rows: Rows) -> Tensor:
    """[episodes] int64: E_ep, the scored events of each."""
    return sum_by(episode_of_event(rows), (rows.set_size > 0).long(), rows.num_episodes)


def sum_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """[size]: the sum of the values that share an index, 0 where none has it."""
    return values.new_zeros(size).index_add(0, index, values)


def masked_difference(a: Tensor, b: Tensor, selected: Tensor) -> Tensor:
    """Returns a - b where selected, else 0: chosen, not multiplied, since NaN * 0 is NaN."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.where(selected, a.to(dtype) - b.to(dtype), 0.0)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a name that is not allowed."""
    if value not in allowed:
        raise InvalidInput(f"{name}: {value!r} is not one of {', '.join(allowed)}. Choose one.")


def same_shape(logprobs: Tensor, **others: Tensor) -> None:
    """Refuses tensors that are not [M, T] like the log-probs."""
    for name, other in others.items():
        if logprobs.dim() != 2 or other.shape != logprobs.shape:
            raise InvalidInput(
                f"{name}: shape {list(other.shape)} beside log-probs of {list(logprobs.shape)}; "
                "both are [M, T], one row per member. Pad them to one width."
            )
