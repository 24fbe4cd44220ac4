"""From a recipe to trained weights: sample a batch, learn from it, and write down what happened."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from srpo_env.config import Recipe
from srpo_env.errors import PolicyError
from srpo_env.evaluation import (
    SetResult,
    by_key,
    by_set,
    interval_of,
    macro,
    mean_over_sets,
    record,
    result_of,
    scores_by_task,
)
from srpo_env.eventlog import read_events
from srpo_env.jobs import Job
from srpo_env.protocols import Trainer
from srpo_env.records import Event
from srpo_env.report import write_report
from srpo_env.runs import Run, checkpoints
from srpo_env.sampling_metrics import sampling_metrics

Say = Callable[[str], None]


class TrainResult(BaseModel):
    """What a training run came to.

    `accuracy_before` and `accuracy_after` are of the baseline workflow where the recipe names one (one sampled output),
    else the team's; the team's stand beside them.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    seconds: float
    updates: int
    held_out: int
    accuracy_before: float | None
    accuracy_after: float | None
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None
    team_accuracy_before: float | None
    team_accuracy_after: float | None
    team_interval_before: tuple[float, float] | None
    team_interval_after: tuple[float, float] | None
    gain: float | None
    gain_interval: tuple[float, float] | None
    checkpoint: str
    report: str


def train(
    target: str | Path | Recipe = "arithmetic_tiny",
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    say: Say | None = None,
) -> TrainResult:
    """Runs a recipe: the same as the command `srpo-env train`.

    Args:
        target: A recipe that ships, a file, a run folder, or a Recipe.
        overrides: `key=value` texts with dotted keys.
        resume: Goes on from the last checkpoint of the recipe's run folder.
        say: Gets each line of text that a person would want to read.

    Raises:
        InvalidInput: The recipe, or something it names, breaks a rule; nothing was written.
        TrainingDiverged: A loss or a gradient is not finite; what was logged stays readable.
    """
    started = time.perf_counter()
    say = say or (lambda line: None)
    job = Job.prepare(target, overrides)
    use_threads(job.recipe.threads)
    trainer = job.trainer()
    run, checkpoint = Run.resume(job.recipe, job.name) if resume else (Run.create(job.recipe, job.name), None)
    try:
        with run, _few_garbage_searches():
            result = _run(job, run, trainer, checkpoint, say, started)
        write_report(run.folder)
    except BaseException as error:
        resumable = f"; `srpo-env train {run.folder} --resume` goes on from its last checkpoint"
        error.add_note(f"The run lies in {run.folder}{resumable if checkpoints(run.folder) else ''}.")
        raise
    _sum_up(result, job, say)
    return result


def plan_of(job: Job) -> str:
    """Returns what a job will do, in one line."""
    recipe, graph = job.recipe, job.graph
    return (
        f"{job.name}: {graph.workflow.name} (K <= {graph.k_max}), {len(job.tasks)} tasks, {recipe.updates} updates of "
        f"{recipe.rollout.tasks_per_batch} tasks x {recipe.rollout.group_size} episodes, seed {recipe.seed}"
    )


_OBJECTS_BEFORE_A_SEARCH = 50_000


