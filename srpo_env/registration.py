"""The ids that `gym.make` knows: one for each workflow that ships."""

from __future__ import annotations

import gymnasium

IDS = {
    "SingleAgent": "single_agent",
    "SolverVerifier": "solver_verifier",
    "ParallelProposers": "parallel_proposers",
    "ProposersVerifier": "proposers_verifier",
    "AdaptiveRouter": "adaptive_router",
    "SearchAggregator": "search_aggregator",
    "SearchHierarchy": "search_hierarchy",
    "Debate": "debate",
    "ToolUse": "tool_use",
}


def register_envs() -> None:
    """Registers `srpo_env/SolverVerifier-v0` and the like; doing it twice changes nothing."""
    for name, workflow in IDS.items():
        env_id = f"srpo_env/{name}-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(
                id=env_id,
                entry_point="srpo_env.env:make",
                kwargs={"workflow": workflow},
                disable_env_checker=False,
                order_enforce=True,
            )
