"""How good a team is: accuracy on held-out tasks, with intervals and what it cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pydantic import BaseModel, ConfigDict

from srpo_env.config import Recipe
from srpo_env.jobs import Job
from srpo_env.records import Event
from srpo_env.report import write_report
from srpo_env.runs import Run, write_whole
from srpo_env.tables import aligned, markdown

Interval = tuple[float, float]


class SetResult(BaseModel):
    """Figures of one task set, or of several together.

    Attributes:
        tasks: Tasks tried.
        samples: k, episodes of each task.
        avg_at_k: Mean score of the scored episodes: the mean over tasks of their mean; the accuracy where scores are
            right or wrong.
        avg_at_k_interval: Its 95% interval: Wilson's for one right-or-wrong episode per task, else a bootstrap over
            tasks.
        pass_at_k: Mean over tasks of their best score; None for k = 1.
        pass_at_k_interval: Its 95% interval.
        measures: What else the reward measures, such as f1: means over tasks of their mean.
        unscored: Episodes that could not be scored (no reference answer, or the policy failed); they are in no mean.
        truncated: Episodes that were cut off.
        members: Members of an episode's sets, added up; the mean over episodes.
        output_tokens: Sampled tokens.
        tool_calls: Calls of tools.
        model_seconds, tool_seconds: Seconds of the outputs and the tool calls, added up.
    """

    model_config = ConfigDict(frozen=True)

    tasks: int
    samples: int
    avg_at_k: float | None
    avg_at_k_interval: Interval | None
    pass_at_k: float | None = None
    pass_at_k_interval: Interval | None = None
    measures: dict[str, float] = {}
    unscored: int = 0
    truncated: int = 0
    members: float = 0.0
    output_tokens: int = 0
    tool_calls: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0

    def __str__(self) -> str:
        return "not scored" if self.avg_at_k is None else f"{self.avg_at_k:.3f} {_shown(self.avg_at_k_interval)}"


class EvalResult(BaseModel):
    """What an evaluation found: the recipe's team, and the baseline workflow where the recipe names one.

    Attributes:
        sets: The team's figures by task set.
        by: Those of the tasks of each value of `eval.by`, such as `difficulty 2`.
        macro: Means over the sets, each counting once.
        baseline: As `macro`, of the baseline workflow.
        baseline_sets: As `sets`, of the baseline workflow.
    """

    model_config = ConfigDict(frozen=True)

    run: str | None = None
    sets: dict[str, SetResult]
    by: dict[str, SetResult] = {}
    macro: SetResult
    baseline: SetResult | None = None
    baseline_sets: dict[str, SetResult] = {}

    def rows(self) -> list[tuple[str, ...]]:
        """The figures as a table: a head, a row for each set and one for their mean, and then those of `by`.

        The baseline's are behind the team's.

        A column that is the same as another, or empty, is left out.
        """
        figures = [*_named("", self.sets, self.macro), *self.by.items()]
        figures += _named("baseline: ", self.baseline_sets, self.baseline)
        measures = list(dict.fromkeys(name for _, found in figures for name in found.measures))
        columns: dict[str, Callable[[SetResult], str]] = {
            "tasks": lambda found: str(found.tasks),
            "samples": lambda found: str(found.samples),
            "avg@k": lambda found: _number(found.avg_at_k),
            "95% interval": lambda found: _shown(found.avg_at_k_interval),
        }
        if any(found.pass_at_k_interval for _, found in figures):
            columns["pass@k"] = lambda found: _number(found.pass_at_k)
            columns["its interval"] = lambda found: _shown(found.pass_at_k_interval)
        columns |= {name: partial(_measure, name) for name in measures}
        columns["outputs an episode"] = lambda found: f"{found.members:.2f}"
        columns["output tokens"] = lambda found: f"{found.output_tokens:,}"
        if any(found.tool_calls for _, found in figures):
            columns["tool calls"] = lambda found: f"{found.tool_calls:,}"
        columns["unscored"] = lambda found: str(found.unscored)
        return [("set", *columns), *((name, *(of(found) for of in columns.values())) for name, found in figures)]


def _named(prefix: str, sets: Mapping[str, SetResult], whole: SetResult | None) -> list[tuple[str, SetResult]]:
    """The rows of a workflow: its sets and their mean, which one set alone does not need."""
    rows = [(prefix + name, found) for name, found in sets.items()]
    return rows if whole is None or len(sets) == 1 else [*rows, (prefix + "macro", whole)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _shown(interval: Interval | None) -> str:
    return "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _measure(name: str, found: SetResult) -> str:
    return _number(found.measures.get(name))


def result_of(episodes: Iterable[Sequence[Event]]) -> SetResult:
    """Returns the figures of finished episodes.

    Args:
        episodes: The events of each episode; episodes of one task share `Event.task`.
    """
    episodes = [each for each in episodes if each]
    ends = [events[-1] for events in episodes]
    scored = [end for end in ends if end.reward is not None]
    scores = by_task((end.task, end.reward) for end in scored if end.reward is not None)
    samples = Counter(end.task for end in ends)
    best = [[max(found)] for found in scores.values()] if max(samples.values(), default=0) > 1 else []
    members = [member for events in episodes for event in events for member in event.members]
    calls = [call for member in members for call in member.tool_calls]
    return SetResult(
        tasks=len(samples),
        samples=max(samples.values(), default=0),
        avg_at_k=mean_of_means(scores.values()),
        avg_at_k_interval=interval_of(list(scores.values())) if scores else None,
        pass_at_k=mean_of_means(best),
        pass_at_k_interval=interval_of(best) if best else None,
        measures=_measures(scored),
        unscored=len(ends) - len(scored),
        truncated=sum(end.truncated for end in ends),
        members=len(members) / len(episodes) if episodes else 0.0,
        output_tokens=sum(len(member.output.output_ids or ()) for member in members),
        tool_calls=len(calls),
        model_seconds=math.fsum(member.output.seconds for member in members),
        tool_seconds=math.fsum(call.seconds for call in calls),
    )


def _measures(ends: Sequence[Event]) -> dict[str, float]:
    """Means over tasks of their mean measures; an episode without a measure is not in its mean."""
    names = dict.fromkeys(name for end in ends for name in end.measures)
    found = {name: by_task((end.task, end.measures[name]) for end in ends if name in end.measures) for name in names}
    return {name: mean_of_means(values.values()) or 0.0 for name, values in found.items()}


def by_task(scores: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Returns the scores of each task."""
    found: dict[str, list[float]] = {}
    for task, score in scores:
        found.setdefault(task, []).append(score)
    return found


