# ruff: noqa: E501 - tables of texts read better unbroken
"""Workflow files with one fault each, made by a generator that knows the faulty line.

A healthy file is a list of labelled lines with random names and comments; a fault edits one of them and names the label at
which it must be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

HEALTHY = """\
version      |srpo_env: 1
name         |name: flow
params       |params:
rounds       |  rounds: {default: 3, min: 1, max: 9}
width        |  width: {default: 2, min: 1, max: 5}
state        |state:
notes        |  notes: {default: [], merge: append}
agents       |agents:
solver       |  SOLVER:
policy       |    policy: main
system       |    system: You are careful.
prompt       |    prompt: |
problem      |      Solve this: {{ task.problem }}
guard        |      {% if VERIFY %}
guarded      |      It was rejected: {{ VERIFY.text }}
endguard     |      {% endif %}
recall       |      Notes: {{ state.notes | join("; ") }}
parse        |    parse: boxed
judge        |  JUDGE:
judge_prompt |    prompt: "Judge {{ SOLVE.outputs | length }} solutions of {{ task.problem }}"
judge_parse  |    parse:
tag          |      tag: verdict
choices      |      choices: [approve, reject]
fallback     |      fallback: reject
nodes        |nodes:
solve        |  SOLVE:
members      |    agents:
count        |      SOLVER: params.width
write        |    write:
write_notes  |      notes: member.text
solve_next   |    next: VERIFY
verify       |  VERIFY:
speaker      |    agents: JUDGE
edges        |    next:
edge1        |      - if: VERIFY.parsed == "approve"
edge1_to     |        to: end
edge2        |      - to: SOLVE
answer       |answer: VERIFY.parsed
limits       |limits:
steps        |  steps: 8
"""

WORDS = [
    "alpha",
    "bravo",
    "coder",
    "drafter",
    "expert",
    "fixer",
    "guide",
    "helper",
    "inquirer",
    "jury",
    "keeper",
    "leader",
    "mentor",
    "planner",
    "reader",
]


@dataclass
class File:
    """A workflow file as labelled lines."""

    rng: Random
    lines: list[tuple[str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def healthy(cls, rng: Random) -> File:
        names = dict(zip(("SOLVER", "JUDGE", "SOLVE", "VERIFY"), rng.sample(WORDS, 4), strict=True))
        made = cls(rng, names=names)
        for line in HEALTHY.splitlines():
            label, _, text = line.partition("|")
            made.lines.append((label.strip(), made.named(text)))
            if rng.random() < 0.3 and label.strip() not in (
                "prompt",
                "problem",
                "guard",
                "guarded",
                "endguard",
                "recall",
            ):
                made.lines.append(("", rng.choice(["", "# a remark", "    # indented: remark"])))
        return made

    def named(self, text: str) -> str:
        for role, name in self.names.items():
            text = text.replace(role, name)
        return text

    def _at(self, label: str) -> int:
        return next(index for index, (each, _) in enumerate(self.lines) if each == label)

    def edit(self, label: str, old: str, new: str) -> str:
        """Replaces part of a line; returns the label."""
        index = self._at(label)
        text = self.lines[index][1]
        assert self.named(old) in text, (label, old, text)
        self.lines[index] = (label, text.replace(self.named(old), self.named(new), 1))
        return label

    def add(self, after: str, *texts: str, labels: tuple[str, ...] = ()) -> str:
        """Adds lines after a label; returns the label of the first."""
        index = self._at(after) + 1
        made = [(labels[i] if i < len(labels) else f"added{i}", self.named(text)) for i, text in enumerate(texts)]
        self.lines[index:index] = made
        return made[0][0]

    def remove(self, *labels: str) -> None:
        """Removes lines."""
        self.lines = [line for line in self.lines if line[0] not in labels]

    def line_of(self, label: str) -> int:
        """The number of a label's line, from 1."""
        return self._at(label) + 1

    def text(self) -> str:
        return "\n".join(text for _, text in self.lines) + "\n"

    def misspelt(self, word: str) -> str:
        """A word with two neighbouring letters swapped, or one doubled."""
        places = [place for place in range(len(word) - 1) if word[place] != word[place + 1]]
        place = self.rng.choice(places)
        swapped = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
        return self.rng.choice([swapped, word[:place] + word[place] * 2 + word[place + 1 :]])


