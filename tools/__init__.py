"""What outputs act on: one file per tool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_env.tools.calculating import calculator
    from srpo_env.tools.math_verification import MathVerifier, Verification
    from srpo_env.tools.retriever import HttpSearch, retriever_app
    from srpo_env.tools.search import Passage, SearchIndex, SearchTool

__all__ = [
    "HttpSearch",
    "MathVerifier",
    "Passage",
    "SearchIndex",
    "SearchTool",
    "Verification",
    "calculator",
    "retriever_app",
]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used."""
    from importlib import import_module

    modules = {
        "HttpSearch": "retriever",
        "MathVerifier": "math_verification",
        "Passage": "search",
        "SearchIndex": "search",
        "SearchTool": "search",
        "Verification": "math_verification",
        "calculator": "calculating",
        "retriever_app": "retriever",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
