"""The workflows that ship, as YAML files in this folder."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Returns the folder of the YAML files."""
    return Path(__file__).parent
