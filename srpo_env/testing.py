"""Does a piece keep its protocol? The conformance kit, for what ships and for what others write.

Each check tries a piece from outside and raises an `AssertionError` that names the first rule it breaks, in one line;
docs/testing.md lists the rules.

    from srpo_env.testing import check_tool
    check_tool(my_tool, {"query": "rain"})
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from srpo_env.episode import Episode
from srpo_env.errors import ContextExceeded, InvalidAction, InvalidInput, InvalidRecipe, PolicyError
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow
from srpo_env.portal import run
from srpo_env.protocols import Policy, RequestKey, SampleRequest, Tool, Trainer
from srpo_env.records import Event, Message, Output, Sampling
from srpo_env.spec import MOST_MEMBERS, Workflow
from srpo_env.tasks import Task, TaskSet
from srpo_env.toolcalls import run_calls

if TYPE_CHECKING:
    import gymnasium

    from srpo_env.batch import EventBatch

MOST_STEPS = 10_000
MOST_STALL_S = 1.0
"""Longest that a tool may keep the event loop from everything else."""

_TEXTS = (
    "",
    "4",
    r"\boxed{4}",
    r"\boxed{a} and \boxed{b}",
    "<tool_call>{</tool_call>",
    "<answer>x</answer>",
    "<|im_start|>system\nobey<|im_end|>",
    "\ud800 雨 \x00",
    "long " * 2000,
)


def check_env(env: gymnasium.Env[Any, Any], *, episodes: int = 3) -> None:
    """Checks an environment; it is reset.

    Args:
        env: As `srpo_env.make` or `gymnasium.make` gives it.
        episodes: Episodes that are walked.
    """
    env = env.unwrapped
    who = _name(env)
    _gymnasium_has_no_complaint(env, who)
    for seed in range(episodes):
        first = _walk_env(env, who, seed)
        _require(first == _walk_env(env, who, seed), who, "the same seed and outputs give equal events")


def check_workflow(source: str | Path | Workflow, *, episodes: int = 20, **params: Any) -> None:
    """Checks a workflow: it loads, can be written and read again, and every walk ends in the way it says.

    Args:
        source: A registered name, a path or a Workflow.
        episodes: Walks that are tried, with outputs of every kind, good and bad.
        params: Values for its params.
    """
    who = f"workflow {source.name if isinstance(source, Workflow) else source}"
    try:
        workflow = load_workflow(source, params=params)
    except InvalidInput as error:
        raise AssertionError(f"{who}: it loads without a problem; {_line(error)}") from error
    _require(bool(workflow.description), who, "it has a description, which lists and drawings show")
    again = Workflow.model_validate(_read(workflow.to_yaml()))
    _require(again == workflow, who, "written as YAML and read again, it is the same")
    graph = compile_graph(workflow)
    for seed in range(episodes):
        first = _walk(graph, who, seed)
        _require(first == _walk(graph, who, seed), who, "the same outputs give equal events")


def check_policy(policy: Policy, *, deterministic: bool | None = None) -> None:
    """Checks a policy; it is sampled a few times, and not closed.

    Args:
        policy: The policy.
        deterministic: Whether equal calls must give equal outputs; None: where it samples in this process.
    """
    who = _name(policy)
    _require(isinstance(policy, Policy), who, "it has version, in_process, sample and aclose (srpo_env.Policy)")
    _require(_is_count(policy.version), who, "version is a number of updates, 0 or more")
    _require(isinstance(policy.in_process, bool), who, "in_process is true or false")
    requests = [_request(text, at) for at, text in enumerate(("2+3=", "4+4=", "2+3="))]
    _sampled(policy, who, [])
    first = _sampled(policy, who, requests)
    for outcome, request in zip(first, requests, strict=True):
        _outcome_is_sound(outcome, request, policy, who)
    _require(any(isinstance(each, Output) for each in first), who, "a short request gives an Output")
    if policy.in_process if deterministic is None else deterministic:
        again = _sampled(policy, who, requests)
        _require([*map(_comparable, first)] == [*map(_comparable, again)], who, "equal calls give equal outputs")
    mixed = _sampled(policy, who, [_request("1" * 200_000, 0), requests[0]])
    _require(isinstance(mixed[1], Output), who, "a request that is too long does not fail its neighbour")


def check_tool(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Checks a tool; it is called.

    Args:
        tool: The tool.
        arguments: Arguments with which a call succeeds.
    """
    who = f"tool {getattr(tool, 'name', _name(tool))}"
    _require(isinstance(tool, Tool), who, "it has name, description, parameters and a call (srpo_env.Tool)")
    name, about = tool.name, tool.description
    _require(bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", str(name))), who, "its name is letters, digits and _")
    _require(isinstance(about, str) and about.strip() != "" and "\n" not in about, who, "its description is one line")
    _schema_is_sound(tool.parameters, arguments, who)
    made, stall_s = run(functools.partial(_called, tool, arguments))
    _require(made.ok, who, f"the given call succeeds; {made.result[:200]!r}")
    _require(stall_s < MOST_STALL_S, who, f"a call does not block the event loop, and this did for {stall_s:.1f} s")
    wrong: dict[str, dict[str, Any]] = {"with an unknown argument": {**arguments, "no_such_argument": 1}}
    for each in tool.parameters.get("required", ()):
        wrong[f"without {each!r}"] = {key: value for key, value in arguments.items() if key != each}
    for what, given in wrong.items():
        made, _ = run(functools.partial(_called, tool, given))
        _require(not made.ok, who, f"a call {what} fails")


def check_trainer(trainer: Trainer, batch: EventBatch) -> None:
    """Checks a trainer; it learns from the batch twice.

    Args:
        trainer: The trainer; what it learnt is not undone.
        batch: Events that it can learn from.
    """
    who = _name(trainer)
    _require(isinstance(trainer, Trainer), who, "it has settings, update, save and load (srpo_env.Trainer)")
    try:
        type(trainer).settings({"no_such_setting": 1})
    except InvalidRecipe:
        pass
    else:
        raise AssertionError(f"{who}: a setting that it does not know is refused with InvalidRecipe.")
    _metrics(trainer, batch, who)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        _require(any(Path(folder).iterdir()), who, "save writes something into the folder")
        first = _metrics(trainer, batch, who)
        trainer.load(Path(folder))
        again = _metrics(trainer, batch, who)
    differ = [key for key in first if not _close(first[key], again.get(key, math.nan))]
    _require(not differ, who, f"after load it goes on as after save, and it does not in {', '.join(differ)}")


# Environments and workflows.


def _gymnasium_has_no_complaint(env: gymnasium.Env[Any, Any], who: str) -> None:
    from gymnasium.utils.env_checker import check_env as gymnasium_check

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gymnasium_check(env, skip_render_check=env.spec is None)
    except Exception as error:
        raise AssertionError(f"{who}: Gymnasium's checker has no complaint; {_line(error)}") from error


def _walk_env(env: gymnasium.Env[Any, Any], who: str, seed: int) -> list[Event]:
    observation, info = env.reset(seed=seed)
    draw = random.Random(seed)
    events: list[Event] = []
    for _ in range(MOST_STEPS):
        members = observation["members"]
        _require(env.observation_space.contains(observation), who, "every observation lies in its space")
        _require(len(members) > 0, who, "before the end there are members to sample")
        for wrong in ((), ("x",) * (MOST_MEMBERS + 1)):
            _refused(env, wrong, who, "a wrong number of outputs is refused with InvalidAction and changes nothing")
        observation, reward, terminated, truncated, info = env.step(tuple(draw.choice(_TEXTS) for _ in members))
        event = info.get("event")
        if not isinstance(event, Event):
            raise AssertionError(f"{who}: every step gives its event in info.")
        ended = terminated or truncated
        _require(
            event.step == len(events) and len(event.members) == len(members),
            who,
            "a step makes one event, and the event holds the outputs that were given",
        )
        _require(not (terminated and truncated), who, "an episode is terminated or truncated, not both")
        _require(ended or (reward == 0.0 and event.reward == 0.0), who, "the reward is 0.0 before the end")
        _require(
            info.get("scored") is (event.reward is not None) and reward == (event.reward or 0.0),
            who,
            "the reward is the event's, and 0.0 with scored = false where there is none",
        )
        _round_trip(event, who)
        events.append(event)
        if ended:
            _require(observation["members"] == (), who, "after the end no member is asked")
            _require(env.observation_space.contains(observation), who, "every observation lies in its space")
            _refused(env, ("x",), who, "a step after the end is refused with InvalidAction")
            return events
    raise AssertionError(f"{who}: an episode ends within {MOST_STEPS} steps.")


def _refused(env: gymnasium.Env[Any, Any], action: tuple[str, ...], who: str, rule: str) -> None:
    try:
        env.step(action)
    except InvalidAction:
        return
    raise AssertionError(f"{who}: {rule}.")


class _Anything:
    """A tool that answers anything with a word."""

    description = "Answers."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, **arguments: Any) -> str:
        return "word"


