"""A run's curves, as SVG elements of a page.

matplotlib draws them in colours that stand for the page's own, so that they follow light and dark.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srpo_env.report_facts import Census, Evaluation, RunFacts, Update

_INKS = {"ink": "#010203", "muted": "#010204", "rule": "#010205"} | {f"c{n}": f"#01021{n}" for n in range(6)}


_FAR = 1e30
"""No chart is drawn so far out: the tables have what is there."""


@dataclass(frozen=True)
class _Line:
    label: str
    ink: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """A chart and its legend.

    Attributes:
        title: What is shown.
        svg: The drawing, which holds numbers and our own words only.
        lines: Label, ink and last value of each line.
        note: How it is to be read.
    """

    title: str
    svg: str
    lines: Sequence[tuple[str, str, str]]
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
    _Plan(
        "Groups without signal",
        {"groups_without_signal": "share of groups"},
        "All episodes of the group got the same reward.",
    ),
    _Plan(
        "Approximate KL",
        {"approx_kl": "old to new"},
        "Nats per token between the weights that sampled and the new ones.",
    ),
    _Plan("Entropy", {"entropy": "per token"}, "Nats per sampled token."),
    _Plan(
        "Size of the routed sets",
        {"set_size_without_routers": "members"},
        "The mean over all sets but the routers' own; frozen members count.",
    ),
    _Plan("Gradient norm", {"grad_norm": "before clipping"}),
    _Plan("Loss", {"loss": "loss"}),
    _Plan("Output length", {"output_tokens_mean": "all agents"}, "Tokens of an output."),
    _Plan(
        "Cut and unreadable outputs", {"truncation_rate": "cut off", "parse_failure_rate": "not parsed"}, "", share=True
    ),
    _Plan(
        "Seconds of an update",
        {
            "seconds_sampling": "sampling",
            "seconds_logprobs": "log-probs",
            "seconds_update": "update",
            "seconds_logging": "logging",
        },
        stacked=True,
    ),
)
_BY_AGENT = {"output_tokens_mean": "output_tokens", "truncation_rate": "", "parse_failure_rate": ""}
"""Metrics that may come by agent only (`output_tokens/agent=solver`), and their name then where it differs."""


def curves(run: RunFacts) -> list[Chart]:
    """Returns the curves that the run has figures for."""
    charts = [made for made in [_accuracy_chart(run)] if made is not None]
    series = series_of(run.updates)
    drawn: set[str] = set()
    for plan in _PLANS:
        lines = _lines(plan, series)
        if lines and plan.title not in drawn:
            drawn.add(plan.title)
            charts.append(_curve(plan, [update.number for update in run.updates], lines))
    return charts


def series_of(updates: Sequence[Update]) -> dict[str, list[float]]:
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
            alone = len(plan.names) == 1
            found |= {agent if alone else f"{label}, {agent}": values for agent, values in agents.items()}
    drawable = {
        label: [value if abs(value) < _FAR else math.nan for value in values] for label, values in found.items()
    }
    known = {label: values for label, values in drawable.items() if any(map(math.isfinite, values))}
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


def _curve(plan: _Plan, numbers: Sequence[int], lines: Sequence[_Line]) -> Chart:
    """Lines over updates; of many noisy ones the mean of a window is drawn thick and each value thin."""
    figure, axes = _axes()
    window = 0 if plan.stacked else window_of(len(numbers))
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
    labels = [(line.label, line.ink, short(_last(line.values))) for line in lines]
    return Chart(plan.title, _svg(figure, plan.title), labels, plan.note)


def _accuracy_chart(run: RunFacts) -> Chart | None:
    by_label: dict[str, list[Evaluation]] = {}
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
        labels.append((label, ink, short(values[-1])))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low - 0.05, 0), min(high + 0.05, 1))
    _update_axis(axes, [each.update for each in run.evaluations])
    return Chart("Accuracy on held-out tasks", _svg(figure, "accuracy"), labels, "Bars: 95% intervals.")


def set_chart(census: Census) -> Chart | None:
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
    axes.set_ylim(0, 1.18 * max(bottom))
    axes.set_xlim(sizes[0] - 0.7, sizes[-1] + 0.7)
    axes.locator_params(axis="both", integer=True)
    if len(sizes) <= 16:
        axes.set_xticks(sizes)
    axes.set_xlabel("K", fontsize=8, color=_INKS["muted"])
    return Chart(
        "Size of the active sets", _svg(figure, "sets"), labels, "Events by K, their number of trained outputs."
    )


def _update_axis(axes: Any, numbers: Sequence[int]) -> None:
    low, high = min(numbers), max(numbers)
    margin = max((high - low) * 0.03, 0.5 if low == high else 0)
    axes.set_xlim(low - margin, high + margin)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_xlabel("update", fontsize=8, color=_INKS["muted"])


def window_of(updates: int) -> int:
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
    """The figure as an element of the page: ids of its own, the page's fonts and colours, few digits."""
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
    text = (
        re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text.split(">", 1)[0])
        + ">"
        + text.split(">", 1)[1]
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    for ink, color in _INKS.items():
        text = text.replace(color, f"var(--{ink})")
    return text.replace("<svg", '<svg role="img"', 1)


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def short(value: Any) -> str:
    """A number in few characters; a dash where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    return (f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}").replace("-", "−")
