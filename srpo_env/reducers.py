"""How the outputs of a set become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_env.views import MemberView


def majority(outputs: Sequence[MemberView]) -> tuple[Any, str]:
    """The value that most members gave, among those that could be read; the first of equals.

    Returns:
        The value and the text of the first member that gave it; (None, "") where no output could be read.
    """
    readable = [output for output in outputs if output.ok]
    if not readable:
        return None, ""
    values = [output.parsed for output in readable]
    winner = max(readable, key=lambda output: values.count(output.parsed))
    return winner.parsed, winner.text


def first_valid(outputs: Sequence[MemberView]) -> tuple[Any, str]:
    """The first output that could be read; (None, "") where none could."""
    for output in outputs:
        if output.ok:
            return output.parsed, output.text
    return None, ""


def concat(outputs: Sequence[MemberView]) -> tuple[Any, str]:
    """All texts, one after the other with an empty line between; the value is the same text."""
    text = "\n\n".join(output.text for output in outputs)
    return text, text


Reducer = Callable[[Sequence["MemberView"]], tuple[Any, str]]

REDUCERS: dict[str, Reducer] = {"majority": majority, "first_valid": first_valid, "concat": concat}