def mean_of_means(scores: Iterable[Sequence[float]]) -> float | None:
    """Returns the mean over tasks of their mean; None where there is none."""
    means = [math.fsum(found) / len(found) for found in scores]
    return math.fsum(means) / len(means) if means else None


def scores_by_task(episodes: Iterable[Sequence[Event]]) -> dict[str, float]:
    """Returns the mean score of each task that has a scored episode."""
    ends = (events[-1] for events in episodes)
    scores = by_task((end.task, end.reward) for end in ends if end.reward is not None)
    return {task: math.fsum(found) / len(found) for task, found in scores.items()}


def interval_of(scores: Sequence[Sequence[float]]) -> Interval:
    """95% interval of the mean over tasks of their mean score.

    Args:
        scores: The scores of each task, at least one.

    Returns:
        Wilson's interval (Wilson, 1927) where each task has one score, 0 or 1; else a percentile bootstrap over tasks,
        which are the independent units (episodes of one task are not).

    >>> tuple(round(bound, 3) for bound in interval_of([[1.0]] * 8 + [[0.0]] * 2))
    (0.49, 0.943)
    """
    from scipy import stats

    if all(len(found) == 1 and found[0] in (0.0, 1.0) for found in scores):
        right = sum(int(found[0]) for found in scores)
        wilson = stats.binomtest(right, len(scores)).proportion_ci(method="wilson")
        return float(wilson.low), float(wilson.high)
    means = [sum(found) / len(found) for found in scores]
    if len(set(means)) == 1:
        return means[0], means[0]
    import numpy as np

    found = stats.bootstrap(
        (np.asarray(means),), np.mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return float(found.low), float(found.high)


def evaluate(
    target: str | Recipe,
    overrides: Iterable[str] = (),
    *,
    samples: int | None = None,
    say: Callable[[str], None] | None = None,
) -> EvalResult:
    """Tries a recipe's team on its held-out tasks and logs the episodes in a run folder.

    Args:
        target: A recipe that ships, a file, or a run folder, whose last checkpoint is tried.
        overrides: `key=value` texts, see `load_recipe`.
        samples: Episodes of each task, in place of the recipe's.
        say: Gets each line of text that a person would want to read.

    Raises:
        InvalidInput: The recipe or an override breaks a rule.
    """
    say = say or (lambda line: None)
    job = Job.prepare(target, overrides, name_suffix="-eval", last_checkpoint=True)
    count = samples or job.recipe.eval.samples
    with Run.create(job.recipe, job.name) as run:
        say(f"{job.name}: {len(job.held_out)} tasks, {count} samples each; run {run.folder}")
        team, baseline = job.try_held_out(run, update=0, samples=count)
        sets, baseline_sets = by_set(job, team), by_set(job, baseline or [])
        parts = by_key(job, team)
        result = EvalResult(
            run=str(run.folder),
            sets=sets,
            by=parts,
            macro=macro(sets),
            baseline=None if baseline is None else macro(baseline_sets),
            baseline_sets=baseline_sets,
        )
        record(run, 0, "team", sets, parts)
        if baseline is not None:
            record(run, 0, "baseline", baseline_sets)
        write_whole(run.folder / "evaluation.json", result.model_dump_json(indent=2))
        write_whole(run.folder / "evaluation.md", markdown(result.rows()))
        for line in aligned(result.rows()):
            say(line)
    write_report(run.folder)
    return result


def by_set(job: Job, episodes: Sequence[list[Event]]) -> dict[str, SetResult]:
    """Returns the figures of held-out episodes by task set."""
    return {name: result_of(found) for name, found in job.by_set(episodes).items()}


def by_key(job: Job, episodes: Sequence[list[Event]]) -> dict[str, SetResult]:
    """Returns the figures of held-out episodes by the value of what `eval.by` names; none where it names nothing."""
    return {name: result_of(found) for name, found in job.by_key(episodes).items()}


def record(
    run: Run, update: int, workflow: str, sets: Mapping[str, SetResult], parts: Mapping[str, SetResult] | None = None
) -> None:
    """Writes a workflow's figures to metrics.jsonl: those of each set where there are several, then their mean.

    Args:
        run: Where they are written.
        update: Updates before the evaluation.
        workflow: `team` or `baseline`.
        sets: Figures by task set.
        parts: Figures by the value of `eval.by`.
    """
    for name, found in {**(sets if len(sets) > 1 else {}), **(parts or {})}.items():
        run.record("eval", update, workflow=workflow, set=name, **found.model_dump())
    run.record("eval", update, workflow=workflow, sets=list(sets), **macro(sets).model_dump())


def macro(results: Mapping[str, SetResult]) -> SetResult:
    """Returns the means over task sets, each counting once; costs are added up.

    Args:
        results: By set. A set without a figure is not in its mean.
    """
    found = list(results.values())
    average, interval = mean_over_sets([(each.avg_at_k, each.avg_at_k_interval) for each in found])
    best, best_interval = mean_over_sets([(each.pass_at_k, each.pass_at_k_interval) for each in found])
    names = dict.fromkeys(name for each in found for name in each.measures)
    measures = {name: statistics.fmean(m.measures[name] for m in found if name in m.measures) for name in names}
    return SetResult(
        tasks=sum(each.tasks for each in found),
        samples=max((each.samples for each in found), default=0),
        avg_at_k=average,
        avg_at_k_interval=interval,
        pass_at_k=best,
        pass_at_k_interval=best_interval,
        measures=measures,
        unscored=sum(each.unscored for each in found),
        truncated=sum(each.truncated for each in found),
        members=statistics.fmean(each.members for each in found) if found else 0.0,
        output_tokens=sum(each.output_tokens for each in found),
        tool_calls=sum(each.tool_calls for each in found),
        model_seconds=math.fsum(each.model_seconds for each in found),
        tool_seconds=math.fsum(each.tool_seconds for each in found),
    )


def mean_over_sets(figures: Iterable[tuple[float | None, Interval | None]]) -> tuple[float | None, Interval | None]:
    """Returns the mean of the sets' figures, and its 95% interval, which treats the sets as fixed.

        low = mean - sqrt(sum of (figure - its low)^2) / number of sets, and high in the same way

    The bounds recover the variance of each figure on their own side (MOVER; Zou and Donner, 2008).
    """
    known = [(value, interval) for value, interval in figures if value is not None and interval is not None]
    if len(known) <= 1:
        return known[0] if known else (None, None)
    mean = math.fsum(value for value, _ in known) / len(known)
    below = math.hypot(*(value - low for value, (low, _) in known)) / len(known)
    above = math.hypot(*(high - value for value, (_, high) in known)) / len(known)
    return mean, (mean - below, mean + above)