Fault = Callable[[File], str]


def _misspelt(label: str, word: str) -> Fault:
    return lambda file: file.edit(label, word, file.misspelt(file.named(word)))


def _edited(label: str, old: str, new: str) -> Fault:
    return lambda file: file.edit(label, old, new)


def _unbounded(file: File) -> str:
    file.remove("limits", "steps")
    return "edge2"


def _two_writers(file: File) -> str:
    file.edit("notes", "{default: [], merge: append}", "{default: []}")
    return "write_notes"


def _no_fallback(file: File) -> str:
    file.remove("fallback")
    return "choices"


def _alias_bomb(file: File) -> str:
    fan = file.rng.randint(6, 12)
    levels = 7
    texts = [f"x-0: &b0 [{', '.join(['lol'] * fan)}]"]
    texts += [f"x-{i}: &b{i} [{', '.join([f'*b{i - 1}'] * fan)}]" for i in range(1, levels)]
    file.add("name", *texts)
    size = total = 1 + fan
    level = 0
    while total <= 10_000:
        size, level = 1 + fan * size, level + 1
        total += size
    return f"added{level}"


def _unreachable(file: File) -> str:
    return file.add("edge2", "  lonely:", "    agents: JUDGE", "    next: end")


def _dead_end(file: File) -> str:
    file.edit("edge1_to", "to: end", "to: trap")
    file.remove("edge2")
    file.add("edge1_to", "      - to: end")
    return file.add("added0", "  trap:", "    agents: JUDGE", "    next: trap", labels=("trap",))


def _choose_without_else(file: File) -> str:
    file.edit("speaker", "agents: JUDGE", "agents:")
    return file.add("speaker", "      choose: task.id", "      among: {a: JUDGE}")


def _acting_loop(file: File) -> str:
    file.edit("speaker", "agents: JUDGE", "agents: {acting: JUDGE}")
    return file.edit("edge2", "to: SOLVE", "to: VERIFY")


def _chosen_reserved(file: File) -> str:
    word = file.rng.choice(["task", "params", "visits", "member", "state"])
    file.edit("solve_next", "VERIFY", word)
    file.edit("guard", "VERIFY", word)
    file.edit("guarded", "VERIFY.text", word)
    file.edit("answer", "VERIFY.parsed", "task.id")
    file.edit("edge1", "VERIFY.parsed ==", "task.id ==")
    return file.edit("verify", "VERIFY:", f"{word}:")


def _boolean_agent(file: File) -> str:
    word = file.rng.choice(["no", "yes", "on", "off", "On", "No"])
    file.edit("speaker", "JUDGE", word)
    return file.edit("judge", "JUDGE", word)


def _true_node(file: File) -> str:
    return file.add("edge2", f"  {file.rng.choice(['true', 'false', 'null', '~', '12', '1.5'])}:", "    agents: JUDGE")


def _duplicate(label: str, text: str) -> Fault:
    return lambda file: file.add(label, text)


