"""The settings of the learner, and the presets that peers' rules are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from srpo_env.errors import InvalidRecipe, nearest
from srpo_env.registry import is_reference
from srpo_env.trainers.srpo.estimators import Estimator
from srpo_env.trainers.srpo.objective import LengthNorm, RatioLevel, SetNorm
from srpo_env.trainers.srpo.weights import Reduction

Preset = Literal["srpo", "grpo", "dr_grpo", "dapo", "gspo", "dr_mas", "at_grpo", "rloo"]

_NO_CLIP = (1.0, math.inf)
PRESETS: dict[str, dict[str, Any]] = {
    "srpo": {
        "ratio_level": "set",
        "reduction": "event",
        "estimator": "group",
        "set_norm": "sqrt",
        "length_norm": "mean",
    },
    "grpo": {
        "ratio_level": "token",
        "reduction": "member",
        "estimator": "group",
        "ddof": 1,
        "eps": 1e-4,
        "clip": 0.2,
    },
    "dr_grpo": {
        "ratio_level": "token",
        "reduction": "constant",
        "estimator": "group_no_std",
        "clip": 0.2,
    },
    "dapo": {
        "ratio_level": "token",
        "reduction": "token",
        "estimator": "group",
        "ddof": 1,
        "eps": 1e-4,
        "clip": (0.2, 0.28),
    },
    "gspo": {
        "ratio_level": "member",
        "reduction": "member",
        "estimator": "group",
        "ddof": 1,
        "eps": 1e-4,
        "length_norm": "mean",
        "clip": (3e-4, 4e-4),
    },
    "dr_mas": {
        "ratio_level": "token",
        "reduction": "token",
        "estimator": "agent",
        "ddof": 1,
        "eps": 1e-6,
        "lone": "raw",
        "per_policy": True,
        "clip": 0.2,
    },
    "at_grpo": {
        "ratio_level": "token",
        "reduction": "member",
        "estimator": "agent_turn",
        "ddof": 1,
        "eps": 1e-6,
        "clip": 0.2,
    },
    "rloo": {
        "ratio_level": "member",
        "reduction": "member",
        "estimator": "loo",
        "length_norm": "sum",
        "clip": _NO_CLIP,
    },
}
"""What each preset sets; a key given beside it wins."""

PRESET_KEYS = (
    "clip",
    "set_norm",
    "length_norm",
    "ratio_level",
    "reduction",
    "estimator",
    "estimator_settings",
    "ddof",
    "eps",
    "lone",
    "per_policy",
    "constant_length",
)
"""Keys of a file that an override of `learner.preset` drops first."""


class SRPOConfig(BaseModel):
    """Settings of `SRPOLearner`.

    Example:
        >>> SRPOConfig(preset="dapo").clip
        (0.2, 0.28)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")

    preset: Preset = "srpo"
    """Sets the keys that are not given."""
    clip: tuple[float, float]
    """Distances of the clip's bounds from 1, below and above; one number: both. They belong to `length_norm`: per-token
    ranges such as 0.2 never bind on means of long outputs."""
    ratio_level: RatioLevel = "set"
    """What carries one ratio and one clip: set, member, token or trajectory."""
    set_norm: SetNorm = "sqrt"
    """f(K) of a set's log-ratio: sqrt K^(-1/2), sum 1, mean 1/K."""
    length_norm: LengthNorm = "mean"
    """Whether a member's log-ratio is the mean or the sum over its tokens."""
    reduction: Reduction = "event"
    """How units make one loss: event, episode, member, token or constant."""
    per_policy: bool = False
    """Counts each policy's rows apart, as if each had a loss of its own and these were added; for levels member and
    token, whose units are of one policy."""
    constant_length: float | None = Field(None, gt=0, allow_inf_nan=False)
    """L in tokens, for reduction `constant`."""
    estimator: str = "group"
    """What a return is compared with: group, group_no_std, loo, decision, agent, agent_turn, or `module:attr` or
    `./file.py:attr` of an own one, `advantage(batch, **settings)`."""
    estimator_settings: dict[str, Any] = {}
    """Keyword arguments of an own estimator."""
    ddof: Literal[0, 1] = 0
    """0 divides the variance by n, 1 by n - 1."""
    eps: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Added to the standard deviation."""
    lone: Literal["zero", "raw"] = "zero"
    """Advantage of a row that is compared with none: zero, or its raw return."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of an episode's rewards."""
    invalid_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """What each trained output that could not be parsed costs: the episode's return, or that of its own row alone where
    the estimator compares members (agent, agent_turn)."""
    kl_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL to the weights that training began from, added to the loss; 0: no KL, and no copy of them."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """What estimates it at each token, weighed as the token is in the loss."""
    objective: str | None = None
    """`module:attr` or `./file.py:attr` of an own objective, `objective(new_logprobs, batch, advantage, **settings)`,
    which returns the loss."""
    objective_settings: dict[str, Any] = {}
    """Keyword arguments of an own objective."""
    mini_batches: int = Field(2, ge=1)
    """Optimiser steps that a batch's events are split over."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Most tokens, padding included, of one forward pass; it changes memory and speed only."""
    grad_norm_by_k_every: int | None = Field(None, ge=1)
    """Logs the gradient's norm by set size at every so many updates, for an extra backward pass; left out: never."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Where old log-probs come from: the learner's own pass before the first step, or the sampler's record."""

    tis_cap: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest importance weight of a unit, old log-probs against the sampler's, which multiplies its advantage; left
    out: none. It needs the sampler's log-probs."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        preset = values.get("preset", "srpo")
        return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **values}

    @field_validator("clip", mode="before")
    @classmethod
    def _both(cls, clip: Any) -> Any:
        return (clip, clip) if isinstance(clip, int | float) and not isinstance(clip, bool) else clip

    @model_validator(mode="after")
    def _fits(self) -> Self:
        low, high = self.clip
        if not (low >= 0 and high >= 0):
            raise ValueError(f"clip is {list(self.clip)}; both distances from 1 are at least 0")
        if self.reduction == "constant" and self.constant_length is None:
            raise ValueError("reduction 'constant' needs constant_length, in tokens; set it to the longest output")
        if self.per_policy and self.ratio_level in ("set", "trajectory"):
            raise ValueError(
                f"per_policy with ratio_level {self.ratio_level!r}, whose units may hold members of several policies; "
                "use 'member' or 'token', or leave it out"
            )
        if self.tis_cap is not None and self.old_logprobs == "sampler":
            raise ValueError(
                "tis_cap weighs recomputed log-probs against the sampler's; old_logprobs 'sampler' has none"
            )
        if self.tis_cap is not None and self.objective is not None:
            raise ValueError("tis_cap belongs to the objective that ships; weigh the units of an own one there")
        known = get_args(Estimator)
        if not self.own_estimator and self.estimator not in known:
            raise ValueError(
                f"estimator {self.estimator!r} is none of {', '.join(known)}, and no `module:attr`."
                f"{nearest(self.estimator, known)}"
            )
        if self.objective is not None and not is_reference(self.objective):
            raise ValueError(f"objective {self.objective!r} is no `module:attr`; leave it out for the one that ships")
        if self.estimator_settings and not self.own_estimator:
            raise ValueError(f"estimator_settings are for an own estimator, and it is {self.estimator!r}")
        if self.objective_settings and self.objective is None:
            raise ValueError("objective_settings are for an own objective, and it is the one that ships")
        return self

    @property
    def own_estimator(self) -> bool:
        """Whether the estimator is `module:attr`."""
        return is_reference(self.estimator)

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> SRPOConfig:
        """Returns the settings of a recipe's `learner` section.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule; srpo without a clip.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise InvalidRecipe("\n".join(_lines(error.errors()))) from error


def _lines(errors: Iterable[Any]) -> list[str]:
    errors = list(errors)
    unknown_preset = any(error["loc"] == ("preset",) for error in errors)  # what it would have set is not missing
    return [_line(error) for error in errors if not (unknown_preset and error["type"] == "missing")]


def _line(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = list(SRPOConfig.model_fields)
        return f"learner: unknown key {key!r}; known are {', '.join(known)}.{nearest(key, known)}"
    if error["type"] == "missing" and key == "clip":
        return (
            "learner: clip is missing; preset srpo has none, since the range belongs to length_norm. Give [low, high], "
            "such as [3.0e-4, 4.0e-4] for means of long outputs, or 0.2 for sums of a few tokens."
        )
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"learner: {message}{'' if message.endswith('?') else '.'}"
    near = nearest(str(error["input"]), get_args(Preset)) if key == "preset" else ""
    return f"learner: {key}: {error['msg']}, and it is {error['input']!r}.{near}"
