"""What happened in a run, as one HTML page that needs nothing else: no network, no script, no other file.

`write_report` reads the run folder and writes `report.html` in it. Whatever models wrote is data: it is escaped, never markup.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from srpo_env.errors import InvalidInput
from srpo_env.records import Event

LONGEST_TEXT = 4000
"""Characters of a prompt or an output that are shown; the log has all."""


def write_report(run_folder: Path) -> Path:
    """Writes a run's report and returns its path; an earlier one is replaced once the new one is whole.

    Args:
        run_folder: A run that was trained, evaluated or only sampled, finished or not.

    Raises:
        InvalidInput: The folder is not a run folder.
    """
    folder = Path(run_folder)
    if not any((folder / part).exists() for part in ("config.yaml", "events", "metrics.jsonl")):
        raise InvalidInput(
            f"{folder} is not a run folder: it has none of config.yaml, events and metrics.jsonl; give one that `train` made."
        )
    page = _render(_read_run(folder)).encode("utf-8", "replace")
    path = folder / "report.html"
    unfinished = folder / f".report.html.{os.getpid()}"
    try:
        unfinished.write_bytes(page)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return path


# Reading a run.


@dataclass
class _Update:
    number: int
    metrics: dict[str, float]


@dataclass
class _Evaluation:
    update: int
    label: str
    workflow: str
    accuracy: float
    interval: tuple[float, float] | None
    facts: Mapping[str, Any]


@dataclass
class _Census:
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
class _Run:
    folder: Path
    config: str
    recipe: dict[str, Any]
    about: dict[str, Any]
    result: dict[str, Any]
    updates: list[_Update]
    evaluations: list[_Evaluation]
    census: _Census
    notices: list[str]


def _read_run(folder: Path) -> _Run:
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
    return _Run(folder, config, recipe, _about(folder), result, updates, evaluations, census, notices)


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
    trained = {name for name, policy in policies.items() if isinstance(policy, dict) and policy.get("train") is not None}
    return frozenset(policies) - trained if trained else frozenset()


def _objects(path: Path, notices: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON Lines file; of a line that is none (a writer that was killed) only a notice is left."""
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


def _read_metrics(path: Path, notices: list[str]) -> tuple[dict[str, Any], list[_Update], list[_Evaluation]]:
    """Returns the closing line, the updates and the evaluations; of an update that was done again the later one counts."""
    result: dict[str, Any] = {}
    updates: dict[int, _Update] = {}
    evaluations: dict[tuple[int, str], _Evaluation] = {}
    for line in _objects(path, notices):
        number = line["update"] if isinstance(line.get("update"), int) else 0
        match line.get("kind"):
            case "result":
                result = line
            case "update":
                metrics = {str(name): _float(value) for name, value in (line.get("metrics") or {}).items()}
                updates[number] = _Update(number, metrics)
            case "eval":
                made = _evaluation(number, line)
                evaluations[number, made.label] = made
    return result, [updates[number] for number in sorted(updates)], [evaluations[key] for key in sorted(evaluations)]


def _evaluation(number: int, line: Mapping[str, Any]) -> _Evaluation:
    workflow = str(line.get("workflow", "team"))
    label = {"team": "team", "baseline": "single output"}.get(workflow, workflow)
    if line.get("set") is not None:
        label += f" on {line['set']}"
    match line.get("interval"):
        case [low, high] if math.isfinite(_float(low)) and math.isfinite(_float(high)):
            interval = (float(low), float(high))
        case _:
            interval = None
    known = {"kind", "update", "workflow", "accuracy", "interval", "set"}
    facts = {key: value for key, value in line.items() if key not in known and not isinstance(value, dict | list)}
    return _Evaluation(number, label, workflow, _float(line.get("accuracy")), interval, facts)


