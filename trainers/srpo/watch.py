"""Does training collapse? Warnings about what the metrics of several updates say in a row."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("srpo_env")

_UPDATES = 10
"""How long something lasts before it is told of, and how long it is not told of again."""


class Watch:
    """Sees the metrics of every update, and warns.

    Args:
        length_norm: The learner's setting, which the clip's range belongs to.
    """

    def __init__(self, length_norm: str) -> None:
        self._watches: dict[str, ClipWatch | GradientWatch | ParseWatch | SignalWatch] = {
            "clip": ClipWatch(length_norm),
            "gradient": GradientWatch(),
            "parse": ParseWatch(),
            "signal": SignalWatch(),
        }

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Takes an update's metrics; those that are left out or NaN say nothing."""
        for watch in self._watches.values():
            watch.see(update, metrics)

    def state(self) -> dict[str, dict[str, Any]]:
        """What has been seen so far, as plain data."""
        return {name: dict(vars(watch)) for name, watch in self._watches.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes up what `state` gave."""
        for name, seen in state.items():
            vars(self._watches[name]).update(seen)


class ClipWatch:
    """The clip of off-policy updates never binds over ten updates, or binds for most units."""

    def __init__(self, length_norm: str) -> None:
        self.length_norm = length_norm
        self.without = 0
        self.silent_until = 0

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Looks at the clip fraction of the steps whose weights had changed."""
        fraction = metrics.get("clip_fraction_off_policy", math.nan)
        if math.isnan(fraction):
            return
        self.without = self.without + 1 if fraction == 0 else 0
        if self.without == _UPDATES:
            self.without = 0
            logger.warning(
                "update %d: the clip has not bound for %d updates; its range is too wide for length_norm %r, or the "
                "learning rate is too small to matter",
                update,
                _UPDATES,
                self.length_norm,
            )
        if fraction > 0.5 and update >= self.silent_until:
            self.silent_until = update + _UPDATES
            logger.warning(
                "update %d: the clip binds for %.0f%% of the units; its range is too narrow for length_norm %r, or the "
                "learning rate is too large",
                update,
                100 * fraction,
                self.length_norm,
            )


class GradientWatch:
    """The norm of a gradient is ten times the median of the last 32 updates."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.silent_until = 0

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Looks at the largest norm of an update's steps."""
        norm = metrics.get("grad_norm_max", math.nan)
        if math.isnan(norm):
            return
        usual = statistics.median(self.norms) if len(self.norms) >= _UPDATES else math.inf
        self.norms = [*self.norms[-31:], norm]
        if norm > 10 * usual and update >= self.silent_until:
            self.silent_until = update + _UPDATES
            logger.warning(
                "update %d: the norm of the gradient is %.3g, and its median was %.3g; look at this update's events, "
                "and lower the learning rate or grad_clip if it happens again",
                update,
                norm,
                usual,
            )


class ParseWatch:
    """An agent's outputs fail to parse more often than before: by 0.1 from ten updates to the next ten."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Looks at every agent's rate."""
        for name, rate in metrics.items():
            prefix, _, agent = name.partition("=")
            if prefix != "parse_failure_rate/agent" or math.isnan(rate):
                continue
            rates = self.rates[agent] = [*self.rates.get(agent, []), rate]
            if len(rates) < 2 * _UPDATES:
                continue
            before, after = (statistics.fmean(part) for part in (rates[:_UPDATES], rates[_UPDATES:]))
            if after > before + 0.1:
                logger.warning(
                    "update %d: outputs of %r that do not parse rose from %.0f%% to %.0f%% over %d updates; look at "
                    "what it writes, and at the reward of an output that does not parse",
                    update,
                    agent,
                    100 * before,
                    100 * after,
                    2 * _UPDATES,
                )
                del rates[:_UPDATES]
            else:
                del rates[0]


class SignalWatch:
    """No group has had a signal for ten updates."""

    def __init__(self) -> None:
        self.without = 0

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Looks at the share of groups without signal."""
        share = metrics.get("groups_without_signal", math.nan)
        if math.isnan(share):
            return
        self.without = self.without + 1 if share == 1 else 0
        if self.without == _UPDATES:
            self.without = 0
            logger.warning(
                "update %d: no group has had returns that differ for %d updates, so nothing was learned; the tasks are "
                "all too easy or all too hard, or the outputs of a group are all the same",
                update,
                _UPDATES,
            )
