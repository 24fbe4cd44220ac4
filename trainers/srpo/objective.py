"""What does one optimiser step minimise? The SRPO loss and its relatives, as functions of log-probs.

Pure tensor mathematics: any device, float32 or float64 (shorter floats are cast up), no loop over
rows. Names end in their axes: `_M` rows (members), `_T` tokens, `_E` events, `_U` units, a unit
being what carries one ratio and one clip.

Source of the set ratio, its norm and its one clip: SRPO (Yang et al., 2026). The min form of the
surrogate, the length norm and every other level, norm and reduction are our reading or a peer's.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.rows import (
    MAX_LOG_RATIO,
    Rows,
    episode_of_row,
    lay_out,
    masked_difference,
    one_of,
    same_shape,
    sum_by,
)
from srpo_env.trainers.srpo.weights import (
    Counts,
    Reduction,
    count_rows,
    row_weights,
    spread_weights,
)

RatioLevel = Literal["set", "member", "token", "trajectory"]
SetNorm = Literal["sqrt", "sum", "mean"]
LengthNorm = Literal["mean", "sum"]


class SRPOLoss(NamedTuple):
    """The loss and what the metrics need; only `loss` carries a gradient.

    Per unit means [E] at level "set", [M] "member", [M, T] "token", [episodes] "trajectory". A unit
    that does not count (unscored or empty) has log-ratio 0, ratio 1, advantage 0 and no flag set.
    """

    loss: Tensor  # scalar
    log_ratio: Tensor  # L_u per unit
    ratio: Tensor  # rho_u = exp(min(L_u, max_log_ratio)) per unit
    clipped: Tensor  # bool per unit; high side where advantage > 0, low side where advantage < 0
    ratio_clamped: Tensor  # bool per unit: L_u was above max_log_ratio
    counted: Tensor  # bool per unit
    advantage: Tensor  # A_u per unit
    set_size: Tensor  # [E] int64: K_e, 0 for an event that does not count
    counts: Counts  # of these rows, whatever `counts` was passed in


def srpo_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    event: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    set_norm: SetNorm = "sqrt",
    length_norm: LengthNorm = "mean",
    ratio_level: RatioLevel = "set",
    reduction: Reduction = "event",
    constant_length: float | None = None,
    episode: Tensor | None = None,
    num_events: int | None = None,
    num_episodes: int | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
    counts: Counts | None = None,
    importance: Tensor | None = None,
) -> SRPOLoss:
    """Negative clipped surrogate of a mini-batch of active sets, or of its peers' units.

        l_i  = Σ_t (log π_new(t) - log π_old(t)) / n_i      (length_norm "sum": not divided by n_i)
        L_e  = K_e^(-1/2) Σ_{i in e} l_i                    (set_norm "sum": factor 1, "mean": 1/K_e)
        ρ_e  = exp(min(L_e, 20)),  no gradient beyond 20
        s_e  = min(ρ_e A_e, clip(ρ_e, 1 - clip_low, 1 + clip_high) A_e)
        loss = -Σ_t W_t s_u(t)                              (W_t: see `token_weights`)

    u(t) is the unit of token t: its event ("set"), row ("member"; GSPO), the token alone ("token";
    GRPO, PPO) or all rows of its episode ("trajectory"). n_i counts the row's sampled tokens, K_e
    the event's rows that have one; NaN advantage takes a row out of everything. Equal advantages
    inside a unit and whole episodes are the caller's to see to.

    Args:
        new_logprobs: [M, T] log π_new of each token; carries the gradient.
        old_logprobs: [M, T] log π_old; taken as a constant.
        mask: [M, T] of any dtype, non-zero = sampled. Elsewhere nothing matters, NaN included.
        event: [M] index of each row's event.
        advantage: [E], one per event; or [M], one per row, when `num_events` is given. NaN =
            unscored.
        clip_low: ε_low >= 0; from 1 on there is no lower bound.
        clip_high: ε_high >= 0; `math.inf` for no upper bound.
        constant_length: L in tokens, for reduction "constant".
        episode: [E] index of each event's episode, for level "trajectory" and reduction "episode".
        num_events: E, where `advantage` is [M].
        num_episodes: size of the [episodes] outputs; None reads the largest index off the device.
        max_log_ratio: where ρ stops growing, in nats.
        counts: of the whole mini-batch over all ranks (see `count`), when the rows are a part of it.
        importance: positive factor of each unit's advantage, of the shape of the per-unit outputs; taken as a
            constant.

    Returns:
        The loss, which parts sum to, and per-unit values; see `SRPOLoss`.

    Raises:
        InvalidInput: a name, range or shape does not fit, or an argument is missing.

    Example: two members with log-ratios +0.25 have ρ = exp(0.5 / √2) = 1.424, clipped once, at 1.2.

        >>> new, old = torch.tensor([[-0.75], [-0.75]]), torch.tensor([[-1.0], [-1.0]])
        >>> out = srpo_loss(new, old, torch.ones(2, 1), torch.tensor([0, 0]), torch.tensor([1.0]),
        ...                 clip_low=0.2, clip_high=0.2)
        >>> out.loss, out.ratio, out.clipped
        (tensor(-1.2000), tensor([1.4241]), tensor([True]))
    """
    one_of("ratio_level", ratio_level, get_args(RatioLevel))
    one_of("set_norm", set_norm, get_args(SetNorm))
    one_of("length_norm", length_norm, get_args(LengthNorm))
    same_shape(new_logprobs, old_logprobs=old_logprobs, mask=mask)
    rows = lay_out(mask, event, advantage, episode, num_events, num_episodes)
    difference_MT = masked_difference(new_logprobs, old_logprobs.detach(), rows.sampled)
    dtype = difference_MT.dtype
    here = count_rows(rows)
    weight_M = row_weights(rows, reduction, constant_length, counts or here, dtype)
    advantage_M = rows.advantage.to(dtype)
    if ratio_level == "token":
        log_ratio, counted = difference_MT, rows.sampled
        weight = spread_weights(weight_M, rows)
        advantage_U = torch.where(counted, advantage_M.unsqueeze(1), 0.0)
    else:
        unit_M, num_units = _units(rows, ratio_level)
        length_M = rows.tokens.clamp(min=1) if length_norm == "mean" else 1
        size_U = sum_by(unit_M, rows.counted.long(), num_units)
        log_ratio = set_log_ratio(difference_MT.sum(1) / length_M, unit_M, size_U, set_norm)
        counted = size_U > 0
        weight = sum_by(unit_M, weight_M, num_units)
        lowest = torch.full_like(weight, -math.inf)  # the members' common value, without rounding
        value_M = torch.where(rows.counted, advantage_M, -math.inf)
        highest = lowest.scatter_reduce(0, unit_M, value_M, "amax")
        advantage_U = torch.where(counted, highest, 0.0)
    if importance is not None:
        if importance.shape != advantage_U.shape:
            raise InvalidInput(
                f"importance: shape {list(importance.shape)} beside units of {list(advantage_U.shape)}; "
                "it has one factor per unit. Compute it at the same ratio_level."
            )
        advantage_U = advantage_U * importance.detach().to(dtype)
    surrogate, ratio, clipped = clipped_surrogate(
        log_ratio, advantage_U, clip_low=clip_low, clip_high=clip_high, max_log_ratio=max_log_ratio
    )
    return SRPOLoss(
        loss=-(weight * surrogate).sum(),
        log_ratio=log_ratio.detach(),
        ratio=ratio.detach(),
        clipped=clipped,
        ratio_clamped=log_ratio > max_log_ratio,
        counted=counted,
        advantage=advantage_U,
        set_size=rows.set_size,
        counts=here,
    )


def set_log_ratio(log_ratio_M: Tensor, unit_M: Tensor, size_U: Tensor, set_norm: SetNorm = "sqrt") -> Tensor:
    """Log-ratio of each active set, or of any other unit made of rows.

        L_u = K_u^(-1/2) Σ_{i in u} l_i                     (set_norm "sum": factor 1, "mean": 1/K_u)

    SRPO (Yang et al., 2026). K_u counts the members that are trained, never the padded width.

    Args:
        log_ratio_M: l_i, one per row, 0 for a row that does not count; carries the gradient.
        unit_M: index of each row's unit, in [0, U).
        size_U: K_u, the rows of each unit that count.

    Returns:
        [U] tensor, 0 where a unit has no such row.

    Raises:
        InvalidInput: `set_norm` is none of the three.

    Example:
        >>> l_i, unit = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.3]), torch.tensor([0, 0, 0, 0, 1])
        >>> set_log_ratio(l_i, unit, torch.tensor([4, 1]))
        tensor([1.0000, 0.3000])
    """
    one_of("set_norm", set_norm, get_args(SetNorm))
    power = {"sqrt": -0.5, "sum": 0.0, "mean": -1.0}[set_norm]
    total_U = sum_by(unit_M, log_ratio_M, len(size_U))
    return total_U * size_U.clamp(min=1).to(total_U.dtype) ** power


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pessimistic surrogate of each unit, its ratio and whether its clip binds.

        ρ = exp(min(L, max_log_ratio))
        s = min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)

    PPO (Schulman et al., 2017). The clip binds where A > 0 and ρ > 1 + clip_high, or A < 0 and
    ρ < 1 - clip_low: compared as logarithms, so that nothing overflows, and constant from there on.

    Args:
        log_ratio: L in nats, any shape; carries the gradient.
        advantage: A, of the same shape.

    Returns:
        s, ρ and the bool `clipped`, each of that shape.

    Raises:
        InvalidInput: a clip is negative or NaN, or `max_log_ratio` is outside (0, 80].

    Example:
        >>> s, ratio, clipped = clipped_surrogate(
        ...     torch.tensor([120.0, 120.0]), torch.tensor([1.0, 0.0]), clip_low=0.2, clip_high=0.2)
        >>> s, clipped
        (tensor([1.2000, 0.0000]), tensor([ True, False]))
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise InvalidInput(
            f"clip: [{clip_low}, {clip_high}] is not a range; both are at least 0. "
            "Give the distances from 1 (0.2 and 0.2 allow ratios from 0.8 to 1.2)."
        )
    if not 0 < max_log_ratio <= 80:
        raise InvalidInput(
            f"max_log_ratio: {max_log_ratio} is outside (0, 80], beyond which exp overflows float32. "
            f"Leave it at {MAX_LOG_RATIO:g}."
        )
    lower = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    too_high = (advantage > 0) & (log_ratio > math.log1p(clip_high))
    too_low = (advantage < 0) & (log_ratio < lower)
    ratio = log_ratio.clamp(max=max_log_ratio).exp()
    surrogate = ratio * advantage
    surrogate = torch.where(too_high, (1 + clip_high) * advantage, surrogate)
    surrogate = torch.where(too_low, (1 - clip_low) * advantage, surrogate)
    return surrogate, ratio, too_high | too_low


def _units(rows: Rows, ratio_level: RatioLevel) -> tuple[Tensor, int]:
    """The unit of each row, and how many units there are."""
    if ratio_level == "set":
        return rows.event, len(rows.set_size)
    if ratio_level == "member":  # a set of its own: any set_norm gives f(1) = 1
        return torch.arange(len(rows.event), device=rows.event.device), len(rows.event)
    return episode_of_row(rows), rows.num_episodes
