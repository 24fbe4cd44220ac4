"""Which tools a run gives its agents: those that are given, made from their settings, or registered under the name.

A tool is loaded from an entry point of the group `srpo_env.tools`, from `package.module:attr` or `./file.py:attr`. What
stands there is a tool; a function, which becomes one; or a class with settings, made by `from_config(name, settings)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from srpo_env.errors import InvalidInput, UnknownName
from srpo_env.function_tools import tool
from srpo_env.protocols import Tool
from srpo_env.registry import load
from srpo_env.spec import Workflow

ToolsGiven = Mapping[str, Tool | Mapping[str, Any]]
"""Tools by the name that agents call them by: the tool itself, or its settings, such as `{"use": "bm25", ...}`."""


def load_tools(*workflows: Workflow, given: ToolsGiven | None = None, demo: bool = True) -> dict[str, Tool]:
    """Returns every tool that the workflows' agents may call.

    Args:
        workflows: Their agents name the tools.
        given: Takes precedence; of a name that is not in it, the registered tool is taken without settings.
        demo: Whether a registered tool that only demonstrates, such as search in a dozen passages, may be taken.

    Raises:
        UnknownName: A tool is neither given nor registered; the agent is named.
        InvalidInput: A tool's settings break a rule, or it needs some.

    >>> from srpo_env.loading import load_workflow
    >>> list(load_tools(load_workflow("tool_use")))
    ['calculator']
    """
    given = given or {}
    found: dict[str, Tool] = {}
    for workflow in workflows:
        for agent, spec in workflow.agents.items():
            for name in spec.tools:
                if name not in found:
                    found[name] = _tool(name, f"agent {agent!r} of workflow {workflow.name!r}", given, demo=demo)
    return found


def make_tool(name: str, settings: Mapping[str, Any]) -> Tool:
    """Makes a tool from its settings.

    Args:
        name: What agents call it by; also the tool that is taken where the settings do not `use` another.
        settings: `use` and the tool's own settings.

    Raises:
        UnknownName: No such tool.
        InvalidInput: The settings break a rule, or what was loaded is no tool.
    """
    own = dict(settings)
    use = str(own.pop("use", None) or name)
    found = load("tool", use)
    if inspect.isclass(found):
        make = getattr(found, "from_config", None)
        if make is None:
            raise InvalidInput(
                f"tools.{name}: class {use!r} has no `from_config(name, settings)`, which makes the tool."
            )
        made = make(name, own)
    elif own:
        raise InvalidInput(f"tools.{name}: tool {use!r} has no settings, and {', '.join(own)} is set. Remove it.")
    else:
        made = tool(found) if inspect.isroutine(found) else found
    if not isinstance(made, Tool):
        raise InvalidInput(
            f"tools.{name}: {use!r} is a {type(made).__name__} and no tool; a tool has name, description, parameters "
            "and an async call (see srpo_env.Tool), or is a function under @srpo_env.tool."
        )
    return made


def _tool(name: str, caller: str, given: ToolsGiven, *, demo: bool) -> Tool:
    if name in given:
        value = given[name]
        return make_tool(name, value) if isinstance(value, Mapping) else value
    try:
        made = make_tool(name, {})
    except UnknownName as error:
        raise UnknownName(f"{caller} may call tool {name!r}: {error}") from error
    if getattr(made, "demo", False) and not demo:
        raise InvalidInput(
            f"{caller} may call tool {name!r}, which stands for a demonstration only; say under `tools` what to use, "
            f"such as {name}: {{use: bm25, corpus: corpus.jsonl}}, or {name}: {{}} for the demonstration."
        )
    return made
