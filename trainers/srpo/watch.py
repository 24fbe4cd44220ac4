"""Does the clip do its work? Warnings about what an update's metrics say in a row."""

from __future__ import annotations

import logging
import math

logger = logging.getLogger("srpo_env")

_UPDATES = 10


class ClipWatch:
    """Warns where the clip of off-policy updates never binds, or binds for most units.

    It warns when the fraction stays 0 over ten updates, and when it is above 0.5, once in ten updates.
    """

    def __init__(self) -> None:
        self._without = 0
        self._silent_until = 0

    def see(self, update: int, clip_fraction: float, length_norm: str) -> None:
        """Takes the clip fraction of an update's off-policy steps; NaN where it had none."""
        if math.isnan(clip_fraction):
            return
        self._without = self._without + 1 if clip_fraction == 0 else 0
        if self._without == _UPDATES:
            self._without = 0
            logger.warning(
                "update %d: the clip has not bound for %d updates; its range is too wide for length_norm %r, or the "
                "learning rate is too small to matter",
                update,
                _UPDATES,
                length_norm,
            )
        if clip_fraction > 0.5 and update >= self._silent_until:
            self._silent_until = update + _UPDATES
            logger.warning(
                "update %d: the clip binds for %.0f%% of the units; its range is too narrow for length_norm %r, or the "
                "learning rate is too large",
                update,
                100 * clip_fraction,
                length_norm,
            )