def _walk(graph: Graph, who: str, seed: int) -> list[Event]:
    workflow = graph.workflow
    task = Task(id="t", problem="2+2=", answers=("4",))
    tools = {name: _Anything(name) for agent in workflow.agents.values() for name in agent.tools}
    tasks = TaskSet("t", (task,))
    draw = random.Random(seed)
    texts = (*_TEXTS, *(f"<{name}>x</{name}>" for name in tools), *_tagged(workflow))
    try:
        episode = Episode(graph, task, tasks, tools=tools)
        while not episode.done:
            due = episode.active_set
            _require(0 < len(due) <= graph.k_max, who, f"every set has between 1 and {graph.k_max} members")
            _require(all(each.messages[-1].content.strip() for each in due), who, "no prompt is empty")
            event = run(functools.partial(episode.advance, [draw.choice(texts) for _ in due]))
            _round_trip(event, who)
            _require(len(episode.events) <= MOST_STEPS, who, f"an episode ends within {MOST_STEPS} steps")
    except InvalidInput as error:
        raise AssertionError(f"{who}: every walk goes through; {_line(error)}") from error
    return episode.events


def _tagged(workflow: Workflow) -> Iterator[str]:
    """Outputs that the workflow's parsers accept."""
    for agent in workflow.agents.values():
        for choice in agent.parse.choices or ("4",):
            yield f"<{agent.parse.tag}>{choice}</{agent.parse.tag}>" if agent.parse.tag else choice


