"""How tool calls are found in an output and run.

Two forms: `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>` (Qwen, Hermes), and the tool's own
tag, `<search>...</search>`, for a tool with one argument. What is malformed goes back to the agent as a failed call.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from srpo_env.errors import InvalidInput, ToolError, ToolUnavailable, nearest
from srpo_env.parsers import after_thinking, tagged
from srpo_env.protocols import Tool
from srpo_env.records import ToolCall
from srpo_env.registry import is_reference
from srpo_env.spec import Workflow

Tools = Mapping[str, Tool]

MOST_CALLS = 8
MOST_RESULT_CHARS = 16_000


def require_tools(workflow: Workflow, tools: Tools) -> None:
    """Makes sure that every tool an agent may call is there.

    Raises:
        InvalidInput: One is missing; it and the agent are named.
    """
    for agent, spec in workflow.agents.items():
        for name in spec.tools:
            if name not in tools:
                raise InvalidInput(
                    f"agent {agent!r} of workflow {workflow.name!r} may call tool {name!r}, which is not among the "
                    f"tools given ({', '.join(tools) or 'none'}).{nearest(name, tools)} Give it under `tools`."
                )


def spoken_name(name: str, tool: Tool) -> str:
    """Returns what agents call a tool by: its name in the workflow, or its own where that is `module:attr`."""
    return tool.name if is_reference(name) else name


async def run_calls(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """Runs the calls that a text makes, side by side, and returns them in the text's order."""
    text = after_thinking(text)
    calls = [(tag, text[start:end]) for tag, start, end in tagged(text, ["tool_call", *tools])]
    made = await asyncio.gather(*(_run(tag, body, tools) for tag, body in calls[:MOST_CALLS]))
    refused = [
        ToolCall(tool=tag, arguments={}, result=f"not run: at most {MOST_CALLS} calls in one output", ok=False)
        for tag, _ in calls[MOST_CALLS:]
    ]
    return (*made, *refused)


async def _run(tag: str, body: str, tools: Tools) -> ToolCall:
    """Runs one call; whatever goes wrong becomes a failed call, which the agent reads."""
    started = time.perf_counter()
    name = tag
    arguments: dict[str, Any] = {}
    unavailable = False
    try:
        name, arguments = _read(tag, body, tools)
        result, ok = await tools[name](**arguments), True
        if not isinstance(result, str):
            raise TypeError(f"the result is a {type(result).__name__}; a tool returns text")
    except ToolError as error:
        result, ok = str(error), False
    except ToolUnavailable as error:
        result, ok, unavailable = str(error), False, True
    except Exception as error:  # noqa: BLE001 - a tool may raise anything on what a model gives it
        result, ok = f"{name} failed: {type(error).__name__}: {error}", False
    result, cut = _bounded(result)
    return ToolCall(
        tool=name,
        arguments=arguments,
        result=result,
        ok=ok,
        unavailable=unavailable,
        cut=cut,
        seconds=time.perf_counter() - started,
    )


def _bounded(result: str) -> tuple[str, int]:
    """Returns a result that a prompt can hold, and how many characters of it are left out of the middle."""
    cut = len(result) - MOST_RESULT_CHARS
    if cut <= 0:
        return result, 0
    half = MOST_RESULT_CHARS // 2
    return f"{result[:half]}\n[... {cut} characters cut ...]\n{result[-half:]}", cut


def _read(tag: str, body: str, tools: Tools) -> tuple[str, dict[str, Any]]:
    if tag != "tool_call":
        names = list(tools[tag].parameters.get("properties", {}))
        if len(names) != 1:
            raise ToolError(f"tool {tag!r} takes {', '.join(names)}; call it as <tool_call>{{...}}</tool_call>.")
        return tag, {names[0]: body.strip()}
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ToolError(
            f'tool call is not {{"name": ..., "arguments": {{...}}}}: {type(error).__name__}: {error}'
        ) from error
    if not isinstance(name, str) or name not in tools:
        raise ToolError(f"no tool {name!r}; yours are {', '.join(tools)}.{nearest(str(name), tools)}")
    if not isinstance(arguments, dict):
        raise ToolError(f"arguments of {name!r} are a {type(arguments).__name__}; give an object.")
    return name, arguments
