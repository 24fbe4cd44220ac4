"""Where the recipes that ship lie."""

from __future__ import annotations

from pathlib import Path


def recipes() -> Path:
    """Returns the folder of recipes."""
    return Path(__file__).parent / "recipes"
