"""Does a function become a tool that agents can read, call and get wrong?"""

import asyncio
import json
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from srpo_env.errors import InvalidInput, ToolError
from srpo_env.function_tools import FunctionTool, tool
from srpo_env.protocols import Tool
from srpo_env.toolcalls import run_calls


@tool
def weather(city: Annotated[str, Field(description="Its name.")], unit: Literal["C", "F"] = "C", days: int = 1) -> str:
    """Tells the weather.

    What follows is for readers of the code.
    """
    return f"{city} {unit} {days} {threading.current_thread() is threading.main_thread()}"


@tool(name="lookup")
async def look_up(schema: str, json: list[int]) -> dict[str, Any]:
    """Looks something up."""
    if schema == "wrong":
        raise ToolError("there is no schema 'wrong'.")
    return {"schema": schema, "sum": sum(json), "é": None}


def call(made: FunctionTool, **arguments: Any) -> str:
    return asyncio.run(made(**arguments))


def test_the_schema_is_the_signature_and_the_description_the_first_line() -> None:
    assert isinstance(weather, Tool)
    assert (weather.name, weather.description) == ("weather", "Tells the weather.")
    assert weather.parameters["properties"] == {
        "city": {"title": "city", "type": "string", "description": "Its name."},
        "unit": {"title": "unit", "type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"title": "days", "type": "integer", "default": 1},
    }
    assert weather.parameters["required"] == ["city"]
    assert weather.parameters["additionalProperties"] is False
    assert look_up.name == "lookup"


def test_arguments_are_read_by_their_types_and_defaults_filled_in() -> None:
    assert call(weather, city="Oslo", days="3").startswith("Oslo C 3")


def test_a_plain_function_runs_in_a_thread() -> None:
    assert call(weather, city="Oslo").endswith("False")


def test_plain_data_comes_back_as_json() -> None:
    assert json.loads(call(look_up, schema="s", json=[1, 2])) == {"schema": "s", "sum": 3, "é": None}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "argument 'city' is missing"),
        ({"city": "Oslo", "town": "Bergen"}, "argument 'town' is unknown"),
        ({"city": "Oslo", "argument_1": "F"}, "argument 'argument_1' is unknown"),
        ({"city": "Oslo", "days": "many"}, "argument 'days': Input should be a valid integer"),
        ({"city": "Oslo", "unit": "K"}, "argument 'unit': Input should be 'C' or 'F'"),
        ({"city": 5}, "argument 'city': Input should be a valid string"),
    ],
)
def test_a_wrong_argument_is_told_to_the_agent(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ToolError, match=error):
        call(weather, **arguments)


def test_an_own_tool_error_comes_through() -> None:
    with pytest.raises(ToolError, match="no schema 'wrong'"):
        call(look_up, schema="wrong", json=[])


def test_no_result_is_a_failed_call() -> None:
    @tool
    def silent() -> None:
        """Says nothing."""

    (made,) = asyncio.run(run_calls('<tool_call>{"name": "silent"}</tool_call>', {"silent": silent}))
    assert not made.ok
    assert "the result is None" in made.result


def without_type(x) -> str:  # type: ignore[no-untyped-def]
    """Lacks a type."""
    return str(x)


def without_docstring(x: str) -> str:
    return x


def with_rest(*rest: str) -> str:
    """Takes any number."""
    return "".join(rest)


def with_strange_type(x: threading.Lock) -> str:  # type: ignore[valid-type]
    """Takes what no agent can write."""
    return str(x)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (without_type, "argument 'x' has no type"),
        (without_docstring, "has no docstring"),
        (with_rest, "can't be given by name"),
        (with_strange_type, "has no schema|not fully defined|types"),
    ],
)
def test_a_function_that_makes_no_tool_is_refused(function: Any, error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        tool(function)
