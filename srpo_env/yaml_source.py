"""What a YAML file says, and where it says it.

Reads YAML with the scalars of YAML 1.2 (`no` is text, `true` is a boolean) and refuses what the versions read
differently (012, 1:30, 2024-01-01, 1_000), duplicate keys, keys that are not text, tags, and aliases that explode. It
works on the parser's events, so that every key and value keeps its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from srpo_env.problems import Mark, Path, Positions, Problem, ScalarPlace

MOST_NODES = 10_000
"""Most values of a file, aliases written out."""
MOST_DEPTH = 40
MOST_CHARS = 1_000_000


@dataclass
class _Node:
    kind: Literal["scalar", "sequence", "mapping"]
    mark: Mark
    value: str = ""
    children: list[_Node] = field(default_factory=list)
    plain: bool = False
    place: ScalarPlace | None = None
    size: int = 1
    open: bool = True


class Unreadable(Exception):
    """The text can't be read any further."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_yaml(text: str, file: str) -> tuple[Any, Positions, list[Problem]]:
    """Returns what a YAML text holds, where everything stands, and what is wrong with it.

    The content is complete even where something is wrong with it (a refused scalar is kept as text, of a duplicate key
    the first value), so that more can be checked. It is None where the text can't be read at all.
    """
    positions = Positions(file, re.split("\r\n|[\n\r\x85\u2028\u2029]", text))
    reader = _Reader(positions)
    try:
        root = reader.compose(text)
        return reader.construct(root, ()), positions, reader.problems
    except Unreadable as error:
        return None, positions, [*reader.problems, error.problem]


