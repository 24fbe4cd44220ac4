"""An episode as text, for people."""

from __future__ import annotations

import re
from collections.abc import Iterable

from srpo_env.records import Event, Member

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def as_text(events: Iterable[Event]) -> str:
    """Returns an episode as plain text: what each member was asked, said and called, and where the walk went."""
    return "\n".join(line for event in events for line in _lines(event))


def print_event(event: Event) -> None:
    """Prints one event, in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in _lines(event):
        style = "bold cyan" if line.startswith("──") else "bold" if line.startswith("=>") else ""
        console.print(Text(_printable(line), style=style))


def _lines(event: Event) -> list[str]:
    lines = [f"── step {event.step}: {event.node} (K = {len(event.members)}) ──"]
    for member in event.members:
        lines += _member_lines(member)
    if event.terminated or event.truncated:
        how = f"truncated ({event.truncated_by})" if event.truncated else "end"
        reward = "unscored" if event.reward is None else f"reward {event.reward:g}"
        lines.append(f"=> {how}; answer {event.answer!r}; {reward} ({event.score_reason})")
    else:
        lines.append(f"=> {event.next_node}" + (f"; value {event.value!r}" if event.value is not None else ""))
    return lines


def _member_lines(member: Member) -> list[str]:
    name = f"{member.agent}[{member.index}]"
    lines = [f"{name} <- {message.role}: {message.content}" for message in member.messages]
    lines.append(f"{name} -> {member.output.text}" if member.error is None else f"{name} -> no output: {member.error}")
    lines += [f"{name} called {call.tool} {call.arguments}: {call.result}" for call in member.tool_calls]
    if not member.parse.ok:
        lines.append(f"{name} could not be read ({member.parse.error}); fallback {member.parse.value!r}")
    return lines


def _printable(text: str) -> str:
    """The text without what would steer a terminal: it comes from a model."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)
