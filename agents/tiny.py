"""The tiny models that ship, Qwen3s of about 0.3 M parameters: one warm-started on sums, one on looking things up."""

from __future__ import annotations

from pathlib import Path


def arithmetic() -> Path:
    """Returns the transformers folder of the policy that the recipe `arithmetic_tiny` starts from."""
    return Path(__file__).parent / "models" / "arithmetic"


def search() -> Path:
    """Returns the transformers folder of the policy that the recipe `search_tiny` starts from."""
    return Path(__file__).parent / "models" / "search"
