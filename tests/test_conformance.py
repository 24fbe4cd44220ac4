"""Does everything that ships keep its protocol, and does the kit see each rule broken?"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from pydantic import BaseModel

import srpo_env
from srpo_env import Output
from srpo_env.config import Recipe
from srpo_env.env import WorkflowEnv
from srpo_env.errors import InvalidRecipe, ToolError
from srpo_env.graph import compile_graph
from srpo_env.jobs import Job
from srpo_env.loading import workflow_files
from srpo_env.registration import IDS
from srpo_env.registry import load, registered
from srpo_env.spec import Agent, Edge, Node, Workflow
from srpo_env.testing import check_env, check_policy, check_tool, check_trainer, check_workflow
from srpo_env.toolset import make_tool

# What ships.


@pytest.mark.parametrize("name", IDS)
def test_every_environment_that_ships_conforms(name: str) -> None:
    check_env(gym.make(f"srpo_env/{name}-v0"))


@pytest.mark.parametrize("name", sorted(workflow_files()))
def test_every_workflow_that_ships_conforms(name: str) -> None:
    check_workflow(name)


ARGUMENTS = {
    "calculator": {"expression": "17 * 24"},
    "search": {"query": "mayor"},
    "bm25": {"query": "rain"},
    "tiny_world": {"query": "Tudil"},
}


@pytest.mark.parametrize("name", sorted(set(registered("tool")) - {"http"}))  # which needs a server: test_retriever
def test_every_tool_that_ships_conforms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRPO_ENV_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "text": "It rains."}')
    check_tool(make_tool(name, {"corpus": str(corpus)} if name == "bm25" else {}), ARGUMENTS[name])


@pytest.fixture(scope="module")
def job() -> Job:
    """A job that trains the tiny model."""
    recipe = {
        "workflow": "tiny/parallel_proposers",
        "tasks": {"train": {"use": "arithmetic", "size": 4}},
        "policies": {"main": {"model": "tiny_arithmetic", "device": "cpu", "train": {"lr": 1e-4}}},
        "sampling": {"train": {"max_tokens": 12}},
        "learner": {"preset": "srpo", "clip": 0.2},
    }
    return Job.prepare(Recipe.model_validate(recipe))


def test_the_policies_that_ship_conform(job: Job) -> None:
    check_policy(job.policies["main"])
    scripted = load("backend", "scripted")
    check_policy(scripted({"*": "4"}))
    check_policy(scripted({"*": "4"}, tokenizer="tiny_arithmetic"))
    check_policy(scripted(["4", "5"]), deterministic=False)


def test_the_trainer_that_ships_conforms(job: Job) -> None:
    log = srpo_env.rollout(job.graph.workflow, tasks=job.tasks, policies=job.policies, episodes=8, group_size=4)
    check_trainer(job.trainer(), log.batch())


# Each rule, broken.


class Echo:
    """A tool that keeps every rule."""

    name: Any = "echo"
    description: Any = "Says it again."
    parameters: Any = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    async def __call__(self, text: str) -> Any:
        return text


class Slow(Echo):
    async def __call__(self, text: str) -> str:
        time.sleep(1.1)  # noqa: ASYNC251 - what the rule forbids
        return text


class Greedy(Echo):
    async def __call__(self, text: str, **rest: Any) -> str:
        return text


class Lenient(Echo):
    async def __call__(self, text: str = "") -> str:
        return text


class Numeric(Echo):
    async def __call__(self, text: str) -> int:
        return 5


class Refusing(Echo):
    async def __call__(self, text: str) -> str:
        raise ToolError("not today.")


def made_of(good: type, **changes: Any) -> Any:
    return type("Broken", (good,), changes)()


def test_the_stub_of_a_tool_conforms() -> None:
    check_tool(Echo(), {"text": "x"})


@pytest.mark.parametrize(
    ("tool", "rule"),
    [
        (object(), "it has name, description, parameters and a call"),
        (made_of(Echo, name="my tool"), "its name is letters, digits and _"),
        (made_of(Echo, description=""), "its description is one line"),
        (made_of(Echo, description="Two\nlines."), "its description is one line"),
        (made_of(Echo, parameters={"type": "string"}), "a schema of an object"),
        (made_of(Echo, parameters={"type": "object"}), "names its properties"),
        (made_of(Echo, parameters={"type": "object", "properties": {"text": {1, 2}}}), "can be written as JSON"),
        (made_of(Echo, parameters={"type": "object", "properties": {}}), "and text is not"),
        (Numeric(), "the given call succeeds; .*a tool returns text"),
        (Refusing(), "the given call succeeds; 'not today.'"),
        (Slow(), "does not block the event loop"),
        (Greedy(), "a call with an unknown argument fails"),
        (Lenient(), "a call without 'text' fails"),
    ],
)
def test_a_tool_that_breaks_a_rule_is_seen(tool: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule) as caught:
        check_tool(tool, {"text": "x"})
    assert "\n" not in str(caught.value)


class Four:
    """A policy that keeps every rule."""

    version: Any = 3
    in_process: Any = True
    output: ClassVar[Mapping[str, Any]] = {"output_ids": (4,), "prompt_ids": (1,), "logprobs": (-1.0,)}
    calls = 0

    async def sample(self, requests: Any) -> Any:
        self.calls += 1
        return [Output(text="4", policy_version=3, **self.output) for _ in requests]

    async def aclose(self) -> None:
        pass


class Raising(Four):
    async def sample(self, requests: Any) -> Any:
        if any(len(request.messages[0].content) > 1000 for request in requests):
            raise ValueError("too long\nby far")
        return await super().sample(requests)


class Failing(Four):
    async def sample(self, requests: Any) -> Any:
        if any(len(request.messages[0].content) > 1000 for request in requests):
            return [srpo_env.protocols.PolicyError("no") for _ in requests]
        return await super().sample(requests)


class Drifting(Four):
    async def sample(self, requests: Any) -> Any:
        return [each.model_copy(update={"text": str(self.calls)}) for each in await super().sample(requests)]


class Empty(Four):
    async def sample(self, requests: Any) -> Any:
        return [srpo_env.protocols.PolicyError("no") for _ in requests]


class Short(Four):
    async def sample(self, requests: Any) -> Any:
        return (await super().sample(requests))[:1]


class Tupled(Four):
    async def sample(self, requests: Any) -> Any:
        return tuple(await super().sample(requests))


class Wordy(Four):
    async def sample(self, requests: Any) -> Any:
        return ["4" for _ in requests]


def giving(**changes: Any) -> Any:
    return made_of(Four, output={**Four.output, **changes})


def test_the_stub_of_a_policy_conforms() -> None:
    check_policy(Four())
    check_policy(Drifting(), deterministic=False)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (object(), "it has version, in_process, sample and aclose"),
        (made_of(Four, version=-1), "version is a number of updates"),
        (made_of(Four, in_process="yes"), "in_process is true or false"),
        (made_of(Four, version=4), "policy_version is the policy's version"),
        (giving(logprobs=(-1.0, -2.0)), "one log-prob for each output id"),
        (giving(output_ids=None), "one log-prob for each output id"),
        (giving(logprobs=(0.5,)), "log-probs are finite, at most 0"),
        (giving(logprobs=(float("nan"),)), "log-probs are finite, at most 0"),
        (giving(prompt_ids=None), "an output with output_ids has prompt_ids"),
        (giving(output_ids=(1,) * 9, logprobs=None), "at most max_tokens ids"),
        (Drifting(), "equal calls give equal outputs"),
        (Raising(), "raises none; too long by far"),
        (Failing(), "does not fail its neighbour"),
        (Empty(), "a short request gives an Output"),
        (Short(), "one outcome a request"),
        (Tupled(), "sample gives a list"),
        (Wordy(), "and this is a str"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_seen(policy: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule) as caught:
        check_policy(policy)
    assert "\n" not in str(caught.value)


class Settings(BaseModel):
    """No settings."""


class Learner:
    """A trainer that keeps every rule."""

    def __init__(self) -> None:
        self.updates = 0

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> BaseModel:
        if values:
            raise InvalidRecipe("unknown")
        return Settings()

    def update(self, batch: Any) -> Any:
        self.updates += 1
        return {"loss": 1 / self.updates, "kl": float("nan"), "seconds_update": time.time()}

    def save(self, folder: Path) -> None:
        (folder / "updates").write_text(str(self.updates))

    def load(self, folder: Path) -> None:
        self.updates = int((folder / "updates").read_text())


class Unchecked(Learner):
    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> BaseModel:
        return Settings()


class Unsaved(Learner):
    def save(self, folder: Path) -> None:
        pass


class Forgetful(Learner):
    def load(self, folder: Path) -> None:
        self.updates = 0


def reporting(metrics: Any) -> Any:
    return made_of(Learner, update=lambda self, batch: metrics)


def test_the_stub_of_a_trainer_conforms() -> None:
    check_trainer(Learner(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trainer", "rule"),
    [
        (object(), "it has settings, update, save and load"),
        (Unchecked(), "a setting that it does not know is refused"),
        (reporting(None), "update gives its metrics, a dict"),
        (reporting({"loss": "low"}), "metrics are numbers by name, and loss is none"),
        (reporting({"loss": float("inf")}), "a metric is finite, .* and loss is not"),
        (Unsaved(), "save writes something"),
        (Forgetful(), "it does not in loss"),
    ],
)
def test_a_trainer_that_breaks_a_rule_is_seen(trainer: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule) as caught:
        check_trainer(trainer, None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


class BrokenEnv(WorkflowEnv):
    """Solver and verifier; `spoil` changes what a step gives, `forgive` lets wrong actions pass."""

    forgive = False

    def __init__(self) -> None:
        super().__init__("solver_verifier")

    def spoil(self, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
        return observation, reward, terminated, truncated, info

    async def astep(self, action: Any) -> Any:
        if self.forgive and self.episode is not None and self.episode.done:
            return self._observation(), 0.0, True, False, {}
        if self.forgive and self.episode is not None and len(action) != len(self.episode.active_set):
            action = ("x",) * len(self.episode.active_set)
        return self.spoil(*await super().astep(action))


def without_event(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
    return observation, reward, terminated, truncated, {k: v for k, v in info.items() if k != "event"}


def with_early_reward(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
    return observation, 0.5, terminated, truncated, info


def with_both_ends(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
    return observation, reward, terminated, terminated, info


def without_scored(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
    return observation, reward, terminated, truncated, {**info, "scored": None}


def with_a_strange_node(
    self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any
) -> Any:
    return {**observation, "node": "nowhere"}, reward, terminated, truncated, info


def late(change: Any) -> Any:
    """Changes what later steps give: Gymnasium's checker takes one step only."""

    def spoil(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
        if info["event"].step:
            observation, info = change(observation, info, terminated)
        return observation, reward, terminated, truncated, info

    return spoil


def nowhere(observation: Any, info: Any, terminated: bool) -> Any:
    return {**observation, "node": "nowhere"}, info


def without_members(observation: Any, info: Any, terminated: bool) -> Any:
    return {**observation, "members": ()}, info


def with_members_after_the_end(observation: Any, info: Any, terminated: bool) -> Any:
    member = {"agent": "solver", "messages": ({"role": "user", "content": "?"},)}
    return ({**observation, "members": (member,)} if terminated else observation), info


def with_a_step_too_many(observation: Any, info: Any, terminated: bool) -> Any:
    return observation, {**info, "event": info["event"].model_copy(update={"step": 9})}


def with_what_json_can_not_hold(observation: Any, info: Any, terminated: bool) -> Any:
    return observation, {**info, "event": info["event"].model_copy(update={"answer": "\ud800"})}


async def step_after_the_end(self: Any, action: Any) -> Any:
    if self.episode is not None and self.episode.done:
        return self._observation(), 0.0, True, False, {}
    return await WorkflowEnv.astep(self, action)


def with_noise(self: Any, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Any:
    self.noise = getattr(self, "noise", 0) + 1
    event = info["event"].model_copy(update={"state_after": str(self.noise)})
    return observation, reward, terminated, truncated, {**info, "event": event}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"forgive": True}, "a wrong number of outputs is refused"),
        ({"spoil": without_event}, "every step gives its event"),
        ({"spoil": with_early_reward}, "the reward is 0.0 before the end"),
        ({"spoil": with_both_ends}, "terminated or truncated, not both"),
        ({"spoil": without_scored}, "the reward is the event's"),
        ({"spoil": with_a_strange_node}, "Gymnasium's checker has no complaint"),
        ({"spoil": with_noise}, "equal events|Gymnasium's checker"),
        ({"spoil": late(nowhere)}, "every observation lies in its space"),
        ({"spoil": late(without_members)}, "before the end there are members"),
        ({"spoil": late(with_members_after_the_end)}, "after the end no member is asked"),
        ({"spoil": late(with_a_step_too_many)}, "a step makes one event"),
        ({"spoil": late(with_what_json_can_not_hold)}, "written as JSON and read again"),
        ({"astep": step_after_the_end}, "a step after the end is refused"),
    ],
)
def test_an_environment_that_breaks_a_rule_is_seen(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(AssertionError, match=rule) as caught:
        check_env(made_of(BrokenEnv, **changes))
    assert "\n" not in str(caught.value)


def test_the_stub_of_an_environment_conforms() -> None:
    check_env(BrokenEnv())


def workflow(**changes: Any) -> Workflow:
    given: dict[str, Any] = {
        "name": "w",
        "description": "One agent.",
        "agents": {"a": Agent(prompt="{{ task.problem }}")},
        "nodes": {"n": Node(agents="a")},
        "answer": "n.text",
    }
    return Workflow(**(given | changes))


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (workflow(nodes={"n": Node(agents="b")}), "it loads without a problem; .*'b'"),
        (workflow(description=""), "it has a description"),
        (workflow(agents={"a": Agent(prompt="{{ task.meta.get }}")}), "it loads without a problem|walk goes through"),
        (workflow(agents={"a": Agent(prompt="{% if visits.n %}x{% endif %}")}), "no prompt is empty"),
        (
            workflow(
                nodes={"n": Node(agents="a", write={"s": "member.text | int / 0"}, next=(Edge(to="end"),))},
                state={"s": 0},
            ),
            "every walk goes through",
        ),
    ],
)
def test_a_workflow_that_breaks_a_rule_is_seen(source: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule) as caught:
        check_workflow(source)
    assert "\n" not in str(caught.value)


