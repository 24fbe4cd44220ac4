"""How an output's text is read.

A parser strips the white-space around what it found and compares exactly; where nothing acceptable was found it says
why, and the workflow's declared fallback is taken. It never raises: a bad output is data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from srpo_env.errors import UnknownName, nearest
from srpo_env.records import Parse, as_json, well_formed
from srpo_env.registry import is_reference, load_reference
from srpo_env.spec import Parser

Read = Callable[[str], Any]
"""Returns what it read, or raises `Unread`. A user's parser has this form too."""

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_QUOTED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\w).])[-+])?(?:(?:\d{1,3}(?:,\d{3}){1,100}(?![,\d])|\d+)(?:\.\d+)?|\.\d+)")
_MOST_DIGITS = 400
_BRACE = re.compile(
    r"(?P<box>\\+(?:boxed|fbox)\s*\{)|\\+(?:boxed|fbox)\s+(?P<number>-?\d+(?:[.,/]\d+)*)|\\.|[{}]", re.DOTALL
)


class Unread(ValueError):
    """Raised by a parser that found nothing acceptable; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class Box:
    r"""One complete \boxed{...} or \fbox{...}: its content, and where it begins and ends in the text."""

    content: str
    start: int
    end: int


def boxes(text: str) -> list[Box]:
    r"""Returns the complete boxes of a text in its order, braces counted; none where the last one is left open.

    A box inside a box is part of the outer one's content; a box that holds nothing but a box gives the inner one's.
    A number may stand without braces: `\boxed 7`. Takes time linear in the text.

    >>> [box.content for box in boxes(r"\boxed{\frac{1}{2}} or \fbox{3}")]
    ['\\frac{1}{2}', '3']
    """
    if "boxed" not in text and "fbox" not in text:
        return []
    opened: list[re.Match[str]] = []
    found: list[tuple[int, int, int, int]] = []  # of each box: where it and its content begin and end
    for match in _BRACE.finditer(text):
        if match["number"] is not None:
            found.append((match.start(), match.end(), match.start("number"), match.end()))
        elif match["box"] is not None or match.group() == "{":
            opened.append(match)
        elif match.group() == "}" and opened:
            opener = opened.pop()
            if opener["box"] is not None:
                start, end = opener.end(), match.start()
                inside = []
                while found and found[-1][0] >= start:
                    inside.append(found.pop())
                if len(inside) == 1 and not text[start : inside[0][0]].strip() + text[inside[0][1] : end].strip():
                    start, end = inside[0][2:]
                found.append((opener.start(), match.end(), start, end))
    left_open = [opener.start() for opener in opened if opener["box"] is not None]
    if left_open and (not found or left_open[-1] > found[-1][0]):
        return []
    return [Box(text[start:end].strip(), first, last) for first, last, start, end in found]


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}; None where there is none, or it is left open.

    >>> last_boxed(r"first \boxed{3}, so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    found = boxes(text)
    return found[-1].content if found else None


def after_thinking(text: str) -> str:
    """Returns the text without its <think> blocks: what is said in them is not the answer.

    Where a chat template has put the opening tag into the prompt, all up to the first </think> is such a block.
    """
    if "<think>" in text:
        text = _THINK.sub("", text)
    before, closed, after = text.partition("</think>")
    return after if closed else before


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
    found = _NUMBER.findall(after_thinking(text))
    if not found:
        raise Unread("no number")
    last = found[-1].replace(",", "")
    if len(last) > _MOST_DIGITS:
        raise Unread(f"the number has {len(last)} digits, more than {_MOST_DIGITS}")
    return float(last) if "." in last else int(last)


PARSERS: dict[str, Read] = {"text": _text, "answer": _answer, "boxed": _boxed, "number": _number}
"""Parsers by name: the whole text; the last box or else the whole text; the last box; the last number. `tag` and
`choice` are spelt `{tag: name}` and `{choices: [...]}`."""


def tagged(text: str, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """Returns the pairs <name>...</name> of a text: each name, and where its content begins and ends.

    A pair is an opening tag and the next closing tag of that name; what lies inside a pair is its content, other tags
    too. Takes time linear in the text.

    >>> tagged("<a>1</a> <a><b>2</b></a>", ["a", "b"])
    [('a', 3, 4), ('a', 12, 20)]
    """
    tags = list(re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text))
    closing: dict[str, int] = {}
    closes: list[int | None] = []
    for at in range(len(tags) - 1, -1, -1):
        slash, name = tags[at].groups()
        closes.append(closing.get(name))
        if slash:
            closing[name] = at
    found, following = [], 0
    for at, (tag, close) in enumerate(zip(tags, reversed(closes), strict=True)):
        if at >= following and not tag[1] and close is not None:
            found.append((tag[2], tag.end(), tags[close].start()))
            following = close + 1
    return found


def _tag(name: str) -> Read:
    def read(text: str) -> str:
        text = after_thinking(text)
        shown = _QUOTED.sub(lambda quoted: "\0" * len(quoted[0]), text)
        found = tagged(shown, [name])
        if len(found) != 1 or f"<{name}>" in shown[found[0][1] : found[0][2]]:
            raise Unread(f"{'no' if not found else 'more than one'} <{name}>...</{name}>")
        _, start, end = found[0]
        return text[start:end].strip()

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
            return Parse.of_checked({"ok": False, "value": as_json(parser.fallback), "error": well_formed(str(error))})
        return Parse.of_checked({"ok": True, "value": as_json(value), "error": None})

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
