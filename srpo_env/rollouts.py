"""Many episodes at once: whose turn it is, what is sampled together, and what is logged."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srpo_env.episode import Episode
from srpo_env.errors import InvalidInput, PolicyError, nearest
from srpo_env.eventlog import EventLog, Journal
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow
from srpo_env.portal import run
from srpo_env.protocols import Policy, RequestKey, Sampled, SampleRequest
from srpo_env.records import Event, Sampling
from srpo_env.spec import Workflow
from srpo_env.tasks import Task, TaskSet, load_tasks
from srpo_env.toolcalls import Tools, require_tools
from srpo_env.toolset import ToolsGiven, load_tools
from srpo_env.views import Ids

SamplingOf = Callable[[str], Sampling]
"""Gives an agent's sampling settings."""


@dataclass(frozen=True)
class Plan:
    """What a batch of episodes is made of: everything that stays the same from one episode to the next.

    Attributes:
        graph: The workflow.
        tasks: The task set, for its rewards.
        policies: Policies by label.
        sampling: Settings by agent.
        tools: Tools by name.
        deterministic: In-process sampling waits until no episode can go on without it.
        max_in_flight: Most episodes that run at once.
        run: Id of the run, for the record.
    """

    graph: Graph
    tasks: TaskSet
    policies: Mapping[str, Policy]
    sampling: SamplingOf = lambda agent: Sampling()
    tools: Tools = field(default_factory=dict)
    deterministic: bool = True
    max_in_flight: int = 512
    run: str = ""

    def __post_init__(self) -> None:
        require_tools(self.graph.workflow, self.tools)
        for name, agent in self.graph.workflow.agents.items():
            if agent.policy not in self.policies:
                raise InvalidInput(
                    f"agent {name!r} is sampled from policy {agent.policy!r}, which is not among the policies "
                    f"{', '.join(self.policies) or '(none)'}.{nearest(agent.policy, self.policies)} Add it under "
                    "`policies`."
                )