@contextmanager
def _few_garbage_searches() -> Iterator[None]:
    """Takes all objects that exist out of the garbage collector's sight, and lets it search more seldom.

    Hundreds of thousands of them are of the imports; looking through them took a tenth of a tiny model's training. A
    batch of events is made of tens of thousands, none of them in a cycle: searched as often as Python does by itself,
    they took another twentieth.
    """
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BEFORE_A_SEARCH, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _run(job: Job, run: Run, trainer: Trainer, checkpoint: Path | None, say: Say, started: float) -> TrainResult:
    recipe, first = job.recipe, 1
    say(f"{plan_of(job)}; run {run.folder}")
    if checkpoint is None:
        before = _evaluate(job, run, 0, say)
    else:
        trainer.load(checkpoint)
        first = int(checkpoint.name) + 1
        before = _first_trial(job, run)
        say(f"resumed after update {first - 1}, from {checkpoint}")
        if _due(recipe.eval.every_updates, first - 1, recipe.updates):
            _evaluate(job, run, first - 1, say)  # it came after the checkpoint, and is aside
    for update in range(first, recipe.updates + 1):
        line = _update(job, run, trainer, update)
        if update in (first, recipe.updates) or update % max(1, recipe.updates // 40) == 0:
            say(f"update {update}/{recipe.updates}  {line}  {time.perf_counter() - started:.0f} s")
        if _due(recipe.log.checkpoint_every_updates, update, recipe.updates):
            run.checkpoint(update, trainer.save)
        if _due(recipe.eval.every_updates, update, recipe.updates):
            _evaluate(job, run, update, say)
    checkpoint = run.checkpoint(recipe.updates, trainer.save)
    after = _evaluate(job, run, recipe.updates, say)
    result = _result(job, run, before, after, checkpoint, time.perf_counter() - started)
    run.record("result", recipe.updates, **result.model_dump())
    return result


def _update(job: Job, run: Run, trainer: Trainer, update: int) -> str:
    """Samples and learns from one batch; returns the line that tells of it."""
    from srpo_env.batch import EventBatch

    start, written = time.perf_counter(), run.log.seconds
    episodes = job.sample(run, update)
    _require_one_sampled(episodes, update)
    events = [event for episode in episodes for event in episode]
    sampled, writing = time.perf_counter(), run.log.seconds - written
    job.rest()
    metrics = trainer.update(EventBatch.from_events(events))
    learned = time.perf_counter()
    metrics |= sampling_metrics(events, job.graph)
    end = time.perf_counter()
    metrics |= {
        "seconds_sampling": sampled - start - writing,
        "seconds_logging": writing + end - learned,
        "seconds": end - start,
        "tokens_per_second": metrics["tokens_sampled"] / (end - start),
    }
    run.record("update", update, metrics=metrics)
    shown = {
        "reward": metrics["reward_mean"],
        "clipped": metrics.get("clip_fraction_off_policy", float("nan")),
        "no signal": metrics.get("groups_without_signal", float("nan")),
        "K": metrics.get("set_size_mean", float("nan")),
        "routed": metrics.get("set_size_without_routers", float("nan")),
    }
    return "  ".join(f"{name} {value:.2f}" for name, value in shown.items() if value == value)


def _require_one_sampled(episodes: Sequence[Sequence[Event]], update: int) -> None:
    """Stops where a server or a tool is down for all: to go on would use up the tasks and teach nothing."""
    ends = [events[-1] for events in episodes]
    if any(end.truncated_by not in ("policy_error", "tool_unavailable") for end in ends):
        return
    said = [each.error for each in ends[0].members]
    said += [call.result for each in ends[0].members for call in each.tool_calls if call.unavailable]
    raise PolicyError(
        f"update {update}: none of its {len(episodes)} episodes could be sampled; the first one: "
        f"{next(filter(None, said), ends[0].truncated_by)} Mend it, and resume the run."
    )


@dataclass(frozen=True)
class Trial:
    """One evaluation: figures of the team and of the baseline workflow by task set, and the scores behind them."""

    team_sets: dict[str, SetResult]
    baseline_sets: dict[str, SetResult] | None
    scores: dict[str, dict[str, float]]
    """By set, the mean score of each scored task: of the baseline workflow where there is one, else of the team."""

    @property
    def team(self) -> SetResult:
        """The team's mean over the sets."""
        return macro(self.team_sets)

    @property
    def baseline(self) -> SetResult | None:
        """The baseline workflow's mean over the sets, if there is one."""
        return None if self.baseline_sets is None else macro(self.baseline_sets)

    @property
    def shown(self) -> SetResult:
        """The baseline workflow's figures where there is one, else the team's."""
        return self.baseline or self.team


def _evaluate(job: Job, run: Run, update: int, say: Say) -> Trial:
    team, baseline = job.try_held_out(run, update=update, samples=job.recipe.eval.samples)
    trial = _trial(job, team, baseline)
    parts = by_key(job, team)
    record(run, update, "team", trial.team_sets, parts)
    if trial.baseline_sets is not None:
        record(run, update, "baseline", trial.baseline_sets)
    run.mark_best()
    shown = f"team {trial.team}" if trial.baseline is None else f"one output {trial.baseline}, team {trial.team}"
    say(f"held out ({trial.team.tasks} tasks) after {update} updates: {shown}")
    for name, part in parts.items():
        say(f"  {name} ({part.tasks} tasks): team {part}, {part.members:.2f} outputs an episode")
    return trial


def _first_trial(job: Job, run: Run) -> Trial:
    """The evaluation before the first update, from the log."""
    found: dict[str, dict[str, list[Event]]] = {"eval-0": {}, "baseline-0": {}}
    for event in read_events(run.folder):
        if event.batch in found:
            found[event.batch].setdefault(event.episode, []).append(event)
    team, baseline = (list(episodes.values()) for episodes in found.values())
    return _trial(job, team, baseline)


def _trial(job: Job, team: list[list[Event]], baseline: list[list[Event]] | None) -> Trial:
    shown = team if job.baseline is None or baseline is None else baseline
    return Trial(
        team_sets=by_set(job, team),
        baseline_sets=None if shown is team else by_set(job, shown),
        scores={name: scores_by_task(found) for name, found in job.by_set(shown).items()},
    )


def _result(job: Job, run: Run, before: Trial, after: Trial, checkpoint: Path, seconds: float) -> TrainResult:
    gain, gain_interval = mean_over_sets(
        _gain(scores, after.scores.get(name, {})) for name, scores in before.scores.items()
    )
    return TrainResult(
        run=str(run.folder),
        seconds=round(seconds, 3),
        updates=job.recipe.updates,
        held_out=before.shown.tasks,
        accuracy_before=before.shown.avg_at_k,
        accuracy_after=after.shown.avg_at_k,
        interval_before=before.shown.avg_at_k_interval,
        interval_after=after.shown.avg_at_k_interval,
        team_accuracy_before=before.team.avg_at_k,
        team_accuracy_after=after.team.avg_at_k,
        team_interval_before=before.team.avg_at_k_interval,
        team_interval_after=after.team.avg_at_k_interval,
        gain=gain,
        gain_interval=gain_interval,
        checkpoint=str(checkpoint),
        report=str(run.folder / "report.html"),
    )


def _gain(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float | None, tuple[float, float] | None]:
    """Mean difference of the tasks' scores, and its interval; None where no task was scored both times."""
    differences = [after[task] - score for task, score in before.items() if task in after]
    if not differences:
        return None, None
    return math.fsum(differences) / len(differences), interval_of([[each] for each in differences])


def _sum_up(result: TrainResult, job: Job, say: Say) -> None:
    def shown(accuracy: float | None, interval: tuple[float, float] | None) -> str:
        if accuracy is None or interval is None:
            return "not scored"
        return f"{accuracy:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"

    first = "one output" if job.baseline is not None else "team"
    say("")
    say(f"accuracy on {result.held_out} held-out tasks, with 95% intervals, in {result.seconds:.0f} s:")
    say(
        f"  {first:<11} {shown(result.accuracy_before, result.interval_before)} -> "
        f"{shown(result.accuracy_after, result.interval_after)}"
    )
    if job.baseline is not None:
        say(
            f"  {'team':<11} {shown(result.team_accuracy_before, result.team_interval_before)} -> "
            f"{shown(result.team_accuracy_after, result.team_interval_after)}"
        )
    say(f"report:      {result.report}")
    say(f"checkpoint:  {result.checkpoint}")
    say(f"next:        srpo-env rollout {result.run} --show 3")


class SampleResult(BaseModel):
    """What a rollout came to."""

    model_config = ConfigDict(frozen=True)

    run: str
    episodes: int
    events: int
    reward_mean: float | None
    unscored: int


def sample(
    target: str | Path | Recipe, overrides: Iterable[str] = (), *, episodes: int | None = None, say: Say | None = None
) -> SampleResult:
    """Runs episodes of a recipe's team, or of a bare workflow with the tiny policy, and logs them; nothing is trained.

    Args:
        target: A recipe, a workflow, a file, or a run folder, whose last checkpoint is sampled.
        overrides: `key=value` texts with dotted keys.
        episodes: How many; None: one batch of the recipe.
        say: Gets each line of text that a person would want to read.

    Raises:
        InvalidInput: The recipe, or something it names, breaks a rule; nothing was written.
    """
    say = say or (lambda line: None)
    job = Job.prepare(target, overrides, name_suffix="-rollout", last_checkpoint=True, bare_workflows=True)
    use_threads(job.recipe.threads)
    with Run.create(job.recipe, job.name) as run:
        say(f"{job.name}: {job.graph.workflow.name} (K <= {job.graph.k_max}); run {run.folder}")
        done = job.sample(run, 1, episodes=episodes)
    write_report(run.folder)
    found = result_of(done)
    return SampleResult(
        run=str(run.folder),
        episodes=len(done),
        events=sum(map(len, done)),
        reward_mean=found.avg_at_k,
        unscored=found.unscored,
    )


def _due(every: int | None, update: int, last: int) -> bool:
    return every is not None and update % every == 0 and update != last


def use_threads(threads: int | None) -> None:
    """Sets the threads of torch on the CPU; None leaves torch's own choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
