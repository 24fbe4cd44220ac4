# ruff: noqa: E501 - tables of texts read better unbroken
"""Workflow files that are wrong in every way a hand or a machine can make them: for the fuzz.

`mutated(seed, sources)` edits the text of a healthy file at random; `generated(seed)` writes one from random parts of the
grammar and of what does not belong to it. Both depend on the seed alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

NASTY = [
    *("no", "yes", "on", "~", "null", "true", "012", "0o17", "1:30", "1_000", "2024-01-01", ".nan", ".inf", "-1", "1e9", "0x1F"),
    *("99999999999999999999999999999999999999999999", "-0", "''", '""', "[]", "{}", "[[]]", "{a: {b: {c: []}}}", "<<", "=", "|", ">-"),
    *("&a", "*a", "&a [*a]", "!tag x", "!!int 3", "!!python/object:os.system x", "? x", "- - -", "%TAG", "@", "`", "#", "...", "---"),
    *("{{ task.problem }}", "{{", "{% if %}", "{% for x in y %}", "{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10**9 }}", "{{ range(10**9) }}"),
    *("solve", "verify", "solve.text", "solve.parsed.x", "visits.nobody", "params.rounds", "member.index", "state", "end", "task"),
    *("\t", "\x00", "\x07", "\u2028", "\ufeff", "é", "漢字", "🙂", "\\boxed{}", "'", '"', ": ", "a: b: c", "]", "}", "x" * 600),
    *("solver.__class__", "((((((((((" * 9, "not " * 200, "- " * 60, "[" * 60, "1 if 1 else", "x | nosuch", "a.b.c.d.e", "1 / 0"),
]  # fmt: skip
NAMES = ["solve", "verify", "judge", "a", "b", "end", "task", "no", "Ä", "x y", "1", "member", "loop", "not", "true"]
KEYS = [
    *(
        "agents",
        "nodes",
        "next",
        "prompt",
        "parse",
        "choices",
        "fallback",
        "tag",
        "use",
        "if",
        "to",
        "choose",
        "among",
        "else",
    ),
    *(
        "acting",
        "reduce",
        "best",
        "write",
        "state",
        "merge",
        "default",
        "min",
        "max",
        "limits",
        "steps",
        "visits",
        "tokens",
    ),
    *(
        "params",
        "start",
        "answer",
        "transition",
        "history",
        "tools",
        "policy",
        "system",
        "name",
        "srpo_env",
        "x-y",
        "zzz",
    ),
]


def mutated(seed: int, sources: Sequence[str]) -> str:
    """Returns the text of one of the sources after one to five random edits."""
    rng = Random(f"mutated/{seed}")
    text = rng.choice(sources)
    for _ in range(rng.randint(1, 5)):
        text = rng.choice(EDITS)(rng, text)
    return text


def _lines(rng: Random, text: str) -> tuple[list[str], int]:
    lines = text.split("\n")
    return lines, rng.randrange(len(lines))


def _drop_line(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    del lines[at : at + rng.choice([1, 1, 1, 4])]
    return "\n".join(lines)


def _repeat_line(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    lines.insert(rng.choice([at, rng.randrange(len(lines) + 1)]), lines[at])
    return "\n".join(lines)


def _swap_lines(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    other = rng.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


def _indent(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    lines[at] = rng.choice([lines[at].lstrip(), "  " + lines[at], " " + lines[at], "\t" + lines[at]])
    return "\n".join(lines)


def _replace_value(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    key, colon, _ = lines[at].partition(":")
    lines[at] = f"{key}{colon} {rng.choice(NASTY)}"
    return "\n".join(lines)


def _replace_key(rng: Random, text: str) -> str:
    lines, at = _lines(rng, text)
    key, colon, value = lines[at].partition(":")
    indent = key[: len(key) - len(key.lstrip())]
    lines[at] = f"{indent}{rng.choice(KEYS + NAMES + NASTY)}{colon}{value}"
    return "\n".join(lines)


def _replace_word(rng: Random, text: str) -> str:
    words = text.split(" ")
    words[rng.randrange(len(words))] = rng.choice(KEYS + NAMES + NASTY)
    return " ".join(words)


def _insert(rng: Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice([*NASTY, chr(rng.randrange(0x20, 0x2FFF))]) + text[at:]


def _delete(rng: Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.choice([1, 1, 2, 30]) :]


def _cut(rng: Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


EDITS = [
    *(_drop_line, _repeat_line, _swap_lines, _indent, _replace_value, _replace_value, _replace_key, _replace_word),
    *(_replace_word, _insert, _delete, _cut),
]


def generated(seed: int) -> str:
    """Returns a file made of random parts: mostly in the right places, now and then of the wrong kind."""
    rng = Random(f"generated/{seed}")
    return json.dumps(_Maker(rng).workflow(), ensure_ascii=rng.random() < 0.5, indent=rng.choice([1, 2]))


class _Maker:
    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.agents = rng.sample(NAMES[:5], rng.randint(1, 4))
        self.nodes = rng.sample(NAMES[:5], rng.randint(1, 5))

    def often(self, value: Any) -> Any:
        """The value, or now and then something else."""
        return value if self.rng.random() < 0.93 else self.junk(2)

    def junk(self, depth: int) -> Any:
        kind = self.rng.randrange(9 if depth else 7)
        simple = [None, True, -1, 0, 3.5, self.rng.choice(NASTY), self.rng.choice(NAMES)]
        if kind < 7:
            return simple[kind]
        if kind == 7:
            return [self.junk(depth - 1) for _ in range(self.rng.randrange(4))]
        return {self.rng.choice(KEYS + NAMES): self.junk(depth - 1) for _ in range(self.rng.randrange(4))}

    def some(self, chances: dict[str, Any]) -> dict[str, Any]:
        """A random part of the keys."""
        made = {key: self.often(value) for key, value in chances.items() if self.rng.random() < 0.6}
        if self.rng.random() < 0.05:
            made[self.rng.choice(KEYS)] = self.junk(2)
        return made

    def workflow(self) -> Any:
        made = {
            "srpo_env": self.often(1),
            "name": self.often("made"),
            **self.some({"params": {"k": self.often(2), "m": self.some({"default": 2, "min": 1, "max": 4})}}),
            **self.some(
                {"state": {"s": self.some({"default": [], "merge": self.rng.choice(["append", "sum", "zz"])})}}
            ),
            "agents": self.often({name: self.often(self.agent()) for name in self.agents}),
            "nodes": self.often({name: self.often(self.node()) for name in self.nodes}),
            "answer": self.often(self.expression()),
            **self.some(
                {"limits": self.some({"steps": 9, "visits": self.rng.choice([3, {self.nodes[0]: 2}]), "tokens": 99})}
            ),
            **self.some({"start": self.rng.choice(self.nodes)}),
        }
        return self.often(made)

    def agent(self) -> dict[str, Any]:
        parser = self.some({"use": "boxed", "tag": "v", "choices": ["x", "y"], "fallback": "y"})
        prompt = (
            f"{{{{ {self.expression()} }}}} {{% if {self.expression()} %}}{{{{ {self.expression()} }}}}{{% endif %}}"
        )
        optional = {"parse": parser, "system": prompt, "history": "own", "tools": ["search"], "policy": "p"}
        return {"prompt": self.often(prompt), **self.some(optional)}

    def node(self) -> dict[str, Any]:
        edges = [self.some({"if": self.expression(), "to": self.target()}) for _ in range(self.rng.randrange(4))]
        return {
            "agents": self.often(self.members()),
            "next": self.often(self.rng.choice([self.target(), edges])),
            **self.some({"reduce": self.rng.choice(["majority", {"best": self.expression()}])}),
            **self.some({"write": {"s": self.expression()}}),
        }

    def members(self) -> Any:
        agent = self.rng.choice(self.agents)
        groups = [agent, [agent, agent], {agent: self.rng.choice([0, 1, 3, "params.k", "params.m * 2", "zz"])}, []]
        group = self.rng.choice(groups)
        chosen = {"choose": self.expression(), "among": {"x": group, "y": agent}, "else": self.rng.choice(groups)}
        return self.rng.choice([group, group, chosen, {"acting": group}])

    def target(self) -> str:
        return self.rng.choice([*self.nodes, *self.nodes, "end", "end", "nowhere"])

    def expression(self) -> str:
        rng = self.rng
        node = rng.choice(self.nodes)
        leaf = rng.choice(["text", "parsed", "outputs", "ok", "visits", "acting", "zz", "outputs[0].text"])
        parts = [
            *(
                f"{node}.{leaf}",
                node,
                f"visits.{node}",
                "params.k",
                "task.problem",
                "state.s",
                "member.index",
                "1",
                "'x'",
            ),
            *(
                f"{node} and {node}.{leaf}",
                f"{node} is none or {node}.parsed == 'x'",
                f"{node}.outputs | length",
                "params.zz",
            ),
            *(rng.choice(NASTY), f"visits.{node} > params.k", f"not {node}", f"{node}.{leaf} | default('x')"),
        ]
        return f" {rng.choice(['and', 'or', '==', '+', '<'])} ".join(rng.sample(parts, rng.choice([1, 1, 2, 3])))
