"""What is seen of an episode: by templates, conditions, reducers and Python transitions, and by whoever samples it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from srpo_env.records import Member, Message, Output


@dataclass(slots=True)  # thousands a second: frozen would cost three times as much
class MemberView:
    """One member's output, as templates, conditions and reducers see it."""

    agent: str
    index: int
    count: int
    text: str
    parsed: Any
    ok: bool
    results: tuple[str, ...] = ()
    acting: bool = False

    @classmethod
    def of(cls, slot: Slot, member: Member) -> MemberView:
        """Returns what is seen of a member in its place."""
        text, parse, calls = member.output.text, member.parse, member.tool_calls
        results = tuple([call.result for call in calls]) if calls else ()
        return cls(slot.agent, slot.index, slot.count, text, parse.value, parse.ok, results, acting=bool(calls))


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a node last did. `text`, `parsed` and `ok` are those of the reducer, or of the only member.

    `outputs` holds the last output of every member, in declared order; `acting` counts those that called a tool last.
    """

    outputs: tuple[MemberView, ...]
    visits: int
    text: str = ""
    parsed: Any = None
    ok: bool = False

    @property
    def acting(self) -> int:
        """Members whose last output called a tool."""
        return sum(output.acting for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Slot:
    """A member's place in a set: which of `count` members of its agent."""

    agent: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Due:
    """A member that is to be sampled: its place, its policy and its rendered prompt.

    `earlier` is its last output where `messages` go on from it: they begin with what it was given and what it said.
    """

    slot: Slot
    policy: str
    turn: int
    messages: tuple[Message, ...]
    earlier: Output | None = None


@dataclass(frozen=True)
class Transition:
    """What a Python transition returns: the node's value, state keys to set, and where to go (None: by its edges)."""

    parsed: Any = None
    text: str = ""
    ok: bool = True
    state: Mapping[str, Any] = field(default_factory=dict)
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    """The names of an episode in the log."""

    run: str
    group: str
    episode: str
    batch: str = ""


class Visits(dict[str, int]):
    """Visits by node; 0 for a node that was not visited, also as an attribute (`visits.solve`)."""

    def __missing__(self, key: str) -> int:
        return 0

    def __getattr__(self, key: str) -> int:
        if key.startswith("_"):
            raise AttributeError(key)
        return self.get(key, 0)
