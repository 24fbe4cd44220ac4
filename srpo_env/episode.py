"""One walk over a graph: which active set is due, what its outputs do, and the event that says so.

An `Episode` is the environment without Gymnasium's clothes. It samples nothing itself: `active_set` says what is to be
sampled, `advance` takes the outcomes and returns the event.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from srpo_env.errors import ContextExceeded, InvalidAction, InvalidWorkflow, PolicyError, nearest
from srpo_env.graph import Graph
from srpo_env.merging import merge
from srpo_env.records import (
    SCHEMA_VERSION,
    Event,
    Member,
    Message,
    Output,
    Sampling,
    ToolCall,
    TruncationReason,
    as_json,
    well_formed,
)
from srpo_env.reducers import REDUCERS, Reducer
from srpo_env.registry import load_reference
from srpo_env.rewards import Score
from srpo_env.spec import Best, Node
from srpo_env.tasks import Task, TaskSet
from srpo_env.templates import Expression, Template, compile_expression
from srpo_env.toolcalls import Tools, require_tools, run_calls, spoken_name
from srpo_env.views import Due, Ids, MemberView, NodeView, Slot, Transition, Visits

_SORTED = json.JSONEncoder(sort_keys=True, default=str)

Outcome = str | Output | ContextExceeded | PolicyError
"""What became of one member: text given by hand, a sampled output, or the error in place of one."""


class Episode:
    r"""Walks a graph for one task.

    Args:
        graph: The compiled workflow.
        task: What is to be solved.
        tasks: The set that scores the answer.
        ids: Names for the log.
        tools: Tools by name.
        clock: Gives the time of events.
        mate: Another episode; where graph and task are the same, its first active set is taken over and not rendered
            again.

    Attributes:
        first_set: The active set that it began with.
        active_set: The one that is due.
        events: What has happened.

    Example:
        >>> from srpo_env import Task, load_tasks
        >>> from srpo_env.graph import compile_graph
        >>> from srpo_env.loading import load_workflow
        >>> task = Task(id="1", problem="1+1=", answers=("2",))
        >>> episode = Episode(compile_graph(load_workflow("single_agent")), task, load_tasks([task]))
        >>> [member.slot.agent for member in episode.active_set]
        ['solver']
        >>> import asyncio
        >>> asyncio.run(episode.advance([r"It is \boxed{2}."])).reward
        1.0
    """

    def __init__(
        self,
        graph: Graph,
        task: Task,
        tasks: TaskSet,
        *,
        ids: Ids | None = None,
        tools: Tools | None = None,
        clock: Callable[[], float] = time.time,
        mate: Episode | None = None,
    ) -> None:
        workflow = graph.workflow
        self.graph, self.task, self.tasks = graph, task, tasks
        self.ids = ids or Ids(run="", group=task.id, episode=task.id)
        self.events: list[Event] = []
        self.terminated = self.truncated = False
        self._tools = tools or {}
        require_tools(workflow, self._tools)
        self._clock = clock
        self._node: str = workflow.first
        self._last: str | None = None
        self._visits = Visits()
        self._views: dict[str, NodeView | None] = dict.fromkeys(workflow.nodes)
        self._state = {name: _copy(key.default) for name, key in workflow.state.items()}
        self._turns: dict[tuple[str, int], list[tuple[tuple[Message, ...], Output]]] = {}
        self._results: dict[tuple[str, int], tuple[str, ...]] = {}
        self._transcript: list[tuple[Slot, str]] = []
        self._tokens = 0
        self._task_view = {"id": task.id, "problem": task.problem, "meta": task.meta}
        self._walked = hashlib.blake2b(task.id.encode("utf-8", "replace"), digest_size=8)
        self._digest = self._state_digest()
        self._started = clock()
        alike = mate is not None and mate.graph is graph and mate.task is task
        self.first_set: tuple[Due, ...] = mate.first_set if mate is not None and alike else self._due()
        self.active_set = self.first_set

    @property
    def node(self) -> str:
        """The current node; after the end, the one that ended the episode."""
        return self._node

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated

    async def advance(self, outcomes: Sequence[Outcome], sampling: Sequence[Sampling | None] | None = None) -> Event:
        """Consumes the outputs of the active set and makes one transition.

        Args:
            outcomes: One per member of `active_set`, in its order.
            sampling: The settings each was sampled with, for the record.

        Returns:
            The event; its `next_node` is current now.

        Raises:
            InvalidAction: Not one outcome per member, or the episode has ended; nothing changed.
        """
        if self.done:
            raise InvalidAction(f"episode {self.ids.episode} has ended; call reset for the next one.")
        due = self.active_set
        if len(outcomes) != len(due):
            raise InvalidAction(
                f"node {self._node!r} waits for {len(due)} outputs and got {len(outcomes)}; give one per member of the "
                f"active set: {', '.join(f'{d.slot.agent}[{d.slot.index}]' for d in due)}."
            )
        members = self._members(due, outcomes, sampling or [None] * len(due))
        if self.graph.callers:
            members = await self._with_calls(members)
        failure = _failure(outcomes, members)
        before, visited = self._digest, self._node
        self._visits[visited] += 1
        self._walk_on(members)
        following, truncated_by = (visited, failure) if failure else self._transition(visited, due, members)
        self.terminated, self.truncated = following == "end", truncated_by is not None
        done = self.done
        answer = self._answer() if done else None
        self._last = visited
        if not done:
            self._record_turns(due, members)
            self._node = following
            self.active_set = self._due()
        self._digest = self._state_digest()
        ended = self._clock()
        fields: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "run": self.ids.run,
            "batch": self.ids.batch,
            "task": self.task.id,
            "group": self.ids.group,
            "episode": self.ids.episode,
            "step": len(self.events),
            "node": visited,
            "visit": self._visits[visited] - 1,
            "members": tuple(members),
            "value": None if failure else as_json(getattr(self._views[visited], "parsed", None)),
            "next_node": following,
            "state_before": before,
            "state_after": self._digest,
            "reward": 0.0,
            "score_reason": None,
            "measures": {},
            "answer": answer,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "truncated_by": truncated_by,
            "started": self._started,
            "ended": ended,
        }
        self._started = ended
        event = Event.of_checked(fields)
        if done:
            score = await self._score(answer, event)
            scored = {"reward": score.value, "score_reason": score.reason, "measures": dict(score.measures)}
            event = Event.of_checked(fields | scored)
        self.events.append(event)
        return event

    # What is due.

    def _due(self) -> tuple[Due, ...]:
        scope = self._scope()
        due: list[Due] = []
        alike: dict[str, Due] = {}
        for slot in self._slots(scope):
            if first := alike.get(slot.agent):
                due.append(Due(slot, first.policy, self._turn(slot), first.messages))
                continue
            due.append(self._render(slot, scope))
            if self.graph.prompts[slot.agent].alike:
                alike[slot.agent] = due[-1]
        return tuple(due)

    def _slots(self, scope: Mapping[str, Any]) -> Sequence[Slot]:
        due = self.graph.sets[self._node]
        if due.acting and self._last == self._node:
            view = self._views[self._node]
            slots = [Slot(each.agent, each.index, each.count) for each in view.outputs if each.acting] if view else []
            if slots:
                return slots
        if due.choose is not None:
            choice = due.choose.evaluate(scope)
            return (due.among.get(choice, ()) if isinstance(choice, str) else ()) or due.slots
        return due.slots

    def _render(self, slot: Slot, scope: Mapping[str, Any]) -> Due:
        agent = self.graph.workflow.agents[slot.agent]
        turn = self._turn(slot)
        member = {
            "agent": slot.agent,
            "index": slot.index,
            "count": slot.count,
            "turn": turn,
            "results": self._results.get((slot.agent, slot.index), ()),
        }
        scope = {**scope, "member": member}
        messages: list[Message] = []
        prompt = self.graph.prompts[slot.agent]
        if prompt.system is not None:
            messages.append(Message(role="system", content=self._text(prompt.system, scope, slot)))
        if agent.history == "own":
            for given, said in self._turns.get((slot.agent, slot.index), ()):
                messages += (given[-1], Message(role="assistant", content=said.text))
        elif agent.history == "team":
            messages.extend(self._team(slot))
        messages.append(Message(role="user", content=self._text(prompt.prompt, scope, slot)))
        earlier = None if agent.history == "none" else self._earlier(slot, messages)
        return Due(slot, agent.policy, turn, tuple(messages), earlier)

    def _earlier(self, slot: Slot, messages: list[Message]) -> Output | None:
        """The member's last output, if these messages go on from it."""
        turns = self._turns.get((slot.agent, slot.index))
        if not turns:
            return None
        given, output = turns[-1]
        said = Message(role="assistant", content=output.text)
        return output if tuple(messages[: len(given) + 1]) == (*given, said) else None

    def _turn(self, slot: Slot) -> int:
        return len(self._turns.get((slot.agent, slot.index), ()))

    def _text(self, template: Template, scope: Mapping[str, Any], slot: Slot) -> str:
        try:
            return template.render(scope)
        except InvalidWorkflow as error:
            raise InvalidWorkflow(
                f"workflow {self.graph.workflow.name!r}, node {self._node!r}, prompt of {slot.agent!r}: {error}"
            ) from error

    def _team(self, slot: Slot) -> list[Message]:
        """The episode so far as this member sees it: its own outputs are the assistant's, the others' named users'."""
        turns = []
        for other, text in self._transcript:
            own = (other.agent, other.index) == (slot.agent, slot.index)
            name = other.agent if other.count == 1 else f"{other.agent} {other.index + 1}"
            turns.append(
                Message(role="assistant", content=text) if own else Message(role="user", content=f"{name}: {text}")
            )
        return turns

    # What the outputs do.

    def _members(
        self, due: Sequence[Due], outcomes: Sequence[Outcome], sampling: Sequence[Sampling | None]
    ) -> list[Member]:
        members = []
        readers = self.graph.readers
        for each, outcome, settings in zip(due, outcomes, sampling, strict=True):
            slot, error = each.slot, None
            if isinstance(outcome, Output):
                output = outcome
            elif isinstance(outcome, str):
                output = Output(text=outcome)
            elif isinstance(outcome, ContextExceeded | PolicyError):
                output, error = Output(text="", prompt_ids=(), output_ids=(), logprobs=()), well_formed(str(outcome))
            else:
                raise InvalidAction(
                    f"node {self._node!r}: the output of {slot.agent}[{slot.index}] is a {type(outcome).__name__}; an "
                    "output is a str or an srpo_env.Output."
                )
            members.append(
                Member.of_checked(
                    {
                        "agent": slot.agent,
                        "index": slot.index,
                        "turn": each.turn,
                        "policy": each.policy,
                        "messages": each.messages,
                        "sampling": settings,
                        "output": output,
                        "parse": readers[slot.agent](output.text),
                        "tool_calls": (),
                        "error": error,
                        "extends": _extends(output, each.earlier),
                    }
                )
            )
        return members

    async def _with_calls(self, members: Sequence[Member]) -> list[Member]:
        """Makes the calls of all members side by side; returns them with what came back."""
        if self.graph.callers.isdisjoint(member.agent for member in members):
            return list(members)
        calls = await asyncio.gather(*(self._calls(member) for member in members))
        return [
            member.model_copy(update={"tool_calls": made}) if made else member
            for member, made in zip(members, calls, strict=True)
        ]

    async def _calls(self, member: Member) -> tuple[ToolCall, ...]:
        names = self.graph.workflow.agents[member.agent].tools
        if not names or member.error is not None:
            return ()
        tools = {spoken_name(name, self._tools[name]): self._tools[name] for name in names}
        return await run_calls(member.output.text, tools)

    def _walk_on(self, members: Sequence[Member]) -> None:
        """Adds what was said to the tokens and to the digest of the walk."""
        said = ["", self._node]
        for member in members:
            output = member.output
            text = output.text
            said.append(f"{member.agent} {member.index} {len(text)} {text}")
            self._tokens += len(output.output_ids or ())
        self._walked.update("\n".join(said).encode())

    def _record_turns(self, due: Sequence[Due], members: Sequence[Member]) -> None:
        """Keeps what was said, for the prompts that come."""
        for each, member in zip(due, members, strict=True):
            self._turns.setdefault((member.agent, member.index), []).append((each.messages, member.output))
            self._transcript.append((each.slot, member.output.text))

    def _transition(
        self, visited: str, due: Sequence[Due], members: Sequence[Member]
    ) -> tuple[str, TruncationReason | None]:
        node = self.graph.workflow.nodes[visited]
        outputs = tuple([MemberView.of(each.slot, member) for each, member in zip(due, members, strict=True)])
        if self.graph.callers:
            results = {(each.agent, each.index): each.results for each in outputs}
            self._results.update(results)
        shown = self._with_earlier(visited, outputs)
        snapshot = self._scope()
        self._write(node.write, outputs, snapshot)
        if node.transition is not None:
            made = self._own_transition(visited, node, outputs, snapshot)
            self._state.update(made.state)
            self._views[visited] = NodeView(shown, self._visits[visited], made.text, made.parsed, made.ok)
            if made.next is not None:
                return self._limited(made.next)
        else:
            self._views[visited] = self._reduced(node.reduce, shown, visited, snapshot)
        return self._limited(self._edge(visited))

    def _own_transition(
        self, visited: str, node: Node, outputs: tuple[MemberView, ...], snapshot: Mapping[str, Any]
    ) -> Transition:
        """Calls a Python transition; it goes only where the node's edges go, and sets only keys of the workflow."""
        made = load_reference(str(node.transition))(outputs, snapshot)
        where = f"workflow {self.graph.workflow.name!r}, node {visited!r}: transition {node.transition}"
        if not isinstance(made, Transition):
            raise InvalidWorkflow(f"{where} gave a {type(made).__name__}; it returns an srpo_env.episode.Transition.")
        targets = [edge.to for edge in node.next]
        if made.next is not None and made.next not in targets:
            raise InvalidWorkflow(
                f"{where} goes to {made.next!r}, which is not a target of the node's `next`: {', '.join(targets)}."
                f"{nearest(made.next, targets)}"
            )
        for key in made.state:
            if key not in self._state:
                raise InvalidWorkflow(
                    f"{where} sets {key!r}, which is not among the keys of `state`: {', '.join(self._state) or 'none'}."
                    f"{nearest(key, self._state)}"
                )
        return made

    def _with_earlier(self, visited: str, outputs: tuple[MemberView, ...]) -> tuple[MemberView, ...]:
        """In a loop of those that still act, the others keep their last output."""
        earlier = self._views[visited]
        if self._last != visited or earlier is None or len(outputs) >= len(earlier.outputs):
            return outputs
        fresh = {(o.agent, o.index): o for o in outputs}
        return tuple(fresh.get((o.agent, o.index), replace(o, acting=False)) for o in earlier.outputs)

    def _reduced(
        self, reduce: str | Best | None, outputs: tuple[MemberView, ...], visited: str, scope: Mapping[str, Any]
    ) -> NodeView:
        visits = self._visits[visited]
        if reduce is None:
            if len(outputs) > 1:
                return NodeView(outputs, visits)
            return NodeView(outputs, visits, outputs[0].text, outputs[0].parsed, outputs[0].ok)
        if isinstance(reduce, str):
            reducer: Reducer = REDUCERS[reduce] if reduce in REDUCERS else load_reference(reduce)
            parsed, text = reducer(outputs)
            return NodeView(outputs, visits, text, parsed, any(output.ok for output in outputs))
        expression = compile_expression(reduce.best)
        winner = max(outputs, key=lambda output: _score(expression, {**scope, "member": output}))
        return NodeView(outputs, visits, winner.text, winner.parsed, winner.ok)

    def _write(self, writes: Mapping[str, str], outputs: Sequence[MemberView], snapshot: Mapping[str, Any]) -> None:
        for key, text in writes.items():
            expression = compile_expression(text)
            rule = self.graph.workflow.state[key].merge
            try:
                values = [expression.evaluate({**snapshot, "member": output}) for output in outputs]
                self._state[key] = merge(rule, self._state[key], values)
            except (InvalidWorkflow, TypeError, ValueError) as error:
                raise InvalidWorkflow(
                    f"workflow {self.graph.workflow.name!r}, node {self._node!r}: `write` of {key!r} (merge {rule}): "
                    f"{error}; of an output that could not be read, member.parsed is the parser's fallback and "
                    "member.ok is false."
                ) from error

    def _edge(self, visited: str) -> str:
        scope: Mapping[str, Any] = {}
        for arrow in self.graph.edges[visited]:
            if arrow.condition is None or arrow.condition.evaluate(scope := scope or self._scope()):
                return arrow.to
        raise InvalidWorkflow(
            f"workflow {self.graph.workflow.name!r}: no edge of node {visited!r} holds; end its list with one without "
            "`if`."
        )

    def _limited(self, following: str) -> tuple[str, TruncationReason | None]:
        """An edge to `end` wins over a limit that is reached in the same step."""
        graph = self.graph
        if following == "end":
            return following, None
        if graph.max_steps is not None and len(self.events) + 1 >= graph.max_steps:
            return following, "steps"
        if self._visits[following] >= graph.max_visits.get(following, self._visits[following] + 1):
            return following, "visits"
        if graph.max_tokens is not None and self._tokens >= graph.max_tokens:
            return following, "tokens"
        return following, None

    # How it ends, and what is seen.

    def _answer(self) -> str | None:
        try:
            answer = self.graph.answer.evaluate(self._scope())
        except InvalidWorkflow:
            return None  # the answer's node was not reached
        return None if answer is None else well_formed(str(answer))

    async def _score(self, answer: str | None, event: Event) -> Score:
        if event.truncated_by in ("policy_error", "tool_unavailable"):
            return Score(value=None, reason=event.truncated_by.replace("_", " "))
        return await self.tasks.score(self.task, answer, (*self.events, event))

    def _scope(self) -> dict[str, Any]:
        return {
            **self._views,
            "task": self._task_view,
            "params": self.graph.params,
            "visits": self._visits,
            "state": dict(self._state),
        }

    def _state_digest(self) -> str:
        """Digest of all that decides how the walk goes on: the task, what was said, where it stands, and the state."""
        digest = self._walked.copy()
        digest.update(b"@" + self._node.encode())
        if self._state:
            digest.update(_SORTED.encode(self._state).encode())
        return digest.hexdigest()


def _failure(outcomes: Sequence[Outcome], members: Sequence[Member]) -> TruncationReason | None:
    """Why these outputs make no transition, if they don't."""
    errors = [outcome for outcome, member in zip(outcomes, members, strict=True) if member.error is not None]
    if errors:
        return "policy_error" if any(isinstance(error, PolicyError) for error in errors) else "context"
    calls = [call for member in members for call in member.tool_calls]
    return "tool_unavailable" if any(call.unavailable for call in calls) else None


def _score(expression: Expression, scope: Mapping[str, Any]) -> float:
    """A member's score; the lowest of all where it has none, as an output that could not be read may have none."""
    try:
        score = expression.evaluate(scope)
    except InvalidWorkflow:
        return -math.inf
    return score if isinstance(score, int | float) and score == score else -math.inf


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, list | dict) else value


def _extends(output: Output, earlier: Output | None) -> bool | None:
    """Whether an output was given the ids of an earlier turn, and more; None where there are none to compare."""
    if earlier is None or earlier.output_ids is None or earlier.prompt_ids is None or output.prompt_ids is None:
        return None
    ids = earlier.prompt_ids + earlier.output_ids
    return output.prompt_ids[: len(ids)] == ids
