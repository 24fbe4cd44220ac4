"""The bundled learner: SRPO, and its peers' rules on the same events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_env.trainers.srpo.config import SRPOConfig
    from srpo_env.trainers.srpo.estimators import advantages
    from srpo_env.trainers.srpo.learner import SRPOLearner
    from srpo_env.trainers.srpo.objective import srpo_loss
    from srpo_env.trainers.srpo.shipped import recipes

__all__ = ["SRPOConfig", "SRPOLearner", "advantages", "recipes", "srpo_loss"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: listing recipes must not load torch."""
    from importlib import import_module

    modules = {
        "SRPOConfig": "config",
        "SRPOLearner": "learner",
        "advantages": "estimators",
        "recipes": "shipped",
        "srpo_loss": "objective",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
