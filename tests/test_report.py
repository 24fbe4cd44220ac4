"""Does the report show what happened, whole and safely, whatever the run holds?"""

import html.parser
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from srpo_env.errors import InvalidInput
from srpo_env.eventlog import EventLog
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling, ToolCall
from srpo_env.report import write_report

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "</pre></div></body><h1>gone</h1>",
    "<think>text</think>",
    '" onmouseover="alert(1)',
    "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt;",
    "<!-- ]]> <svg onload=alert(1)>",
]
RECIPE = """\
srpo_env: 1
description: Three proposers and a majority vote learn two-digit addition.
workflow: {use: tiny/parallel_proposers, params: {proposers: 3}}
tasks: {train: {use: arithmetic}, eval: {use: arithmetic, split: test}}
policies: {main: {model: tiny_arithmetic, train: {lr: 1.5e-4}}, judge: {model: frozen}}
trainer: srpo
eval: {baseline: tiny/single_agent}
seed: 7
updates: 80
"""
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: the elements with their attributes, the text, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "title"):
            self.text += data


def member(index: int, text: str, *, agent: str = "proposer", value: Any = None, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "agent": agent,
        "index": index,
        "turn": 0,
        "policy": "main",
        "messages": (Message(role="user", content="12+34="),),
        "sampling": Sampling(max_tokens=6),
        "output": Output(text=text, output_ids=tuple(range(len(text[:6]) + 1)), finish_reason="stop"),
        "parse": Parse(ok=value is not None, value=value, error=None if value is not None else "no number"),
    }
    return Member(**(fields | changes))


def event(batch: str, episode: str, members: tuple[Member, ...], reward: float | None, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "run": "r",
        "batch": batch,
        "task": "12+34",
        "group": f"{batch}.12+34",
        "episode": episode,
        "step": 0,
        "node": "propose",
        "visit": 0,
        "members": members,
        "next_node": "end",
        "state_before": "a",
        "state_after": "b",
        "reward": reward,
        "score_reason": "right" if reward else "wrong",
        "answer": "46",
        "terminated": True,
        "truncated": False,
        "started": 1_796_000_000.0,
        "ended": 1_796_000_001.0,
    }
    return Event(**(fields | changes))


def log_batch(log: EventLog, batch: str, texts: list[str], *, sizes: tuple[int, ...] = (3,)) -> None:
    for at, text in enumerate(texts):
        size = sizes[at % len(sizes)]
        members = tuple(member(index, text, value=text if index else None) for index in range(size))
        log.append(event(batch, f"{batch}.{at}", members, float(at % 2)))


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluation(update: int, workflow: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    interval = None if accuracy is None else [accuracy - 0.03, accuracy + 0.03]
    return {
        "kind": "eval",
        "update": update,
        "workflow": workflow,
        "accuracy": accuracy,
        "interval": interval,
        "tasks": 1024,
        **more,
    }


def metrics_of(update: int, total: int, draw: random.Random) -> dict[str, float]:
    done = update / total
    return {
        "loss": draw.gauss(0, 0.02),
        "grad_norm": 0.5 + draw.random() / 3,
        "clip_fraction_low_off_policy": 0.05 + 0.02 * draw.random(),
        "clip_fraction_high_off_policy": 0.08 + 0.05 * draw.random(),
        "clip_fraction_high/K=3": 0.1,
        "approx_kl": 0.01 * draw.random(),
        "entropy": 1.2 - 0.9 * done + 0.05 * draw.random(),
        "reward_mean": 0.4 + 0.5 * done + draw.gauss(0, 0.05),
        "groups_without_signal": 0.1 + 0.5 * done + 0.05 * draw.random(),
        "output_tokens/agent=proposer": 3.2,
        "truncation_rate/agent=proposer": 0.01 * draw.random(),
        "parse_failure_rate/agent=proposer": 0.04 * (1 - done),
        "seconds_sampling": 0.5 + 0.1 * draw.random(),
        "seconds_logprobs": 0.08,
        "seconds_update": 0.3,
        "lr": 1.5e-4,
        "set_size_mean": 3.0,
    }


def trained_run(folder: Path, *, updates: int = 80, finished: bool = True, texts: list[str] | None = None) -> Path:
    """A run folder as `train` leaves it, by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(RECIPE)
    about = {"recipe": "arithmetic_tiny", "started": 1_796_000_000.0, "versions": {"torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(about))
    draw = random.Random(0)
    lines = [evaluation(0, "team", 0.41), evaluation(0, "baseline", 0.36)]
    lines += [{"kind": "update", "update": n, "metrics": metrics_of(n, 80, draw)} for n in range(1, updates + 1)]
    if finished:
        lines += [evaluation(updates, "team", 0.88), evaluation(updates, "baseline", 0.81)]
        lines.append(
            {"kind": "result", "update": updates, "seconds": 171.2, "gain": 0.45, "gain_interval": [0.421, 0.479]}
        )
    write_metrics(folder, lines)
    with EventLog.writing(folder) as log:
        log_batch(log, "eval-0", ["46"] * 4)
        for number in sorted({1, updates // 2, updates} - {0}):
            log_batch(log, f"update-{number}", texts or ["46", "45", "the answer is 46", "4 6"], sizes=(3, 3, 1, 2))
    return folder


def page_of(folder: Path) -> tuple[str, Page]:
    text = write_report(folder).read_text(encoding="utf-8")
    return text, Page(text)
