"""What can go wrong, as one tree.

    SrpoEnvError
    ├── InvalidInput            the user's input is wrong; the command line exits with 2
    │   ├── InvalidWorkflow     a workflow file or object breaks a rule of the grammar
    │   │   ├── InvalidWorkflowFile  with all problems, each at its line (yaml_source.py)
    │   │   └── TemplateError        a template or condition can't be compiled or evaluated (templates.py)
    │   ├── InvalidRecipe       a recipe, an override or a setting
    │   ├── InvalidTask         a task file or a row of it
    │   ├── UnknownName         a name that is not registered, with the nearest ones
    │   ├── MissingModel        a model folder that is not there or is not one
    │   ├── MissingExtra        an optional dependency that is not installed
    │   └── RunExists           a run folder that would be overwritten
    ├── InvalidAction           `step` got the wrong number or kind of outputs; nothing changed
    ├── ToolError               an agent called a tool wrongly; the agent is told
    ├── ToolUnavailable         a tool can't answer, whatever the agent says; the episode is truncated and not scored
    ├── ContextExceeded         a prompt leaves no room for an output; the episode is truncated
    ├── PolicyError             a policy could not produce an output (after its retries)
    ├── Untrainable             outputs that the learner can't use: no token ids, no log-probs
    ├── DamagedLog              a journal that can't be read as it stands
    └── TrainingDiverged        a loss or parameter that is not finite

Every message names the thing, the value, the rule and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SrpoEnvError(Exception):
    """Root of every error that this package raises on purpose."""


class InvalidInput(SrpoEnvError, ValueError):
    """What the user gave breaks a rule; the message says which and what to do."""


class InvalidWorkflow(InvalidInput):
    """A workflow breaks one or more rules of the grammar."""


class InvalidRecipe(InvalidInput):
    """A recipe, an override or a setting breaks a rule."""


class InvalidTask(InvalidInput):
    """A task file can't be read, or one of its rows is not a task."""


class UnknownName(InvalidInput, LookupError):
    """A name is not registered."""


class MissingModel(InvalidInput):
    """A model folder is missing or is not a transformers folder."""


class MissingExtra(InvalidInput, ImportError):
    """An optional dependency is not installed."""


class RunExists(InvalidInput):
    """A run folder exists already and would be overwritten."""


class InvalidAction(SrpoEnvError, ValueError):
    """`step` got the wrong number or kind of outputs; the episode is unchanged."""


class ToolError(SrpoEnvError):
    """An agent called a tool wrongly; the message goes back to the agent."""


class ToolUnavailable(SrpoEnvError):
    """A tool can't answer, whatever the agent says: its server is down. The agent must not be judged by that."""


class ContextExceeded(SrpoEnvError):
    """A prompt leaves no room for an output in the policy's context; no request was made."""


class PolicyError(SrpoEnvError):
    """A policy could not produce an output, after all its retries."""


class Untrainable(SrpoEnvError):
    """The learner can't use these outputs."""


class DamagedLog(SrpoEnvError):
    """A journal is damaged somewhere other than in its last line."""


class TrainingDiverged(SrpoEnvError):
    """A loss, a gradient or a parameter is not finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the known name nearest to `name`, or an empty string.

    >>> nearest("solvr", ["solver", "verifier"])
    " Did you mean 'solver'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