class _Reader:
    """Composes events to nodes, and constructs values of nodes."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.problems: list[Problem] = []
        self._root: _Node | None = None
        self._stack: list[_Node] = []
        self._anchors: dict[str, _Node] = {}

    def _problem(self, mark: Mark, what: str, rule: str = "", hint: str = "") -> Problem:
        return Problem(self.positions.file, mark.line, mark.column, what, rule, hint)

    # Events to nodes.

    def compose(self, text: str) -> _Node:
        """Returns the root node; raises Unreadable."""
        if len(text) > MOST_CHARS:
            what, rule = f"the file has {len(text)} characters", f"at most {MOST_CHARS} are read"
            raise Unreadable(self._problem(Mark(1, 1), what, rule))
        for event in self._events(text):
            mark = _mark(event.start_mark)
            match event:
                case yaml.AliasEvent():
                    self._place(self._aliased(str(event.anchor), mark), mark)
                case yaml.ScalarEvent():
                    self._place(self._scalar(event, mark), mark, event.anchor)
                case yaml.SequenceStartEvent():
                    self._refuse_tag(event.tag, mark)
                    self._place(_Node("sequence", mark), mark, event.anchor)
                case yaml.MappingStartEvent():
                    self._refuse_tag(event.tag, mark)
                    self._place(_Node("mapping", mark), mark, event.anchor)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    node = self._stack.pop()
                    node.open = False
                    self._grow(node.size, mark)
                case yaml.DocumentStartEvent() if self._root is not None:
                    what = "a second document begins"
                    raise Unreadable(self._problem(mark, what, "a file holds one", "Remove the '---'"))
        if self._root is None:
            what = "the file is empty"
            raise Unreadable(self._problem(Mark(1, 1), what, "it holds a mapping of keys to values"))
        return self._root

    def _place(self, node: _Node, mark: Mark, anchor: str | None = None) -> None:
        """Puts a node below the one that is open, and opens it where it is a sequence or mapping."""
        if self._stack:
            self._stack[-1].children.append(node)
        else:
            self._root = node
        if anchor:
            self._anchors[anchor] = node
        if not node.open:
            self._grow(node.size, mark)
            return
        self._stack.append(node)
        if len(self._stack) > MOST_DEPTH:
            rule = f"at most {MOST_DEPTH} levels are read"
            raise Unreadable(self._problem(mark, "values are nested too deeply", rule))

    def _grow(self, size: int, mark: Mark) -> None:
        """Counts a finished node in the one that holds it."""
        if self._stack:
            self._stack[-1].size += size
            if self._stack[-1].size > MOST_NODES:
                rule = f"a file holds at most {MOST_NODES} values, aliases written out"
                hint = "Use fewer aliases of aliases"
                raise Unreadable(self._problem(mark, "the alias budget is exceeded", rule, hint))

    def _events(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            mark = _mark(error.problem_mark or error.context_mark)
            raise Unreadable(
                self._problem(mark, f"not YAML: {error.problem}", error.context or "", _QUOTE_HINT)
            ) from error
        except (yaml.YAMLError, UnicodeEncodeError) as error:
            at = next((i for i, char in enumerate(text) if _UNREADABLE.match(char)), 0)
            mark = Mark(text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1)
            what = f"not YAML: the character {text[at : at + 1]!r}" if text else "not YAML"
            raise Unreadable(
                self._problem(mark, what, "a file holds printable characters; others are escaped in quotes")
            ) from error

    def _aliased(self, anchor: str, mark: Mark) -> _Node:
        node = self._anchors.get(anchor)
        if node is None:
            what, rule = f"the alias *{anchor} has no anchor", f"&{anchor} must come before it"
            raise Unreadable(self._problem(mark, what, rule, _QUOTE_HINT))
        if node.open:
            rule = "an anchor can't hold an alias of itself"
            raise Unreadable(self._problem(mark, f"the alias *{anchor} is recursive", rule))
        return node

    def _scalar(self, event: Any, mark: Mark) -> _Node:
        start, end = event.start_mark, event.end_mark
        literal = event.style in ("|", ">")
        first = start.line + 1 + literal
        plain = not event.style and event.tag is None
        last = max(first, end.line + (0 if literal and end.column == 0 else 1))
        place = ScalarPlace(first, last, mark.column, event.style == "|", plain)
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            self._refuse_tag(event.tag, mark)
        return _Node("scalar", mark, event.value, plain=plain, place=place, open=False)

    def _refuse_tag(self, tag: str | None, mark: Mark) -> None:
        if tag is not None:
            self.problems.append(
                self._problem(
                    mark,
                    f"the tag {tag!r}",
                    "tags have no meaning here",
                    "Remove it, or quote the text",
                )
            )

    # Nodes to values.

    def construct(self, node: _Node, path: Path) -> Any:
        """Returns the node's value and notes where its parts stand."""
        self.positions.values[path] = node.mark
        if node.kind == "scalar":
            assert node.place is not None
            self.positions.scalars[path] = node.place
            return self.resolve(node)
        if node.kind == "sequence":
            return [self.construct(child, (*path, index)) for index, child in enumerate(node.children)]
        return self._mapping(node, path)

    def _mapping(self, node: _Node, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        first: dict[str, Mark] = {}
        merged: list[_Node] = []
        for key_node, value_node in zip(node.children[::2], node.children[1::2], strict=True):
            key = self._key(key_node)
            if key is None:
                continue
            if key in first:
                what = f"the key {key!r} is written twice"
                rule = f"keys are unique (the first is on line {first[key].line})"
                self.problems.append(self._problem(key_node.mark, what, rule, "Remove or rename one"))
                continue
            first[key] = key_node.mark
            if key == "<<" and key_node.plain:
                merged.append(value_node)
                continue
            self._note_key(key_node, (*path, key))
            made[key] = self.construct(value_node, (*path, key))
        for value_node in merged:
            self._merge(value_node, path, made)
        return made

    def _merge(self, source: _Node, path: Path, made: dict[str, Any]) -> None:
        """A merge key: what the mapping itself says wins, then the first of several sources."""
        if source.kind == "sequence":
            for child in source.children:
                self._merge(child, path, made)
            return
        if source.kind != "mapping":
            self.problems.append(
                self._problem(
                    source.mark,
                    "<< merges something else",
                    "it takes an alias of a mapping, or a list of them",
                )
            )
            return
        for key_node, value_node in zip(source.children[::2], source.children[1::2], strict=True):
            if key_node.kind == "scalar" and key_node.value == "<<":
                self._merge(value_node, path, made)
            elif key_node.kind == "scalar" and key_node.value not in made:
                self._note_key(key_node, (*path, key_node.value))
                made[key_node.value] = self.construct(value_node, (*path, key_node.value))

    def _note_key(self, node: _Node, path: Path) -> None:
        self.positions.keys[path] = node.mark
        if node.plain and _BOOLEAN_KEY.fullmatch(node.value):
            self.positions.boolean_keys[path] = node.value

    def _key(self, node: _Node) -> str | None:
        if node.kind != "scalar":
            hint = "A template that begins with {{ is quoted" if node.kind == "mapping" else "Quote it"
            self.problems.append(self._problem(node.mark, f"a {node.kind} as a key", "a key is text", hint))
            return None
        before = len(self.problems)
        value = self.resolve(node)
        if not isinstance(value, str) and len(self.problems) == before:
            what = f"the key {node.value} is {_kind(value)}" if node.value else "a key is empty"
            self.problems.append(
                self._problem(
                    node.mark,
                    what,
                    "a key is text",
                    f"Write '{node.value}' in quotes, or another name",
                )
            )
        return node.value

    def resolve(self, node: _Node) -> str | int | float | bool | None:
        """The value of a scalar by YAML 1.2's core schema."""
        text = node.value
        if not node.plain:
            return text
        if text in _CORE:
            return _CORE[text]
        if _INTEGER.fullmatch(text):
            return (
                int(text, 16 if text[:2] == "0x" else 10)
                if len(text) < 40
                else self._refused(node, "a number of that length")
            )
        if _FLOAT.fullmatch(text):
            return float(text)
        for pattern, reading in _AMBIGUOUS:
            if pattern.fullmatch(text):
                return self._refused(node, reading)
        return text

    def _refused(self, node: _Node, reading: str) -> str:
        what = f"{node.value} is {reading} in some versions of YAML and not in others"
        self.problems.append(
            self._problem(
                node.mark,
                what,
                "the reading must be plain",
                f"Write '{node.value}' in quotes if text is meant",
            )
        )
        return node.value


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)


def _kind(value: Any) -> str:
    return "null" if value is None else "a boolean" if isinstance(value, bool) else "a number"


_QUOTE_HINT = "Text that holds YAML's own characters (: # {{ [ ] , & * ! or quotes at its start) is quoted as a whole"
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_UNPLAIN = re.compile("[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_CORE: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_BOOLEAN_KEY = re.compile("yes|no|on|off|true|false|null|~", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_AMBIGUOUS = (
    (
        re.compile(r"[-+]?0[0-9_]+|0o[0-7]+|[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+"),
        "a number of another base",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?|[-+]?0[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"),
        "a number",
    ),
    (re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"), "a number to base 60"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?"), "a date"),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)|="), "a special value"),
)


class _Dumper(yaml.SafeDumper):
    """Writes text that this module reads back as text: blocks for several lines, quotes where a reading is possible."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _UNPLAIN.search(text) else "|" if "\n" in text else None
    if style is None:
        read = _Reader(Positions(""))
        node = _Node("scalar", Mark(1, 1), text, plain=True)
        if not isinstance(read.resolve(node), str) or read.problems or _BOOLEAN_KEY.fullmatch(text):
            style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def write_yaml(data: Any) -> str:
    """Returns YAML text of plain data; `read_yaml` gives it back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
