"""Do many episodes at once give what each alone would, whoever finishes first and whatever fails?"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import srpo_env
from srpo_env import EventLog, Task
from srpo_env.errors import ContextExceeded, InvalidInput, PolicyError
from srpo_env.graph import Graph
from srpo_env.protocols import RequestKey, SampleRequest
from srpo_env.records import Event, Output, Sampling
from srpo_env.rewards import Score
from srpo_env.rollouts import Plan, Start, run_episodes, seed_of, starts
from srpo_env.tasks import load_tasks

TASKS = [Task(id=str(i), problem=f"{i}+{i}=", answers=(str(2 * i),)) for i in range(16)]
APPROVE, REJECT = "<verdict>approve</verdict>", "<verdict>reject</verdict>"
Policies = dict[str, Any]

MIXED = """
name: mixed
agents:
  near: {policy: near, prompt: "{{ task.problem }} near"}
  far: {policy: far, prompt: "{{ task.problem }} far"}
nodes:
  both: {agents: [near, far, near], next: [{if: visits.both > 1, to: end}, {to: both}]}
answer: visits.both
limits: {steps: 2}
"""


def verdict_of(request: SampleRequest) -> str:
    """What a solver or verifier says, by nothing but its seed: about half of the verdicts reject."""
    if "Check every step" in request.messages[-1].content:
        return APPROVE if request.seed % 2 else REJECT
    return f"\\boxed{{{request.seed % 7}}}"


def play(workflow: str, policies: Any, **values: Any) -> EventLog:
    given: dict[str, Any] = {"tasks": TASKS, "episodes": 64, "group_size": 4, "seed": 3}
    return srpo_env.rollout(workflow, policies=policies, **(given | values))


def plan_of(graph: Graph, policies: Policies, **values: Any) -> Plan:
    return Plan(graph=graph, tasks=load_tasks(TASKS), policies=policies, **values)


def run(plan: Plan, episodes: Sequence[Start], **values: Any) -> list[list[Event]]:
    return asyncio.run(run_episodes(plan, episodes, **values))


# The same seed and the same outputs give equal events.


@pytest.fixture(scope="module")
def one_at_a_time(scripted: Any) -> list[Event]:
    return play("solver_verifier", scripted(verdict_of), max_in_flight=1).events


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("in_flight", [1, 64, 256])
def test_events_do_not_depend_on_concurrency_nor_on_who_finishes_first(
    scripted: Any, one_at_a_time: list[Event], in_flight: int, in_process: bool
) -> None:
    delays = random.Random(in_flight)

    async def late(request: SampleRequest) -> str:
        await asyncio.sleep(delays.random() / 200)
        return verdict_of(request)

    log = play("solver_verifier", scripted(late, in_process=in_process), max_in_flight=in_flight)
    assert log.events == one_at_a_time


def test_members_of_a_set_stand_in_declared_order_whatever_finishes_first(scripted: Any) -> None:
    async def late(request: SampleRequest) -> str:
        await asyncio.sleep((3 - request.key.member) / 100)
        return f"\\boxed{{{request.key.member}}}"

    log = play("parallel_proposers", scripted(late, in_process=False), episodes=2, group_size=1)
    assert [[m.parse.value for m in event.members] for event in log] == [["0", "1", "2"]] * 2


def test_an_episode_is_the_same_alone_and_among_others(scripted: Any) -> None:
    alone = play("solver_verifier", scripted(verdict_of), episodes=4, group_size=4)
    assert play("solver_verifier", scripted(verdict_of)).events[: len(alone)] == alone.events


def test_another_seed_gives_other_events(scripted: Any) -> None:
    first, second = (play("solver_verifier", scripted(verdict_of), seed=seed).events for seed in (3, 4))
    assert first != second


# When in-process requests are sampled.


def test_every_set_of_one_step_is_sampled_in_one_batch_in_order(scripted: Any) -> None:
    policy = scripted(lambda request: "4")
    play("proposers_verifier", policy, episodes=4, group_size=2)
    assert policy.batches == [
        [(task, episode, 0, member) for task in (0, 1) for episode in (0, 1) for member in (0, 1, 2)],
        [(task, episode, 1, 0) for task in (0, 1) for episode in (0, 1)],
    ]


def test_a_batch_holds_whoever_is_due_at_whatever_step(scripted: Any) -> None:
    """Episode 0 ends after a step and makes room for episode 2; two run at once."""

    def said(request: SampleRequest) -> str:
        return APPROVE if request.key.episode == 0 else REJECT

    policy = scripted(said)
    play("solver_verifier", policy, episodes=3, group_size=3, max_in_flight=2)
    assert policy.batches == [
        [(0, 0, 0, 0), (0, 1, 0, 0)],
        [(0, 0, 1, 0), (0, 1, 1, 0)],
        [(0, 1, 2, 0), (0, 2, 0, 0)],
        [(0, 1, 3, 0), (0, 2, 1, 0)],
        [(0, 2, 2, 0)],
        [(0, 2, 3, 0)],
    ]


def test_a_batch_waits_for_an_episode_whose_remote_policy_is_still_at_work(compiled: Any, scripted: Any) -> None:
    graph = compiled(
        "name: two\nagents:\n  far: {policy: far, prompt: a}\n  near: {policy: near, prompt: b}\n"
        "nodes:\n  first: {agents: far, next: second}\n  second: {agents: near}\nanswer: second.text\n"
    )

    async def late(request: SampleRequest) -> str:
        await asyncio.sleep(request.key.episode / 50)
        return "x"

    near = scripted(lambda request: "4")
    policies = {"near": near, "far": scripted(late, in_process=False)}
    run(plan_of(graph, policies), starts(TASKS[:1], group_size=3, batch="", seed=0))
    assert near.batches == [[(0, 0, 1, 0), (0, 1, 1, 0), (0, 2, 1, 0)]]


def test_near_and_far_members_of_one_set_are_sampled_by_their_own_policies(compiled: Any, scripted: Any) -> None:
    near, far = scripted(lambda request: "near"), scripted(lambda request: "far", in_process=False)
    plan = plan_of(compiled(MIXED), {"near": near, "far": far})
    done = run(plan, starts(TASKS[:2], group_size=1, batch="", seed=0))
    assert [[m.output.text for m in e.members] for events in done for e in events] == [["near", "far", "near"]] * 4
    assert near.batches == [[(0, 0, s, 0), (0, 0, s, 2), (1, 0, s, 0), (1, 0, s, 2)] for s in (0, 1)]
    assert sorted(far.batches) == [[(0, 0, 0, 1)], [(0, 0, 1, 1)], [(1, 0, 0, 1)], [(1, 0, 1, 1)]]


def test_two_policies_in_process_are_each_sampled_once_a_batch(compiled: Any, scripted: Any) -> None:
    near, far = scripted(lambda request: "near"), scripted(lambda request: "far")
    run(plan_of(compiled(MIXED), {"near": near, "far": far}), starts(TASKS[:2], group_size=1, batch="", seed=0))
    assert [len(batch) for batch in near.batches] == [4, 4]
    assert [len(batch) for batch in far.batches] == [2, 2]


def test_when_not_deterministic_every_set_is_sampled_at_once(scripted: Any) -> None:
    policy = scripted(lambda request: "4")
    play("single_agent", policy, episodes=4, group_size=2, deterministic=False)
    assert sorted(policy.batches) == [[(task, episode, 0, 0)] for task in (0, 1) for episode in (0, 1)]


@settings(max_examples=settings.default.max_examples // 10)
@given(in_flight=st.integers(1, 9), episodes=st.integers(1, 9), near=st.booleans(), seed=st.integers(0, 9))
def test_no_mixture_of_policies_waits_for_ever(in_flight: int, episodes: int, near: bool, seed: int) -> None:
    class Random:
        version = 0

        def __init__(self, in_process: bool) -> None:
            self.in_process = in_process

        async def sample(self, requests: Sequence[SampleRequest]) -> list[Output]:
            for _ in range(requests[0].seed % 3):
                await asyncio.sleep(0)
            return [Output(text=verdict_of(request)) for request in requests]

        async def aclose(self) -> None:
            pass

    graph = srpo_env.make("solver_verifier").graph
    agents = graph.workflow.agents | {
        "verifier": graph.workflow.agents["verifier"].model_copy(update={"policy": "far"})
    }
    graph = Graph(**{**vars(graph), "workflow": graph.workflow.model_copy(update={"agents": agents})})
    plan = plan_of(graph, {"main": Random(near), "far": Random(not near)}, max_in_flight=in_flight)
    done = run(plan, starts(TASKS[:1], group_size=episodes, batch="", seed=seed))
    assert [events[-1].terminated for events in done] == [True] * episodes


# What fails.


def test_a_policy_that_fails_in_one_episode_leaves_the_others_alone(scripted: Any) -> None:
    def said(request: SampleRequest) -> Any:
        failures = {1: PolicyError("503"), 2: ContextExceeded("long")}
        return failures.get(request.key.episode, Output(text=r"\boxed{0}"))

    log = play("single_agent", scripted(said), episodes=4, group_size=4)
    assert [event.truncated_by for event in log] == [None, "policy_error", "context", None]
    assert [event.reward for event in log] == [1.0, None, 0.0, 1.0]


@pytest.mark.parametrize("in_process", [True, False])
def test_an_unexpected_exception_of_a_policy_surfaces_itself(scripted: Any, in_process: bool) -> None:
    def said(request: SampleRequest) -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        play("parallel_proposers", scripted(said, in_process=in_process))


def test_an_exception_keeps_its_cause(scripted: Any) -> None:
    def said(request: SampleRequest) -> str:
        raise KeyError("bug") from ValueError("cause")

    with pytest.raises(KeyError) as error:
        play("single_agent", scripted(said))
    assert isinstance(error.value.__cause__, ValueError)


def test_an_unexpected_exception_cancels_the_others_and_nothing_is_logged_afterwards(scripted: Any) -> None:
    cancelled: list[int] = []

    async def said(request: SampleRequest) -> str:
        if request.key.episode == 1:
            await asyncio.sleep(0.02)
            raise KeyError("bug")
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            cancelled.append(request.key.episode)
            raise
        return "4"

    async def both() -> int:
        with pytest.raises(KeyError, match="bug"):
            await run_episodes(plan, starts(TASKS[:1], group_size=3, batch="", seed=0), log=log)
        logged = len(log)
        await asyncio.sleep(0.05)
        return len(log) - logged

    log = EventLog()
    plan = plan_of(srpo_env.make("single_agent").graph, {"main": scripted(said, in_process=False)})
    assert asyncio.run(both()) == 0
    assert sorted(cancelled) == [0, 2]


def test_an_exception_of_a_reward_surfaces_itself(scripted: Any) -> None:
    def reward(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
        raise ZeroDivisionError("reward")

    with pytest.raises(ZeroDivisionError, match="reward"):
        play("single_agent", scripted(lambda request: "4"), tasks=load_tasks(TASKS, reward=reward))


@pytest.mark.parametrize("in_process", [True, False])
def test_a_policy_that_gives_too_few_outcomes_is_named(in_process: bool) -> None:
    class Short:
        version = 0

        def __init__(self) -> None:
            self.in_process = in_process

        async def sample(self, requests: Sequence[SampleRequest]) -> list[Output]:
            return [Output(text="4")] * (len(requests) - 1)

        async def aclose(self) -> None:
            pass

    with pytest.raises(PolicyError, match=r"policy 'main' gave 2 outcomes for 3 requests"):
        play("parallel_proposers", Short(), episodes=1, group_size=1)


def test_a_policy_that_is_not_there_is_named_with_its_agent(scripted: Any) -> None:
    with pytest.raises(InvalidInput, match=r"agent 'solver' is sampled from policy 'main'.*Did you mean 'main_'"):
        play("single_agent", {"main_": scripted(lambda request: "4")})


@pytest.mark.parametrize(("episodes", "group_size"), [(5, 2), (0, 1), (4, 0), (-4, 2)])
def test_episodes_are_a_multiple_of_the_group_size(scripted: Any, episodes: int, group_size: int) -> None:
    with pytest.raises(InvalidInput, match=f"episodes {episodes}, group_size {group_size}"):
        play("single_agent", scripted(lambda request: "4"), episodes=episodes, group_size=group_size)


# Names, seeds and what is logged.


def test_episodes_of_a_task_are_a_group() -> None:
    found = starts(TASKS[:2], group_size=2, batch="update-1", seed=0)
    assert [(each.group, each.episode) for each in found] == [
        ("update-1/tasks/0", "update-1/tasks/0/0"),
        ("update-1/tasks/0", "update-1/tasks/0/1"),
        ("update-1/tasks/1", "update-1/tasks/1/0"),
        ("update-1/tasks/1", "update-1/tasks/1/1"),
    ]


def test_a_task_that_appears_twice_makes_two_groups() -> None:
    found = starts([TASKS[0], TASKS[1], TASKS[0]], group_size=1, batch="u", seed=0)
    assert [each.group for each in found] == ["u/tasks/0", "u/tasks/1", "u/tasks/0#2"]


def test_a_task_that_appears_twice_is_sampled_with_two_sets_of_seeds(scripted: Any) -> None:
    policy = scripted(lambda request: "4")
    play("single_agent", policy, tasks=TASKS[:1], episodes=4, group_size=2)
    assert len({request.seed for request in policy.requests}) == 4


def test_every_row_of_a_rollout_has_a_seed_of_its_own(scripted: Any) -> None:
    policy = scripted(verdict_of)
    play("solver_verifier", policy)
    assert len({request.seed for request in policy.requests}) == len(policy.requests)


@given(st.integers(0, 2**31), st.text(), st.tuples(*[st.integers(0, 99)] * 4))
def test_a_row_seed_fits_in_63_bits_and_depends_on_nothing_else(seed: int, group: str, key: tuple[int, ...]) -> None:
    found = seed_of(seed, group, RequestKey(*key))
    assert 0 <= found < 2**63
    assert found == seed_of(seed, group, RequestKey(key[0] + 1, *key[1:]))


@pytest.mark.parametrize(
    "other",
    [
        (1, "g", RequestKey(0, 0, 0, 0)),
        (0, "h", RequestKey(0, 0, 0, 0)),
        (0, "g", RequestKey(0, 1, 0, 0)),
        (0, "g", RequestKey(0, 0, 1, 0)),
        (0, "g", RequestKey(0, 0, 0, 1)),
    ],
    ids=["seed", "group", "episode", "step", "member"],
)
def test_a_row_seed_depends_on_the(other: tuple[int, str, RequestKey]) -> None:
    assert seed_of(*other) != seed_of(0, "g", RequestKey(0, 0, 0, 0))


def test_runs_of_neighbouring_seeds_share_no_stream() -> None:  # B053
    """With seed + index, the second episode of run 7 would be the first of run 8."""
    streams = [seed_of(seed, "g", RequestKey(0, episode, 0, 0)) for seed in (7, 8) for episode in range(4)]
    assert len(set(streams)) == 8
    assert streams[:4] == [seed_of(7, "g", RequestKey(0, episode, 0, 0)) for episode in range(4)]


def test_sampling_settings_reach_the_policy_and_the_record(scripted: Any) -> None:
    policy = scripted(lambda request: "4")
    log = play("single_agent", policy, episodes=1, group_size=1, sampling=Sampling(temperature=0.25))
    assert policy.requests[0].sampling == log.events[0].members[0].sampling == Sampling(temperature=0.25)


def test_settings_may_differ_from_agent_to_agent(compiled: Any, scripted: Any) -> None:
    policy = scripted(verdict_of)
    plan = plan_of(
        compiled("solver_verifier"),
        {"main": policy},
        sampling=lambda agent: Sampling(max_tokens={"solver": 5, "verifier": 7}[agent]),
    )
    run(plan, starts(TASKS[:1], group_size=1, batch="", seed=0))
    assert [request.sampling.max_tokens for request in policy.requests][:2] == [5, 7]


def test_events_are_logged_in_the_run_folder_as_they_happen(scripted: Any, tmp_path: Path) -> None:
    seen: list[int] = []

    def said(request: SampleRequest) -> str:
        seen.append(len(EventLog(tmp_path)))
        return "4"

    log = play("single_agent", scripted(said), episodes=3, group_size=1, max_in_flight=1, run_folder=tmp_path)
    assert seen == [0, 1, 2]
    assert EventLog(tmp_path).events == log.events


def test_a_log_in_memory_stands_episode_by_episode(scripted: Any) -> None:
    log = play("solver_verifier", scripted(verdict_of), episodes=8, group_size=4)
    assert [event.id for event in log] == [event.id for events in log.episodes() for event in events]


def test_tasks_are_taken_in_order_and_again_from_the_front(scripted: Any) -> None:
    log = play("single_agent", scripted(lambda request: "4"), tasks=TASKS[:2], episodes=3, group_size=1)
    assert [event.task for event in log] == ["0", "1", "0"]
    assert len({event.group for event in log}) == 3


def test_a_listener_hears_of_every_event(compiled: Any, scripted: Any) -> None:
    heard: list[str] = []
    plan = plan_of(compiled("single_agent"), {"main": scripted(lambda request: "4")})
    episodes = starts(TASKS[:3], group_size=1, batch="", seed=0)
    done = run(plan, episodes, on_event=lambda event: heard.append(event.id))
    assert heard == [events[0].id for events in done]


def test_no_episodes_are_done_at_once(compiled: Callable[..., Graph], scripted: Any) -> None:
    assert run(plan_of(compiled("single_agent"), {"main": scripted(lambda request: "4")}), []) == []
