"""What is wrong with a workflow, and where."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from srpo_env.errors import InvalidWorkflow, nearest

Path = tuple[str | int, ...]
"""Where a value lies: the keys and indexes that lead to it."""


class Mark(NamedTuple):
    """A place in a file, both from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where.

    Attributes:
        file: The file as it was named; the workflow's name where there is no file.
        line, column: From 1; None where there is no file.
        what: The thing and its value.
        rule: The rule that it breaks.
        hint: The next step, such as the nearest valid name.
        path: The keys that lead to it, dotted.
    """

    file: str
    line: int | None
    column: int | None
    what: str
    rule: str = ""
    hint: str = ""
    path: str = ""

    def __str__(self) -> str:
        where = (
            f"{self.file}:{self.line}:{self.column}"
            if self.line is not None
            else f"{self.file}: {self.path}".rstrip(": ")
        )
        hint = f" {self.hint}" + ("" if self.hint.endswith("?") else ".") if self.hint else ""
        return f"{where}: {'; '.join(filter(None, (self.what, self.rule)))}.{hint}"


class InvalidWorkflowFile(InvalidWorkflow):
    """A workflow breaks rules: `problems` holds every one, with its place; the message is one line for each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ScalarPlace:
    """Where a scalar lies, to find a word inside it."""

    first: int
    last: int
    column: int
    literal: bool
    plain: bool


@dataclass
class Positions:
    """Where each key and value of a file stands."""

    file: str
    lines: list[str] = field(default_factory=list)
    keys: dict[Path, Mark] = field(default_factory=dict)
    values: dict[Path, Mark] = field(default_factory=dict)
    scalars: dict[Path, ScalarPlace] = field(default_factory=dict)
    boolean_keys: dict[Path, str] = field(default_factory=dict)
    """Keys that YAML 1.1 reads as booleans or null, as they are spelt."""

    def key(self, path: Path) -> Mark | None:
        """Returns the place of the key at a path; of the nearest part around it where the path has none."""
        return self.keys.get(path) or self.value(path)

    def value(self, path: Path) -> Mark | None:
        """Returns the place of the value at a path; of the nearest part around it where the path has none."""
        if path in self.values:
            return self.values[path]
        return self.key(path[:-1]) if path else None

    def inside(self, path: Path, line: int = 1, word: str = "") -> Mark | None:
        """Returns the place of a word on a line (from 1) of the text at a path."""
        scalar = self.scalars.get(path)
        if scalar is None:
            return self.value(path)
        one_line = scalar.first == scalar.last
        start = min(scalar.first + line - 1, scalar.last)
        candidates = [start] if scalar.literal or one_line else range(scalar.first, scalar.last + 1)
        pattern = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)" if word else r"\S")
        for number in candidates:
            text = self.lines[number - 1] if number <= len(self.lines) else ""
            begin = scalar.column - 1 if number == scalar.first and not scalar.literal else 0
            if match := pattern.search(text, begin):
                return Mark(number, match.start() + 1)
        return Mark(start, 1) if scalar.literal else self.value(path)

    def plain(self, path: Path) -> bool:
        """Whether the value at a path, or a short form of it, is written without quotes."""
        scalar = self.scalars.get(path) or self.scalars.get(path[:-1])
        return scalar is not None and scalar.plain

    def rename(self, old: Path, new: Path) -> None:
        """Moves what is known of a key and of all below it to another key."""
        for table in (self.keys, self.values, self.scalars, self.boolean_keys):
            _rename(table, old, new)


def _rename(table: dict[Path, Any], old: Path, new: Path) -> None:
    for path in [path for path in table if path[: len(old)] == old]:
        table[new + path[len(old) :]] = table.pop(path)


class Report:
    """Collects problems of a workflow whose parts stand at known positions."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.problems: list[Problem] = []

    def at(self, path: Path, what: str, rule: str = "", hint: str = "") -> None:
        """Notes a problem at the value at a path."""
        self._add(self.positions.value(path), path, what, rule, hint)

    def at_key(self, path: Path, what: str, rule: str = "", hint: str = "") -> None:
        """Notes a problem at the key at a path."""
        self._add(self.positions.key(path), path, what, rule, hint)

    def inside(self, path: Path, line: int, word: str, what: str, rule: str, hint: str) -> None:
        """Notes a problem at a word on a line of the text at a path."""
        self._add(self.positions.inside(path, line, word), path, what, rule, hint)

    def unknown(self, path: Path, kind: str, name: str, known: Collection[str]) -> None:
        """Notes a value that names something that does not exist."""
        self.at(path, *_unknown(kind, name, known))

    def unknown_key(self, path: Path, kind: str, name: str, known: Collection[str]) -> None:
        """Notes a key that names something that does not exist."""
        self.at_key(path, *_unknown(kind, name, known))

    def _add(self, mark: Mark | None, path: Path, what: str, rule: str, hint: str) -> None:
        line, column = mark or (None, None)
        dotted = ".".join(str(part) for part in path)
        problem = Problem(self.positions.file, line, column, what, rule, hint.strip(), dotted)
        self.problems.append(problem)


def _unknown(kind: str, name: str, known: Collection[str]) -> tuple[str, str, str]:
    rule = f"the {kind}s are {listed(known)}" if known else f"there is no {kind}"
    return f"{kind} '{name}' does not exist", rule, nearest(name, known)


def listed(names: Collection[str], most: int = 12) -> str:
    """Returns names for a message, the first few of many.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, ...'
    """
    if not names:
        return "none"
    return ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")


def sorted_once(problems: Iterable[Problem]) -> list[Problem]:
    """Returns problems in the order of the file, one for each place (without a file: for each path)."""
    first: dict[object, Problem] = {}
    for problem in problems:
        path = problem.path if problem.line is None else ""
        first.setdefault((problem.line, problem.column, path), problem)
    return sorted(first.values(), key=lambda problem: (problem.line or 0, problem.column or 0))
