"""What a run folder holds, as its report needs it: figures as they were written, and what is counted in the events."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Update:
    """The figures of one update; NaN where one is not finite."""

    number: int
    metrics: dict[str, float]


@dataclass
class Evaluation:
    """One evaluation of a workflow on one task set, or on all where `set` is None; `facts` are its other figures."""

    update: int
    set: str | None
    label: str
    workflow: str
    accuracy: float
    interval: tuple[float, float] | None
    facts: Mapping[str, Any]


@dataclass
class Census:
    """What was counted in the events.

    Attributes:
        events, episodes, tokens, members, failed_parses: Totals; episodes are those that ended.
        set_sizes: Events by (node, K).
        rewards: Scored rewards of the episodes that ended, by batch.
        unscored: Episodes that ended without a score.
        first, last: Events of the first and the last batch that is worth showing.
    """

    events: int = 0
    episodes: int = 0
    tokens: int = 0
    members: int = 0
    failed_parses: int = 0
    unscored: int = 0
    started: float | None = None
    set_sizes: Counter[tuple[str, int]] = field(default_factory=Counter)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    first: tuple[str, list[dict[str, Any]]] = ("", [])
    last: tuple[str, list[dict[str, Any]]] = ("", [])

    @property
    def trained(self) -> bool:
        """Whether some batch was sampled to be trained on."""
        return self.first[0].startswith("update-")


@dataclass
class RunFacts:
    """All that the report tells of a run.

    Attributes:
        folder: The run folder.
        config: Text of config.yaml.
        recipe: What it says.
        about: What run.json says of the beginning.
        result: The closing line of metrics.jsonl, if the run came to it.
        updates, evaluations: In order.
        census: What was counted in the events.
        notices: What could not be read.
    """

    folder: Path
    config: str
    recipe: dict[str, Any]
    about: dict[str, Any]
    result: dict[str, Any]
    updates: list[Update]
    evaluations: list[Evaluation]
    census: Census
    notices: list[str]


def read_run(folder: Path) -> RunFacts:
    """Reads a run folder, whatever of it there is."""
    notices: list[str] = []
    config = _text(folder / "config.yaml")
    try:
        recipe = yaml.safe_load(config)
    except yaml.YAMLError:
        recipe = None
        notices.append("config.yaml can't be read as YAML; it is shown below as it stands.")
    recipe = recipe if isinstance(recipe, dict) else {}
    result, updates, evaluations = _read_metrics(folder / "metrics.jsonl", notices)
    census = _take_census(_events(folder, notices), _frozen(recipe))
    return RunFacts(folder, config, recipe, _about(folder), result, updates, evaluations, census, notices)


def _about(folder: Path) -> dict[str, Any]:
    """Returns what run.json says of the run's beginning: the recipe's name, the time, the versions."""
    try:
        about = json.loads(_text(folder / "run.json"))
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _frozen(recipe: Mapping[str, Any]) -> frozenset[str]:
    """Policies that are not trained, in a recipe that trains another one: their outputs don't count in K."""
    policies = recipe.get("policies")
    if not isinstance(policies, dict):
        return frozenset()
    trained = {
        name for name, policy in policies.items() if isinstance(policy, dict) and policy.get("train") is not None
    }
    return frozenset(policies) - trained if trained else frozenset()


