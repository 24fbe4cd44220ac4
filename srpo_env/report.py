"""What happened in a run, as one HTML page that needs nothing else: no network, no script, no other file.

`write_report` reads a run folder and writes `report.html` in it. What models wrote is data: escaped, never markup.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from srpo_env.errors import InvalidInput
from srpo_env.records import Event
from srpo_env.report_charts import curves, series_of, set_chart, short, window_of
from srpo_env.report_facts import Census, Evaluation, RunFacts, Update, number_of, read_run

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
            f"{folder} is not a run folder: it has none of config.yaml, events and metrics.jsonl; "
            "give one that `train`, `eval` or `rollout` made."
        )
    page = _render(read_run(folder)).encode("utf-8", "replace")
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


# Episodes that are shown.


@dataclass(frozen=True)
class _Shown:
    title: str
    why: str
    reward: str
    good: bool
    events: Sequence[Event]


def _shown_episodes(census: Census, *, learning: bool) -> list[_Shown]:
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
    shown = (_shown(batch if learning else "", why, events) for batch, why, events in chosen)
    return [made for made in shown if made is not None]


def _ended(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The episodes that ended; all of them where none did."""
    episodes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        episodes.setdefault(str(event.get("episode")), []).append(event)
    ended = [each for each in episodes.values() if each[-1].get("terminated") or each[-1].get("truncated")]
    return ended or list(episodes.values())


def _reward(events: Sequence[Mapping[str, Any]]) -> float:
    reward = number_of(events[-1].get("reward"))
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
    title = re.sub(r"^update-(\d+)$", r"Update \1", batch) or "Episode"
    return _Shown(title, why, reward, bool(last.reward and last.reward > 0), made)


# The page.


def _render(run: RunFacts) -> str:
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
        "short": short,
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
        charts=curves(run),
        sets=set_chart(run.census),
        averaged=2 * window_of(len(run.updates)) + 1,
        evaluations=run.evaluations,
        fact_names=list(dict.fromkeys(key for each in run.evaluations for key, value in each.facts.items() if value)),
        batches=_batches(run.census) if not run.evaluations else [],
        metrics=_metric_rows(run.updates),
        episodes=_shown_episodes(run.census, learning=bool(run.updates or run.evaluations)),
        config=run.config,
        versions=_versions(run),
        folder=str(run.folder),
        written=_date(datetime.now(UTC).timestamp()),
    )


def _subtitle(run: RunFacts) -> list[tuple[str, str]]:
    """Facts under the title: name and value."""
    workflow, tasks = run.recipe.get("workflow"), run.recipe.get("tasks")
    uses = tasks.get("train") if isinstance(tasks, dict) else None
    policies = run.recipe.get("policies")
    models = [
        policy.get("model")
        for policy in (policies.values() if isinstance(policies, dict) else ())
        if isinstance(policy, dict)
    ]
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


def _state(run: RunFacts) -> tuple[str, bool]:
    """In what state the run is, and whether it is done."""
    wanted = run.recipe.get("updates")
    if not run.updates:
        if run.evaluations and run.census.trained:
            return "stopped before the first update", False
        if not run.census.events and not run.evaluations:
            return "nothing was logged", False
        evaluated = run.evaluations or any(batch.startswith("eval-") for batch in run.census.rewards)
        return ("evaluation" if evaluated else "rollout"), True
    done = run.updates[-1].number
    if isinstance(wanted, int) and done < wanted:
        return f"stopped after {done} of {wanted} updates", False
    return f"{done} updates", True


@dataclass(frozen=True)
class _Comparison:
    label: str
    before: Evaluation
    after: Evaluation | None
    gain: str
    """The difference with its sign, and its interval where the run paired the tasks."""


def _comparisons(run: RunFacts) -> list[_Comparison]:
    """The first and the last evaluation of each workflow, the single output's first; its sets are in a table."""
    found: dict[str, list[Evaluation]] = {}
    whole = {each.workflow for each in run.evaluations if each.set is None}
    for each in run.evaluations:
        if math.isfinite(each.accuracy) and (each.set is None or each.workflow not in whole):
            found.setdefault(each.label, []).append(each)
    ordered = sorted(found.items(), key=lambda item: item[1][0].workflow != "baseline")
    made = []
    for at, (label, course) in enumerate(ordered):
        gain = f"{course[-1].accuracy - course[0].accuracy:+.3f}" if len(course) > 1 else ""
        match run.result.get("gain_interval"):
            case [float() as low, float() as high] if at == 0 and gain:
                gain += f" [{low:+.3f}, {high:+.3f}]"
        made.append(_Comparison(label, course[0], course[-1] if len(course) > 1 else None, gain.replace("-", "−")))
    return made


def _tiles(run: RunFacts) -> list[tuple[str, str]]:
    """The run in a few figures."""
    census = run.census
    seconds = number_of(run.result.get("seconds"))
    rewards = [reward for each in census.rewards.values() for reward in each]
    sets = census.set_sizes.total()
    tiles = {
        "updates": f"{len(run.updates):,}" if run.updates else "",
        "from start to end": _duration(seconds) if math.isfinite(seconds) else "",
        "episodes": f"{census.episodes:,}",
        "events": f"{census.events:,}",
        "mean reward": f"{statistics.fmean(rewards):.3f}" if len(census.rewards) == 1 and rewards else "",
        "unscored episodes": f"{census.unscored:,}" if census.unscored else "",
        "mean set size K": f"{sum(k * n for (_, k), n in census.set_sizes.items()) / sets:.2f}" if sets else "",
        "sets with K > 1": f"{sum(n for (_, k), n in census.set_sizes.items() if k > 1) / sets:.0%}" if sets else "",
        "tokens sampled": _compact(census.tokens) if census.tokens else "",
        "outputs not parsed": f"{100 * census.failed_parses / census.members:.3g}%" if census.members else "",
    }
    return [(label, value) for label, value in tiles.items() if value]


def _batches(census: Census) -> list[tuple[str, int, str]]:
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


def _metric_rows(updates: Sequence[Update]) -> list[_MetricRow]:
    """Every metric: its course, and its first, last, smallest and largest value."""
    rows = []
    for name, values in sorted(series_of(updates).items()):
        known = [value for value in values if math.isfinite(value)]
        figures = [values[0], values[-1], min(known, default=math.nan), max(known, default=math.nan)]
        rows.append(_MetricRow(name, "/" in name, _spark(values), [short(figure) for figure in figures]))
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
    flat = high == low or not math.isfinite(high - low)
    heights = [0.5 if flat else (value - low) / (high - low) for _, value in known]
    return " ".join(
        f"{100 * at / (len(values) - 1):.1f},{18 - 16 * height:.1f}"
        for (at, _), height in zip(known, heights, strict=True)
    )


def _versions(run: RunFacts) -> list[tuple[str, str]]:
    given = run.about.get("versions")
    if isinstance(given, dict):
        return [(str(name), str(version)) for name, version in given.items()]
    found = [("python", platform.python_version())]
    for name in ("srpo-env", "torch", "transformers", "numpy", "gymnasium"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return found


# Numbers and texts.


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
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "␡", text
    )
