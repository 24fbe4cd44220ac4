"""How tool calls are found in an output and run.

Two forms: `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>` (Qwen, Hermes), and the tool's own tag,
`<search>...</search>`, for a tool with one argument. What is malformed goes back to the agent as a failed call.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from srpo_env.errors import ToolError, nearest
from srpo_env.parsers import after_thinking
from srpo_env.protocols import Tool
from srpo_env.records import ToolCall

Tools = Mapping[str, Tool]

MOST_CALLS = 8
_CALL = re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)


async def run_calls(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """Runs the calls that a text makes, side by side, and returns them in the text's order."""
    found = [match.groups() for match in _CALL.finditer(after_thinking(text))]
    calls = [(tag, body) for tag, body in found if tag == "tool_call" or tag in tools]
    made = await asyncio.gather(*(_run(tag, body, tools) for tag, body in calls[:MOST_CALLS]))
    refused = [
        ToolCall(tool=tag, arguments={}, result=f"not run: at most {MOST_CALLS} calls in one output", ok=False)
        for tag, _ in calls[MOST_CALLS:]
    ]
    return (*made, *refused)


async def _run(tag: str, body: str, tools: Tools) -> ToolCall:
    started = time.perf_counter()
    name, arguments = tag, {}
    try:
        name, arguments = _read(tag, body, tools)
        result, ok = await tools[name](**arguments), True
    except ToolError as error:
        result, ok = str(error), False
    return ToolCall(tool=name, arguments=arguments, result=result, ok=ok, seconds=time.perf_counter() - started)


def _read(tag: str, body: str, tools: Tools) -> tuple[str, dict[str, Any]]:
    if tag != "tool_call":
        names = list(tools[tag].parameters.get("properties", {}))
        if len(names) != 1:
            raise ToolError(f"tool {tag!r} takes {', '.join(names)}; call it as <tool_call>{{...}}</tool_call>.")
        return tag, {names[0]: body.strip()}
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ToolError(
            f'tool call is not {{"name": ..., "arguments": {{...}}}}: {type(error).__name__}: {error}'
        ) from error
    if name not in tools:
        raise ToolError(f"no tool {name!r}; yours are {', '.join(tools)}.{nearest(str(name), tools)}")
    if not isinstance(arguments, dict):
        raise ToolError(f"arguments of {name!r} are a {type(arguments).__name__}; give an object.")
    return str(name), arguments