def _objects(path: Path, notices: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON Lines file; a line that is none (its writer was killed) leaves a notice."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield found
            elif line.strip():
                notices.append(f"{path.parent.name}/{path.name}, line {number}, is damaged and was left out.")


def _events(folder: Path, notices: list[str]) -> Iterator[dict[str, Any]]:
    """Yields events as plain data, one at a time: a run may hold more of them than fit in memory as records."""
    for segment in sorted((folder / "events").glob("*.jsonl")):
        yield from _objects(segment, notices)


def _read_metrics(path: Path, notices: list[str]) -> tuple[dict[str, Any], list[Update], list[Evaluation]]:
    """Returns the closing line, the updates and the evaluations; of one that was done again the later counts."""
    result: dict[str, Any] = {}
    updates: dict[int, Update] = {}
    evaluations: dict[tuple[int, str], Evaluation] = {}
    for line in _objects(path, notices):
        number = line["update"] if isinstance(line.get("update"), int) else 0
        match line.get("kind"):
            case "result":
                result = line
            case "update":
                metrics = {str(name): number_of(value) for name, value in (line.get("metrics") or {}).items()}
                updates[number] = Update(number, metrics)
            case "eval":
                made = _evaluation(number, line)
                evaluations[number, made.label] = made
    return result, [updates[number] for number in sorted(updates)], [evaluations[key] for key in sorted(evaluations)]


def _evaluation(number: int, line: Mapping[str, Any]) -> Evaluation:
    workflow = str(line.get("workflow", "team"))
    label = {"team": "team", "baseline": "single output"}.get(workflow, workflow)
    task_set = None if line.get("set") is None else str(line["set"])
    if task_set is not None:
        label += f" on {task_set}"
    elif len(sets := line.get("sets") or ()) > 1:
        label += f", mean of {len(sets)} sets"
    interval: tuple[float, float] | None = None
    match line.get("avg_at_k_interval"):
        case [low, high] if math.isfinite(number_of(low)) and math.isfinite(number_of(high)):
            interval = (float(low), float(high))
    known = {"kind", "update", "workflow", "avg_at_k", "avg_at_k_interval", "set"}
    measures = line.get("measures")
    figures = {**line, **(measures if isinstance(measures, dict) else {})}
    facts = {key: value for key, value in figures.items() if key not in known and not isinstance(value, dict | list)}
    return Evaluation(number, task_set, label, workflow, number_of(line.get("avg_at_k")), interval, facts)


def number_of(value: Any) -> float:
    """A number as float; NaN for whatever is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _take_census(events: Iterable[dict[str, Any]], frozen: frozenset[str]) -> Census:
    census = Census()
    other_sizes: Counter[tuple[str, int]] = Counter()
    for event in events:
        batch, members = str(event.get("batch", "")), event.get("members", ())
        census.events += 1
        if started := event.get("started"):
            census.started = min(started, census.started or started)
        size = 0
        for member in members:
            ids = member["output"].get("output_ids")
            census.tokens += len(ids or ())
            census.failed_parses += not member["parse"]["ok"]
            size += member.get("policy") not in frozen and member.get("error") is None and (ids is None or len(ids) > 0)
        census.members += len(members)
        if not batch.startswith("baseline-"):
            sizes = census.set_sizes if batch.startswith("update-") else other_sizes
            sizes[str(event.get("node")), size] += 1
        if event.get("terminated") or event.get("truncated"):
            census.episodes += 1
            rewards = census.rewards.setdefault(batch, [])
            if event.get("reward") is None:
                census.unscored += 1
            else:
                rewards.append(number_of(event["reward"]))
        _keep(census, batch, event)
    if not census.set_sizes:
        census.set_sizes = other_sizes
    return census


def _keep(census: Census, batch: str, event: dict[str, Any]) -> None:
    """Keeps the events of the first and the last batch; those that were trained on are preferred."""

    def rank(name: str) -> tuple[bool, int]:
        number = re.search(r"(\d+)$", name)
        return name.startswith("update-"), int(number[1]) if number else 0

    if not census.first[1] or (rank(batch)[0] and (not census.trained or rank(batch) < rank(census.first[0]))):
        census.first = (batch, [])
    if not census.last[1] or rank(batch) > rank(census.last[0]):
        census.last = (batch, [])
    for name, kept in {census.first[0]: census.first[1], census.last[0]: census.last[1]}.items():
        if name == batch:
            kept.append(event)
    if census.first[0] == census.last[0]:
        census.first = census.last
