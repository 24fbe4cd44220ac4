"""Any generator of reasoning-gym as a task set.

    pip install reasoning-gym
    srpo-env train RECIPE "tasks.train={use: './examples/reasoning_gym_tasks.py:tasks', dataset: chain_sum, size: 2000}"

The package's own verifier scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import reasoning_gym

from srpo_env import Event, Score, Task, TaskSet
from srpo_env.parsers import after_thinking, last_boxed


def tasks(
    *, split: str = "train", dataset: str = "chain_sum", size: int = 1000, settings: Mapping[str, Any] | None = None
) -> TaskSet:
    """Returns tasks of a generator; the splits are drawn from different seeds, so easy ones may stand in both.

    Args:
        split: `train` or `test`.
        dataset: Name of the generator, as in `reasoning_gym.factory.DATASETS`.
        size: How many.
        settings: The generator's own, such as {"min_terms": 3}.
    """
    made = reasoning_gym.create_dataset(dataset, size=size, seed={"train": 0, "test": 1}[split], **(settings or {}))
    entries = {f"{dataset}/{split}/{number}": entry for number, entry in enumerate(made)}

    def reward(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
        if answer is None:
            return Score(value=0.0, reason="no answer")
        text = after_thinking(answer)
        boxed = last_boxed(text)
        value = float(made.score_answer(text.strip() if boxed is None else boxed, entries[task.id]))
        return Score(value=value, reason="right" if value == 1 else "wrong")

    return TaskSet(
        dataset,
        [
            Task(id=name, problem=entry["question"], answers=(str(entry["answer"]),), set=dataset)
            for name, entry in entries.items()
        ],
        reward=reward,
    )
