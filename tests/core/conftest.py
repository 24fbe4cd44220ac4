"""What the tests of the core share: small workflows, episodes walked by hand, and events made by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from srpo_env.episode import Episode, Outcome
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow
from srpo_env.protocols import Sampled, SampleRequest
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling
from srpo_env.rewards import Reward
from srpo_env.tasks import Task, load_tasks

TASK = Task(id="t", problem="2+2=", answers=("4",))


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Graph]:
    """Compiles a workflow that ships, or one given as YAML."""

    def compiled(workflow: str, **params: Any) -> Graph:
        if "\n" in workflow:
            file = tmp_path / f"workflow_{len(list(tmp_path.iterdir()))}.yaml"
            file.write_text(workflow, encoding="utf-8")
            workflow = str(file)
        return compile_graph(load_workflow(workflow, params=params))

    return compiled


@pytest.fixture
def started(compiled: Callable[..., Graph]) -> Callable[..., Episode]:
    """Starts an episode of a workflow that ships, or of one given as YAML."""

    def started(
        workflow: str,
        *,
        task: Task = TASK,
        tools: Mapping[str, Any] | None = None,
        reward: Reward | None = None,
        **params: Any,
    ) -> Episode:
        return Episode(compiled(workflow, **params), task, load_tasks([task], reward=reward), tools=tools)

    return started


def advance(episode: Episode, *outcomes: Outcome) -> Event:
    return asyncio.run(episode.advance(outcomes))


@pytest.fixture(name="advance")
def advance_() -> Callable[..., Event]:
    """Consumes outputs and gives the event."""
    return advance


def make_member(text: str = "4", **values: Any) -> Member:
    output = {key: values.pop(key) for key in tuple(values) if key in Output.model_fields}
    made = {
        "agent": "solver",
        "index": 0,
        "turn": 0,
        "policy": "main",
        "messages": (Message(role="user", content="2+2="),),
        "sampling": Sampling(),
        "parse": Parse(ok=True, value=text),
    }
    return Member(**(made | values), output=Output(text=text, **output))


@pytest.fixture
def member() -> Callable[..., Member]:
    """Makes a member; keys of an Output go into its output."""
    return make_member


def make_event(members: Sequence[Member] | None = None, **values: Any) -> Event:
    made: dict[str, Any] = {
        "run": "r",
        "task": "t",
        "group": "g",
        "episode": "g/0",
        "step": 0,
        "node": "solve",
        "visit": 0,
        "next_node": "end",
        "state_before": "a",
        "state_after": "b",
        "reward": 1.0,
        "terminated": True,
        "truncated": False,
    }
    return Event(**(made | values), members=tuple((make_member(),) if members is None else members))


@pytest.fixture
def event() -> Callable[..., Event]:
    """Makes an event."""
    return make_event


class Scripted:
    """A policy that answers by a function of the request and notes what it was asked together."""

    def __init__(
        self, answer: Callable[[SampleRequest], Sampled | str | Awaitable[Sampled | str]], *, in_process: bool = True
    ) -> None:
        self.version = 0
        self.in_process = in_process
        self.batches: list[list[tuple[int, int, int, int]]] = []
        self.requests: list[SampleRequest] = []
        self._answer = answer

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        self.requests += requests
        self.batches.append([(r.key.task, r.key.episode, r.key.step, r.key.member) for r in requests])
        return list(await asyncio.gather(*map(self._one, requests)))

    async def aclose(self) -> None:
        pass

    async def _one(self, request: SampleRequest) -> Sampled:
        said = self._answer(request)
        if isinstance(said, Awaitable):
            said = await said
        return Output(text=said) if isinstance(said, str) else said


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    """A policy that answers by a function of the request and notes what it was asked together."""
    return Scripted