def _float(value: Any) -> float:
    """A number as float; NaN for whatever is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _take_census(events: Iterable[dict[str, Any]], frozen: frozenset[str]) -> _Census:
    census = _Census()
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
        (census.set_sizes if batch.startswith("update-") else other_sizes)[str(event.get("node")), size] += 1
        if event.get("terminated") or event.get("truncated"):
            census.episodes += 1
            rewards = census.rewards.setdefault(batch, [])
            if event.get("reward") is None:
                census.unscored += 1
            else:
                rewards.append(_float(event["reward"]))
        _keep(census, batch, event)
    if not census.set_sizes:
        census.set_sizes = other_sizes
    return census


def _keep(census: _Census, batch: str, event: dict[str, Any]) -> None:
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


# Episodes that are shown.


@dataclass(frozen=True)
class _Shown:
    title: str
    why: str
    reward: str
    good: bool
    events: Sequence[Event]


def _shown_episodes(census: _Census) -> list[_Shown]:
    """One episode of the first batch; of the last one the best, the worst and one at random."""
    draw = random.Random(0)
    first, last = (_ended(events) for _, events in (census.first, census.last))
    chosen: list[tuple[str, str, list[dict[str, Any]]]] = []
    ordered = sorted(last, key=_reward)
    if ordered:
        chosen.append((census.last[0], "best", ordered.pop()))
    if ordered:
        chosen.append((census.last[0], "worst", ordered.pop(0)))
    if ordered:
        chosen.append((census.last[0], "at random", draw.choice(ordered)))
    if first and census.first[0] != census.last[0]:
        chosen.insert(0, (census.first[0], "at random", draw.choice(first)))
    return [made for batch, why, events in chosen if (made := _shown(batch, why, events)) is not None]


def _ended(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The episodes that ended; all of them where none did."""
    episodes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        episodes.setdefault(str(event.get("episode")), []).append(event)
    ended = [each for each in episodes.values() if each[-1].get("terminated") or each[-1].get("truncated")]
    return ended or list(episodes.values())


def _reward(events: Sequence[Mapping[str, Any]]) -> float:
    reward = _float(events[-1].get("reward"))
    return reward if math.isfinite(reward) else -math.inf


def _shown(batch: str, why: str, events: Sequence[dict[str, Any]]) -> _Shown | None:
    try:
        made = [Event.model_validate({key: value for key, value in each.items() if key != "crc32"}) for each in events]
    except ValidationError:
        return None
    last = made[-1]
    if not (last.terminated or last.truncated):
        reward = "unfinished"
    elif last.reward is None:
        reward = "unscored"
    else:
        reward = f"reward {last.reward:g}"
    title = re.sub(r"^update-(\d+)$", r"Update \1", batch) or "Rollout"
    return _Shown(title, why, reward, bool(last.reward and last.reward > 0), made)


# Charts: drawn by matplotlib with colours that stand for the page's own, so that they follow light and dark.

_INKS = {"ink": "#010203", "muted": "#010204", "rule": "#010205"} | {f"c{n}": f"#01021{n}" for n in range(6)}


@dataclass(frozen=True)
class _Line:
    label: str
    ink: str
    values: Sequence[float]


@dataclass(frozen=True)
class _Chart:
    title: str
    svg: str
    lines: Sequence[tuple[str, str, str]]
    """Label, ink and last value of each line."""
    note: str = ""


@dataclass(frozen=True)
class _Plan:
    """A chart of metrics over updates: its lines are those of `names` that the run has."""

    title: str
    names: Mapping[str, str]
    note: str = ""
    share: bool = False
    stacked: bool = False


