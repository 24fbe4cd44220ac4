"""The Gymnasium environment: each `step` consumes one active set."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces

from srpo_env.episode import Episode
from srpo_env.errors import InvalidAction, InvalidInput
from srpo_env.graph import compile_graph
from srpo_env.loading import load_workflow
from srpo_env.portal import on_background_loop
from srpo_env.records import Event, Output
from srpo_env.spaces import Members, Names, Outputs
from srpo_env.spec import Workflow
from srpo_env.tasks import Task, TaskSet, load_tasks
from srpo_env.toolset import ToolsGiven, load_tools
from srpo_env.transcript import as_text, print_event
from srpo_env.views import Ids

Observation = dict[str, Any]


class WorkflowEnv(gymnasium.Env[Observation, Sequence[Any]]):
    r"""A workflow as an environment.

    An observation is `{"node": name, "members": (...)}`: the members of the active set and what each is asked. An
    action is one output per member, a str or an `Output`. After the end the observation has no members. The reward is
    0.0 before the last step, there the score; an answer that can't be scored gives 0.0 and `info["scored"] = False`.

    `step` and `reset` drive the asynchronous `astep` and `areset` on a loop of their own, so they work in a notebook
    too.

    Example:
        >>> import srpo_env
        >>> env = srpo_env.make("single_agent", tasks=[srpo_env.Task(id="1", problem="2+2=", answers=("4",))])
        >>> observation, info = env.reset(seed=7)
        >>> observation["node"], observation["members"][0]["agent"]
        ('solve', 'solver')
        >>> observation, reward, terminated, truncated, info = env.step((r"the answer is \boxed{4}",))
        >>> reward, terminated, info["event"].members[0].parse.value
        (1.0, True, '4')
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}

    def __init__(
        self,
        workflow: str | Path | Workflow,
        tasks: str | Path | TaskSet | Sequence[Any] = "arithmetic",
        *,
        split: str = "train",
        params: Mapping[str, Any] | None = None,
        tools: ToolsGiven | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise InvalidInput(f"render_mode {render_mode!r}; it is None, 'ansi' or 'human'.")
        self.graph = compile_graph(load_workflow(workflow, params=params))
        self.tasks = load_tasks(tasks, split=split)
        self.render_mode = render_mode
        self._tools = load_tools(self.graph.workflow, given=tools)
        names = self.graph.workflow.nodes
        self.observation_space = spaces.Dict(
            {"node": Names(tuple(names)), "members": Members(tuple(self.graph.workflow.agents), self.graph.k_max)}
        )
        self.action_space = Outputs(self.graph.k_max)
        self.episode: Episode | None = None
        self._seed: int | None = None
        self._index = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts the next episode.

        Args:
            seed: Starts the stream of tasks anew; without it the stream goes on.
            options: `{"task": id}` or `{"task": Task(...)}` sets the task.
        """
        super().reset(seed=seed, options=options)
        if seed is not None or self._seed is None:
            self._seed = seed if seed is not None else int(self.np_random.integers(2**31))
            self._index = 0
        else:
            self._index += 1
        task = self._task(options)
        ids = Ids(run="", group=f"{task.id}.{self._seed}", episode=f"{task.id}.{self._seed}.{self._index}")
        self.episode = Episode(self.graph, task, self.tasks, ids=ids, tools=self._tools)
        return self._observation(), self._info(None)

    async def astep(self, action: Sequence[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Consumes the outputs of the active set.

        Args:
            action: One entry per member of the set; or K_max entries, of which the first K count.

        Raises:
            InvalidAction: Another number of entries, or the episode has ended; nothing changed.
        """
        episode = self.episode
        if episode is None:
            raise InvalidAction("step before reset: no episode is running; call reset first.")
        if isinstance(action, str | Output) or not isinstance(action, Sequence):
            raise InvalidAction(
                f"action is a {type(action).__name__}; give a tuple with one output per member of the set."
            )
        due = len(episode.active_set)
        event = await episode.advance(action[:due] if len(action) == self.graph.k_max else action)
        if self.render_mode == "human":
            print_event(event)
        reward = 0.0 if event.reward is None else event.reward
        return self._observation(), reward, event.terminated, event.truncated, self._info(event)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `areset`."""
        return on_background_loop(functools.partial(self.areset, seed=seed, options=options))

    def step(self, action: Sequence[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `astep`."""
        return on_background_loop(functools.partial(self.astep, action))

    def render(self) -> str | None:
        """Returns the episode so far as text (`ansi`); in `human` mode each step is printed as it is taken."""
        if self.render_mode == "ansi" and self.episode is not None:
            return as_text(self.episode.events)
        return None

    def _task(self, options: dict[str, Any] | None) -> Task:
        drawn = self.tasks.tasks[int(self.np_random.integers(len(self.tasks)))]
        wanted = (options or {}).get("task")
        if wanted is None:
            return drawn
        if isinstance(wanted, Task):
            return wanted
        for task in self.tasks.tasks:
            if task.id == wanted:
                return task
        raise InvalidInput(
            f"options: task {wanted!r} is not in task set {self.tasks.name!r}; give the id of one of its tasks."
        )

    def _observation(self) -> Observation:
        assert self.episode is not None
        due = () if self.episode.done else self.episode.active_set
        return {
            "node": self.episode.node,
            "members": tuple(
                {"agent": each.slot.agent, "messages": tuple(message.model_dump() for message in each.messages)}
                for each in due
            ),
        }

    def _info(self, event: Event | None) -> dict[str, Any]:
        assert self.episode is not None
        info: dict[str, Any] = {"task": self.episode.task.id, "episode": self.episode.ids.episode}
        if event is not None:
            info |= {"event": event, "scored": event.reward is not None}
            if event.truncated_by is not None:
                info["truncated_by"] = event.truncated_by
        return info


def make(
    workflow: str | Path | Workflow,
    tasks: str | Path | TaskSet | Sequence[Any] = "arithmetic",
    *,
    split: str = "train",
    tools: ToolsGiven | None = None,
    render_mode: str | None = None,
    **params: Any,
) -> WorkflowEnv:
    """Makes an environment.

    Args:
        workflow: A name that ships (`srpo-env list workflows`), a path, or a Workflow.
        tasks: See `load_tasks`.
        split: Split of the task set.
        tools: Tools that agents may call, by name: the tool itself or its settings, such as `{"use": "bm25",
            "corpus": "corpus.jsonl"}`; of a name that is left out, the registered tool.
        render_mode: `ansi`, `human` or None.
        params: Values for the workflow's params.

    Raises:
        InvalidInput: The workflow, the tasks or a param breaks a rule.

    >>> make("parallel_proposers", proposers=5).action_space
    Outputs(K <= 5)
    """
    return WorkflowEnv(workflow, tasks, split=split, params=params, tools=tools, render_mode=render_mode)