FAULTS: dict[str, Fault] = {
    "misspelt key of the workflow": _misspelt("answer", "answer"),
    "misspelt key of an agent": _misspelt("prompt", "prompt"),
    "misspelt key of a parser": _misspelt("fallback", "fallback"),
    "misspelt key of a node": _misspelt("speaker", "agents"),
    "misspelt key of limits": _misspelt("steps", "steps"),
    "misspelt key of a param": _misspelt("rounds", "default"),
    "key of another part": lambda file: file.add("policy", "    temperature: 0.7"),
    "unknown agent": _edited("speaker", "JUDGE", "JUDGEX"),
    "unknown agent in counts": _edited("count", "SOLVER", "SOLVERX"),
    "unknown node": _edited("solve_next", "VERIFY", "VERIFYX"),
    "unknown node in a list of edges": _edited("edge1_to", "end", "ende"),
    "unknown parser": _edited("parse", "boxed", "boxd"),
    "unknown tool": lambda file: file.add("parse", "    tools: [serach]"),
    "unknown reducer": lambda file: file.add("write_notes", "    reduce: majorty"),
    "unknown state key": _edited("write_notes", "notes", "nots"),
    "choices without fallback": _no_fallback,
    "fallback that is no choice": _edited("fallback", "fallback: reject", "fallback: rejct"),
    "edges without fallback": lambda file: file.edit("edge2", "- to: SOLVE", "- {if: visits.SOLVE < 3, to: SOLVE}"),
    "unbounded cycle": _unbounded,
    "edge that is never taken": lambda file: file.add("edge2", "      - to: end"),
    "duplicate key": _duplicate("parse", "    parse: text"),
    "duplicate agent": _duplicate("parse", "  SOLVER: {prompt: again}"),
    "duplicate key inside": _edited("width", "max: 5", "max: 5, max: 6"),
    "boolean as a name": _boolean_agent,
    "key that is no text": _true_node,
    "reserved word as a name": _chosen_reserved,
    "two writers of a key": _two_writers,
    "undefined variable": _edited("problem", "task.problem", "tusk.problem"),
    "undefined field": _edited("problem", "task.problem", "task.question"),
    "undefined param": _edited("recall", "state.notes", "params.notes"),
    "unguarded variable": _edited("problem", "{{ task.problem }}", "{{ VERIFY.text }}"),
    "unguarded variable in a quoted prompt": _edited("system", "You are careful.", '"{{ VERIFY.text }}"'),
    "text of a set without reducer": _edited("judge_prompt", "SOLVE.outputs | length", "SOLVE.text"),
    "unknown field of an output": _edited("judge_prompt", "SOLVE.outputs | length", "SOLVE.outputs[0].txt"),
    "template syntax": _edited("recall", "{{ state.notes |", "{{ state.notes | |"),
    "call in a template": _edited("problem", "task.problem", "task.problem.upper()"),
    "comparison that never holds": _edited("edge1", '"approve"', '"aprove"'),
    "expression syntax": _edited("edge1", '"approve"', '"approve" and'),
    "number for text": _edited("system", "You are careful.", "42"),
    "text for a mapping": lambda file: file.edit(
        "notes", "{default: [], merge: append}", "{default: [], merge: appendix}"
    ),
    "text for a number": _edited("steps", "8", "'eight'"),
    "name that is no name": _edited("speaker", "JUDGE", "'a judge'"),
    "octal number": _edited("steps", "8", "010"),
    "date": _edited("system", "You are careful.", "2024-01-01"),
    "default out of range": _edited("rounds", "default: 3", "default: 12"),
    "empty set": _edited("count", "params.width", "0"),
    "foreign name in a count": _edited("count", "params.width", "width"),
    "limit of nothing": _edited("steps", "8", "0"),
    "limit below the shortest walk": _edited("steps", "8", "1"),
    "unreachable node": _unreachable,
    "dead end": _dead_end,
    "router without else": _choose_without_else,
    "loop whoever acts": _acting_loop,
    "alias bomb": _alias_bomb,
    "recursive alias": lambda file: file.add("name", "x-a: &a [1, *a]"),
    "alias without anchor": lambda file: file.edit("parse", "boxed", "*parser"),
    "tab": lambda file: file.add("policy", "\thistory: own"),
    "unquoted condition": lambda file: file.edit(
        "edge1", 'if: VERIFY.parsed == "approve"', 'if: "approve" == VERIFY.parsed'
    ),
    "unquoted template": _edited(
        "judge_prompt", '"Judge {{ SOLVE.outputs | length }} solutions of {{ task.problem }}"', "{{ task.problem }}"
    ),
    "second document": lambda file: file.add("steps", "---", "name: other"),
    "tag": _edited("system", "You are careful.", "!careful text"),
    "empty prompt": _edited(
        "judge_prompt", '"Judge {{ SOLVE.outputs | length }} solutions of {{ task.problem }}"', '""'
    ),
}


def single_faults(number: int, seed: int = 0) -> list[tuple[str, str, int]]:
    """Returns `number` files with one fault each: the kind of fault, the text, and the faulty line."""
    made = []
    kinds = list(FAULTS)
    for index in range(number):
        kind = kinds[index % len(kinds)]
        file = File.healthy(Random(f"{seed}/{index}"))
        label = FAULTS[kind](file)
        made.append((kind, file.text(), file.line_of(label)))
    return made