class Turns:
    """Decides when waiting requests are sampled.

    A request to an in-process policy waits until no episode can go on without it; then all that wait are sampled in the
    order (task, episode, step, member), so that a batch's rows depend on nothing but the seed. Requests to other
    policies, and all of them when not `deterministic`, go at once.
    """

    def __init__(
        self, policies: Mapping[str, Policy], tasks: asyncio.TaskGroup, *, going: int, deterministic: bool
    ) -> None:
        self._policies = policies
        self._tasks = tasks
        self._going = going
        self._deterministic = deterministic
        self._waiting: list[_Set] = []

    async def sample(self, labels: Sequence[str], requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns the outcomes of one set, in order; `labels` names each member's policy."""
        at_once: dict[str, list[int]] = {}
        held: list[int] = []
        for at, label in enumerate(labels):
            wait = self._deterministic and self._policies[label].in_process
            (held if wait else at_once.setdefault(label, [])).append(at)
        due = _Set(labels, requests, held, asyncio.get_running_loop().create_future())
        if held:
            self._waiting.append(due)
            self.ended()
        if at_once:
            async with asyncio.TaskGroup() as group:
                for label, places in at_once.items():
                    group.create_task(self._fill(due, label, places))
        if held:
            await due.complete
        return [due.outcomes[at] for at in range(len(requests))]

    async def _fill(self, due: _Set, label: str, places: Sequence[int]) -> None:
        found = await _sampled(label, self._policies[label], [due.requests[at] for at in places])
        due.outcomes.update(zip(places, found, strict=True))

    def ended(self) -> None:
        """One of those going waits, or has ended for good."""
        self._going -= 1
        if self._going == 0 and self._waiting:
            self._tasks.create_task(self._sample_waiting())

    async def _sample_waiting(self) -> None:
        sets, self._waiting = self._waiting, []
        rows = sorted(((due, at) for due in sets for at in due.held), key=lambda row: row[0].requests[row[1]].key)
        for label in dict.fromkeys(due.labels[at] for due, at in rows):
            mine = [(due, at) for due, at in rows if due.labels[at] == label]
            found = await _sampled(label, self._policies[label], [due.requests[at] for due, at in mine])
            for (due, at), outcome in zip(mine, found, strict=True):
                due.outcomes[at] = outcome
        self._going += len(sets)
        for due in sets:
            if not due.complete.done():
                due.complete.set_result(None)


@dataclass(slots=True)
class _Set:
    """An active set on its way: the outcomes that are there, by place, and whether those it was held for are."""

    labels: Sequence[str]
    requests: Sequence[SampleRequest]
    held: Sequence[int]
    complete: asyncio.Future[None]
    outcomes: dict[int, Sampled] = field(default_factory=dict)


async def _sampled(label: str, policy: Policy, requests: Sequence[SampleRequest]) -> list[Sampled]:
    outcomes = await policy.sample(requests)
    if len(outcomes) != len(requests):
        raise PolicyError(
            f"policy {label!r} gave {len(outcomes)} outcomes for {len(requests)} requests; a policy gives one each."
        )
    return outcomes


@dataclass(frozen=True, slots=True)
class Start:
    """One episode to be run: its task, its place in the batch, and the seed of the batch."""

    task: Task
    batch: str
    group: str
    task_index: int
    episode_index: int
    seed: int

    @property
    def episode(self) -> str:
        """The episode's id."""
        return f"{self.group}/{self.episode_index}"


def starts(tasks: Sequence[Task], *, group_size: int, batch: str, seed: int) -> list[Start]:
    """Returns `group_size` episodes for each task, in order."""
    seen: dict[str, int] = {}
    found = []
    for at, task in enumerate(tasks):
        name = f"{task.set}/{task.id}"
        seen[name] = seen.get(name, 0) + 1
        group = f"{batch or seed}/{name}" + (f"#{seen[name]}" if seen[name] > 1 else "")
        found += [Start(task, batch, group, at, episode, seed) for episode in range(group_size)]
    return found


async def run_episodes(
    plan: Plan,
    episodes: Sequence[Start],
    *,
    log: EventLog | Journal | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> list[list[Event]]:
    """Runs episodes side by side, at most `plan.max_in_flight` at once, and logs each event as it happens.

    Returns:
        The events of each episode, in the order of `episodes`, whatever finished first.
    """
    done: list[list[Event]] = [[] for _ in episodes]
    queue = enumerate(_begun(plan, episodes))
    workers = min(plan.max_in_flight, len(episodes))

    def take(event: Event) -> None:
        if log is not None:
            log.append(event)
        if on_event is not None:
            on_event(event)

    async def work(turns: Turns) -> None:
        for at, (start, episode) in queue:
            done[at] = await _walk(plan, start, episode, turns, take)
        turns.ended()

    try:
        async with asyncio.TaskGroup() as group:
            turns = Turns(plan.policies, group, going=workers, deterministic=plan.deterministic)
            for _ in range(workers):
                group.create_task(work(turns))
    except BaseExceptionGroup as errors:
        first = _first(errors)
        raise first from first.__cause__
    return done


def _begun(plan: Plan, episodes: Sequence[Start]) -> Iterator[tuple[Start, Episode]]:
    """Begins one episode after the other, when it is asked for; the mates of a group share their first prompts."""
    mate = None
    for start in episodes:
        ids = Ids(run=plan.run, group=start.group, episode=start.episode, batch=start.batch)
        mate = Episode(plan.graph, start.task, plan.tasks, ids=ids, tools=plan.tools, mate=mate)
        yield start, mate


async def _walk(plan: Plan, start: Start, episode: Episode, turns: Turns, take: Callable[[Event], None]) -> list[Event]:
    while not episode.done:
        due = episode.active_set
        settings = [plan.sampling(each.slot.agent) for each in due]
        keys = [RequestKey(start.task_index, start.episode_index, len(episode.events), at) for at in range(len(due))]
        requests = [
            SampleRequest(each.messages, sampling, seed_of(start.seed, start.group, key), key, each.earlier)
            for each, sampling, key in zip(due, settings, keys, strict=True)
        ]
        outcomes = await turns.sample([each.policy for each in due], requests)
        take(await episode.advance(outcomes, settings))
    return episode.events


def seed_of(seed: int, group: str, key: RequestKey) -> int:
    """Returns the seed of one row: 63 bits that depend on the run's seed and on the row's place, and on nothing else.

    A group is a task in a batch; of a task that stands twice in a batch, each time has its own.
    """
    text = f"{seed}/{group}/{key.episode}/{key.step}/{key.member}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1


def rollout(
    workflow: str | Path | Workflow,
    tasks: str | Path | TaskSet | Sequence[Any] = "arithmetic",
    *,
    policies: Policy | Mapping[str, Policy],
    episodes: int = 64,
    group_size: int = 8,
    seed: int = 0,
    split: str = "train",
    params: Mapping[str, Any] | None = None,
    sampling: Sampling | None = None,
    tools: ToolsGiven | None = None,
    deterministic: bool = True,
    max_in_flight: int = 512,
    run_folder: str | Path | None = None,
) -> EventLog:
    """Runs episodes of a workflow and returns their log.

    Args:
        workflow: A name that ships, a path or a Workflow.
        tasks: See `load_tasks`.
        policies: One policy for all agents, or policies by label.
        episodes: Number of episodes: `episodes / group_size` tasks, taken from the front of the set.
        group_size: Episodes of the same task.
        seed: Decides the sampling.
        split: Split of the task set.
        params: Values for the workflow's params.
        sampling: Settings of all agents.
        tools: See `srpo_env.make`.
        deterministic: See `Turns`.
        max_in_flight: Most episodes that run at once.
        run_folder: Where the events are logged as they happen; None: in memory.

    Raises:
        InvalidInput: The workflow, the tasks or a number breaks a rule.

    Example:
        >>> from srpo_env.agents import ScriptedPolicy
        >>> log = rollout("single_agent", policies=ScriptedPolicy(lambda request: "4"), episodes=4, group_size=2)
        >>> len(log)
        4
    """
    if group_size < 1 or episodes < 1 or episodes % group_size:
        raise InvalidInput(
            f"episodes {episodes}, group_size {group_size}; episodes is a positive multiple of group_size: every task "
            "gets group_size of them."
        )
    found = load_tasks(tasks, split=split)
    count = episodes // group_size
    chosen = [found.tasks[at % len(found)] for at in range(count)]
    settings = sampling or Sampling()
    graph = compile_graph(load_workflow(workflow, params=params))
    plan = Plan(
        graph=graph,
        tasks=found,
        policies=policies if isinstance(policies, Mapping) else _Same(policies),
        sampling=lambda agent: settings,
        tools=load_tools(graph.workflow, given=tools),
        deterministic=deterministic,
        max_in_flight=max_in_flight,
    )
    log = EventLog() if run_folder is None else EventLog.writing(run_folder)
    episodes_ = starts(chosen, group_size=group_size, batch="", seed=seed)
    done = run(functools.partial(run_episodes, plan, episodes_, log=None if run_folder is None else log))
    if run_folder is None:
        log.extend(event for each in done for event in each)
    log.close()
    return log


class _Same(dict[str, Policy]):
    """One policy under every label."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(main=policy)
        self._policy = policy

    def __contains__(self, label: object) -> bool:
        return True

    def __missing__(self, label: str) -> Policy:
        return self._policy


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error itself: a reader wants what went wrong, not the group it was caught in."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
