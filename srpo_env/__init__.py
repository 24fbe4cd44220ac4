"""Teams of language-model agents as graphs, Gymnasium environments and training data.

`make` gives an environment, `rollout` runs many episodes, `train` runs a recipe. Names are imported when they are first
used, so that `import srpo_env` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_env.batch import EventBatch
    from srpo_env.env import WorkflowEnv, make
    from srpo_env.episode import Episode
    from srpo_env.errors import SrpoEnvError, ToolError
    from srpo_env.evaluation import evaluate
    from srpo_env.eventlog import EventLog
    from srpo_env.function_tools import tool
    from srpo_env.loading import load_workflow
    from srpo_env.protocols import Policy, SampleRequest, Tool, Trainable, Trainer
    from srpo_env.records import Event, Member, Message, Output, Sampling
    from srpo_env.rewards import Score
    from srpo_env.rollouts import rollout
    from srpo_env.spec import Workflow
    from srpo_env.tasks import Task, TaskSet, load_tasks
    from srpo_env.training import train

__version__ = "0.1.0"

_WHERE = {
    "batch": ("EventBatch",),
    "env": ("WorkflowEnv", "make"),
    "episode": ("Episode",),
    "errors": ("SrpoEnvError", "ToolError"),
    "evaluation": ("evaluate",),
    "eventlog": ("EventLog",),
    "function_tools": ("tool",),
    "loading": ("load_workflow",),
    "protocols": ("Policy", "SampleRequest", "Tool", "Trainable", "Trainer"),
    "records": ("Event", "Member", "Message", "Output", "Sampling"),
    "rewards": ("Score",),
    "rollouts": ("rollout",),
    "spec": ("Workflow",),
    "tasks": ("Task", "TaskSet", "load_tasks"),
    "training": ("train",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Episode",
    "Event",
    "EventBatch",
    "EventLog",
    "Member",
    "Message",
    "Output",
    "Policy",
    "SampleRequest",
    "Sampling",
    "Score",
    "SrpoEnvError",
    "Task",
    "TaskSet",
    "Tool",
    "ToolError",
    "Trainable",
    "Trainer",
    "Workflow",
    "WorkflowEnv",
    "__version__",
    "evaluate",
    "load_tasks",
    "load_workflow",
    "make",
    "rollout",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'srpo_env' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"srpo_env.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


importlib.import_module("srpo_env.registration").register_envs()
