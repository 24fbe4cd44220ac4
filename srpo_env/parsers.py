"""How an output's text is read.

A parser strips the white-space around what it found and compares exactly; where nothing acceptable was found it says why,
and the workflow's declared fallback is taken. It never raises: a bad output is data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from srpo_env.errors import UnknownName, nearest
from srpo_env.records import Parse
from srpo_env.registry import is_reference, load_reference
from srpo_env.spec import Parser

Read = Callable[[str], Any]
"""Returns what it read, or raises `Unread`. A user's parser has this form too."""

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Unread(ValueError):
    """Raised by a parser that found nothing acceptable; the message says what was looked for."""


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...}, braces counted; None where there is none.

    A box that holds nothing but a box gives the inner one's content. Takes time linear in the text.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    opened: list[re.Match[str]] = []
    found: tuple[int, int] | None = None
    outer: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        token = match.group()
        if token.endswith("{") and token != "\\{":
            opened.append(match)
        elif token == "}" and opened:
            opener = opened.pop()
            if opener.group() == "{":
                continue
            start, end = opener.end(), match.start()
            holds_only_a_box = (
                outer is not None and start <= outer[0] and not text[start : outer[0]].strip() + text[outer[1] : end].strip()
            )
            if not holds_only_a_box:
                found = (start, end)
            outer = (opener.start(), match.end())
    return None if found is None else text[found[0] : found[1]].strip()


def after_thinking(text: str) -> str:
    """Returns the text without its <think> blocks: what is said in them is not the answer."""
    return _THINK.sub("", text) if "<think>" in text else text


def _text(text: str) -> str:
    return text.strip()


def _boxed(text: str) -> str:
    found = last_boxed(after_thinking(text))
    if not found:
        raise Unread(r"no complete \boxed{...}")
    return found


def _answer(text: str) -> str:
    text = after_thinking(text)
    found = last_boxed(text)
    found = text.strip() if found is None else found
    if not found:
        raise Unread("no answer: the text is empty")
    return found


def _number(text: str) -> int | float:
    found = re.findall(r"[-+]?\d+(?:\.\d+)?", after_thinking(text))
    if not found:
        raise Unread("no number")
    return float(found[-1]) if "." in found[-1] else int(found[-1])


PARSERS: dict[str, Read] = {"text": _text, "answer": _answer, "boxed": _boxed, "number": _number}
"""Parsers by name: the whole text; the last box or else the whole text; the last box; the last number. `tag` and `choice`
are spelt `{tag: name}` and `{choices: [...]}`."""


def _tag(name: str) -> Read:
    pattern = re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL)

    def read(text: str) -> str:
        text = _QUOTED.sub("", after_thinking(text))
        found = {inner.strip() for inner in pattern.findall(text)}
        if len(found) != 1:
            raise Unread(f"{'no' if not found else 'more than one'} <{name}>...</{name}>")
        return str(found.pop())

    return read


@lru_cache(maxsize=256)
def reader(parser: Parser) -> Callable[[str], Parse]:
    """Returns the function that reads an output by these rules.

    Raises:
        UnknownName: No parser of that name.
    """
    read = _reader_of(parser)
    choices = parser.choices

    def parse(text: str) -> Parse:
        try:
            value = read(text)
            if choices is not None and value not in choices:
                raise Unread(f"{_short(str(value))!r} is not one of {', '.join(choices)}")
        except Unread as error:
            return Parse(ok=False, value=parser.fallback, error=str(error))
        return Parse(ok=True, value=value)

    return parse


def _reader_of(parser: Parser) -> Read:
    if parser.tag is not None:
        return _tag(parser.tag)
    name = parser.use or "text"
    if is_reference(name):
        return _guarded(load_reference(name), name)
    if name not in PARSERS:
        raise UnknownName(f"parser {name!r} is not known; known are {', '.join(PARSERS)}.{nearest(name, PARSERS)}")
    return PARSERS[name]


def _guarded(read: Read, name: str) -> Read:
    """A user's parser may raise anything on a strange text; that is a failed parse and names the parser."""

    def guarded(text: str) -> Any:
        try:
            return read(text)
        except Unread:
            raise
        except Exception as error:
            raise Unread(f"parser {name} raised {type(error).__name__}: {_short(str(error))}") from error

    return guarded


def _short(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