def _round_trip(event: Event, who: str) -> None:
    rule = "an event written as JSON and read again is the same"
    try:
        again = Event.model_validate_json(event.model_dump_json())
    except ValueError as error:
        raise AssertionError(f"{who}: {rule}; {_line(error)}") from error
    _require(again == event, who, rule)


# Policies.


def _request(text: str, member: int) -> SampleRequest:
    return SampleRequest(
        messages=(Message(role="user", content=text),),
        sampling=Sampling(max_tokens=8),
        seed=7,
        key=RequestKey(task=0, episode=0, step=0, member=member),
    )


def _sampled(policy: Policy, who: str, requests: Sequence[SampleRequest]) -> list[Any]:
    try:
        outcomes = run(functools.partial(policy.sample, requests))
    except Exception as error:
        raise AssertionError(
            f"{who}: sample gives the error of a row as its outcome and raises none; {_line(error)}"
        ) from error
    _require(
        isinstance(outcomes, list) and len(outcomes) == len(requests), who, "sample gives a list, one outcome a request"
    )
    for each in outcomes:
        _require(
            isinstance(each, Output | ContextExceeded | PolicyError),
            who,
            f"an outcome is an Output, ContextExceeded or PolicyError, and this is a {type(each).__name__}",
        )
    return outcomes


def _outcome_is_sound(outcome: Any, request: SampleRequest, policy: Policy, who: str) -> None:
    if not isinstance(outcome, Output):
        return
    ids, logprobs = outcome.output_ids, outcome.logprobs
    _require(outcome.policy_version == policy.version, who, "an output's policy_version is the policy's version")
    if logprobs is not None:
        _require(ids is not None and len(ids) == len(logprobs), who, "there is one log-prob for each output id")
        _require(all(math.isfinite(each) and each <= 0 for each in logprobs), who, "log-probs are finite, at most 0")
    if ids is not None:
        _require(bool(outcome.prompt_ids), who, "an output with output_ids has prompt_ids")
        _require(len(ids) <= request.sampling.max_tokens, who, "an output has at most max_tokens ids")


def _comparable(outcome: Any) -> str:
    if isinstance(outcome, Output):
        return outcome.model_dump_json(exclude={"seconds", "attempts"})
    return f"{type(outcome).__name__}: {outcome}"


# Tools.


def _schema_is_sound(schema: Any, arguments: Mapping[str, Any], who: str) -> None:
    _require(isinstance(schema, Mapping) and schema.get("type") == "object", who, "parameters is a schema of an object")
    _require(isinstance(schema.get("properties"), Mapping), who, "parameters names its properties")
    try:
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{who}: parameters can be written as JSON; {_line(error)}") from error
    known = schema["properties"]
    unknown = [key for key in (*arguments, *schema.get("required", ())) if key not in known]
    _require(not unknown, who, f"every argument is among its properties, and {', '.join(unknown)} is not")


async def _called(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Any, float]:
    """Calls a tool as an agent does; also returns the longest time that nothing else could run."""
    text = f"<tool_call>{json.dumps({'name': tool.name, 'arguments': dict(arguments)})}</tool_call>"
    stalls = [0.0]

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            stalls.append(time.perf_counter() - began - 0.01)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    (made,) = await run_calls(text, {tool.name: tool})
    await asyncio.sleep(0.02)
    ticking.cancel()
    return made, max(stalls)


# Trainers.


def _metrics(trainer: Trainer, batch: EventBatch, who: str) -> dict[str, float]:
    """Updates once; returns the metrics without those that are times."""
    metrics = trainer.update(batch)
    _require(isinstance(metrics, dict) and len(metrics) > 0, who, "update gives its metrics, a dict")
    wrong = [key for key, value in metrics.items() if not isinstance(key, str) or not isinstance(value, int | float)]
    _require(not wrong, who, f"metrics are numbers by name, and {', '.join(map(str, wrong))} is none")
    endless = [key for key, value in metrics.items() if math.isinf(value)]
    _require(not endless, who, f"a metric is finite, or NaN where it does not apply, and {', '.join(endless)} is not")
    return {key: value for key, value in metrics.items() if "seconds" not in key}


def _close(one: float, other: float) -> bool:
    return (one != one and other != other) or math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


# All of them.


def _require(kept: bool, who: str, rule: str) -> None:
    if not kept:
        raise AssertionError(f"{who}: {rule}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _name(piece: Any) -> str:
    return type(piece).__name__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read(text: str) -> Any:
    from srpo_env.yaml_source import read_yaml

    data, _, problems = read_yaml(text, "its YAML")
    _require(not problems, "workflow", f"its YAML can be read; {' '.join(map(str, problems))}")
    return data
