"""How the writes of several members of a set meet in one state key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from srpo_env.registry import load_reference

Merge = Callable[[Any, Sequence[Any]], Any]
"""Makes the new value of the old one and the members' values, in declared order."""

MERGES: dict[str, Merge] = {
    "append": lambda old, values: [*(old or []), *values],
    "extend": lambda old, values: [*(old or []), *(item for value in values for item in value)],
    "any": lambda old, values: any(values),
    "all": lambda old, values: all(values),
    "sum": lambda old, values: (old or 0) + sum(values),
    "min": lambda old, values: min(values if old is None else [old, *values]),
    "max": lambda old, values: max(values if old is None else [old, *values]),
    "first": lambda old, values: values[0],
    "last": lambda old, values: values[-1],
}


def merge(rule: str | None, old: Any, values: Sequence[Any]) -> Any:
    """Returns the key's new value; without a rule the only member's value replaces the old one.

    >>> merge("append", ["a"], ["b", "c"])
    ['a', 'b', 'c']
    """
    if rule is None:
        return values[-1]
    chosen = MERGES[rule] if rule in MERGES else load_reference(rule)
    return chosen(old, values)
