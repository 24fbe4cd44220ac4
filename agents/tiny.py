"""The tiny models that ship, Qwen3s of about 0.3 M parameters: two warm-started on sums, one on looking things up."""

from __future__ import annotations

from pathlib import Path


def arithmetic() -> Path:
    """Returns the transformers folder of the policy that the recipe `arithmetic_tiny` starts from."""
    return Path(__file__).parent / "models" / "arithmetic"


def router() -> Path:
    """Returns the transformers folder of the router and the solvers that the recipe `router_tiny` starts from."""
    return Path(__file__).parent / "models" / "router"


def search() -> Path:
    """Returns the transformers folder of the policy that the recipe `search_tiny` starts from."""
    return Path(__file__).parent / "models" / "search"