_PLANS = (
    _Plan("Reward", {"reward_mean": "mean of a batch"}, "The mean over the batch's scored episodes."),
    _Plan(
        "Clip fraction",
        {"clip_fraction_low_off_policy": "low", "clip_fraction_high_off_policy": "high"},
        "Share of sets whose ratio left the clip range, in updates whose weights had moved since sampling.",
    ),
    _Plan(
        "Clip fraction",
        {"clip_fraction_low": "low", "clip_fraction_high": "high"},
        "Share of sets whose ratio left the clip range.",
    ),
    _Plan("Groups without signal", {"groups_without_signal": "share of groups"}, "All episodes of the group got the same reward."),
    _Plan("Approximate KL", {"approx_kl": "old to new"}, "Nats per token between the weights that sampled and the new ones."),
    _Plan("Entropy", {"entropy": "per token"}, "Nats per sampled token."),
    _Plan("Gradient norm", {"grad_norm": "before clipping"}),
    _Plan("Loss", {"loss": "loss"}),
    _Plan("Output length", {"output_tokens_mean": "all agents"}, "Tokens of an output."),
    _Plan("Cut and unreadable outputs", {"truncation_rate": "cut off", "parse_failure_rate": "not parsed"}, "", share=True),
    _Plan(
        "Seconds of an update",
        {
            "seconds_sampling": "sampling",
            "seconds_logprobs": "log-probs",
            "seconds_update": "update",
        },
        stacked=True,
    ),
)
_BY_AGENT = {"output_tokens_mean": "output_tokens", "truncation_rate": "", "parse_failure_rate": ""}
"""Metrics that may come by agent only (`output_tokens/agent=solver`), and their name then where it differs."""


def _charts(run: _Run) -> list[_Chart]:
    charts = [made for made in [_accuracy_chart(run)] if made is not None]
    series = _series(run.updates)
    drawn: set[str] = set()
    for plan in _PLANS:
        lines = _lines(plan, series)
        if lines and plan.title not in drawn:
            drawn.add(plan.title)
            charts.append(_curve(plan, [update.number for update in run.updates], lines))
    return charts


def _series(updates: Sequence[_Update]) -> dict[str, list[float]]:
    """The values of each metric, one for each update; NaN where an update lacks it."""
    names = dict.fromkeys(name for update in updates for name in update.metrics)
    return {name: [update.metrics.get(name, math.nan) for update in updates] for name in names}


