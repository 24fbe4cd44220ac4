"""What is the advantage of each event or member of a batch, by the estimator of the settings?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.estimators import GroupCount, advantages, count_groups

OwnEstimator = Callable[[EventBatch], Tensor]

_PER_MEMBER = ("agent", "agent_turn")


class Estimate(NamedTuple):
    """Advantages of a batch.

    Attributes:
        advantage: [E], or [M] of an estimator that compares members; NaN where unscored.
        per_member: Which of the two.
    """

    advantage: Tensor
    per_member: bool

    def by_row(self, batch: EventBatch) -> Tensor:
        """[M] advantages."""
        return self.advantage if self.per_member else self.advantage[batch.event]


def estimate(batch: EventBatch, config: SRPOConfig, own: OwnEstimator | None = None) -> Estimate:
    """Advantages by the estimator of the settings, or by an own one.

    Each trained output that could not be parsed costs `invalid_penalty`: as a part of its event's reward, and so of the
    episode's return; where an estimator compares members, off the return of its own row alone.

    Raises:
        InvalidInput: An own estimator gives no [E] or [M]; or, at level set or trajectory, a unit has several.
    """
    if own is None:
        returns, keys = _compared(batch, config)
        values = advantages(returns, **keys, ddof=config.ddof, eps=config.eps, lone=config.lone)
        found = Estimate(values, config.estimator in _PER_MEMBER)
    else:
        found = _checked(own(_with_penalties(batch, config)), batch, config.estimator)
    if config.ratio_level in ("set", "trajectory"):
        _check_units(found, batch, config)
    return found


def signal(batch: EventBatch, config: SRPOConfig) -> GroupCount | None:
    """How many cells the estimator compares within, and how many say nothing; None for an own one."""
    if config.own_estimator:
        return None
    returns, keys = _compared(batch, config)
    return count_groups(returns, **keys)


def _compared(batch: EventBatch, config: SRPOConfig) -> tuple[Tensor, dict[str, Any]]:
    """The return of each row, and the keys that it is compared by."""
    keys: dict[str, Any] = {"method": config.estimator, "group": batch.group, "episode": batch.episode}
    if config.estimator not in _PER_MEMBER:
        keys |= {"node": batch.node, "visit": batch.visit}
        return _with_penalties(batch, config).returns(config.gamma), keys
    keys |= {"group": batch.group[batch.event], "episode": batch.episode[batch.event]}
    keys |= {"agent": batch.agent, "turn": batch.turn}
    return batch.returns(config.gamma)[batch.event] - _penalties(batch, config), keys


def _with_penalties(batch: EventBatch, config: SRPOConfig) -> EventBatch:
    """The batch with its members' penalties taken off the rewards of their events."""
    if not config.invalid_penalty:
        return batch
    return replace(batch, reward=batch.reward.index_add(0, batch.event, _penalties(batch, config), alpha=-1))


def _penalties(batch: EventBatch, config: SRPOConfig) -> Tensor:
    """[M] what each row costs; nothing for those that are not trained."""
    return config.invalid_penalty * (batch.mask.any(1) & ~batch.parse_ok).double()


def _checked(values: Any, batch: EventBatch, name: str) -> Estimate:
    shapes = ((batch.num_events,), (batch.num_members,))
    if not isinstance(values, Tensor) or tuple(values.shape) not in shapes:
        got = f"a tensor of {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise InvalidInput(
            f"estimator {name!r}: it returned {got}; it returns a tensor with an advantage for each of the "
            f"{batch.num_events} events, or for each of the {batch.num_members} members."
        )
    values = values.detach().to("cpu", torch.promote_types(values.dtype, torch.float32))
    if bool(values.isinf().any()):
        raise InvalidInput(f"estimator {name!r}: an advantage is infinite; it is a number, or NaN where unscored.")
    return Estimate(values, tuple(values.shape) != shapes[0])


def _check_units(found: Estimate, batch: EventBatch, config: SRPOConfig) -> None:
    rows = batch.mask.any(1)
    whole = config.ratio_level == "trajectory"
    unit = (batch.episode[batch.event] if whole else batch.event)[rows]
    values = found.by_row(batch)[rows].double().nan_to_num(nan=torch.inf)
    size = len(batch.names["episode"]) if whole else batch.num_events
    low = torch.full((size,), torch.inf, dtype=torch.float64).scatter_reduce(0, unit, values, "amin")
    high = torch.full((size,), -torch.inf, dtype=torch.float64).scatter_reduce(0, unit, values, "amax")
    uneven = (high - low > 1e-9 * high.abs().clamp(min=1)) | (high.isinf() & low.isfinite())
    if bool(uneven.any()):
        at = int(torch.nonzero(uneven)[0])
        name = f"episode {batch.names['episode'][at]}" if whole else f"event {batch.event_ids[at]}"
        raise InvalidInput(
            f"estimator {config.estimator!r}: {name} has the advantages {low[at]:g} and {high[at]:g} (inf: unscored); "
            f"at ratio_level {config.ratio_level!r} a unit has one. Use the estimator 'group', or ratio_level 'member' "
            "or 'token'."
        )
