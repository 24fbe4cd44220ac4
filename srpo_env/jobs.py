"""What a recipe becomes: a graph, tasks, policies and a trainer, all checked before anything is written."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from srpo_env.config import PolicyUse, Recipe, TasksUse, WorkflowUse, find_recipe, is_workflow, load_recipe, recipe_of
from srpo_env.errors import InvalidRecipe, nearest
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow
from srpo_env.portal import run as run_async
from srpo_env.protocols import Policy, Resting, Served, Trainable, Trainer
from srpo_env.records import Event
from srpo_env.registry import load
from srpo_env.rollouts import Plan, run_episodes, starts
from srpo_env.runs import Run, checkpoints
from srpo_env.tasks import Task, TaskSet, join, load_tasks
from srpo_env.toolcalls import Tools
from srpo_env.toolset import load_tools


@dataclass(frozen=True)
class Job:
    """A recipe with everything that it names, found and checked; models are loaded when they are first used."""

    recipe: Recipe
    name: str
    graph: Graph
    baseline: Graph | None
    tasks: TaskSet
    held_out: TaskSet
    policies: dict[str, Policy]
    learner: Any
    tools: Tools

    @classmethod
    def prepare(
        cls,
        target: str | Path | Recipe,
        overrides: Iterable[str] = (),
        *,
        name_suffix: str = "",
        last_checkpoint: bool = False,
        bare_workflows: bool = False,
    ) -> Job:
        """Finds and checks everything that a recipe names.

        Args:
            target: A recipe that ships, a file, a run folder or a Recipe.
            overrides: `key=value` texts.
            name_suffix: Added to the name of the run.
            last_checkpoint: For a run folder: takes the policies from its last checkpoint, and a run folder of its own.
            bare_workflows: A workflow may stand in place of a recipe; it gets arithmetic tasks and the tiny policy.

        Raises:
            InvalidInput: Whatever is wrong, before anything is written.
        """
        if isinstance(target, Recipe):
            recipe, name, folder = target, "run", None
        else:
            recipe, name, folder = _found(target, list(overrides), bare_workflows=bare_workflows)
        if folder is not None and last_checkpoint:
            recipe = _at_checkpoint(recipe, folder, overrides)
        assert not isinstance(recipe.workflow, str)
        graph = _graph(recipe.workflow)
        baseline = None if recipe.eval.baseline is None else compile_graph(load_workflow(recipe.eval.baseline))
        learner = load("trainer", recipe.trainer)
        _check_agents(recipe, graph)
        tasks = _tasks(recipe.tasks.train)
        held_out = tasks if recipe.tasks.eval is None else _held_out(recipe.tasks.eval)
        _check_key(recipe.eval.by, held_out)
        return cls(
            recipe=recipe,
            name=name + name_suffix,
            graph=graph,
            baseline=baseline,
            tasks=tasks,
            held_out=held_out,
            policies={label: _policy(label, use, recipe) for label, use in recipe.policies.items()},
            learner=learner,
            tools=_tools(recipe, graph, baseline),
        )

    @cached_property
    def settings(self) -> Any:
        """The trainer's settings, checked."""
        return self.learner.settings(self.recipe.learner)

    def trainer(self) -> Trainer:
        """Makes the trainer; loads the models of the policies that are trained.

        Raises:
            InvalidRecipe: No policy is trained, or one that is can't be.
        """
        training = {label: use.train for label, use in self.recipe.policies.items() if use.train is not None}
        if not training:
            raise InvalidRecipe(
                "policies: none has a `train` block, so there is nothing to learn; give one, such as {lr: 1.0e-6}."
            )
        policies: dict[str, Trainable] = {}
        for label in training:
            policy = self.policies[label]
            if not isinstance(policy, Trainable):
                raise InvalidRecipe(
                    f"policies.{label}: backend {self.recipe.policies[label].sample.backend!r} has no weights in "
                    f"this process; "
                    "use backend local, or leave `train` out."
                )
            policies[label] = policy
        made: Trainer = self.learner(
            self.settings, policies, training=training, total_updates=self.recipe.updates, seed=self.recipe.seed
        )
        return made

    def batch_of_tasks(self, update: int) -> list[Task]:
        """Returns the tasks of an update (counted from 1): each epoch is a permutation of all, decided by the seed."""
        tasks, size = self.tasks.tasks, self.recipe.rollout.tasks_per_batch
        found = []
        for position in range((update - 1) * size, update * size):
            epoch, at = divmod(position, len(tasks))
            found.append(tasks[_permutation(len(tasks), self.recipe.seed, epoch)[at]])
        return found

    def sample(self, run: Run, update: int, *, episodes: int | None = None) -> list[list[Event]]:
        """Samples the batch of an update, or another number of episodes, and logs it; returns each episode's events."""
        tasks, size = self.batch_of_tasks(update), self.recipe.rollout.group_size
        if episodes is not None:
            groups = -(-episodes // size)
            tasks = [self.tasks.tasks[at % len(self.tasks)] for at in range(groups)]
        begun = starts(
            tasks, group_size=size, batch=f"update-{update}" if episodes is None else "rollout", seed=self.recipe.seed
        )
        return run_async(lambda: run_episodes(self._plan(run, self.graph, self.tasks), begun[:episodes], log=run.log))

    def servers(self) -> dict[str, list[str]]:
        """Returns the commands that start the servers of each policy that has some."""
        found = {}
        for label in self.recipe.policies:
            backend, settings = self.backend(label)
            if isinstance(backend, Served):
                found[label] = backend.start_commands(label, settings)
        return found

    def backend(self, label: str) -> tuple[Any, dict[str, Any]]:
        """Returns the backend of a policy and the settings that it is made of."""
        return _backend(self.recipe.policies[label], self.recipe)

    def rest(self) -> None:
        """Lets the policies that can give their memory to the learner."""
        for policy in self.policies.values():
            if isinstance(policy, Resting):
                policy.rest()

    def try_held_out(
        self, run: Run, *, update: int, samples: int
    ) -> tuple[list[list[Event]], list[list[Event]] | None]:
        """Tries the held-out tasks: returns the team's episodes, and the baseline workflow's if there is one."""
        found: list[list[list[Event]] | None] = []
        for graph, batch in ((self.graph, f"eval-{update}"), (self.baseline, f"baseline-{update}")):
            if graph is None:
                found.append(None)
                continue
            episodes = starts(self.held_out.tasks, group_size=samples, batch=batch, seed=self.recipe.seed)
            plan = self._plan(run, graph, self.held_out, evaluating=True)
            found.append(run_async(lambda plan=plan, episodes=episodes: run_episodes(plan, episodes, log=run.log)))  # type: ignore[misc]
        team, baseline = found
        assert team is not None
        return team, baseline

    def by_set(self, episodes: Sequence[list[Event]]) -> dict[str, list[list[Event]]]:
        """Sorts episodes by their task set."""
        return self._sorted(episodes, lambda task: task.set)

    def by_key(self, episodes: Sequence[list[Event]]) -> dict[str, list[list[Event]]]:
        """Sorts episodes by what `eval.by` names, as `level 2` before `level 10`; tasks without it are left out."""
        key = self.recipe.eval.by
        found = self._sorted(episodes, lambda task: f"{key} {task.meta[key]}" if key in task.meta else "")
        return {label: found[label] for label in sorted(found, key=_digits_as_numbers) if label}

    def _sorted(self, episodes: Sequence[list[Event]], label: Callable[[Task], str]) -> dict[str, list[list[Event]]]:
        labels = {task.id: label(task) for task in self.held_out.tasks}
        found: dict[str, list[list[Event]]] = {}
        for events in episodes:
            found.setdefault(labels[events[-1].task], []).append(events)
        return found

    def _plan(self, run: Run, graph: Graph, tasks: TaskSet, *, evaluating: bool = False) -> Plan:
        return Plan(
            graph=graph,
            tasks=tasks,
            policies=self.policies,
            sampling=cache(partial(self.recipe.sampling_of, evaluating=evaluating)),
            tools=self.tools,
            deterministic=self.recipe.rollout.deterministic,
            max_in_flight=self.recipe.rollout.max_in_flight,
            run=run.folder.name,
        )


def _found(target: str | Path, overrides: list[str], *, bare_workflows: bool) -> tuple[Recipe, str, Path | None]:
    """Returns a target's recipe, its name, and the run folder that it lies in."""
    if bare_workflows and is_workflow(target):
        data = {
            "workflow": str(target),
            "tasks": {"train": {"use": "arithmetic"}},
            "tools": {"search": {}},  # for those that search: in the demonstration
            "policies": {"main": {"model": "tiny_arithmetic"}},
        }
        return recipe_of(data, overrides, str(target)), Path(target).stem, None
    path = find_recipe(target)
    folder = path.parent if path.name == "config.yaml" else None
    return load_recipe(target, overrides), folder.name if folder else path.stem, folder


def _graph(use: WorkflowUse) -> Graph:
    """Returns a recipe's workflow with its params and its agents' policies."""
    workflow = load_workflow(use.use, params=use.params)
    for name in use.policies:
        if name not in workflow.agents:
            raise InvalidRecipe(
                f"workflow.policies: {name!r} is not an agent of workflow {use.use!r}; its agents are "
                f"{', '.join(workflow.agents)}.{nearest(name, workflow.agents)}"
            )
    agents = {
        name: agent.model_copy(update={"policy": use.policies.get(name, agent.policy)})
        for name, agent in workflow.agents.items()
    }
    return compile_graph(workflow.model_copy(update={"agents": agents}))


def _digits_as_numbers(label: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", label)]


def _check_key(key: str | None, tasks: TaskSet) -> None:
    known = sorted({each for task in tasks.tasks for each in task.meta})
    if key is not None and key not in known:
        raise InvalidRecipe(
            f"eval.by: {key!r} is not in the meta of any held-out task; there are {', '.join(known) or 'no keys'}."
            f"{nearest(key, known)}"
        )


def _tasks(use: TasksUse) -> TaskSet:
    return load_tasks(
        use.use if isinstance(use.use, str) else list(use.use),
        split=use.split,
        limit=use.limit,
        columns=use.columns,
        reward=use.reward,
        extra_member_cost=use.extra_member_cost,
        **(use.model_extra or {}),
    )


def _held_out(uses: TasksUse | Mapping[str, TasksUse]) -> TaskSet:
    if isinstance(uses, TasksUse):
        return _tasks(uses)
    for name, use in uses.items():
        if not isinstance(use.use, str):
            raise InvalidRecipe(
                f"tasks.eval.{name}.use: {list(use.use)} under one name; give each set its own, as in "
                f"tasks.eval.{use.use[0]}.use={use.use[0]}."
            )
    return join([replace(_tasks(use), name=name) for name, use in uses.items()])


def _tools(recipe: Recipe, graph: Graph, baseline: Graph | None) -> Tools:
    workflows = [each.workflow for each in (graph, baseline) if each is not None]
    given = {name: use.model_dump() for name, use in recipe.tools.items()}
    return load_tools(*workflows, given=given, demo=False)


def _policy(label: str, use: PolicyUse, recipe: Recipe) -> Policy:
    backend, settings = _backend(use, recipe)
    made: Policy = backend.from_config(label, settings)
    return made


def _backend(use: PolicyUse, recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """Returns a policy's backend and what it is made of."""
    backend = load("backend", use.sample.backend)
    settings = dict(use.sample.model_extra or {})
    if not recipe.rollout.deterministic and getattr(backend, "in_process", False):
        settings.setdefault("deterministic", False)
    if use.model is not None:
        settings |= {"model": use.model, "dtype": use.dtype, "device": use.device}
    if use.train is not None and use.train.lora is not None:
        settings |= {"lora": use.train.lora, "seed": recipe.seed}
    elif use.train is None and any(_adapts(other, use) for other in recipe.policies.values()):
        settings["frozen"] = True
    return backend, settings


def _adapts(use: PolicyUse, other: PolicyUse) -> bool:
    """Whether a policy trains an adapter on another one's model."""
    adapts = use.train is not None and use.train.lora is not None
    return adapts and (use.model, use.sample.backend) == (other.model, other.sample.backend)


def _check_agents(recipe: Recipe, graph: Graph) -> None:
    agents = graph.workflow.agents
    for name in recipe.sampling.agents:
        if name not in agents:
            raise InvalidRecipe(
                f"sampling.agents: {name!r} is not an agent of the workflow; its agents are {', '.join(agents)}."
            )
    for name, agent in agents.items():
        if agent.policy not in recipe.policies:
            raise InvalidRecipe(
                f"agent {name!r} is sampled from policy {agent.policy!r}, which the recipe does not have; it has "
                f"{', '.join(recipe.policies)}. Add it under `policies`."
            )
        if recipe.policies[agent.policy].train is None:
            continue
        sampling = recipe.sampling_of(name)
        if sampling.top_p != 1 or sampling.top_k != 0 or sampling.temperature == 0:
            raise InvalidRecipe(
                f"agent {name!r} is trained and sampled with temperature {sampling.temperature:g}, top_p "
                f"{sampling.top_p:g}, top_k "
                f"{sampling.top_k}; log-probs of the learner match a positive temperature, top_p 1 and top_k 0 only. "
                "Set these under sampling.train."
            )


def _at_checkpoint(recipe: Recipe, folder: Path, overrides: Iterable[str]) -> Recipe:
    found = checkpoints(folder)
    policies = {
        label: use.model_copy(update={"model": str(found[-1] / label)})
        if found and (found[-1] / label).is_dir()
        else use
        for label, use in recipe.policies.items()
    }
    keeps_run = any(str(text).startswith("run=") for text in overrides)
    return recipe.model_copy(update={"policies": policies, "run": recipe.run if keeps_run else None})


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/tasks/{epoch}").shuffle(order)
    return order
