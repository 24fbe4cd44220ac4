"""The tiny model that ships: a Qwen3 of about 0.3 M parameters with a character tokenizer, warm-started on sums."""

from __future__ import annotations

from pathlib import Path


def arithmetic() -> Path:
    """Returns the transformers folder of the policy that the recipe `arithmetic_tiny` starts from."""
    return Path(__file__).parent / "models" / "arithmetic"
