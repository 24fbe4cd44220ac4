"""How an answer is scored: right, wrong, or unscorable with a reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from pydantic import Field

from srpo_env.parsers import after_thinking, last_boxed
from srpo_env.records import Event, Record, Text

if TYPE_CHECKING:
    from srpo_env.tasks import Task

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,100}|\d{1,400})(?:\.\d{1,400})?|[-+]?\.\d{1,400}")

_DIGITS = re.compile(r"[0-9]{1,400}")


class Score(Record):
    """A reward; `value` is None where the answer can't be scored, which is neither right nor wrong.

    Attributes:
        value: The reward.
        reason: Why, in a few words: `right`, `wrong`, `no answer`, `no reference answer`, ...
        measures: Further figures of the answer by name, such as f1; they are averaged in evaluations.
    """

    value: float | None
    reason: Text
    measures: dict[str, float] = Field(default_factory=dict)  # a default of {} would be deep-copied each time


_RIGHT, _WRONG = Score(value=1.0, reason="right"), Score(value=0.0, reason="wrong")
_NO_ANSWER, _NO_REFERENCE = Score(value=0.0, reason="no answer"), Score(value=None, reason="no reference answer")

Reward = Callable[["Task", str | None, Sequence[Event]], Score | Awaitable[Score]]
"""`reward(task, answer, events)`: scores the team's answer, None where it gave none; `events` are the episode's.

A function, or an `async` one where scoring takes long enough to hold up other episodes."""


def exact_match(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
    r"""1 where the answer equals one of the task's, else 0; None where the task has no answer to compare with.

    The last \boxed{} of the answer counts, or the whole of it where it has none. Equal means: the same text once the
    white-space around it is stripped, or the same number (`1,000`, `1000` and `1000.0` are equal).
    """
    accepted = [text for answer_ in task.answers if (text := answer_.strip())]
    if not accepted:
        return _NO_REFERENCE
    if answer is None or not answer.strip():
        return _NO_ANSWER
    given = plain_answer(answer)
    return _RIGHT if given in accepted or any(_same_number(given, text) for text in accepted) else _WRONG


def less_extra_members(reward: Reward, cost: float) -> Reward:
    """Returns a reward that takes `cost` off another one's score for each member of a set beyond the set's first.

        score - cost * sum of (size of S_e - 1) over the episode's events e

    A set's size counts all of its members, frozen ones and those without an output too: each was asked for. What can't
    be scored stays so.
    """

    async def reduced(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
        found = reward(task, answer, events)
        score = await found if inspect.isawaitable(found) else found
        extra = sum(len(event.members) - 1 for event in events)
        if not isinstance(score, Score) or score.value is None or not extra:
            return score
        reason = f"{score.reason}, {extra} extra member{'s' if extra > 1 else ''}"
        return score.model_copy(update={"value": score.value - cost * extra, "reason": reason})

    return reduced


def plain_answer(text: str) -> str:
    r"""Returns the content of the last \boxed{} after any <think> block, or else the whole text, stripped.

    >>> plain_answer(r"<think>\boxed{3}?</think> It is \boxed{4}.")
    '4'
    """
    text = after_thinking(text)
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def _same_number(first: str, second: str) -> bool:
    if _DIGITS.fullmatch(first) and _DIGITS.fullmatch(second):
        return int(first) == int(second)
    if not (_NUMBER.fullmatch(first) and _NUMBER.fullmatch(second)):
        return False
    return Fraction(first.replace(",", "")) == Fraction(second.replace(",", ""))
