"""What is to be solved: tasks, task sets, and where they come from.

A task set is a list of tasks and the reward that scores an answer to one. It comes from a registered name (entry point
group `srpo_env.tasks`), rows of a file or of the hub (`task_rows`), or Python.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from srpo_env.errors import InvalidInput, InvalidTask, UnknownName, nearest
from srpo_env.records import Event, Record, Text
from srpo_env.registry import is_reference, load, load_reference, registered
from srpo_env.rewards import Reward, Score, exact_match, less_extra_members
from srpo_env.task_rows import is_rows, read_rows


class Task(Record):
    """One problem.

    Attributes:
        id: Unique in its set.
        problem: What the agents are asked.
        answers: Accepted answers; none: unscorable.
        meta: Whatever else the source says; templates read it as `task.meta`.
        set: Name of the task set.
    """

    id: Text = Field(min_length=1)
    problem: Text = Field(min_length=1)
    answers: tuple[Text, ...]
    meta: dict[str, Any] = {}
    set: Text = "tasks"

    @field_validator("answers", mode="before")
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for v in values)


@dataclass(frozen=True)
class TaskSet:
    """Tasks with the rewards that score them.

    >>> tasks = TaskSet("two", (Task(id="a", problem="1+1=", answers=("2",)),))
    >>> import asyncio
    >>> asyncio.run(tasks.score(tasks.tasks[0], "2", ())).value
    1.0
    """

    name: str
    tasks: Sequence[Task]
    reward: Reward = exact_match
    parts: Mapping[str, Reward] = field(default_factory=dict)
    """Rewards of the sets that this one was joined from, by `Task.set`."""

    def __len__(self) -> int:
        return len(self.tasks)

    async def score(self, task: Task, answer: str | None, events: Sequence[Event]) -> Score:
        """Scores the answer with the reward of the task's own set.

        Raises:
            InvalidInput: The reward gave something other than a Score.
        """
        score = self.parts.get(task.set, self.reward)(task, answer, events)
        if not isinstance(score, Score):
            score = await score if inspect.isawaitable(score) else score
        if not isinstance(score, Score):
            raise InvalidInput(
                f"task set {self.name!r}: the reward gave a {type(score).__name__} for task {task.id!r}; it returns an "
                "srpo_env.Score."
            )
        return score

    def limited(self, limit: int | None) -> TaskSet:
        """Returns the set of the first `limit` tasks; all where it is None."""
        return self if limit is None else replace(self, tasks=self.tasks[:limit])


def load_tasks(
    use: str | Path | TaskSet | Sequence[Any],
    *,
    split: str = "train",
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    reward: str | Reward | None = None,
    extra_member_cost: float = 0.0,
    **settings: Any,
) -> TaskSet:
    """Returns a task set.

    Args:
        use: A registered name, a .jsonl, .csv or .parquet file, `datasets:ORG/NAME` on the hub, `module:attr` of a
            function with the signature of a registered one, a TaskSet, a list of Tasks, or a list of any of these,
            which are joined.
        split: `train`, `test` or another one that the set has; a file has one split, whatever it is called.
        limit: Keeps the first tasks, of each set where there are several.
        columns: For a file: its names for `id`, `problem`, `answer`, as {"question": "problem"}.
        reward: Replaces the set's own: a function or `module:attr`.
        extra_member_cost: What each member of a set beyond its first takes off the score, see `less_extra_members`.
        settings: Settings of a registered set, such as the difficulty of `arithmetic`.

    Raises:
        UnknownName: No such set; the nearest names are given.
        InvalidTask: The file can't be read, or a row is not a task.
        InvalidInput: A setting is unknown or breaks a rule.
    """
    chosen = load_reference(reward) if isinstance(reward, str) else reward
    if isinstance(use, TaskSet):
        found = use
    elif isinstance(use, str | Path):
        found = _named(str(use), split=split, columns=columns, settings=settings)
    elif not isinstance(use, list | tuple) or any(isinstance(item, Task) for item in use):
        found = TaskSet("tasks", _only_tasks(use))
    else:
        found = join([load_tasks(item, split=split, limit=limit, columns=columns, **settings) for item in use])
        limit = None
    if not len(found):
        raise InvalidTask(f"task set {found.name!r} has no tasks in split {split!r}; at least one is needed.")
    if chosen is not None:
        found = replace(found, reward=chosen, parts={})
    if extra_member_cost:
        parts = {name: less_extra_members(each, extra_member_cost) for name, each in found.parts.items()}
        found = replace(found, reward=less_extra_members(found.reward, extra_member_cost), parts=parts)
    return found.limited(limit)


def _only_tasks(use: Any) -> tuple[Task, ...]:
    others = [item for item in use if not isinstance(item, Task)] if isinstance(use, list | tuple) else [use]
    if others:
        raise InvalidInput(
            f"tasks: a {type(others[0]).__name__} where a name, a path, a TaskSet or a list of Tasks is expected; "
            "a list holds either Tasks only, or the other three."
        )
    return tuple(use)


def join(sets: Iterable[TaskSet]) -> TaskSet:
    """Joins sets into one; each task keeps the reward of its own, and its id where that stays unique.

    An id that stands in several of the sets gets the set's name in front: `gsm8k/17`.

    Raises:
        InvalidInput: Two sets have the same name.
    """
    sets = list(sets)
    parts: dict[str, Reward] = {}
    tasks: list[Task] = []
    for each in sets:
        for name, reward in (each.parts or {each.name: each.reward}).items():
            if name in parts:
                raise InvalidInput(
                    f"two of the task sets to be joined are called {name!r}; their tasks could not be told apart."
                )
            parts[name] = reward
        tasks += [task if each.parts else task.model_copy(update={"set": each.name}) for task in each.tasks]
    seen = Counter(task.id for task in tasks)
    tasks = [task if seen[task.id] == 1 else task.model_copy(update={"id": f"{task.set}/{task.id}"}) for task in tasks]
    return TaskSet("+".join(each.name for each in sets), tuple(tasks), parts=parts)


def _named(name: str, *, split: str, columns: Mapping[str, str] | None, settings: dict[str, Any]) -> TaskSet:
    if is_rows(name):
        if settings:
            raise InvalidInput(
                f"task file {name}: unknown setting {next(iter(settings))!r}; a file takes only `columns`."
            )
        return read_tasks(name, columns, split=split)
    if not is_reference(name) and name not in registered("task set"):
        known = registered("task set")
        raise UnknownName(
            f"task set {name!r} is not known; known are {', '.join(sorted(known))}.{nearest(name, known)} "
            "Give one of them, or the path of a .jsonl file with rows of id, problem, answer."
        )
    make = load("task set", name)
    accepted = inspect.signature(make).parameters
    for key in settings:
        if key not in accepted:
            others = [each for each in accepted if each != "split"]
            raise InvalidInput(
                f"task set {name!r}: unknown setting {key!r}; it has {', '.join(others)}.{nearest(key, others)}"
            )
    made = make(split=split, **settings)
    if not isinstance(made, TaskSet):
        raise InvalidInput(f"task set {name!r} gave {type(made).__name__}; the function must return a TaskSet.")
    return made


def read_tasks(
    use: str | Path,
    columns: Mapping[str, str] | None = None,
    *,
    split: str = "train",
    name: str | None = None,
    reward: Reward = exact_match,
) -> TaskSet:
    """Reads tasks from rows of `id, problem, answer` (text or number) or `answers` (a list); the rest is `meta`.

    Args:
        use: A .jsonl, .csv or .parquet file, or `datasets:ORG/NAME` on the hub.
        columns: The rows' names for `id`, `problem`, `answer`, as {"question": "problem"}.
        split: Of a data set of the hub.
        name: Of the set; the file's by default.
        reward: Scores an answer.

    Raises:
        InvalidTask: The rows can't be read, there are none, or one has no answer or repeats an id; with its place.
    """
    name = name or Path(str(use).partition(":")[2] or use).stem
    return tasks_of(read_rows(use, split), name, columns=columns, reward=reward, source=str(use))


def tasks_of(
    rows: Iterable[tuple[str, dict[str, Any]]],
    name: str,
    *,
    columns: Mapping[str, str] | None = None,
    reward: Reward = exact_match,
    source: str | None = None,
) -> TaskSet:
    """Makes a task set of rows, each with the place that errors name, `file:line`; see `read_tasks`."""
    tasks: list[Task] = []
    numbers: dict[str, str] = {}
    for place, row in rows:
        number = place.rpartition(":")[2]  # of the line or row
        task = _task(place, number, row, columns or {}, name)
        if task.id in numbers:
            raise InvalidTask(
                f"{place}: id {task.id!r} stands in line {numbers[task.id]} too; ids are unique in a file."
            )
        numbers[task.id] = number
        tasks.append(task)
    if not tasks:
        raise InvalidTask(
            f"task file {source or name} has no rows; each line is one JSON object with id, problem and answer."
        )
    return TaskSet(name, tuple(tasks), reward=reward)


def _task(place: str, number: str, row: dict[str, Any], columns: Mapping[str, str], set_: str) -> Task:
    row = {columns.get(key, key): value for key, value in row.items()}
    if "answers" not in row and "answer" in row:
        row["answers"] = row.pop("answer")
    for key in ("problem", "answers"):
        if row.get(key) in (None, "", []):
            shown = "answer" if key == "answers" else key
            raise InvalidTask(
                f"{place}: no {shown}; a task needs id, problem and answer. Its keys are {', '.join(row)}; "
                f"`columns: {{your_name: {shown}}}` renames one."
            )
    id_ = row.pop("id", None)
    known = {"id": str(number if id_ is None else id_), "problem": row.pop("problem"), "answers": row.pop("answers")}
    try:
        return Task(**known, meta=row.pop("meta", {}) | row, set=set_)
    except (ValidationError, TypeError) as error:
        what = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ("meta",), "msg": str(error)}
        raise InvalidTask(f"{place}: {'.'.join(map(str, what['loc']))}: {what['msg']}.") from error
