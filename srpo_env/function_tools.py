"""How a Python function becomes a tool: its signature is the schema, its docstring's first line the description."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from srpo_env.errors import InvalidInput, ToolError


class FunctionTool:
    """A function that agents may call; made by `tool`.

    Attributes:
        name: The name that agents call it by.
        description: One sentence for the prompt.
        parameters: JSON Schema of the arguments.
        function: The function itself.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or function.__name__
        self.description = _description(function)
        self._arguments = _arguments(function)
        self.parameters: Mapping[str, Any] = self._arguments.model_json_schema(by_alias=True)

    async def __call__(self, **arguments: Any) -> str:
        """Calls the function and returns its result, text as it is and other plain data as JSON.

        Raises:
            ToolError: An argument is missing, unknown or of the wrong type; or the function raised it.
        """
        try:
            checked = self._arguments.model_validate(arguments)
        except ValidationError as error:
            raise ToolError(f"{self.name}: {'; '.join(map(_problem, error.errors()))}.") from error
        fields = type(checked).model_fields
        values = {str(field.alias): getattr(checked, attribute) for attribute, field in fields.items()}
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**values)
        else:
            result = await asyncio.to_thread(self.function, **values)
        if result is None:
            raise TypeError("the result is None; a tool returns text, or plain data that JSON can hold")
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    def __repr__(self) -> str:
        return f"tool({self.name}: {self.description})"


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...


@overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Makes a tool of a function, as `@tool` or `@tool(name="...")`.

    Every argument has a type; what an agent gives is checked against it, and `ToolError` tells the agent what it did
    wrong. A plain function runs in a thread of its own, an async one in the event loop, so that it must not block.

    Raises:
        InvalidInput: An argument has no type, or can't be given by name, or there is no docstring.

    Example:
        >>> @tool
        ... async def add(a: int, b: int = 1) -> int:
        ...     '''Adds two whole numbers.'''
        ...     return a + b
        >>> add.description, list(add.parameters["properties"])
        ('Adds two whole numbers.', ['a', 'b'])
        >>> asyncio.run(add(a="2"))
        '3'
    """
    if function is None:
        return lambda function: FunctionTool(function, name=name)
    return FunctionTool(function)


def _description(function: Callable[..., Any]) -> str:
    lines = (inspect.getdoc(function) or "").strip().splitlines()
    if not lines:
        raise InvalidInput(
            f"tool {function.__name__!r} has no docstring; its first line tells agents what the tool does. Add one."
        )
    return lines[0]


def _arguments(function: Callable[..., Any]) -> type[BaseModel]:
    """The arguments as a model; its fields are numbered, so that an argument may have any name."""
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidInput(
            f"tool {function.__name__!r}: {error}; the types of a tool's arguments are names of its module."
        ) from error
    fields: dict[str, Any] = {}
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise InvalidInput(
                f"tool {function.__name__!r}: argument {argument} can't be given by name; agents give every argument "
                "by name. Declare each one."
            )
        if argument.name not in types:
            raise InvalidInput(
                f"tool {function.__name__!r}: argument {argument.name!r} has no type; it becomes the schema that "
                f"agents read. Write `{argument.name}: str` or the like."
            )
        default = ... if argument.default is argument.empty else argument.default
        fields[f"argument_{len(fields)}"] = (
            types[argument.name],
            Field(default, alias=argument.name, title=argument.name),
        )
    try:
        return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise InvalidInput(
            f"tool {function.__name__!r}: a type of its arguments has no schema: {str(error).splitlines()[0]}"
        ) from error


def _problem(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"argument {place!r} is unknown"
    if error["type"] == "missing":
        return f"argument {place!r} is missing"
    return f"argument {place!r}: {error['msg']}"
