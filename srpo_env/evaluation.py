"""How good a team is: accuracy on held-out tasks, with intervals and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from srpo_env.config import Recipe
from srpo_env.records import Event


class SetResult(BaseModel):
    """Figures of one task set, or of several together.

    Attributes:
        tasks: Tasks tried.
        samples: Episodes of each task.
        accuracy: Mean score of the scored episodes (Avg@k: the mean over tasks of their mean).
        interval: 95% interval of the accuracy: Wilson's for one right-or-wrong episode per task, else a bootstrap over
            tasks.
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
    accuracy: float | None
    interval: tuple[float, float] | None
    unscored: int = 0
    truncated: int = 0
    members: float = 0.0
    output_tokens: int = 0
    tool_calls: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0

    def __str__(self) -> str:
        if self.accuracy is None or self.interval is None:
            return "not scored"
        return f"{self.accuracy:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


class EvalResult(BaseModel):
    """What an evaluation found: the recipe's team, and the baseline workflow where the recipe names one."""

    model_config = ConfigDict(frozen=True)

    run: str | None = None
    sets: dict[str, SetResult]
    by: dict[str, SetResult] = {}
    """Figures of the tasks of each value of `eval.by`, such as `difficulty 2`."""
    macro: SetResult
    baseline: SetResult | None = None


def result_of(episodes: Iterable[Sequence[Event]]) -> SetResult:
    """Returns the figures of finished episodes.

    Args:
        episodes: The events of each episode; episodes of one task share `Event.task`.
    """
    episodes = [each for each in episodes if each]
    scores: dict[str, list[float]] = {}
    samples = Counter(events[-1].task for events in episodes)
    for events in episodes:
        if events[-1].reward is not None:
            scores.setdefault(events[-1].task, []).append(events[-1].reward)
    means = [sum(found) / len(found) for found in scores.values()]
    members = [member for events in episodes for event in events for member in event.members]
    calls = [call for member in members for call in member.tool_calls]
    return SetResult(
        tasks=len(samples),
        samples=max(samples.values(), default=0),
        accuracy=math.fsum(means) / len(means) if means else None,
        interval=interval_of(list(scores.values())) if means else None,
        unscored=sum(events[-1].reward is None for events in episodes),
        truncated=sum(events[-1].truncated for events in episodes),
        members=len(members) / len(episodes) if episodes else 0.0,
        output_tokens=sum(len(member.output.output_ids or ()) for member in members),
        tool_calls=len(calls),
        model_seconds=math.fsum(member.output.seconds for member in members),
        tool_seconds=math.fsum(call.seconds for call in calls),
    )


def scores_by_task(episodes: Iterable[Sequence[Event]]) -> dict[str, float]:
    """Returns the mean score of each task that has a scored episode."""
    scores: dict[str, list[float]] = {}
    for events in episodes:
        if events[-1].reward is not None:
            scores.setdefault(events[-1].task, []).append(events[-1].reward)
    return {task: math.fsum(found) / len(found) for task, found in scores.items()}


def interval_of(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
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
    from srpo_env.jobs import Job
    from srpo_env.report import write_report
    from srpo_env.runs import Run

    say = say or (lambda line: None)
    job = Job.prepare(target, overrides, name_suffix="-eval", last_checkpoint=True)
    count = samples or job.recipe.eval.samples
    with Run.create(job.recipe, job.name) as run:
        say(f"{job.name}: {len(job.held_out)} tasks, {count} samples each; run {run.folder}")
        team, baseline = job.try_held_out(run, update=0, samples=count)
        result = EvalResult(
            run=str(run.folder),
            sets={name: result_of(episodes) for name, episodes in job.by_set(team).items()},
            by={name: result_of(episodes) for name, episodes in job.by_key(team).items()},
            macro=macro([result_of(episodes) for episodes in job.by_set(team).values()]),
            baseline=None if baseline is None else result_of(baseline),
        )
        for name, found in (result.sets | result.by).items():
            run.record("eval", 0, workflow="team", set=name, **found.model_dump())
            say(
                f"{name}: team {found}, {found.tasks} tasks, {found.members:.2f} outputs an episode, "
                f"{found.output_tokens} output tokens, {found.unscored} unscored"
            )
        if result.baseline is not None:
            run.record("eval", 0, workflow="baseline", **result.baseline.model_dump())
            say(f"baseline {job.recipe.eval.baseline}: {result.baseline}")
    write_report(run.folder)
    return result


def macro(results: Sequence[SetResult]) -> SetResult:
    """Returns the mean over task sets, each counting once; its interval treats the sets as fixed.

    half width = sqrt(sum of squared half widths) / number of sets
    """
    scored = [
        (each.accuracy, each.interval) for each in results if each.accuracy is not None and each.interval is not None
    ]
    accuracy = math.fsum(value for value, _ in scored) / len(scored) if scored else None
    interval = None
    if accuracy is not None:
        half = math.sqrt(math.fsum(((high - low) / 2) ** 2 for _, (low, high) in scored)) / len(scored)
        interval = scored[0][1] if len(scored) == 1 else (accuracy - half, accuracy + half)
    return SetResult(
        tasks=sum(each.tasks for each in results),
        samples=max((each.samples for each in results), default=0),
        accuracy=accuracy,
        interval=interval,
        unscored=sum(each.unscored for each in results),
        truncated=sum(each.truncated for each in results),
        members=math.fsum(each.members for each in results) / len(results) if results else 0.0,
        output_tokens=sum(each.output_tokens for each in results),
        tool_calls=sum(each.tool_calls for each in results),
        model_seconds=math.fsum(each.model_seconds for each in results),
        tool_seconds=math.fsum(each.tool_seconds for each in results),
    )