def test_the_stub_of_a_workflow_conforms() -> None:
    check_workflow(workflow())


def test_an_episode_without_an_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srpo_env.testing.MOST_STEPS", 0)
    with pytest.raises(AssertionError, match="workflow w: an episode ends within 0 steps"):
        check_workflow(workflow())
    with pytest.raises(AssertionError, match="BrokenEnv: an episode ends within 0 steps"):
        check_env(BrokenEnv())


def test_a_workflow_that_chance_decides_is_seen(tmp_path: Path) -> None:
    code = "import random\nfrom srpo_env.views import Transition\n"
    (tmp_path / "chance.py").write_text(code + "def go(outputs, scope): return Transition(parsed=random.random())\n")
    with pytest.raises(AssertionError, match="the same outputs give equal events"):
        check_workflow(workflow(nodes={"n": Node(agents="a", transition=f"{tmp_path}/chance.py:go")}))


def test_a_set_that_is_too_large_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        def __init__(self, graph: Any) -> None:
            self.graph, self.k_max = graph, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.graph, name)

    monkeypatch.setattr("srpo_env.testing.compile_graph", lambda workflow: Small(compile_graph(workflow)))
    with pytest.raises(AssertionError, match="every set has between 1 and 0 members"):
        check_workflow(workflow())


def test_a_workflow_that_is_written_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    other = workflow(description="Another.").to_yaml()
    monkeypatch.setattr(Workflow, "to_yaml", lambda self: other)
    with pytest.raises(AssertionError, match="written as YAML and read again, it is the same"):
        check_workflow(workflow())