def _lines(plan: _Plan, series: Mapping[str, Sequence[float]]) -> list[_Line]:
    found: dict[str, Sequence[float]] = {}
    for name, label in plan.names.items():
        if name in series:
            found[label] = series[name]
        elif name in _BY_AGENT:
            start = f"{_BY_AGENT[name] or name}/agent="
            agents = {key.removeprefix(start): values for key, values in series.items() if key.startswith(start)}
            short = len(plan.names) == 1
            found |= {agent if short else f"{label}, {agent}": values for agent, values in agents.items()}
    known = {label: values for label, values in found.items() if any(map(math.isfinite, values))}
    return [_Line(label, f"c{at}", values) for at, (label, values) in enumerate(list(known.items())[:6])]


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.0))
    axes = figure.add_axes((0.105, 0.185, 0.885, 0.77))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_INKS["rule"])
    axes.tick_params(colors=_INKS["muted"], labelsize=8, length=0, pad=4)
    axes.grid(axis="y", color=_INKS["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=4)
    return figure, axes


def _curve(plan: _Plan, numbers: Sequence[int], lines: Sequence[_Line]) -> _Chart:
    """Lines over updates; of many noisy ones the mean of a window is drawn thick and each value thin."""
    figure, axes = _axes()
    window = 0 if plan.stacked else _window(len(numbers))
    if plan.stacked:
        values = [[0.0 if math.isnan(value) else value for value in line.values] for line in lines]
        if len(numbers) > 1:
            axes.stackplot(numbers, values, colors=[_INKS[line.ink] for line in lines], alpha=0.85, linewidth=0)
        else:
            bottoms = [sum(each[0] for each in values[:at]) for at in range(len(values))]
            for line, value, bottom in zip(lines, values, bottoms, strict=True):
                axes.bar(numbers, value, bottom=bottom, width=0.4, color=_INKS[line.ink], alpha=0.85)
    else:
        for line in lines:
            color, few = _INKS[line.ink], sum(map(math.isfinite, line.values)) <= 24
            axes.plot(
                numbers,
                line.values,
                color=color,
                linewidth=0.7 if window else 1.6,
                alpha=0.35 if window else 1,
                marker="o" if few else None,
                markersize=3,
            )
            if window:
                axes.plot(numbers, _smooth(line.values, window), color=color, linewidth=1.8)
    if plan.share:
        axes.set_ylim(bottom=0)
    _update_axis(axes, numbers)
    labels = [(line.label, line.ink, _short(_last(line.values))) for line in lines]
    return _Chart(plan.title, _svg(figure, plan.title), labels, plan.note)


def _accuracy_chart(run: _Run) -> _Chart | None:
    by_label: dict[str, list[_Evaluation]] = {}
    for each in run.evaluations:
        if math.isfinite(each.accuracy):
            by_label.setdefault(each.label, []).append(each)
    if not by_label or len({each.update for each in run.evaluations}) < 2:
        return None
    figure, axes = _axes()
    labels = []
    for at, (label, found) in enumerate(list(by_label.items())[:6]):
        ink = f"c{at}"
        numbers, values = [each.update for each in found], [each.accuracy for each in found]
        axes.plot(numbers, values, color=_INKS[ink], linewidth=1.8, marker="o", markersize=4)
        sure = [each for each in found if each.interval is not None]
        for each in sure:
            axes.plot([each.update] * 2, each.interval, color=_INKS[ink], linewidth=1.2)
        labels.append((label, ink, _short(values[-1])))
    axes.set_ylim(0, 1)
    _update_axis(axes, [each.update for each in run.evaluations])
    return _Chart("Accuracy on held-out tasks", _svg(figure, "accuracy"), labels, "Bars: 95% intervals.")


def _set_chart(census: _Census) -> _Chart | None:
    """How many events had which K, by node."""
    if not census.set_sizes:
        return None
    figure, axes = _axes()
    nodes = sorted({node for node, _ in census.set_sizes})
    sizes = range(min(size for _, size in census.set_sizes), max(size for _, size in census.set_sizes) + 1)
    bottom = [0] * len(sizes)
    labels = []
    for at, node in enumerate(nodes):
        ink = f"c{min(at, 5)}"
        heights = [census.set_sizes[node, size] for size in sizes]
        axes.bar(sizes, heights, bottom=bottom, width=0.62, color=_INKS[ink], alpha=0.9)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        labels.append((node, ink, f"{sum(heights):,}"))
    for size, height in zip(sizes, bottom, strict=True):
        if height:
            axes.annotate(
                f"{height / census.set_sizes.total():.0%}",
                (size, height),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_INKS["ink"],
            )
    axes.margins(y=0.16)
    axes.set_xlim(sizes[0] - 0.7, sizes[-1] + 0.7)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("K", fontsize=8, color=_INKS["muted"])
    return _Chart("Size of the active sets", _svg(figure, "sets"), labels, "Events by K, their number of trained outputs.")


def _update_axis(axes: Any, numbers: Sequence[int]) -> None:
    low, high = min(numbers), max(numbers)
    margin = max((high - low) * 0.03, 0.5 if low == high else 0)
    axes.set_xlim(low - margin, high + margin)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_xlabel("update", fontsize=8, color=_INKS["muted"])


def _window(updates: int) -> int:
    """How far the mean that is drawn thick reaches to each side; 0: each value is drawn thick."""
    return updates // 16 if updates >= 48 else 0


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean of the values at most `reach` away, without those that are not finite."""
    means = []
    for at in range(len(values)):
        near = [value for value in values[max(0, at - reach) : at + reach + 1] if math.isfinite(value)]
        means.append(statistics.fmean(near) if near else math.nan)
    return means


def _svg(figure: Any, name: str) -> str:
    """The figure as an element for the page: its own ids, the page's fonts and colours, no more digits than are seen."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "axes.unicode_minus": True}):
        FigureCanvasSVG(figure)
        figure.savefig(
            written, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", name.lower())
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text.split(">", 1)[0]) + ">" + text.split(">", 1)[1]
    text = text.replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    for ink, color in _INKS.items():
        text = text.replace(color, f"var(--{ink})")
    return text.replace("<svg", '<svg role="img"', 1)


# The page.


def _render(run: _Run) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("srpo_env", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": _shown_text,
        "short": _short,
        "alike": lambda members: len({member.messages for member in members}) == 1,
        "percent": lambda share: f"{100 * min(max(share, 0.0), 1.0):.1f}%",
        "drawn": lambda svg: Markup(svg),  # noqa: S704 - made by _svg of numbers and our own words
    }
    return environment.get_template("report.html.jinja").render(
        title=str(run.about.get("recipe") or run.folder.resolve().name),
        subtitle=_subtitle(run),
        description=" ".join(str(run.recipe.get("description", "")).split()),
        state=_state(run),
        notices=run.notices[:5] + ([f"{len(run.notices) - 5} more of this kind."] if len(run.notices) > 5 else []),
        comparisons=_comparisons(run),
        tiles=_tiles(run),
        charts=_charts(run),
        sets=_set_chart(run.census),
        averaged=2 * _window(len(run.updates)) + 1,
        evaluations=run.evaluations,
        fact_names=list(dict.fromkeys(key for each in run.evaluations for key in each.facts)),
        batches=_batches(run.census) if not run.evaluations else [],
        metrics=_metric_rows(run.updates),
        episodes=_shown_episodes(run.census),
        config=run.config,
        versions=_versions(run),
        folder=str(run.folder),
        written=_date(datetime.now(UTC).timestamp()),
    )


def _subtitle(run: _Run) -> list[tuple[str, str]]:
    """Facts under the title: name and value."""
    workflow, tasks = run.recipe.get("workflow"), run.recipe.get("tasks")
    uses = tasks.get("train") if isinstance(tasks, dict) else None
    policies = run.recipe.get("policies")
    models = [policy.get("model") for policy in (policies.values() if isinstance(policies, dict) else ()) if isinstance(policy, dict)]
    began = run.about.get("started") or run.census.started or _modified(run.folder / "config.yaml")
    facts = {
        "started": _date(began) if began else None,
        "workflow": _use(workflow),
        "tasks": _use(uses),
        "model": ", ".join(dict.fromkeys(str(model) for model in models if model)),
        "trainer": run.recipe.get("trainer") if run.updates else None,
        "seed": run.recipe.get("seed"),
        "run": run.folder.resolve().name if run.about.get("recipe") else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _use(section: Any) -> str | None:
    used = section.get("use") if isinstance(section, dict) else section
    return ", ".join(map(str, used)) if isinstance(used, list) else used


def _modified(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _state(run: _Run) -> tuple[str, bool]:
    """In what state the run is, and whether it is done."""
    wanted = run.recipe.get("updates")
    if not run.updates:
        if run.census.trained:
            return "stopped before the first update", False
        return ("evaluation" if run.evaluations else "rollout"), True
    done = run.updates[-1].number
    if isinstance(wanted, int) and done < wanted:
        return f"stopped after {done} of {wanted} updates", False
    return f"{done} updates", True


@dataclass(frozen=True)
class _Comparison:
    label: str
    before: _Evaluation
    after: _Evaluation | None
    gain: str
    """The difference with its sign, and its interval where the run paired the tasks."""


def _comparisons(run: _Run) -> list[_Comparison]:
    """The first and the last evaluation of each workflow, the single output's first."""
    found: dict[str, list[_Evaluation]] = {}
    for each in run.evaluations:
        if math.isfinite(each.accuracy):
            found.setdefault(each.label, []).append(each)
    ordered = sorted(found.items(), key=lambda item: item[1][0].workflow != "baseline")
    made = []
    for at, (label, each) in enumerate(ordered):
        gain = f"{each[-1].accuracy - each[0].accuracy:+.3f}" if len(each) > 1 else ""
        match run.result.get("gain_interval"):
            case [float() as low, float() as high] if at == 0 and gain:
                gain += f" [{low:+.3f}, {high:+.3f}]"
        made.append(_Comparison(label, each[0], each[-1] if len(each) > 1 else None, gain.replace("-", "−")))
    return made


def _tiles(run: _Run) -> list[tuple[str, str]]:
    """The run in a few figures."""
    census = run.census
    seconds = _float(run.result.get("seconds"))
    rewards = [reward for each in census.rewards.values() for reward in each]
    sets = census.set_sizes.total()
    tiles = {
        "updates": f"{len(run.updates):,}" if run.updates else "",
        "from start to end": _duration(seconds) if math.isfinite(seconds) else "",
        "episodes": f"{census.episodes:,}",
        "events": f"{census.events:,}",
        "mean reward": f"{statistics.fmean(rewards):.3f}" if rewards and not run.updates else "",
        "unscored episodes": f"{census.unscored:,}" if census.unscored else "",
        "mean set size K": f"{sum(k * n for (_, k), n in census.set_sizes.items()) / sets:.2f}" if sets else "",
        "sets with K > 1": f"{sum(n for (_, k), n in census.set_sizes.items() if k > 1) / sets:.0%}" if sets else "",
        "tokens sampled": _compact(census.tokens) if census.tokens else "",
        "outputs not parsed": f"{census.failed_parses / census.members:.1%}" if census.members else "",
    }
    return [(label, value) for label, value in tiles.items() if value]


def _batches(census: _Census) -> list[tuple[str, int, str]]:
    """Batch, scored episodes and mean reward, where there is nothing better to tell how it went."""
    return [
        (batch or "rollout", len(rewards), f"{statistics.fmean(rewards):.3f}" if rewards else "–")
        for batch, rewards in census.rewards.items()
        if not batch.startswith("update-")
    ]


@dataclass(frozen=True)
class _MetricRow:
    name: str
    nested: bool
    spark: str
    figures: Sequence[str]


def _metric_rows(updates: Sequence[_Update]) -> list[_MetricRow]:
    """Every metric: its course, and its first, last, smallest and largest value."""
    rows = []
    for name, values in sorted(_series(updates).items()):
        known = [value for value in values if math.isfinite(value)]
        figures = [values[0], values[-1], min(known, default=math.nan), max(known, default=math.nan)]
        rows.append(_MetricRow(name, "/" in name, _spark(values), [_short(figure) for figure in figures]))
    return rows


def _spark(values: Sequence[float]) -> str:
    """Points of a small line, in a box of 100 by 20."""
    if len(values) > 100:
        step = len(values) / 100
        values = [values[int(at * step)] for at in range(100)]
    known = [(at, value) for at, value in enumerate(values) if math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    if not math.isfinite(high - low) or high == low:
        low, high = low - 1, low + 1
    return " ".join(f"{100 * at / (len(values) - 1):.1f},{18 - 16 * (value - low) / (high - low):.1f}" for at, value in known)


def _versions(run: _Run) -> list[tuple[str, str]]:
    given = run.about.get("versions")
    if isinstance(given, dict):
        return [(str(name), str(version)) for name, version in given.items()]
    found = [("python", platform.python_version())]
    for name in ("srpo-env", "torch", "transformers", "numpy", "gymnasium"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return found


# Numbers and texts.


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _short(value: Any) -> str:
    """A number in few characters; a dash where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    return (f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}").replace("-", "−")


def _compact(count: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= unit:
            return f"{count / (1e3 if name == 'k' else unit):.3g} {name}"
    return f"{count:,}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def _shown_text(value: Any, limit: int = LONGEST_TEXT) -> str:
    """A text as it is shown: control characters visible, and not longer than anyone reads; the template escapes it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > limit:
        text = f"{text[:limit]} … ({len(text) - limit:,} more characters)"
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "␡", text)
