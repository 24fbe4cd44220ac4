"""Where outputs come from: one file per backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_env.agents.local import LocalPolicy
    from srpo_env.agents.scripted import ScriptedPolicy
    from srpo_env.agents.server import ServerPolicy

__all__ = ["LocalPolicy", "ScriptedPolicy", "ServerPolicy"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: a scripted policy must not load torch."""
    from importlib import import_module

    modules = {"LocalPolicy": "local", "ScriptedPolicy": "scripted", "ServerPolicy": "server"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
